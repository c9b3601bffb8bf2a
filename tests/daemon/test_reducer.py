"""A peer's part in rounds: residuals when a round was repaired, and where results are applied."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from holdfast.collectives.reduction import ReduceResult
from holdfast.daemon.peer import reducer
from holdfast.daemon.peer.peer_config import CurrentSpec, PeerConfig, PeerContext
from holdfast.daemon.peer.reducer import Reducer
from holdfast.diloco.outer import outer_step
from holdfast.membership.peer.replica import Replica
from holdfast.membership.spec.spec import DilocoTable, RunSpec
from holdfast.protocol.arena import Values
from holdfast.protocol.messages import Commit, Contributor, ContributorRun, FragmentSize
from holdfast.protocol.network.sockets import SocketNetwork
from tests.checkpoint.test_shared_state import founded

ME, OTHER = "a" * 32, "b" * 32
CONTRIBUTORS = (Contributor(OTHER, 1, 1.0), Contributor(ME, 1, 1.0))
EVERYWHERE = (ContributorRun(b"\x02", 3), ContributorRun(b"\x03", 2))
SHUT_OUT_OF_SOME = (ContributorRun(b"\x03", 3), ContributorRun(b"\x01", 2))


class Input:
    """Stands for the encoded contribution."""

    settled = False

    def settle(self) -> None:
        self.settled = True


def a_reducer(network: Any = None, state_service: Any = None) -> Reducer:
    context = PeerContext(
        PeerConfig(ME, "a", "run", (), ()),
        network,
        cast("Any", None),
        Replica(ME),
        start=lambda *_: None,
        tell=lambda _message: None,
        perform=lambda _effects: None,
        spec=CurrentSpec(RunSpec()),
    )
    return Reducer(context, cast("Any", None), state_service)


def settled(manifest: tuple[ContributorRun, ...], contributors: Any = CONTRIBUTORS) -> bool | None:
    """Return whether such a commit settles the residual, or None if the residual is dropped."""
    mine = a_reducer()
    kept = mine._inputs[1] = cast("Any", Input())
    mine._residuals[0] = cast("Any", object())
    mine.settle(Commit(1, 2, 0, 0, 4, contributors, bytes(32), manifest))
    return None if 0 not in mine._residuals else bool(kept.settled)


def test_a_contribution_that_is_in_every_chunk_settles_its_residual() -> None:
    assert settled(()) is True
    assert settled(EVERYWHERE) is True


def test_who_was_shut_out_of_a_chunk_forgets_its_residual() -> None:
    assert settled(SHUT_OUT_OF_SOME) is None


def test_who_did_not_contribute_keeps_its_residual() -> None:
    assert settled((), CONTRIBUTORS[:1]) is False


def test_a_residual_settled_though_shut_out_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "is_everywhere", lambda manifest, place: True)
    assert settled(SHUT_OUT_OF_SOME) is True


@pytest.mark.real_time
async def test_the_outer_step_never_holds_up_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken_in: list[int] = []

    def noted(*values: Any, **options: Any) -> None:
        taken_in.append(threading.get_ident())
        outer_step(*values, **options)

    monkeypatch.setattr(reducer, "outer_step", noted)
    sizes = (FragmentSize(4, 4, 0),)
    state, no_counters = founded(*sizes), np.empty(0, np.int64)
    network = SimpleNamespace()
    network.run_sync = lambda function: SocketNetwork.run_sync(cast("Any", network), function)
    mine = a_reducer(network, SimpleNamespace(state=state))
    ones = np.ones(4, np.float32)

    def pieces() -> Iterator[tuple[slice, Values]]:
        taken_in.append(threading.get_ident())
        yield from ((where, ones[where]) for where in (slice(0, 3), slice(3, 4)))

    kept = mine._inputs[1] = cast("Any", Input())
    mine._running[1] = cast("Any", SimpleNamespace(diloco=DilocoTable()))
    mine._results[1] = ReduceResult(pieces, no_counters, bytes(32))
    await mine.apply(Commit(1, 1, 0, 0, 4, CONTRIBUTORS, bytes(32)))
    assert state.heads()[0].version == 1
    assert len(taken_in) == 3
    assert threading.get_ident() not in taken_in
    assert kept.settled

"""A peer's part in rounds: what becomes of error feedback when a round was repaired."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.daemon import reducer
from holdfast.daemon.reducer import Reducer
from holdfast.protocol.messages import Commit, Contributor, ContributorRun

ME, OTHER = "a" * 32, "b" * 32
CONTRIBUTORS = (Contributor(OTHER, 1, 1.0), Contributor(ME, 1, 1.0))
EVERYWHERE = (ContributorRun(b"\x02", 3), ContributorRun(b"\x03", 2))
SHUT_OUT_OF_SOME = (ContributorRun(b"\x03", 3), ContributorRun(b"\x01", 2))


class Input:
    """Stands for the encoded contribution."""

    settled = False

    def settle(self) -> None:
        self.settled = True


def settled(manifest: tuple[ContributorRun, ...], contributors: Any = CONTRIBUTORS) -> bool | None:
    """Whether the residual is settled by such a commit; None: it is forgotten."""
    parts = SimpleNamespace(config=SimpleNamespace(me=ME))
    mine = Reducer(cast("Any", parts), cast("Any", None))
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

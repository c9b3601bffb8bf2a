"""Lying contributors in whole runs: detection, robust sums, and no false accusations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio
from numpy.typing import NDArray

from holdfast.membership.master.rounds.update_history import ODD_ROUNDS
from holdfast.membership.peer.peer_effects import PeerEffect
from holdfast.membership.peer.round_course import RoundCourse
from holdfast.protocol.messages import Posted
from holdfast.simulation.drifting_trainer import Delta, small_layout
from holdfast.simulation.swarm import Swarm
from tests.plain import describe
from tests.swarm.test_swarm import events

SPEC = """
[diloco]
sync_every = 4
outer_lr = 1.0
outer_momentum = {momentum}
[membership]
min_members = 2
deadline_s = 3
grace_s = 1
[reduce]
codec_up = "{codec}"
combine = "{combine}"
chunk_bytes = {chunk_bytes}
"""
COUNT = 6_000


@asynccontextmanager
async def a_swarm(
    names: str,
    delta: Delta | None = None,
    *,
    codec: str = "fp32",
    combine: str = "mean",
    chunk_bytes: int = 2**20,
) -> AsyncIterator[Swarm]:
    momentum = 0.9 if combine == "mean" else 0.0
    toml = SPEC.format(codec=codec, combine=combine, momentum=momentum, chunk_bytes=chunk_bytes)
    async with trio.open_nursery() as nursery:
        swarm = Swarm(nursery, toml, layout=small_layout((COUNT,)), delta=delta)
        swarm.witness.knows_contributions = combine == "mean" and codec == "fp32"
        await swarm.start_master()
        for name in names:
            swarm.add_peer(name)
        await swarm.until(lambda: all(swarm.in_sync(name) for name in names))
        yield swarm
        nursery.cancel_scope.cancel()


def members(swarm: Swarm) -> list[dict[str, Any]]:
    found = describe(swarm.coordinator, trio.current_time())["members"]
    assert isinstance(found, list)
    return found


@pytest.mark.fault("an update is larger than its sender said")
async def test_a_daemon_that_understates_its_updates_is_refused_and_in_the_end_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_swarm("abcd") as swarm:
        liar, posted = swarm.peers["b"], RoundCourse.posted

        def understate(
            self: RoundCourse, message: Posted, norm: float | None, refusal: str
        ) -> list[PeerEffect]:
            if self is liar.service.replica.course and norm is not None:
                norm /= 5
            return posted(self, message, norm, refusal)

        monkeypatch.setattr(RoundCourse, "posted", understate)
        begin = swarm.committed + 1  # what was posted before is no lie
        await swarm.until(lambda: any("updates in a row" in text for text in events(swarm)))
        gone = next(text for text in events(swarm) if "updates in a row" in text)
        assert gone.startswith("b ")
        assert "it had announced" in gone
        await swarm.until(lambda: swarm.committed >= begin + 3)
        late = swarm.witness.commits[begin:]
        assert all(liar.peer not in [c.peer for c in commit.contributors] for commit in late)
        await swarm.come_to_rest("acd")
        swarm.check_final("acd")


@pytest.mark.parametrize("codec", ["fp32", "int8+zstd", "nf4", "topk16"])
async def test_however_honest_updates_grow_and_shrink_nobody_is_refused(codec: str) -> None:
    """With error feedback a short update carries the rest of a long one, which is longer than
    itself.
    """

    def delta(peer: str, round_: int, count: int) -> NDArray[np.float32]:
        rng = np.random.default_rng((int(peer[:8], 16), round_))
        length = (1.0, 0.15, 2.5)[(round_ + int(peer[:8], 16)) % 3]
        return (length * rng.standard_normal(count)).astype(np.float32)

    async with a_swarm("abcd", delta, codec=codec) as swarm:
        await swarm.until(lambda: swarm.committed >= 15)
        for words in ("refused", "seem longer"):
            assert not [text for text in events(swarm) if words in text]
        assert not any(member["suspicion"] for member in members(swarm))


async def test_clipping_outvotes_a_liar_also_after_a_death() -> None:
    """Honest values are about 1; the liar's are -1, with no larger norm."""
    lying: set[str] = set()

    def delta(peer: str, round_: int, count: int) -> NDArray[np.float32]:
        rng = np.random.default_rng((int(peer[:8], 16), round_))
        values = 1.0 + 0.1 * rng.uniform(-1, 1, count)
        return (-values if peer in lying else values).astype(np.float32)

    async with a_swarm("abcde", delta, combine="clipped") as swarm:
        lying.add(swarm.peers["c"].peer)
        await swarm.until(lambda: swarm.committed >= 4)
        swarm.crash("a")
        await swarm.until(lambda: swarm.committed >= 8)
        await swarm.come_to_rest("bcde")
        swarm.check_final("bcde")
        shared = swarm.peers["b"].trainer._shared
        assert shared is not None
        version = swarm.witness.versions[0]
        moved = np.arange(COUNT, dtype=np.float64) - shared.values(0)
        # Each of them is rounded to float32 at up to 6000.
        assert moved.min() > 0.9 * version - 0.01
        assert moved.max() < 1.1 * version + 0.01


async def test_who_points_against_the_others_and_who_copies_are_named() -> None:
    """Each chunk is added up by another member; what they find is told once."""
    bad: dict[str, str] = {}

    def delta(peer: str, round_: int, count: int) -> NDArray[np.float32]:
        kind = bad.get(peer, "")
        own = np.random.default_rng(
            (int((bad["copied"] if kind == "copier" else peer)[:8], 16), round_)
        )
        common = np.random.default_rng(round_).standard_normal(count)
        values = (common + own.standard_normal(count)).astype(np.float32)
        return -values if kind == "flipped" else values

    async with a_swarm("abcdef", delta, chunk_bytes=4096) as swarm:
        peers = {name: swarm.peers[name].peer for name in "abcdef"}
        bad |= {peers["c"]: "flipped", peers["f"]: "copier", "copied": peers["a"]}
        start = swarm.committed
        await swarm.until(lambda: swarm.committed >= start + ODD_ROUNDS + 4)
        found = {member["name"]: member["suspicion"] for member in members(swarm)}
        assert found["c"].startswith("its updates point against the others', for ")
        assert found["f"].startswith(f"its updates are nearly those of a ({peers['a'][:8]}), for ")
        assert [name for name, text in found.items() if text] == ["a", "c", "f"]
        assert len([text for text in events(swarm) if text.startswith("c: its updates")]) == 1

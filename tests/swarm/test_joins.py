"""Joins during rounds: slow lines, deaths in the middle, and joiners that cannot keep up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import trio

from holdfast.checkpoint import blocks
from holdfast.protocol.errors import PeerLostError
from holdfast.simulation.drifting_trainer import small_layout
from holdfast.simulation.swarm import Swarm
from tests.checkpoint.pins import pinned
from tests.plain import describe
from tests.swarm.test_swarm import a_swarm, settled, spec

VALUES = 40_000
STATE_BYTES = 2 * 4 * VALUES + 8
LAYOUT = small_layout((VALUES,), counters=1)


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with mock.patch.object(blocks, "BLOCK_BYTES", 4_096):
        yield


def slow_line(swarm: Swarm, bytes_per_s: float, names: str = "abc") -> None:
    """Set the newcomer's links to the named peers."""
    for name in names:
        swarm.world.link("late", name, delay_s=0.02, bytes_per_s=bytes_per_s)
        swarm.world.link(name, "late", delay_s=0.02, bytes_per_s=bytes_per_s)


@asynccontextmanager
async def a_copy(share: float = 1 / 3) -> AsyncIterator[Swarm]:
    """A newcomer has received so much of the state, over a line that would not do beside rounds."""
    async with a_swarm("abc", layout=LAYOUT) as swarm:
        await swarm.come_to_rest("abc")
        slow_line(swarm, 30_000.0)
        swarm.add_peer("late", founder=False)
        await swarm.until(lambda: received_bytes(swarm) > share * STATE_BYTES)
        yield swarm


def row(swarm: Swarm) -> dict[str, Any] | None:
    """Return the newcomer's row of the master's status."""
    if swarm.master is None:
        return None
    status = describe(swarm.coordinator, trio.current_time())
    return next((m for m in status["members"] if m["name"] == "late"), None)


def received_bytes(swarm: Swarm) -> int:
    return swarm.peers["late"].service.state_service.received_bytes


def is_in_sync(swarm: Swarm) -> bool:
    return swarm.peers["late"].service.replica.trainer.in_sync


async def test_a_copy_is_shown_in_blocks_bytes_donors_and_seconds() -> None:
    async with a_copy() as swarm:
        await trio.sleep(1.1)  # until the next report
        found = row(swarm)
        assert found is not None
        (copy,) = found["copies"]
        assert copy["bytes"]["all"] == STATE_BYTES
        assert STATE_BYTES / 3 < copy["bytes"]["done"] < STATE_BYTES
        assert 0 < copy["blocks"]["done"] < copy["blocks"]["all"] == 81
        assert len(copy["donors"]) == 3, "everybody who holds the version gives"
        left = copy["bytes"]["all"] - copy["bytes"]["done"]
        assert copy["left_s"] == pytest.approx(left / copy["bytes_per_s"])
        assert found["why"] == copy["text"]
        assert copy["text"].startswith("copying fragment 0: 0 of 0 MiB from 3 donors, ")
        await swarm.until(lambda: is_in_sync(swarm), within_s=20)
        found = row(swarm)
        assert found is not None
        assert found["copies"] == []


@pytest.mark.fault(
    "master, donor or session is lost during a copy",
    "as ever",
    "the copy goes on with what is there",
)
@pytest.mark.parametrize("what", ["master", "donor", "joiner's session"])
async def test_a_copy_that_is_disturbed_goes_on_with_what_it_has(what: str) -> None:
    async with a_copy(1 / 2) as swarm:
        if what == "master":
            swarm.crash_master()
            await swarm.start_master()
        elif what == "donor":
            swarm.crash("c")
        else:
            swarm.world.cut("late", "master")
            await trio.sleep(4)
            swarm.world.heal("late", "master")
        await swarm.until(lambda: is_in_sync(swarm), within_s=60)
        # Of what was on its way each of the three may have sent a few blocks twice.
        assert STATE_BYTES <= received_bytes(swarm) < 1.2 * STATE_BYTES
        swarm.check_final(["a", "b", "late"])


async def test_blocks_of_a_copy_that_was_given_up_are_forgotten_when_nothing_is_missing() -> None:
    async with a_copy() as swarm:
        state = swarm.peers["late"].service.state
        assert state is not None
        state.fragments[0].kept[b"a digest"] = np.zeros(9, np.uint8)
        await swarm.until(lambda: is_in_sync(swarm), within_s=20)
        await trio.sleep(1)
        assert not state.fragments[0].kept


@pytest.mark.parametrize("ticks", [3, 4, 5])
async def test_a_copy_that_fails_as_it_is_replaced_ends_nothing_but_itself(ticks: int) -> None:
    async with a_copy() as swarm:
        late = swarm.peers["late"].service
        order, joiner = late.replica.fragments[0].fetching, late.state_service._joiner
        assert order is not None
        assert joiner is not None
        for donor in joiner._fetches[0]._donors.values():
            donor.send.send_nowait(PeerLostError(donor.peer, "its link is gone"))
        for _ in range(ticks):
            await trio.lowlevel.checkpoint()
        late.perform(late.replica.sync(order))
        for _ in range(20):  # no time passes
            await trio.lowlevel.checkpoint()
        assert late.replica.fragments[0].fetching is order, "the new one has not failed"
        await swarm.until(lambda: is_in_sync(swarm), within_s=60)
        assert not late.state_service._fetches
        slow_line(swarm, 1e7)
        swarm.resume()
        await swarm.commit(2)
        await swarm.come_to_rest(["a", "b", "c", "late"])
        swarm.check_final(["a", "b", "c", "late"])


@pytest.mark.fault("a joiner dies", "closed connection", "its donors keep nothing for it")
async def test_a_joiner_that_dies_holds_nothing_at_its_donors() -> None:
    async with a_copy() as swarm:
        states = [swarm.peers[name].service.state for name in "abc"]
        assert all(state is not None and pinned(state, 0) for state in states)
        swarm.crash("late")
        await trio.sleep(1)
        assert all(state is not None and not pinned(state, 0) for state in states)


@pytest.mark.fault(
    "a joiner's line cannot carry the commits",
    "what it received, what was committed",
    "its copy ends, it is told why and waits; nobody else notices",
)
async def test_who_cannot_keep_up_waits_and_is_told_why_until_the_run_needs_less() -> None:
    async with a_swarm("abc", layout=LAYOUT) as swarm:
        coordinator = swarm.coordinator
        slow_line(swarm, 20_000.0)  # a round needs eight times as much in its time
        late = swarm.add_peer("late", founder=False)
        await swarm.until(lambda: "the run's commits need" in str(row(swarm)), within_s=60)
        await trio.sleep(1)  # it hears of it, too, and a round that ran then ends
        text = next(t for t in late.service.report.notices if "cannot keep up" in t)
        assert "its link carries" in text
        assert late.service.replica.fragments[0].fetching is None
        before = swarm.committed
        await trio.sleep(5)  # while it waits it costs nobody anything
        assert swarm.committed > before + 5
        assert not late.service.replica.rounds
        for name in "abc":
            state = swarm.peers[name].service.state
            assert state is not None
            assert not pinned(state, 0)
        swarm.decide(coordinator.pause)
        await swarm.until(lambda: is_in_sync(swarm), within_s=120)
        swarm.check_final(["a", "b", "c", "late"])


async def test_results_of_rounds_wait_for_the_copy_as_they_came() -> None:
    layout = small_layout((VALUES, VALUES), counters=1)
    toml = spec(codec="int8", fragments=1).replace("sync_every = 4", "sync_every = 40")
    async with a_swarm("abc", toml=toml, layout=layout) as swarm:
        slow_line(swarm, 60_000.0)
        late = swarm.add_peer("late", founder=False)
        reducer = late.service.reducer
        await swarm.until(lambda: len(reducer._results) >= 1, within_s=60)
        # An int8 encoding is a fourth of the values; idle lanes refer to some chunks, too.
        assert reducer._hub.buffers.lent_bytes < len(reducer._running) * VALUES * 4
        await swarm.until(lambda: is_in_sync(swarm), within_s=60)
        await settled(swarm, "abc")
        await swarm.until(lambda: swarm.in_sync("late"))
        swarm.check_final(["a", "b", "c", "late"])

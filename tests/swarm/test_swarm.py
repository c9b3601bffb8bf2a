"""Whole runs in virtual time: production master and peers, trainers of a few numbers.

The witness inside the swarm checks parity, history and divisors after every event; these tests set
the scene, do the harm and say what must come of it.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio

from holdfast.collectives.reduction import Reduction
from holdfast.membership.master.state.master_effects import Effect
from holdfast.membership.peer.local_round import RoundState
from holdfast.protocol.messages import ModelLayout, Role, TensorSpec
from holdfast.simulation.drifting_trainer import small_layout
from holdfast.simulation.invariants import check_invariants
from holdfast.simulation.swarm import Swarm
from holdfast.simulation.witness import ViolationError

SPEC = """
[run]
name = "swarm"
rounds = {rounds}
[diloco]
sync_every = 4
fragments = {fragments}
[membership]
contributors = {contributors}
min_members = {min_members}
deadline_s = 3
grace_s = 1
[reduce]
codec_up = "{codec}"
codec_down = "{codec}"
"""


def spec(
    *,
    rounds: int = 0,
    contributors: int = 3,
    min_members: int = 2,
    codec: str = "fp32",
    fragments: int = 1,
) -> str:
    return SPEC.format(
        rounds=rounds,
        contributors=contributors,
        min_members=min_members,
        codec=codec,
        fragments=fragments,
    )


@asynccontextmanager
async def a_swarm(
    names: str = "abc", spares: str = "", toml: str | None = None, **options: Any
) -> AsyncIterator[Swarm]:
    """Start a swarm and wait for its first commit."""
    async with trio.open_nursery() as nursery:
        swarm = Swarm(nursery, toml or spec(), **options)
        await swarm.start_master()
        for name in names:
            swarm.add_peer(name)
        for name in spares:
            swarm.add_peer(name, role=Role.SPARE)
        await swarm.until(
            lambda: swarm.committed >= 1 and all(swarm.in_sync(n) for n in names + spares)
        )
        yield swarm
        nursery.cancel_scope.cancel()


def events(swarm: Swarm) -> list[str]:
    return [event.text for event in swarm.coordinator.context.events]


def state_bytes(swarm: Swarm, names: Sequence[str]) -> dict[str, int]:
    """Return the bytes of the state that each peer has copied."""
    return {n: swarm.peers[n].service.training.progress().state_received_bytes for n in names}


async def settled(swarm: Swarm, names: str, *, more: int = 2) -> None:
    """Wait for more commits, then check that the named peers hold the same bits."""
    await swarm.commit(more)
    await swarm.come_to_rest(names)
    swarm.check_final(names)
    check_invariants(swarm.coordinator)


# ---------------------------------------------------------------- nothing goes wrong


async def test_a_wrong_mean_is_found_also_when_the_right_one_was_seen() -> None:
    async with a_swarm("abc") as swarm:
        assert swarm.witness.checked is not None
        commit, ends, mean = swarm.witness.checked
        swarm.witness.saw_mean("b", commit, ends=ends, mean=mean)
        wrong = mean.copy()
        wrong[-1] += 1
        with pytest.raises(ViolationError, match="the mean of"):
            swarm.witness.saw_mean("b", commit, ends=ends, mean=wrong)


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_peer_that_loses_the_last_result_ends_with_a_copy_of_it_or_says_so(
    in_time: bool,
) -> None:
    async with a_swarm("abc", toml=spec(rounds=6)) as swarm:
        round_table = swarm.coordinator.scheduler.round_table
        await swarm.until(lambda: swarm.committed == 5 and bool(round_table.reducing()))
        for other in "ab":
            swarm.world.partition(other, "c")
        late = swarm.peers["c"].service
        await swarm.until(lambda: late.replica.trainer.finished)
        assert late.replica.behind, (
            "it was told that the run is over before it has the last weights"
        )
        assert not late.finished.is_set()
        if in_time:
            swarm.heal_all()
        else:
            for other in "ab":
                swarm.leave(other)
        await swarm.until(late.finished.is_set)
        assert (late.training.layout is None) is late.replica.behind is not in_time
        if in_time:
            swarm.check_final("abc")
            assert swarm.committed == 6


async def test_a_round_that_is_over_leaves_nothing_for_the_collector() -> None:
    """Its buffers are as large as a fragment, and the collector sees a few small objects."""
    async with a_swarm("abc") as swarm:
        gc.collect()
        gc.disable()
        try:
            await swarm.commit(8)
            left = sum(type(each) is Reduction for each in gc.get_objects())
        finally:
            gc.enable()
        assert left <= 2 * len(swarm.peers)  # one may be under way, one waiting to be applied


@pytest.mark.parametrize(
    "layout",
    [
        small_layout((1,), counters=0),
        small_layout((0,), counters=0),
        small_layout((2,), counters=3),
        small_layout((1_000, 7, 0, 513), counters=1),
        ModelLayout((TensorSpec("scale", (), "float32", "parameter"),)),
        ModelLayout(
            (
                TensorSpec("empty", (0, 4), "float32", "parameter"),
                TensorSpec("mean", (3,), "float32", "buffer"),
                TensorSpec("scale", (), "float32", "parameter"),
            )
        ),
    ],
    ids=["one element", "nothing", "fewer than members", "uneven", "0-dim", "empty and buffer"],
)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
async def test_tensors_of_every_size(layout: ModelLayout, codec: str) -> None:
    async with a_swarm("abcd", toml=spec(contributors=0, codec=codec), layout=layout) as swarm:
        await settled(swarm, "abcd")


async def test_uneven_token_weights_are_the_divisor() -> None:
    async with a_swarm("abc") as swarm:
        for weight, sim in enumerate(swarm.peers.values(), start=1):
            sim.trainer.tokens_per_step = 7 * weight**3
        await settled(swarm, "abc", more=4)
        weights = {c.peer: c.weight for c in swarm.witness.commits[-1].contributors}
        a, b, c = (weights[swarm.peers[name].peer] for name in "abc")
        assert a < b < c


# ---------------------------------------------------------------- coming and going


@pytest.mark.fault(
    "a joiner is slower than the rounds",
    "its view of the versions",
    "it replays what it missed; nobody waits",
)
async def test_a_joiner_over_a_link_slower_than_the_rounds_replays_them() -> None:
    layout = small_layout((40_000,), counters=1)
    async with a_swarm("abc", layout=layout) as swarm:
        for name in "abc":
            swarm.world.link("late", name, delay_s=0.05, bytes_per_s=600_000.0)
            swarm.world.link(name, "late", delay_s=0.05, bytes_per_s=600_000.0)
        before = swarm.committed
        swarm.add_peer("late", founder=False)
        await swarm.until(lambda: swarm.peers["late"].service.replica.trainer.in_sync)
        assert swarm.committed > before, "nobody stops for a joiner"
        await settled(swarm, "abc")
        await swarm.until(lambda: swarm.in_sync("late"))
        swarm.check_final(["a", "b", "c", "late"])


# ---------------------------------------------------------------- deaths


def attached(swarm: Swarm) -> set[str]:
    """Return the names of the master's members."""
    return {member.name for member in swarm.coordinator.context.roster.by_number()}


def in_phase(swarm: Swarm, name: str, phase: str) -> bool:
    """Return whether a peer is in a phase of a round now."""
    service = swarm.peers[name].service
    here = list(service.replica.rounds.values())
    if phase == "open":
        return any(r.phase is RoundState.OPEN and r.ready is None for r in here)
    if phase == "ready":
        return any(r.phase is RoundState.OPEN and r.ready is not None for r in here)
    return any(r.phase.value == phase for r in here)


@pytest.mark.fault("two die at once", "the same", "the round goes on with a quorum, or is void")
async def test_two_deaths_at_once() -> None:
    async with a_swarm("abcde", toml=spec(contributors=0)) as swarm:
        await swarm.until(lambda: in_phase(swarm, "b", "reducing"))
        swarm.crash("b")
        swarm.crash("d")
        await settled(swarm, "ace")


@pytest.mark.fault(
    "a peer freezes", "silence for `deadline_s`", "out, its place is taken; thaws as a spare"
)
async def test_a_frozen_peer_is_out_within_the_deadline_and_thaws_as_a_spare() -> None:
    async with a_swarm("abc", "d") as swarm:
        frozen_s = trio.current_time()
        swarm.world.freeze("c")
        await swarm.until(lambda: swarm.role("d") is Role.CONTRIBUTOR)
        assert trio.current_time() - frozen_s < 3.0 + 1.0, "the deadline and a little"
        await swarm.commit(2)
        swarm.world.thaw("c")
        await swarm.until(lambda: swarm.in_sync("c"))
        await settled(swarm, "abcd")
        assert swarm.role("c") is Role.SPARE


async def test_a_round_that_is_aborted_behind_the_next_one_is_run_again_after_it() -> None:
    """The next one, of another fragment, is open for a later step: trainers go on to that."""
    async with a_swarm("abc", toml=spec(fragments=2), bytes_per_s=1e5) as swarm:
        coordinator = swarm.coordinator
        round_table = coordinator.scheduler.round_table
        await swarm.when(lambda: round_table.reducing() and round_table.opened(), within_s=60)
        (aborted,), (later,) = round_table.reducing(), round_table.opened()
        assert later.at_step > aborted.at_step

        def abort(now_s: float) -> list[Effect]:
            round_table.abort(aborted, "nothing moved")
            return coordinator.settle(now_s)

        swarm.decide(abort)
        await settled(swarm, "abc")


# ---------------------------------------------------------------- the master


@pytest.mark.fault(
    "the master dies",
    "peers' sessions break",
    "it goes on from the journal; no round lost, no state moved",
)
@pytest.mark.parametrize("phase", ["open", "ready", "reducing", "reduced"])
async def test_a_master_restart_loses_no_round_and_needs_no_resync(phase: str) -> None:
    layout = small_layout((3_000,), counters=1)
    async with a_swarm("abc", "d", layout=layout, bytes_per_s=200_000.0) as swarm:
        await swarm.until(lambda: in_phase(swarm, "a", phase))
        received = state_bytes(swarm, "abcd")
        swarm.crash_master()
        await trio.sleep(1)
        # Who comes back after the commit of a round that it holds copies it: so the spare comes
        # first.
        swarm.stop("c", asleep=False)
        await swarm.start_master()
        await swarm.until(lambda: "d" in attached(swarm))
        swarm.go_on("c")
        await settled(swarm, "abcd", more=3)
        roles = [swarm.role(name) for name in "abcd"]
        assert roles == [*[Role.CONTRIBUTOR] * 3, Role.SPARE]
        assert received == state_bytes(swarm, "abcd")


# ---------------------------------------------------------------- copies that differ


async def test_a_drifted_peer_is_healed_by_the_blocks_that_differ() -> None:
    layout = small_layout((700_000,), counters=1)  # about 2.7 blocks of values, as much momentum
    async with a_swarm("abc", layout=layout) as swarm:
        drifted = swarm.peers["b"]
        assert drifted.service.state is not None
        swarm.witness.excused.add(drifted.peer)
        before = drifted.service.training.progress().state_received_bytes
        drifted.service.state.fragments[0].parts.values[123] += np.float32(
            1.0
        )  # a bit flip in its memory
        await swarm.until(lambda: drifted.service.training.progress().state_received_bytes > before)
        await swarm.until(lambda: swarm.in_sync("b"))
        swarm.witness.excused.clear()
        await settled(swarm, "abc")
        healed = drifted.service.training.progress().state_received_bytes - before
        assert healed < 4 * 700_000, "less than the values alone: only what differed came"

"""A master's absence: trainers continue, and the next rounds contain their updates."""

from __future__ import annotations

import pytest
import trio

from holdfast.membership.peer.trainer_control import WORTH_SHARE
from holdfast.simulation.drifting_trainer import small_layout
from holdfast.simulation.swarm import Swarm
from tests.swarm.test_swarm import a_swarm, settled, spec

STEP_S = 0.05
SYNC_EVERY = 4  # of the spec
DEADLINE_S = 3.0


def steps(swarm: Swarm) -> list[int]:
    return [sim.service.training.progress().step for sim in swarm.peers.values()]


def waited_s(swarm: Swarm) -> float:
    return sum(sim.trainer.waited_s for sim in swarm.peers.values())


@pytest.mark.fault("the master is away", "the session's end", "trainers go on, within bounds")
async def test_trainers_go_on_without_a_master() -> None:
    async with a_swarm("abc") as swarm:
        swarm.crash_master()
        await trio.sleep(0.2)
        before, idle_s = steps(swarm), waited_s(swarm)
        await trio.sleep(1.0)
        for now, then in zip(steps(swarm), before, strict=True):
            assert now - then >= 0.9 * 1.0 / STEP_S
        assert waited_s(swarm) - idle_s < 0.1
        committed = swarm.committed
        await swarm.start_master()
        await swarm.until(lambda: swarm.committed > committed)
        # All of it is in the next commit: the weight is the tokens since the last one.
        weights = [c.weight for c in swarm.witness.commits[committed].contributors]
        assert all(weight > 64 * 1.0 / STEP_S for weight in weights)
        await settled(swarm, "abc", more=30)


async def test_rounds_that_trainers_are_ahead_of_are_caught_up_with() -> None:
    """Two seconds are forty steps: ten rounds. None is void, and the steps agree again, two more by
    each round."""
    async with a_swarm("abc") as swarm:
        swarm.crash_master()
        await trio.sleep(2.0)
        await swarm.start_master()
        committed = swarm.committed
        await swarm.until(lambda: swarm.committed >= committed + 28, within_s=20)
        assert swarm.coordinator.scheduler.round_table.abort_count == 0
        run_step = swarm.coordinator.context.history.step
        assert all(abs(step - run_step) <= SYNC_EVERY for step in steps(swarm))
        await settled(swarm, "abc")


@pytest.mark.parametrize("fragments", [1, 2])
async def test_no_round_of_almost_nothing_follows_a_masters_restart(fragments: int) -> None:
    """All trainers are ten rounds ahead then, so every next round would be due at once."""
    every = "sync_every = {}\n".format
    toml = spec(fragments=fragments).replace(every(SYNC_EVERY), every(8))
    async with a_swarm("abc", toml=toml) as swarm:
        swarm.crash_master()
        await trio.sleep(2.0)
        await swarm.start_master()
        committed = swarm.committed
        await swarm.until(lambda: swarm.committed >= committed + 32, within_s=20)
        for commit in swarm.witness.commits[committed:]:
            assert all(c.weight >= 64 * 8 * WORTH_SHARE for c in commit.contributors)
        run_step = swarm.coordinator.context.history.step
        assert all(abs(step - run_step) <= 8 for step in steps(swarm)), "the steps agree again"
        await settled(swarm, "abc")


@pytest.mark.fault("the master is away")
async def test_they_do_not_go_on_for_ever() -> None:
    async with a_swarm("abc") as swarm:
        swarm.crash_master()
        before = steps(swarm)
        await trio.sleep(3 * DEADLINE_S)
        far = steps(swarm)
        for now, then in zip(far, before, strict=True):
            most = DEADLINE_S / STEP_S + 2 * SYNC_EVERY
            assert 0.9 * DEADLINE_S / STEP_S <= now - then <= most
        await trio.sleep(3 * DEADLINE_S)
        assert steps(swarm) == far
        await swarm.start_master()
        await settled(swarm, "abc", more=20)


@pytest.mark.fault("the master is away")
@pytest.mark.parametrize("at_s", [0.0, 0.01, 0.03, 0.05])
async def test_a_round_in_flight_when_the_master_goes_is_counted_once(at_s: float) -> None:
    async with a_swarm("abc", apply_s=0.02) as swarm:
        for _crash in range(2):
            assert swarm.master is not None
            scheduler = swarm.coordinator.scheduler
            await swarm.until(lambda: any(r.attempt for r in scheduler.rounds.values()))  # noqa: B023
            await trio.sleep(at_s)
            swarm.crash_master()
            idle_s = waited_s(swarm)
            await trio.sleep(1.0)
            # Of the three seconds of three trainers; a wait that was going on is counted whole.
            assert waited_s(swarm) - idle_s < 1.0, "they do not wait for its outcome"
            await swarm.start_master()
            await swarm.until(
                lambda: swarm.master is not None and bool(swarm.coordinator.scheduler.rounds)
            )
        await settled(swarm, "abc", more=10)


@pytest.mark.fault(
    "the master dies during a reduction",
    "the journal has its order",
    "it goes on and is committed by the next master",
)
async def test_a_reduction_outlives_the_master_and_is_committed_by_the_next_one() -> None:
    """The lines need six seconds for the reduction; the master is away for three of them."""
    async with a_swarm("abc", layout=small_layout((300_000,)), bytes_per_s=2.5e5) as swarm:
        scheduler = swarm.coordinator.scheduler
        await swarm.until(lambda: any(r.attempt for r in scheduler.rounds.values()))
        (order,) = [r.attempt.order for r in scheduler.rounds.values() if r.attempt is not None]
        assert order is not None
        began_s, committed = trio.current_time(), swarm.committed
        sent_bytes = sum(swarm.world.sent_bytes.values())
        await trio.sleep(2.0)
        swarm.crash_master()
        await trio.sleep(3.0)
        await swarm.start_master()
        await swarm.until(lambda: swarm.committed > committed)
        took_s = trio.current_time() - began_s
        commit = swarm.witness.commits[committed]
        assert (commit.round, commit.contributors) == (order.round, order.contributors)
        assert 5.0 < took_s < 8.0, "as long as it would have taken"
        # Each peer sends two thirds of the fragment as its own and two thirds as results.
        once_bytes = 3 * (2 / 3 + 2 / 3) * 4 * 300_000
        assert sum(swarm.world.sent_bytes.values()) - sent_bytes < 1.1 * once_bytes
        await settled(swarm, "abc")


async def test_a_healthy_run_is_not_lifted() -> None:
    async with a_swarm("abc") as swarm:
        await settled(swarm, "abc", more=10)
        assert [sim.service.replica.trainer.extension_count for sim in swarm.peers.values()] == [
            0,
            0,
            0,
        ]


async def test_a_trainer_that_comes_while_the_master_is_away_goes_on_too() -> None:
    async with a_swarm("abc", toml=spec()) as swarm:
        swarm.crash_master()
        await trio.sleep(0.1)
        swarm.peers["b"].trainer.crash()
        await trio.sleep(1.2)
        before = swarm.peers["b"].service.training.progress().step
        await trio.sleep(1.0)
        assert swarm.peers["b"].service.training.progress().step > before + 2 * SYNC_EVERY
        await swarm.start_master()
        await settled(swarm, "abc", more=10)

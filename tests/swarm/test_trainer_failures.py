"""Trainers that fail in the middle of a run: replacement, messages of the master, and recovery."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from holdfast.daemon.peer import trainer_service
from holdfast.protocol.messages import FailureKind, Remedy, Role, TrainerFailed
from holdfast.simulation.swarm import Swarm
from tests.plain import describe
from tests.swarm.test_swarm import a_swarm, events, settled, spec

RESTARTING = TrainerFailed(FailureKind.MEMORY, "OutOfMemoryError: no", Remedy.RESTART, 2, 4.0)
GIVEN_UP = TrainerFailed(FailureKind.CUDA, "CUDA error: lost", Remedy.NONE, 5)


def member(swarm: Swarm, name: str) -> dict[str, Any]:
    status = describe(swarm.coordinator, trio.current_time())
    found: dict[str, Any] = next(m for m in status["members"] if m["name"] == name)
    return found


def has_trainer(swarm: Swarm, name: str) -> bool:
    """Return whether the master sees a peer's trainer; cheaper to poll than the status."""
    found = swarm.coordinator.context.roster.get(swarm.peers[name].peer)
    return found is not None and found.trainer.running


async def contributes(swarm: Swarm, name: str) -> None:
    """Wait for a commit with this peer in it."""
    seen = swarm.committed
    peer = swarm.peers[name].peer
    await swarm.until(
        lambda: any(
            c.peer == peer for commit in swarm.witness.commits[seen:] for c in commit.contributors
        )
    )


@pytest.mark.fault(
    "and a spare is warm", "`settle_s` without a trainer", "the spare takes the place"
)
async def test_a_warm_spare_takes_the_place_of_one_whose_trainer_restarts() -> None:
    async with a_swarm("abc", "d") as swarm:
        moved = swarm.peers["d"].service.state_service.received_bytes
        at_s = trio.current_time()
        swarm.peers["b"].trainer.crash(RESTARTING)
        await swarm.until(lambda: swarm.role("d") is Role.CONTRIBUTOR)
        assert trio.current_time() - at_s < 2 * swarm.spec.settle_s
        told = "restarting in 4 s after out of memory (OutOfMemoryError: no), failure 2 in a row"
        assert member(swarm, "b")["trainer_state"] == told
        assert told in member(swarm, "b")["why"]
        assert any("OutOfMemoryError: no; restarting in 4 s" in text for text in events(swarm))
        await contributes(swarm, "d")
        assert swarm.peers["d"].service.state_service.received_bytes == moved
        await swarm.until(lambda: has_trainer(swarm, "b"))
        assert member(swarm, "b")["trainer_state"] == "running"
        assert swarm.role("b") is Role.SPARE, "it is the warm one now"
        await settled(swarm, "abcd")


async def test_without_a_spare_it_keeps_its_place() -> None:
    async with a_swarm("abc") as swarm:
        swarm.peers["b"].trainer.crash(RESTARTING)
        await trio.sleep(2.0)
        assert swarm.role("b") is Role.CONTRIBUTOR
        swarm.add_peer("e", role=Role.SPARE)  # now there is one, as soon as it is in sync
        await swarm.until(lambda: swarm.role("e") is Role.CONTRIBUTOR)
        assert swarm.role("b") is Role.SPARE
        await settled(swarm, "abce")


async def test_a_trainer_that_is_given_up_costs_the_place_and_nothing_else() -> None:
    async with a_swarm("abc") as swarm:
        swarm.peers["b"].trainer.crash(GIVEN_UP)
        await swarm.until(lambda: swarm.role("b") is Role.SPARE)
        state = member(swarm, "b")["trainer_state"]
        assert state.startswith("given up after 5 failures in a row, the last one: CUDA error")
        # It is in sync, serves others, and says the same after the master's restart.
        swarm.add_peer("e")
        await swarm.until(lambda: swarm.role("e") is Role.CONTRIBUTOR)
        swarm.crash_master()
        await swarm.start_master()
        await trio.sleep(2.0)
        assert member(swarm, "b")["trainer_state"] == state
        await settled(swarm, "abce")
        swarm.resume()
        swarm.peers["b"].trainer.retry()
        await swarm.until(lambda: has_trainer(swarm, "b"))
        swarm.crash("c")
        await swarm.until(lambda: swarm.role("b") is Role.CONTRIBUTOR)
        await settled(swarm, "abe")


@pytest.mark.fault("a trainer takes no step")
async def test_one_that_takes_no_step_is_ended_after_the_deadline() -> None:
    toml = spec() + "[trainer]\nstep_deadline_s = 20\n"
    async with a_swarm("abc", toml=toml) as swarm:
        swarm.peers["b"].trainer.stuck = True
        at_s = trio.current_time()
        await swarm.until(lambda: any("hang: no step for" in text for text in events(swarm)))
        assert 20 < trio.current_time() - at_s < 25
        await contributes(swarm, "b")
        await settled(swarm, "abc")


@pytest.mark.fault(
    "a trainer takes no step",
    "its steps in the arena",
    "named after `STILL_SAID_S`; ended, restarted",
)
@pytest.mark.parametrize("deadline_s", [0, 600])
async def test_one_that_takes_no_step_is_named_long_before_it_is_ended(
    deadline_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_service, "STILL_SHOWN_S", 6.0)
    toml = spec() + f"[trainer]\nstep_deadline_s = {deadline_s}\n"
    async with a_swarm("abc", toml=toml) as swarm:
        swarm.peers["b"].trainer.stuck = True
        await trio.sleep(10.0)
        assert member(swarm, "b")["why"] == "its trainer has taken no step for 6 s"
        assert "no step" not in member(swarm, "a")["why"] + member(swarm, "c")["why"]
        swarm.peers["b"].trainer.crash()
        await contributes(swarm, "b")
        assert member(swarm, "b")["why"] == ""
        await settled(swarm, "abc")


async def test_waiting_for_the_run_is_no_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_service, "STILL_SHOWN_S", 6.0)
    toml = spec() + "[trainer]\nstep_deadline_s = 2\n"
    async with a_swarm("abc", "d", toml=toml) as swarm:
        swarm.pause()
        await trio.sleep(15.0)
        assert not [name for name in "abcd" if "no step" in member(swarm, name)["why"]]
        swarm.crash_master()
        await trio.sleep(15.0)
        await swarm.start_master()
        swarm.resume()
        await settled(swarm, "abcd")
        assert not [text for text in events(swarm) if "hang" in text]


@pytest.mark.fault("its loss is not finite")
async def test_a_loss_that_is_not_finite_costs_a_reload_and_in_the_end_a_restart() -> None:
    async with a_swarm("abc") as swarm:
        trainer = swarm.peers["b"].trainer
        for count in (1, 2):
            trainer.spoil()
            assert trainer._machine.loaded is False
            await swarm.until(lambda: trainer._machine.loaded)
            await contributes(swarm, "b")
            told = [t for t in events(swarm) if "it goes on with the shared state" in t]
            assert len(told) == count
            assert member(swarm, "b")["trainer"], "the process goes on"
        trainer.spoil()
        await swarm.until(lambda: not has_trainer(swarm, "b"))
        await swarm.until(lambda: any("again after 2 reloads" in text for text in events(swarm)))
        await contributes(swarm, "b")
        await settled(swarm, "abc")


@pytest.mark.fault("an update is not finite", "its daemon's norm", "its weights are replaced")
@pytest.mark.parametrize("names", ["a", "ab", "abc"])
@pytest.mark.parametrize("fragments", [1, 2])
async def test_an_update_that_is_not_finite_costs_a_reload_and_no_standstill(
    names: str, fragments: int
) -> None:
    """Its weights break a step before a round; no loss tells of it, and a round may need this
    peer.
    """
    last = names[-1]
    toml = spec(contributors=len(names), min_members=1, fragments=fragments)
    async with a_swarm(names, toml=toml + "[trainer]\nnan_steps = 0\n") as swarm:
        trainer = swarm.peers[last].trainer
        for count in (1, 2):
            trainer.spoilt = True
            await swarm.until(lambda: not trainer.spoilt, within_s=10.0)
            assert trainer.cleared_count == count, "its optimizer's state goes, too"
            await contributes(swarm, last)
            told = [text for text in events(swarm) if "it goes on with the shared state" in text]
            assert len(told) == count, told
            assert member(swarm, last)["trainer"], "the process goes on"
        trainer.spoilt = True
        await swarm.until(lambda: any("again after 2 reloads" in text for text in events(swarm)))
        await contributes(swarm, last)
        await settled(swarm, names)


async def test_a_trainer_without_a_finite_update_is_ended_however_slow_its_rounds_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_service, "RELOADS_S", 2.0)
    async with a_swarm("ab", toml=spec(contributors=2, min_members=1)) as swarm:
        trainer = swarm.peers["b"].trainer
        trainer.poison = lambda _round: float("nan")
        trainer.step_s = 2 * trainer_service.RELOADS_S
        await swarm.until(lambda: any("again after 2 reloads" in text for text in events(swarm)))
        trainer.poison, trainer.step_s = None, swarm.peers["a"].trainer.step_s
        await contributes(swarm, "b")
        await settled(swarm, "ab")


async def test_a_residual_that_is_not_finite_is_dropped() -> None:
    async with a_swarm("a", toml=spec(contributors=1, min_members=1, codec="int8")) as swarm:
        residual = swarm.peers["a"].service.reducer.residual_of(0)
        assert residual is not None
        residual.values[:] = float("nan")
        await settled(swarm, "a")
        told = [text for text in events(swarm) if "it goes on with the shared state" in text]
        assert len(told) == 1, told

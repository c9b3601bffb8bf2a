"""Scenarios as data: their coverage, and the shrinking of a failing one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest
import trio
from attrs import evolve

from holdfast.membership.master.state.roster import Detector
from holdfast.simulation.batch import broken_by
from holdfast.simulation.frozen_hosts import FrozenHosts, on_host
from holdfast.simulation.hostile_peer import Falsehood, Hostile
from holdfast.simulation.scenario import Fault, Instant, Kind, Scenario
from holdfast.simulation.scenario_run import run_scenario
from holdfast.simulation.shrink import RUNS_MAX, shrink

QUIET = Scenario(seed=1, peers=3, bytes_per_s=1e5)


def test_a_scenario_is_a_function_of_its_seed() -> None:
    assert Scenario.of(7) == Scenario.of(7) != Scenario.of(8)
    assert Scenario.of(7, peers=12).peers == 12


def test_five_hundred_seeds_have_every_kind_of_fault_at_every_instant() -> None:
    faults = [fault for seed in range(500) for fault in Scenario.of(seed).faults]
    assert set(Kind) - {Kind.NO_DATABASE} == {fault.kind for fault in faults}
    assert set(Instant) == {fault.instant for fault in faults}
    assert any(fault.who == "master" and fault.kind is Kind.CRASH for fault in faults)


def test_the_same_seed_gives_the_same_run_in_any_process() -> None:
    code = (
        "from holdfast.simulation.scenario_run import run_scenario\n"
        "from holdfast.simulation.scenario import Scenario\n"
        "for s in range(2): print(run_scenario(Scenario.of(s)))"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert told[0].count("Outcome(") == 2
    assert told[0] == told[1]


# ---------------------------------------------------------------- kinds that are easily harmless


@pytest.mark.fault("a process stands still, a machine sleeps")
@pytest.mark.parametrize(
    "fault",
    [
        Fault(Kind.SLOW_DISK, "master", amount=0.7),
        Fault(Kind.FULL_DISK, "master"),
        Fault(Kind.RATE, "p1", amount=1e4),
        Fault(Kind.DELAY, "p1", amount=1.0),
        Fault(Kind.STALL, "master"),
        Fault(Kind.SLEEP, "p1"),
        Fault(Kind.PAUSE),
    ],
    ids=lambda fault: fault.kind.value,
)
def test_a_fault_bites(fault: Fault) -> None:
    """In the same time, fewer rounds are committed. Without one that sleeps most go on."""
    late = Fault(Kind.TRAINER, "p2", at_s=6.0)
    plain, hurt = (
        run_scenario(evolve(QUIET, faults=faults))
        for faults in ((late,), (evolve(fault, for_s=5.5), late))
    )
    share = 0.85 if fault.kind is Kind.SLEEP else 0.75
    assert hurt.committed < share * plain.committed


def test_what_lasted_beyond_the_peace_does_not_end_a_second_time() -> None:
    """Else this pause's end would resume the run that the end of the scenario has paused."""
    outcome = run_scenario(evolve(QUIET, faults=(Fault(Kind.PAUSE, for_s=1.6),)))
    assert outcome.committed < 10


def test_a_member_that_is_silent_for_too_long_must_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = evolve(QUIET, faults=(Fault(Kind.SLEEP, "p1"),), linger_s=7.0)
    assert not broken_by(silent)
    monkeypatch.setattr(Detector, "silent", lambda *_: [])
    assert "p1 is silent since" in broken_by(silent)


# ---------------------------------------------------------------- hosts that stand still


@pytest.mark.fault(
    "a process stands still, a machine sleeps",
    "silence; its own timers are late",
    "as a death; it is synced again and blames nobody",
)
async def test_a_host_that_stands_still_wakes_with_all_its_timers_late() -> None:
    standstill = FrozenHosts()
    woke: dict[str, float] = {}

    async def sleep(name: str) -> None:
        await trio.sleep(1.0)
        woke[name] = trio.current_time()

    async with trio.open_nursery() as nursery:
        for name in ("still", "lively"):
            with on_host(name):
                nursery.start_soon(sleep, name)
        await trio.sleep(0.5)
        standstill.stop("still")
        await trio.sleep(9.5)
        assert woke == {"lively": 1.0}
        standstill.go_on("still")
        await trio.sleep(0)
    assert woke == {"lively": 1.0, "still": 10.0}


# ---------------------------------------------------------------- shrinking


def test_a_failing_list_of_faults_shrinks_to_what_it_takes() -> None:
    asked = Counter[str]()

    def fails(scenario: Scenario) -> bool:
        asked["times"] += 1
        kinds = {fault.kind for fault in scenario.faults}
        return {Kind.CRASH, Kind.PAUSE} <= kinds

    faults = tuple(
        Fault(kind, "p0", at_s=1.23, for_s=0.77, instant=Instant.FLUSH)
        for kind in (Kind.JOIN, Kind.CRASH, Kind.TRAINER, Kind.CUT, Kind.PAUSE, Kind.LEAVE)
    )
    found = shrink(evolve(QUIET, spare=True, faults=faults), fails)
    assert found == evolve(QUIET, faults=(Fault(Kind.CRASH, "p0"), Fault(Kind.PAUSE, "p0")))
    assert asked["times"] <= RUNS_MAX
    asked.clear()
    shrink(evolve(QUIET, faults=faults), fails, runs_max=3)
    assert asked["times"] == 3


def test_an_adversary_shrinks_to_the_lie_that_it_takes() -> None:
    lies = (Falsehood.MUTE, Falsehood.DIGEST, Falsehood.AGAIN)
    scenario = evolve(QUIET, adversary=Hostile(1, "p1", lies, always=True))

    def fails(scenario: Scenario) -> bool:
        adversary = scenario.adversary
        return isinstance(adversary, Hostile) and Falsehood.DIGEST in adversary.kinds

    assert shrink(scenario, fails).causes == [f"p1 {Falsehood.DIGEST.value}"]

"""What the files test_simulation_*.py have in common: each lives through its share of the seeds.

They are files of their own so that they are spread over the machine's cores.
"""

from __future__ import annotations

import gc

import pytest

from holdfast.daemon.simulation.run import Outcome, simulate
from holdfast.daemon.simulation.scenario import Instant, Kind, Scenario

BLOCK = 25
BLOCKS = 20  # of a shard


def blocks(shard: int) -> pytest.MarkDecorator:
    """The first seeds of the shard's blocks, as its test's parameter."""
    first = shard * BLOCK * BLOCKS
    firsts = range(first, first + BLOCK * BLOCKS, BLOCK)
    return pytest.mark.parametrize("first", firsts, ids=lambda n: f"seeds-{n}-")


def live_through(first: int) -> None:
    """A block of seeds."""
    gc.collect()
    gc.freeze()  # thousands of histories make garbage, and what pytest holds is none
    try:
        check([simulate(seed) for seed in range(first, first + BLOCK)], first)
    finally:
        gc.unfreeze()


def check(outcomes: list[Outcome], first: int) -> None:
    """A loss that leaves everything to do is repaired, if enough are left; nothing is run again."""
    reruns = 0
    for seed, outcome in enumerate(outcomes, start=first):
        scenario = Scenario.of(seed)
        kinds = [fault.kind for fault in scenario.faults]
        if not scenario.aimed or any(fault.who == "master" for fault in scenario.faults):
            continue
        reruns += outcome.reruns
        loss = scenario.faults[0]
        if kinds == [Kind.CRASH] and loss.instant is Instant.REDUCTION and not loss.after_s:
            assert outcome.repairs or outcome.aborts, outcome
    assert reruns <= 1

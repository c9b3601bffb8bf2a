"""Do the histories of losses see anything? Each test plants one bug in a peer, which they must find.

The bugs:

    divisor of all        an owner divides by everybody's weight, whoever is in the chunk
    set not told          a result does not say who is missing in it
    heir encodes anew     an heir spreads other bytes than those that it holds
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from holdfast.collectives.allreduce import Reduction
from holdfast.collectives.arithmetic import Factors
from holdfast.collectives.result import Result
from holdfast.daemon.simulation.deaths import simulate_deaths
from holdfast.daemon.simulation.witness import ViolationError
from holdfast.protocol.errors import HoldfastError
from holdfast.protocol.messages import Repair

SEEDS_MAX = 300

Patch = pytest.MonkeyPatch
BUGS: dict[str, Callable[[Patch], None]] = {}


def bug(name: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS[name] = plant
        return plant

    return register


@bug("divisor of all")
def _(patch: Patch) -> None:
    original = Factors.of

    def of(contributors: Any, present: Sequence[bool] | None = None) -> Factors:
        return Factors(original(contributors, present).factors, original(contributors).divisor)

    patch.setattr(Factors, "of", of)


@bug("set not told")
def _(patch: Patch) -> None:
    original = Result.made

    def made(self: Result, index: int, length: int, present: Sequence[bool]) -> None:
        original(self, index, length, [True] * len(present))

    patch.setattr(Result, "made", made)


@bug("heir encodes anew")
def _(patch: Patch) -> None:
    original = Reduction.repair

    def repair(self: Reduction, order: Repair) -> None:
        for assignment in order.assignments:
            if assignment.anew or assignment.owner != self._me:
                continue
            first = assignment.first_chunk
            for index in range(first, first + assignment.chunk_count):
                other = bytearray(self._result.room(index))
                other[0] ^= 1
                self._result._rooms[index] = memoryview(other)
        original(self, order)

    patch.setattr(Reduction, "repair", repair)


def is_violated(seed: int) -> bool:
    """By whoever sees it first: the witness, at the end, or a peer."""
    found: list[BaseException] = []
    try:
        simulate_deaths(seed)
    except* (ViolationError, HoldfastError, AssertionError, ValueError) as group:
        found.append(group)
    return bool(found)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: Patch) -> None:
    BUGS[name](monkeypatch)
    assert any(is_violated(seed) for seed in range(SEEDS_MAX))


def test_every_bug_is_listed_above() -> None:
    assert __doc__ is not None
    for name in BUGS:
        assert f"    {name} " in __doc__

"""Makes the list of faults of a failing scenario shorter, then its values simpler.

First whole runs of faults are left out, halves, then quarters, then single ones (Zeller's ddmin); then
each that is left is tried with plainer values: at no instant, at once, until the peace; then the run
itself with fewer choices. What still fails is kept. A run that fails for another reason counts, too:
it is a failure with fewer faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import evolve

from .scenario import Fault, Instant, Scenario

RUNS_MAX = 40  # of the scenario, all in all; what is found by then is told

Fails = Callable[[Scenario], bool]


def shrink(scenario: Scenario, fails: Fails, runs_max: int = RUNS_MAX) -> Scenario:
    """A scenario with as few and as plain faults as were found to fail still.

    Args:
      scenario: which fails.
      runs_max: how often ``fails`` may be asked.
    """
    runs = iter(range(runs_max))

    def still_fails(candidate: Scenario) -> bool:
        return next(runs, None) is not None and fails(candidate)

    scenario = _with_fewer_faults(scenario, still_fails)
    return _plainer(scenario, still_fails)


def _with_fewer_faults(scenario: Scenario, fails: Fails) -> Scenario:
    faults = list(scenario.faults)
    if faults and fails(evolve(scenario, faults=())):
        return evolve(scenario, faults=())
    size = max(1, len(faults) // 2)
    while len(faults) > 1:
        for start in range(0, len(faults), size):
            fewer = faults[:start] + faults[start + size :]
            if fewer and fails(evolve(scenario, faults=tuple(fewer))):
                faults = fewer
                size = max(1, min(size, len(faults) // 2))
                break
        else:
            if size == 1:
                break
            size //= 2
    return evolve(scenario, faults=tuple(faults))


def _plainer(scenario: Scenario, fails: Fails) -> Scenario:
    """Take one plainer value after the other as long as that fails, too."""
    plainer = True
    while plainer:
        plainer = False
        for candidate in _plainer_ones(scenario):
            if fails(candidate):
                scenario, plainer = candidate, True
                break
    return scenario


def _plainer_ones(scenario: Scenario) -> Iterator[Scenario]:
    for index, fault in enumerate(scenario.faults):
        for plain in _plainer_faults(fault):
            faults = (*scenario.faults[:index], plain, *scenario.faults[index + 1 :])
            yield evolve(scenario, faults=faults)
    for plain_run in (
        evolve(scenario, spare=False),
        evolve(scenario, fragments=1),
        evolve(scenario, overlap=0),
        evolve(scenario, slowness=1.0),
        evolve(scenario, jitter_s=0.0),
        evolve(scenario, apply_s=0.0),
        evolve(scenario, codec="fp32"),
        evolve(scenario, counters=0),
        evolve(scenario, linger_s=0.0),
        evolve(scenario, tensors=(max(scenario.tensors),)),
    ):
        if plain_run != scenario:
            yield plain_run


def _plainer_faults(fault: Fault) -> Iterator[Fault]:
    for plain in (
        evolve(fault, instant=Instant.TIME),
        evolve(fault, after_s=0.0),
        evolve(fault, at_s=0.0),
        evolve(fault, at_s=round(fault.at_s, 1)),
        evolve(fault, for_s=0.0),  # until the peace
    ):
        if plain != fault:
            yield plain
    for plain in (
        evolve(fault, after_s=round(fault.after_s, 2)),
        evolve(fault, for_s=round(fault.for_s, 1)),
    ):
        if plain != fault:
            yield plain

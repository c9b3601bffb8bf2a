"""Reduction of a failing scenario to fewer faults with simpler values.

First, groups of faults are removed: halves, then quarters, then single ones (Zeller's ddmin). Then
lies of an adversary are removed, one by one, and each remaining fault is tried with simpler values:
no instant, no delay, no end. Then the run itself is tried with simpler options. A change stays if
the scenario still fails. A failure for another reason counts too: it is a failure with fewer
faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import evolve

from .scenario import Fault, Instant, Scenario

RUNS_MAX = 40  # limit of the runs; the simplest scenario found by then is reported

Fails = Callable[[Scenario], bool]


def shrink(scenario: Scenario, fails: Fails, runs_max: int = RUNS_MAX) -> Scenario:
    """Return the simplest scenario found that still fails.

    Args:
      scenario: a failing scenario.
      fails: runs a scenario and returns whether it fails.
      runs_max: limit of the calls of ``fails``.
    """
    runs = iter(range(runs_max))

    def still_fails(candidate: Scenario) -> bool:
        return next(runs, None) is not None and fails(candidate)

    scenario = _with_fewer_faults(scenario, still_fails)
    return _simplified(scenario, still_fails)


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


def _simplified(scenario: Scenario, fails: Fails) -> Scenario:
    """Simplify one value after the other as long as the scenario still fails."""
    changed = True
    while changed:
        changed = False
        for candidate in _simpler_scenarios(scenario):
            if fails(candidate):
                scenario, changed = candidate, True
                break
    return scenario


def _simpler_scenarios(scenario: Scenario) -> Iterator[Scenario]:
    for adversary in scenario.adversary.simpler() if scenario.adversary is not None else ():
        yield evolve(scenario, adversary=adversary)
    for index, fault in enumerate(scenario.faults):
        for simpler in _simpler_faults(fault):
            faults = (*scenario.faults[:index], simpler, *scenario.faults[index + 1 :])
            yield evolve(scenario, faults=faults)
    for candidate in (
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
        if candidate != scenario:
            yield candidate


def _simpler_faults(fault: Fault) -> Iterator[Fault]:
    for simpler in (
        evolve(fault, instant=Instant.TIME),
        evolve(fault, after_s=0.0),
        evolve(fault, at_s=0.0),
        evolve(fault, at_s=round(fault.at_s, 1)),
        evolve(fault, for_s=0.0),  # until all faults are ended
    ):
        if simpler != fault:
            yield simpler
    for simpler in (
        evolve(fault, after_s=round(fault.after_s, 2)),
        evolve(fault, for_s=round(fault.for_s, 1)),
    ):
        if simpler != fault:
            yield simpler

"""The simulator's seeds that tests run, and what each has to show.

The fixed ones decide whether a change is good; all that ever failed are among them. Others follow
from the commit, so that every change is tried with new ones: see ``rotating``. A failing test
prints the command that runs its seed again.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.simulation.scenario import Instant, Kind, Scenario
from holdfast.simulation.scenario_run import RunOutcome, run_scenario

BLOCK = 25
HAPPEN_MIN = 0.7  # of a block's faults; the others find their target gone, or the run at its end
# Seeds that once violated an invariant, with the cause.
FAILED = {
    519_564_803: (
        "trainers that had used up an epoch without a master got no samples for the step to their"
        " post"
    ),
    1_265_407_416: "who was away as its update was committed trained on the same samples again",
    1_806_642_587: "a long lease that came back late took longer to train on than was waited for",
    7_000_929: "a pair whose route was forgotten at one end never linked again",
    8_001_275: "trainers were held before the step of the round that was open",
    8_002_519: "as 8001275, with a clock that leapt",
    8_004_034: "as 7000929, after one was alone",
    8_004_481: "as 7000929, after one was alone",
    252_796_819: "who held a result that a repair had replaced was taken for a holder",
    252_805_132: "who could not keep up waited twice as long for each fragment of the state",
    252_810_794: "a copy was there before the round that its peer was applying",
    600_149: "an update that crossed a new offer of its round was taken, and posted once more",
    252_800_507: "the last holder left while nobody else was there; no rewind was awaited",
}
FIXED = (*range(200), *FAILED)
# Seeds that still violate an invariant, with the cause: expected to fail, and listed after the
# tests.
KNOWN: dict[int, str] = {}


def blocks(seeds: Sequence[int]) -> pytest.MarkDecorator:
    """Parametrize a test with blocks of seeds; known failures are cases of their own."""
    firsts = range(0, len(seeds), BLOCK)
    found = [seeds[first : first + BLOCK] for first in firsts]
    known = [seed for block in found for seed in block if seed in KNOWN]
    return pytest.mark.parametrize(
        "seeds",
        [
            *(
                pytest.param(
                    [seed for seed in block if seed not in KNOWN],
                    id=f"seeds-{block[0]}-to-{block[-1]}-",
                )
                for block in found
            ),
            *(
                pytest.param(
                    [seed], id=f"seed-{seed}-", marks=pytest.mark.xfail(reason=KNOWN[seed])
                )
                for seed in known
            ),
        ],
    )


def live_through(seeds: Sequence[int]) -> list[RunOutcome]:
    """Run a block of seeds; most of the faults that they plan must happen."""
    outcomes = [outcome_of(seed) for seed in seeds]
    planned = sum(len(Scenario.of(seed).faults) for seed in seeds)
    assert sum(len(outcome.faults) for outcome in outcomes) > HAPPEN_MIN * planned
    return outcomes


def outcome_of(seed: int) -> RunOutcome:
    """Run a seed; a crash at the start of a reduction must lead to a repair or an abort."""
    scenario = Scenario.of(seed)
    try:
        outcome = run_scenario(scenario)
        if [fault.kind for fault in scenario.faults] == [Kind.CRASH] and scenario.aimed:
            crash = scenario.faults[0]
            if crash.instant is Instant.REDUCTION and not crash.after_s and crash.who != "master":
                assert outcome.repairs or outcome.aborts, outcome
    except BaseException as error:
        error.add_note(f"again: python -m holdfast.simulation --start {seed} --seeds 1")
        raise
    return outcome


def check_reruns(seeds: Sequence[int], outcomes: Sequence[RunOutcome]) -> None:
    """Check that after losses of peers at chosen instants at most one reduction is run again."""
    reruns = 0
    for seed, outcome in zip(seeds, outcomes, strict=True):
        scenario = Scenario.of(seed)
        if scenario.aimed and all(fault.who != "master" for fault in scenario.faults):
            reruns += outcome.reruns
    assert reruns <= 1

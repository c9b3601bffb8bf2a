"""What lying contributors do to a model, under the mean and under robust rules.

    python -m benchmarks.poison                                        all arms
    python -m benchmarks.poison --arms mean,clipped-flipped2 --json poison.json
    python -m benchmarks.poison --arms clipped-constant2@combine=clipped:0.5,scale=5

Eight replicas as in ``benchmarks.learning``, of which none, one or two change each pseudo-gradient
before their daemon sees it; ``poison_arms`` says how. Everything else is the production master, peers and
hook in virtual time, so the same arm ends with the same bits however busy the machine is. Each arm is a
process of its own and leaves a file in ``build/poison``; what is there from the same commit is not measured
again.

The JSON has per arm ``loss`` (validation loss of the shared parameters), ``ratio`` to the loss of
``mean`` where nobody lies, how many peers are ``left_out`` in the end, and what these were made of.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import asdict

sys.path.insert(0, str(Path(__file__).parents[1]))  # for when this file itself is run
from benchmarks import combining
from benchmarks.commands import ROOT, BenchError
from benchmarks.lab_run import stop_on_signals
from benchmarks.learning import Job, check_steps, measure_all, names_of
from benchmarks.learning_arms import VALIDATION_WINDOWS, Outcome, Recipe
from benchmarks.poison_arms import (
    ATTACKS,
    CAUGHT,
    DEFAULT,
    GATED,
    LIARS,
    PEERS,
    RATIO_MAX,
    RULES,
    SCALE,
    SYNC_EVERY,
    arm_of,
)
from benchmarks.report import Table, commit
from benchmarks.sections import Measured

# A third of ``learning``'s: eight replicas train instead of two to four, in thirty arms.
STEPS = 160
KEPT = ROOT / "build" / "poison"
CLEAN = "mean"


def jobs_of(names: Sequence[str], recipe: Recipe, windows: int, folder: Path) -> list[Job]:
    wanted = dict.fromkeys([CLEAN, *names])  # all are compared with it
    return [Job(arm_of(name), recipe, windows, folder, "benchmarks.poison") for name in wanted]


def summary(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    clean = next(each.loss for each in outcomes if each.arm == CLEAN)
    figures = {}
    for outcome in outcomes:
        arm, ratio = arm_of(outcome.arm), outcome.loss / clean
        figures[outcome.arm] = {
            "what": arm.what,
            "combine": arm.settings["combine"],
            "scale": arm.scale if arm.attack else None,
            "loss": outcome.loss,
            "ratio": ratio,
            "meets": None if arm.ratio_max is None else ratio <= arm.ratio_max,
            "left_out": PEERS - outcome.notes["contributors_at_last"],
            "rounds": outcome.notes["rounds"],
            "outcome": asdict(outcome),
        }
    return figures


# ---------------------------------------------------------------- as a section of RESULTS.md


def why_no_torch() -> str:
    return "" if find_spec("torch") else "torch is not installed (`make install` does it)"


def poison() -> Measured:
    jobs = jobs_of(DEFAULT, Recipe(steps=STEPS), VALIDATION_WINDOWS, KEPT)
    # Most of an hour. Which code found what is said; whoever changes the arithmetic empties the folder.
    figures = summary(measure_all(jobs, 1, reuse=True))
    costs = combining.measure(combining.CONTRIBUTORS)
    return [table(figures), combining.table(costs)], {"arms": figures, "combining": costs}


def table(figures: dict[str, dict[str, Any]]) -> Table:
    rows = []
    cases = [("", 0), *((attack, liars) for attack in ATTACKS for liars in LIARS)]
    for attack, liars in cases:
        arms = [f"{rule}-{attack}{liars}" if attack else rule for rule in RULES]
        what = f"{attack}, {liars} of {PEERS}: {ATTACKS[attack]}" if attack else "nobody lies"
        rows.append([what, *(_cell(figures.get(arm)) for arm in arms)])
    for name in GATED:
        arm = arm_of(name)
        what = (
            f"{arm.attack} and {CAUGHT:g} times as long, {arm.liars} of {PEERS}: refused, removed"
        )
        rows.append([what, _cell(figures.get(name)), ""])
    robust = [row for row in figures.values() if row["meets"] is not None]
    within = sum(row["meets"] for row in robust)
    clean = figures[CLEAN]["outcome"]
    commits = {row["outcome"]["notes"]["commit"] for row in figures.values()}
    seconds = sum(row["outcome"]["seconds"] for row in figures.values())
    return Table(
        "Validation loss of the shared parameters after lies, nats per byte, and against the mean "
        "where nobody lies",
        ["python -m benchmarks.poison"],
        ["who lies", *(f"`{rule}`" for rule in RULES)],
        rows,
        [
            f"Asked of `clipped`: {RATIO_MAX - 1:+.0%} at most; {within} of "
            f"{len(robust)} are within.",
            f"What a liar sends is {SCALE:g} times as long as its honest update, which the master's norm "
            f"gate (3 times the median) lets pass; {CAUGHT:g} times as long it is refused each "
            "time, and its sender sent away after the third, whatever the rule: that is one run for each number "
            "of liars.",
            f"A byte-level GPT (0.8 million parameters) as in *learning*, but {STEPS} steps of each of "
            f"{PEERS} replicas, H = {SYNC_EVERY}, so {clean['notes']['rounds']} rounds; one seed. "
            f"Production master, peers and hook, in virtual time. All arms took {seconds / 60:.0f} "
            "minutes, one after the other.",
            f"Code of {', '.join(sorted(f'`{each}`' for each in commits))}.",
        ],
    )


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    removed = f", {row['left_out']} left out" if row["left_out"] else ""
    mark = "" if row["meets"] is not False else " (MISSED)"
    return f"{row['loss']:.4f} ({row['ratio'] - 1:+.1%}{removed}){mark}"


# ---------------------------------------------------------------- the command


def main() -> int:
    parser = argparse.ArgumentParser(prog="poison", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arms", metavar="NAME[,...]", help=f"of {', '.join(DEFAULT)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--jobs", type=int, default=1, help="at a time")
    parser.add_argument("--reuse", action="store_true", help="also what other commits found")
    parser.add_argument("--keep", type=Path, default=KEPT, help="folder for finished runs")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each replica")
    parser.add_argument("--batch", type=int, default=Recipe().batch, help="windows of a step")
    parser.add_argument("--validation-windows", type=int, default=VALIDATION_WINDOWS)
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    stop_on_signals()
    recipe = Recipe(options.steps, options.batch, options.seed)
    windows = options.validation_windows
    try:
        if options.one:
            Job(arm_of(options.one), recipe, windows, options.keep).measure()
            return 0
        names = names_of(options.arms) if options.arms else DEFAULT
        jobs = jobs_of(names, recipe, windows, options.keep)
        for job in jobs:
            check_steps(job)
        figures = summary(measure_all(jobs, options.jobs, reuse=options.reuse))
        if options.json:
            content = {"commit": commit(), "arms": figures}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
        for name, row in figures.items():
            print(f"{name:28} {_cell(row)}")
    except BenchError as error:
        print(f"poison: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("poison: stopped; finished runs are kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

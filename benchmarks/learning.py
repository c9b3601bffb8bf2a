"""What DiLoCo's variants learn, arm by arm, compared with data parallel on the same tokens.

    python -m benchmarks.learning                                     all arms, three seeds each
    python -m benchmarks.learning --arms dp,diloco2 --seeds 1 --json learning.json
    python -m benchmarks.learning --arms diloco4@sync_every=10        an arm with other settings

Each replica trains the byte-level GPT of ``examples/train.py`` on the standard library's sources:
AdamW, 500 steps of 12 windows of 64 bytes, a warm-up and a cosine. Each arm with each seed is a
process of its own (``learning_run``) and leaves a file in ``build/learning``; what is there from
the same commit is not measured again. An arm's baseline is measured with it.

The JSON has per arm, as means over seeds: ``loss`` (validation loss of the shared parameters),
``tokens`` of all replicas together, ``ratio_to_baseline`` (the loss divided by the baseline's over
the same seeds; null for a baseline whose own is not measured), and what these were made of.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import attrs
from attrs import asdict, frozen

from benchmarks.learning_arms import (
    DEFAULT,
    EVALUATION_BATCH,
    FOUND,
    FRAGMENTS,
    SYNC_EVERY,
    VALIDATION_WINDOWS,
    Arm,
    Outcome,
    Recipe,
    arm_of,
    with_baselines,
)
from benchmarks.report import (
    ROOT,
    BenchError,
    Measured,
    Table,
    bench_parser,
    commit,
    run_main,
    say,
    tell,
)

SEEDS = 3
KEPT = ROOT / "build" / "learning"
COMMAND = "python -m benchmarks.learning"


@frozen
class Job:
    """An arm with a seed, and where its outcome is kept."""

    arm: Arm
    recipe: Recipe
    validation_windows: int
    folder: Path

    @property
    def path(self) -> Path:
        """By what was run, so that an arm with another name and the same settings finds it."""
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:16]}.json"

    @property
    def key(self) -> dict[str, Any]:
        """What an outcome depends on, but for the code."""
        what = {
            "arm": self.arm.key,
            "recipe": asdict(self.recipe),
            "validation_windows": self.validation_windows,
            "torch": version("torch"),
            "figures": [each.name for each in attrs.fields(Outcome)],
        }
        return dict(json.loads(json.dumps(what)))

    def kept(self) -> tuple[Outcome, str] | None:
        """What was found before, and the commit that did; None: nothing was."""
        try:
            content = json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        if content["key"] != self.key:
            return None
        return Outcome(**{**content["outcome"], "arm": self.arm.name}), content["commit"]

    def measure(self) -> float:
        """Live through it, keep the outcome, and return its loss."""
        from benchmarks.learning_run import run_arm  # imports torch

        outcome = run_arm(self.arm, self.recipe, validation_windows=self.validation_windows)
        content = {"commit": commit(), "key": self.key, "outcome": asdict(outcome)}
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".new")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        scratch.replace(self.path)
        return outcome.loss


# ---------------------------------------------------------------- all of them


def measure_all(jobs: Sequence[Job], parallel: int, *, reuse: bool) -> list[Outcome]:
    """Outcomes of all jobs, in their order.

    Raises:
      BenchError: some failed; the others were finished and are kept.
    """
    head = commit()
    # Changes that are not committed have no name: what was found with some is not found again.
    good = {head} if not head.endswith("+") else set()
    waiting = []
    for job in jobs:
        kept = job.kept()
        if kept is None or not (reuse or kept[1] in good):
            waiting.append(job)
    if known := len(jobs) - len(waiting):
        say(f"{known} of {len(jobs)} were measured before")
    waiting.sort(key=lambda job: -job.arm.peers)  # the long ones first
    failed = _run(waiting, parallel)
    if failed:
        raise BenchError(f"failed: {', '.join(failed)}; their words are above")
    found = [job.kept() for job in jobs]
    return [
        attrs.evolve(each[0], notes={**each[0].notes, "commit": each[1]})
        for each in found
        if each is not None
    ]


def _run(jobs: Sequence[Job], parallel: int) -> list[str]:
    """Measure each in a process of its own; return the names of those that failed."""
    failed = []
    spawn = get_context("spawn")
    with ProcessPoolExecutor(parallel, mp_context=spawn, max_tasks_per_child=1) as pool:
        running = {pool.submit(job.measure): job for job in jobs}
        try:
            for left, future in enumerate(as_completed(running)):
                job = running[future]
                name = f"{job.arm.name}, seed {job.recipe.seed}"
                if error := future.exception():
                    failed.append(name)
                    traceback.print_exception(error)
                told = "FAILED" if error else f"loss {future.result():.4f}"
                say(f"{name}: {told}; {len(jobs) - left - 1} of {len(jobs)} left")
        except KeyboardInterrupt:
            for process in active_children():
                process.kill()
            raise
    return failed


def summary(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Figures by arm: means over seeds, and each seed's."""
    by_arm: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_arm.setdefault(outcome.arm, []).append(outcome)
    figures = {}
    for name, some in by_arm.items():
        arm = arm_of(name)
        compared, baseline = _paired(some, by_arm.get(arm.baseline, []))
        speeds = [outcome.speed for outcome in some if outcome.speed is not None]
        figures[name] = {
            "loss": statistics.fmean(outcome.loss for outcome in some),
            "tokens": statistics.fmean(outcome.tokens for outcome in some),
            "ratio_to_baseline": _mean_loss(compared) / _mean_loss(baseline) if baseline else None,
            "ratio_error": _ratio_error(compared, baseline),
            "baseline": arm.baseline,
            "losses": [outcome.loss for outcome in some],
            "round_bytes": statistics.fmean(outcome.round_bytes for outcome in some),
            "speed": statistics.fmean(speeds) if speeds else None,
            "seconds": sum(outcome.seconds for outcome in some),
            "outcomes": [asdict(outcome) for outcome in some],
        }
    return figures


def _paired(
    some: Sequence[Outcome], baselines: Sequence[Outcome]
) -> tuple[list[Outcome], list[Outcome]]:
    """Those of an arm and of its baseline whose seeds both have."""
    seeds = {each.seed for each in some} & {each.seed for each in baselines}
    return [o for o in some if o.seed in seeds], [o for o in baselines if o.seed in seeds]


def _mean_loss(some: Sequence[Outcome]) -> float:
    return statistics.fmean(each.loss for each in some)


def _ratio_error(some: Sequence[Outcome], baselines: Sequence[Outcome]) -> float | None:
    """Standard error of the ratio from which bytes were held out, which all arms have in common.

    Not from the seeds, of which there are few: their losses are told one by one.
    """
    if not baselines or len(some[0].losses) < 2:
        return None
    of_arm = [statistics.fmean(part) for part in zip(*(o.losses for o in some), strict=True)]
    of_base = [statistics.fmean(part) for part in zip(*(o.losses for o in baselines), strict=True)]
    differences = [one - other for one, other in zip(of_arm, of_base, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return error / statistics.fmean(of_base)


# ---------------------------------------------------------------- as a section of RESULTS.md


def learning() -> Measured:
    return _section(DEFAULT, os.cpu_count() or 1, reuse=False)


def found() -> Measured:
    """Arms that take hours: what any commit found of them is kept."""
    return _section(FOUND, 1, reuse=True)


def _section(names: Sequence[str], parallel: int, *, reuse: bool) -> Measured:
    jobs = jobs_of(names, SEEDS, Recipe(), VALIDATION_WINDOWS, KEPT)
    return measured(jobs, parallel, f"{COMMAND} --arms {','.join(names)}", reuse=reuse)


def measured(jobs: Sequence[Job], parallel: int, command: str, *, reuse: bool) -> Measured:
    figures = summary(measure_all(jobs, parallel, reuse=reuse))
    return [table(figures, command)], figures


def jobs_of(
    names: Sequence[str], seeds: int, recipe: Recipe, validation_windows: int, folder: Path
) -> list[Job]:
    """Each arm, and each arm's baseline, with each seed."""
    return [
        Job(arm_of(name), attrs.evolve(recipe, seed=seed), validation_windows, folder)
        for name in with_baselines(list(names))
        for seed in range(seeds)
    ]


def table(figures: dict[str, dict[str, Any]], command: str) -> Table:
    rows = []
    for name, row in figures.items():
        arm = arm_of(name)
        low, high = min(row["losses"]), max(row["losses"])
        rows.append(
            [
                f"`{name}`: {arm.what}",
                f"{row['loss']:.4f}",
                f"{low:.4f} to {high:.4f}" if len(row["losses"]) > 1 else "",
                str(len(row["losses"])),
                "" if arm.baseline == name else _against(row),
                "" if arm.baseline == name else f"`{arm.baseline}`",
                f"{row['tokens'] / 1e3:.0f}",
                "" if row["speed"] is None else f"{row['speed']:.1%}",
                f"{row['round_bytes'] / 1e6:.3f}",
            ]
        )
    outcomes = [each for row in figures.values() for each in row["outcomes"]]
    commits = sorted({f"`{each['notes']['commit']}`" for each in outcomes})
    return Table(
        "Validation loss of the shared parameters, nats per byte, mean over seeds; against the"
        " baseline over the seeds that both have",
        [command],
        [
            *("arm", "loss", "over seeds", "seeds", "against", "of"),
            *("thousand tokens", "speed", "MB a round"),
        ],
        rows,
        [
            (
                "A byte-level GPT (0.8 million parameters) on the standard library's sources,"
                " split by file; every replica takes 500 steps of 12 windows of 64 bytes, H ="
                f" {SYNC_EVERY}, where there are fragments P = {FRAGMENTS}, outer rate and momentum"
                f" 0.7 unless said. Validated on {VALIDATION_WINDOWS} windows of held-out files,"
                " the same ones for all; what comes after ± is the standard error of a comparison"
                " on other bytes like these, not on other seeds."
            ),
            (
                "Production master, peers and hook, torch in every trainer; the network is the one"
                " in memory, time is virtual. Every peer's copy was compared byte by byte at the"
                " end, and its roots at every version. `dp` is plain torch in one process."
            ),
            (
                f"Code of {', '.join(commits)}. *MB a round*: handed to all streams between all"
                " hosts, from the first commit to the last; for `dp`, computed, not counted: a"
                " ring all-reduce of bf16 gradients, a step. *Speed*: tokens per virtual second,"
                " as a share of what the peers did alone; what is waited for in rounds without"
                " overlap is in it."
            ),
        ],
    )


def _against(row: dict[str, Any]) -> str:
    if row["ratio_to_baseline"] is None:
        return ""
    error = row["ratio_error"]
    return f"{row['ratio_to_baseline'] - 1:+.2%}" + ("" if error is None else f" ± {error:.2%}")


# ---------------------------------------------------------------- the command


def main() -> int:
    parser = bench_parser("learning", __doc__)
    parser.add_argument("--arms", metavar="NAME[,...]", help=f"of {', '.join(DEFAULT)}, and others")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="of each arm")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--reuse", action="store_true", help="also what other commits found")
    parser.add_argument("--keep", type=Path, default=KEPT, help="folder for finished runs")
    parser.add_argument("--steps", type=int, default=Recipe().steps, help="of each replica")
    parser.add_argument("--batch", type=int, default=Recipe().batch, help="windows of a step")
    parser.add_argument("--validation-windows", type=int, default=VALIDATION_WINDOWS)
    options = parser.parse_args()
    recipe = Recipe(options.steps, options.batch)
    names = names_of(options.arms) if options.arms else DEFAULT
    jobs = jobs_of(names, options.seeds, recipe, options.validation_windows, options.keep)
    if options.validation_windows % EVALUATION_BATCH:
        raise BenchError(f"--validation-windows must be a multiple of {EVALUATION_BATCH}")
    for job in jobs:
        check_steps(job)
    return tell(measured(jobs, options.jobs, COMMAND, reuse=options.reuse), options)


def names_of(text: str) -> list[str]:
    """Names of arms; a comma also separates the settings of one: ``a,b@x=1,y=2,c``."""
    names: list[str] = []
    for part in text.split(","):
        if "=" in part and "@" not in part and names:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names


def check_steps(job: Job) -> None:
    """Raises BenchError for steps in which not every fragment gets its round."""
    arm, steps = job.arm, job.recipe.steps
    every = int(arm.settings.get("sync_every", 1))
    if steps < every or steps % every:
        raise BenchError(f"{arm.name}: {steps} steps are no whole number of rounds of {every}")


if __name__ == "__main__":
    sys.exit(run_main("learning", main))

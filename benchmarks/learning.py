"""What presets learn, compared with data parallel on the same tokens.

    python -m benchmarks.learning                                     all arms, three seeds each
    python -m benchmarks.learning --arms diloco2,muon4 --seeds 1 --json learning.json
    python -m benchmarks.learning --arms diloco4@sync_every=10        an arm with other settings

An arm is a preset and a number of peers. It is a run of ``holdfast try``: replicas of
``learning_script.py`` under real daemons, for 500 steps each. Its baseline, ``dp4`` for four peers,
is the script alone with all their windows in each step, and is measured with it. An arm with a seed
leaves a file in ``build/learning``; what is there from the same commit is not measured again.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from attrs import evolve, frozen

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
from holdfast.daemon.cli.trial import Trial, replicas, run_trial, script_alone
from holdfast.membership.spec.preset import PRESETS
from holdfast.membership.spec.spec import TABLES, RunSpec

SEEDS, STEPS, BATCH = 3, 500, 12  # a batch is of windows of 64 bytes
DATA_PARALLEL = "dp"
DATA_PARALLEL_EVERY = 20  # steps of its rounds, which change nothing
DEFAULT = ["diloco2", "diloco4", "diloco4@sync_every=10", "streaming2", "sparse2"]
# What was found since, and the same with AdamW for Muon or the other way round.
FOUND = ["muon4", "muon8", "muon-streaming2", "diloco4@inner=Muon"]
# Inner rates that suit data parallel, and the papers' rounds of 30 steps.
TUNED = [
    *("dp4@rate=2e-3", "dp4@rate=8e-3", "diloco4@rate=4e-3", "muon4@rate=4e-3"),
    "diloco4@sync_every=30,outer_lr=0.6,outer_momentum=0.9,rate=4e-3",
    "muon4@sync_every=30,outer_lr=0.7,outer_momentum=0.6,rate=4e-3",
]
LONG, LONG_STEPS = ["diloco4@rate=4e-3"], 2_500
INNER = ("AdamW", "Muon")  # optimizers that the script has
RATE = "1e-3"  # its own
# Of presets that were measured with another one than the first; the script has no SGD.
PRESET_INNER = {"muon": "Muon", "muon-streaming": "Muon", "allreduce": "SGD"}
SCRIPT = Path(__file__).with_name("learning_script.py")
FIGURE = "validation_loss"
KEPT = ROOT / "build" / "learning"
COMMAND = "python -m benchmarks.learning"

Found = dict[str, Any]


@frozen
class Arm:
    """A run: a preset with changed settings, or data parallel; inner optimizer and its rate."""

    name: str
    peers: int
    inner: str
    rate: str  # of the inner optimizer, at its highest
    spec: RunSpec | None  # None: data parallel

    @classmethod
    def of(cls, name: str) -> Arm:
        """Return the arm of a name such as ``diloco4@sync_every=10,inner=Muon,rate=2e-3``.

        Raises:
          UserError: there is no such arm, or it cannot have these settings.
        """
        base, _, changes = name.partition("@")
        found = re.fullmatch(r"(.*?)(\d+)", base)
        preset, peers = found.groups() if found else (base, "0")
        changed = dict(each.split("=", 1) for each in changes.split(",") if "=" in each)
        if preset not in (DATA_PARALLEL, *PRESETS) or not int(peers):
            raise BenchError(f"no arm {base!r}: give {DATA_PARALLEL} or a preset, and a number")
        inner = changed.pop("inner", PRESET_INNER.get(preset, INNER[0]))
        rate = changed.pop("rate", RATE)
        if inner not in INNER or (preset == DATA_PARALLEL and changed):
            raise BenchError(
                f"{name}: inner is one of {', '.join(INNER)}, rate a number, and"
                f" {DATA_PARALLEL} has no other setting"
            )
        if preset == DATA_PARALLEL:
            return cls(name, int(peers), inner, rate, None)
        text = f'[run]\npreset = "{preset}"\n'
        for table, kind in TABLES.items():
            keys = [key.name for key in attrs.fields(kind) if key.name in changed]
            if keys and table != "run":
                text += f"[{table}]\n" + "".join(f"{key} = {changed.pop(key)}\n" for key in keys)
        if changed:
            raise BenchError(f"{name}: run.toml has no {', '.join(changed)}")
        return cls(name, int(peers), inner, rate, RunSpec.parse(text))

    @property
    def baseline(self) -> str:
        """The name of the arm that it is compared with."""
        changes = [f"inner={self.inner}"] if self.inner != INNER[0] else []
        changes += [f"rate={self.rate}"] if self.rate != RATE else []
        return f"{DATA_PARALLEL}{self.peers}" + ("@" if changes else "") + ",".join(changes)

    def trial(self, steps: int) -> Trial:
        if self.spec is None:
            return evolve(script_alone(RunSpec(), steps, DATA_PARALLEL_EVERY), label=self.name)
        return replicas(self.name, self.spec, self.peers, steps)

    def measure(self, seed: int, steps: int, batch: int) -> Found:
        """Train it, and return what came of it."""
        windows = batch if self.spec else batch * self.peers
        script = [str(SCRIPT), f"--inner={self.inner}", f"--rate={self.rate}"]
        command = [sys.executable, *script, f"--seed={seed}", f"--batch={windows}"]
        with tempfile.TemporaryDirectory(prefix="learning-") as folder:
            trial = self.trial(steps)
            found = run_trial(trial, Path(folder) / "run", command, say)
        if (loss := found.end(FIGURE)) is None:
            raise BenchError(f"{self.name}: no {FIGURE} was logged")
        measured = {"loss": loss, "tokens": found.tokens, "round_bytes": found.round_bytes}
        return {**measured, "seed": seed, "seconds": found.seconds, "commit": commit()}


def measure_all(
    names: Sequence[str], seeds: int, steps: int, batch: int, folder: Path, *, reuse: bool
) -> dict[str, list[Found]]:
    """Return what came of each arm and each arm's baseline with each seed."""
    arms = [Arm.of(name) for name in names]
    wanted = dict.fromkeys(name for arm in arms for name in (arm.baseline, arm.name))
    found: dict[str, list[Found]] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        for seed in range(seeds):
            path = folder / f"{name}-{steps}x{batch}-{seed}.json"
            kept = json.loads(path.read_text()) if path.exists() else None
            # Changes that are not committed have no name: what was found with some is not reused.
            if not kept or not (reuse or kept["commit"] == commit().rstrip("+")):
                kept = Arm.of(name).measure(seed, steps, batch)
                path.write_text(json.dumps(kept, indent=1) + "\n")
                say(f"{name}, seed {seed}: loss {kept['loss']:.4f}")
            found.setdefault(name, []).append(kept)
    return found


def against(some: Sequence[Found], baseline: Sequence[Found]) -> tuple[float, float]:
    """Return the share by which losses are above the baseline's, and its error over the seeds."""
    shares = [one["loss"] / other["loss"] - 1 for one, other in zip(some, baseline, strict=True)]
    error = statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
    return statistics.fmean(shares), error


def table(found: dict[str, list[Found]], command: str) -> Table:
    rows = []
    for name, some in found.items():
        arm, losses = Arm.of(name), [each["loss"] for each in some]
        compared = ""
        if arm.spec is not None:
            share, error = against(some, found[arm.baseline])
            compared = f"{share:+.2%}" + (f" ± {error:.2%}" if len(some) > 1 else "")
        rows.append(
            [
                f"`{name}`",
                f"{statistics.fmean(losses):.4f}",
                f"{min(losses):.4f} to {max(losses):.4f}" if len(losses) > 1 else "",
                compared,
                f"`{arm.baseline}`" if compared else "",
                f"{statistics.fmean(each['tokens'] for each in some) / 1e3:.0f}",
                f"{statistics.fmean(each['round_bytes'] for each in some) / 1e6:.3f}",
            ]
        )
    commits = sorted({f"`{each['commit']}`" for some in found.values() for each in some})
    return Table(
        f"Validation loss of the shared parameters, nats per byte; seeds: {len(some)}",
        [command],
        ["arm", "loss", "over seeds", "against", "of", "thousand tokens", "MB a round"],
        rows,
        [
            "A preset and the number of its peers; `dp4` is data parallel: one process that takes"
            " the steps of one peer with the windows of four. A byte-level GPT (0.8 million"
            " parameters) on the standard library's sources, split by file; every peer takes"
            f" {STEPS} steps of {BATCH} windows of 64 bytes unless the command says otherwise."
            " Behind ± is the standard error over the seeds. *MB a round*: sent by one peer.",
            f"Code of {', '.join(commits)}; by `holdfast try`'s runs.",
        ],
    )


# ---------------------------------------------------------------- the command


def learning() -> Measured:
    return _section(DEFAULT, reuse=False)


def tuned() -> Measured:
    """Measure inner rates, with one seed; what any commit found of them is kept."""
    short = measure_all(TUNED, 1, STEPS, BATCH, KEPT, reuse=True)
    long = measure_all(LONG, 1, LONG_STEPS, BATCH, KEPT, reuse=True)
    one_seed = f"{COMMAND} --seeds 1 --arms"
    tables = [
        table(short, f"{one_seed} {','.join(TUNED)}"),
        table(long, f"{one_seed} {','.join(LONG)} --steps {LONG_STEPS}"),
    ]
    return tables, {"short": short, "long": long}


def found() -> Measured:
    """Measure arms that take hours; what any commit found of them is kept."""
    return _section(FOUND, reuse=True)


def _section(names: Sequence[str], *, reuse: bool) -> Measured:
    measured = measure_all(names, SEEDS, STEPS, BATCH, KEPT, reuse=reuse)
    return [table(measured, f"{COMMAND} --arms {','.join(names)}")], measured


def names_of(text: str) -> list[str]:
    """Return names of arms; a comma also separates settings of one: ``a,b@x=1,y=2,c``."""
    return re.split(r",(?!\w+=)", text)


def main() -> int:
    parser = bench_parser("learning", __doc__)
    parser.add_argument("--arms", metavar="NAME[,...]", help=f"of {', '.join(DEFAULT)}, and others")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="of each arm")
    parser.add_argument("--reuse", action="store_true", help="also what other commits found")
    parser.add_argument("--keep", type=Path, default=KEPT, help="folder for finished runs")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each replica")
    parser.add_argument("--batch", type=int, default=BATCH, help="windows of a step")
    options = parser.parse_args()
    names = names_of(options.arms) if options.arms else DEFAULT
    figures = measure_all(
        names, options.seeds, options.steps, options.batch, options.keep, reuse=options.reuse
    )
    return tell(([table(figures, COMMAND)], figures), options)


if __name__ == "__main__":
    sys.exit(run_main("learning", main))

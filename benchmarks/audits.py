"""The section about owners that lie: how soon they are found out, and what looking costs everybody.

    python -m benchmarks.audits                     all of it; half an hour on two cores
    python -m benchmarks.audits --honest 200        fewer runs in which nobody lies

Runs of production masters and peers in virtual time (``python -m holdfast.simulation``), some with a liar, most
without; then reductions on loopback with contributions signed and kept and without, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.commands import BenchError, allreduce, run
from benchmarks.lab_run import stop_on_signals
from benchmarks.progress import say
from benchmarks.report import Table, keep_json, print_tables
from benchmarks.sections import Measured
from holdfast.simulation.liar_run import expected_rounds
from holdfast.simulation.lying_peers import Lie

SHARE = 0.05  # of chunks are audited, where somebody lies
HONEST_SHARE = 0.2  # where nobody does: the more are looked at, the more could go wrong
LIARS = {
    Lie.OWNER: "adds wrongly, shows what it was given",
    Lie.FORGER: "adds wrongly, shows forged contributions",
    Lie.SILENT: "adds wrongly, shows nothing",
    Lie.ACCUSER: "says of honest owners that they lied",
}
SEEDS = 50  # runs of each kind of liar
HONEST_SEEDS = 2_000
PAIRS = 3  # of processes with and without signatures
BULK = ("--peers=4", "--codec=fp32", "--size=64MiB", "--repeat=5", "--warm-up=2")


def simulated(*options: str) -> dict[str, Any]:
    """The figures of ``python -m holdfast.simulation``.

    Raises:
      BenchError: a promise was broken.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        path = Path(directory) / "report.json"
        run([sys.executable, "-m", "holdfast.simulation", *options, "--quiet", f"--json={path}"])
        figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def liars() -> tuple[Table, Any]:
    rows, raw = [], {}
    for lie, what in LIARS.items():
        say(f"a liar that {what}, {SEEDS} runs")
        options = [f"--seeds={SEEDS}", f"--audit={SHARE}", f"--liar={lie.value}"]
        figures = raw[lie.value] = simulated(*options)
        rounds = figures["lied"]
        rows.append(
            [
                f"`{lie.value}`: {what}",
                f"{len(rounds)} of {figures['seeds']}",
                f"{statistics.mean(rounds):.1f}",
                f"{expected_rounds(lie, SHARE, 1):.1f}",
                str(max(rounds)),
            ]
        )
    table = Table(
        f"One of four peers lies, in one chunk of each round; of all chunks {SHARE:.0%} are audited",
        [f"python -m holdfast.simulation --seeds {SEEDS} --audit {SHARE} --liar owner"],
        ["who lies how", "found out", "after rounds, mean", "expected", "at most"],
        rows,
        [
            "Rounds in which it lied, the one in which it was found out included; no round with a lie "
            "in an audited chunk was committed, and nobody else was convicted, or the run would have "
            "failed. *Found out* is quarantine; of one that shows nothing, that it owns nothing any more."
        ],
    )
    return table, raw


def honest(seeds: int) -> tuple[Table, Any]:
    say(f"nobody lies, {seeds} runs")
    figures = simulated(f"--seeds={seeds}", f"--audit={HONEST_SHARE}")
    counted = ("seeds", "faults", "events", "committed", "reruns")
    table = Table(
        f"Nobody lies, machines and lines fail; of all chunks {HONEST_SHARE:.0%} are audited",
        [f"python -m holdfast.simulation --seeds {seeds} --audit {HONEST_SHARE}"],
        ["runs", "faults", "events", "rounds committed", "run again", "convictions"],
        [[*(f"{figures[name]:,}" for name in counted), "0"]],
        ["A conviction ends the command with an error, and so does every other broken promise."],
    )
    return table, figures


def cost() -> tuple[Table, Any]:
    plain, sealed = [], []
    for turn in range(PAIRS):
        say(f"4 peers, 64 MiB, with signatures and without, {turn + 1} of {PAIRS}")
        plain.append(allreduce(*BULK))
        sealed.append(allreduce(*BULK, "--sealed"))

    def ratio(name: str) -> float:
        pairs = zip(plain, sealed, strict=True)
        return float(statistics.median(ours[name] / bare[name] for bare, ours in pairs))

    rows = [
        [
            what,
            f"{statistics.median(each['median_s'] for each in runs) * 1e3:.0f}",
            f"{statistics.median(each['cpu_s'] for each in runs):.3f}",
        ]
        for what, runs in (("plain", plain), ("signed and kept", sealed))
    ]
    rows.append(["ratio, median of pairs", f"{ratio('median_s'):.2f}", f"{ratio('cpu_s'):.2f}"])
    command = f"holdfast bench allreduce {' '.join(BULK)}"
    table = Table(
        "What signatures cost: 64 MiB of float32 among four peers on one machine",
        [command, f"{command} --sealed"],
        ["contributions", "a round, ms", "CPU, s a peer"],
        rows,
        [
            f"Medians of {PAIRS} pairs of processes in turns. All four share the cores, so their CPU is "
            "the time; over slow lines threads have it to spare."
        ],
    )
    return table, {"plain": plain, "sealed": sealed}


def measured(seeds: int) -> Measured:
    tables, raw = [], {}
    for name, (table, figures) in (
        ("cost", cost()),
        ("liars", liars()),
        ("honest", honest(seeds)),
    ):
        tables.append(table)
        raw[name] = figures
    return [tables[1], tables[2], tables[0]], raw


def audits() -> Measured:
    """The section of RESULTS.md."""
    return measured(HONEST_SEEDS)


def main() -> int:
    parser = argparse.ArgumentParser(prog="audits", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--honest", type=int, default=HONEST_SEEDS, metavar="SEEDS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    stop_on_signals()
    try:
        tables, raw = measured(options.honest)
    except BenchError as error:
        print(f"audits: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    keep_json(raw, options.json)
    print_tables(tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())

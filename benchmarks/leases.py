"""The section about leased data: each sample once an epoch, what that costs, what the journal keeps of it.

    python -m benchmarks.leases --json leases.json

Three epochs of 10,007 samples: peers are killed with their trainers and come back, others join. The model
itself counts what it is trained on (``leases_trainer``), so the last version says how often each sample is in
committed work. Then the same script with leases and without, in turns; then data sets of three sizes.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.commands import ROOT, BenchError
from benchmarks.grounds import Loopback
from benchmarks.lab_run import LabRun, Status, stop_on_signals
from benchmarks.progress import say
from benchmarks.report import Table, keep_json, print_tables
from benchmarks.sections import Measured
from holdfast.daemon.paths import JOURNAL_FILE

SAMPLES, EPOCHS, KILLS = 10_007, 3, 5
FIRST, LATE = ("alder", "birch", "cedar"), ("dogwood", "elder")
STEP_S = 0.03  # of 16 samples: an epoch takes some ten seconds of all peers, so that kills fall into each
TURNS, MEASURED_S = 3, 12.0
WAIT_STEP_S = 0.02  # a step in which the script waits, as for a GPU
LENGTHS = (10**4, 10**6, 10**9)
JOURNAL_ROUNDS = 40
WAIT_S = 240.0
SCRIPT = str(ROOT / "benchmarks" / "leases_trainer.py")

SPEC = """\
[run]
name = "leases"
[diloco]
sync_every = 10
[membership]
min_members = 2
deadline_s = 3
grace_s = 2
"""


def _committed(run: LabRun, more: int) -> Status:
    goal = run.master()["committed"] + more
    return run.until(
        lambda s: s["committed"] >= goal or s["state"] == "finished", f"{more} more rounds", WAIT_S
    )


def exactness(seed: int) -> dict[str, Any]:
    """Count what is in committed work of three epochs with kills and joins.

    Raises:
      BenchError: the run did not end.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="holdfast-leases-") as place:
        folder = Path(place)
        script = [SCRIPT, "--samples", str(SAMPLES), "--step-s", str(STEP_S)]
        with Loopback() as ground, LabRun(ground, folder, script) as run:
            run.start_master(SPEC + f"[data]\nepochs = {EPOCHS}\n")

            def join(name: str) -> None:
                host = 1 + (FIRST + LATE).index(name)
                run.join(
                    name,
                    host,
                    founder=name == FIRST[0],
                    more=("--save", str(folder / f"{name}.pt")),
                )

            for name in FIRST:
                join(name)
            _committed(run, 3)
            kills, joined, here = 0, list(LATE), list(FIRST)
            while kills < KILLS:
                if joined:
                    here.append(joined[0])
                    join(joined.pop(0))
                victim = chance.choice(here)
                run.note_trainers()
                run.kill(victim)
                kills += 1
                say(f"kill {kills}: {victim}")
                _committed(run, chance.randint(1, 4))
                join(victim)
                status = _committed(run, chance.randint(2, 5))
                if status["state"] == "finished":
                    break
            run.until(lambda s: s["state"] == "finished", "the end", WAIT_S)
            ended = run.master()
            until_s = time.monotonic() + WAIT_S
            while any(run.ended(name) is None for name in here) and time.monotonic() < until_s:
                time.sleep(0.1)
            saved = [folder / f"{name}.pt" for name in here]
            return {
                "samples": SAMPLES,
                "epochs": EPOCHS,
                "kills": kills,
                "joins": len(LATE) - len(joined),
                "rounds": ended["committed"],
                "peers_counted": sum(path.exists() for path in saved),
                "times_in_committed_work": [
                    _counts([path for path in saved if path.exists()], epoch)
                    for epoch in range(EPOCHS)
                ],
            }


def _counts(saved: list[Path], epoch: int) -> dict[str, int]:
    """Return how many samples were in committed work so often; the same in all files.

    Raises:
      BenchError: peers' models differ.
    """
    import torch

    counts = [Counter(torch.load(path)[epoch].tolist()) for path in saved]
    if not counts or any(each != counts[0] for each in counts):
        raise BenchError(f"the peers' models do not agree on epoch {epoch}: {counts}")
    return {str(times): count for times, count in sorted(counts[0].items())}


def _samples_per_s(leased: bool) -> float:
    """Return the samples a second that went into committed work of two peers."""
    with tempfile.TemporaryDirectory(prefix="holdfast-leases-") as place:
        script = [SCRIPT, "--step-s", str(WAIT_STEP_S), "--uncounted", "--samples", str(10**6)]
        script += [] if leased else ["--plain"]
        with Loopback() as ground, LabRun(ground, Path(place), script) as run:
            run.start_master(SPEC)
            for host, name in enumerate(FIRST[:2], 1):
                run.join(name, host, founder=host == 1)
            run.until(lambda s: s["committed"] >= 10, "ten rounds", WAIT_S)
            began = run.master()
            run.until(
                lambda s: (
                    s["now_s"] - began["now_s"] >= MEASURED_S
                    and s["committed"] > began["committed"]
                ),
                "some seconds",
                WAIT_S,
            )
            ended = run.master()
            tokens: int = ended["headline"]["tokens"] - began["headline"]["tokens"]
            seconds: float = ended["now_s"] - began["now_s"]
            return tokens / seconds


def _journal_bytes(length: int) -> float:
    """Return the bytes of records a round, with a data set of so many samples."""
    with tempfile.TemporaryDirectory(prefix="holdfast-leases-") as place:
        folder = Path(place)
        script = [SCRIPT, "--uncounted", "--samples", str(length), "--step-s", "0.005"]
        with Loopback() as ground, LabRun(ground, folder, script) as run:
            run.start_master(SPEC)
            for host, name in enumerate(FIRST[:2], 1):
                run.join(name, host, founder=host == 1)
            run.until(lambda s: s["committed"] >= 10, "ten rounds", WAIT_S)
            began, bytes_before = run.master()["committed"], _bytes_of(folder)
            _committed(run, JOURNAL_ROUNDS)
            rounds: int = run.master()["committed"] - began
            return (_bytes_of(folder) - bytes_before) / rounds


def _bytes_of(folder: Path) -> int:
    path = f"file:{folder / 'master' / JOURNAL_FILE}?mode=ro"
    with sqlite3.connect(path, uri=True) as base:
        return int(base.execute("SELECT sum(length(body)) FROM records").fetchone()[0])


def measure(seed: int = 1) -> dict[str, Any]:
    """Measure all three; raises BenchError if a run does not end."""
    found = exactness(seed)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(TURNS):
        for leased in (True, False) if turn % 2 else (False, True):
            rates[leased].append(_samples_per_s(leased))
            say(f"{'with' if leased else 'without'} leases: {rates[leased][-1]:.0f} samples/s")
    found["samples_per_s_leased"] = statistics.median(rates[True])
    found["samples_per_s_plain"] = statistics.median(rates[False])
    found["throughput"] = found["samples_per_s_leased"] / found["samples_per_s_plain"]
    found["journal_bytes_a_round"] = {str(each): _journal_bytes(each) for each in LENGTHS}
    return found


def exact(found: dict[str, Any]) -> bool:
    """Return whether each sample is in committed work once an epoch."""
    return all(each == {"1": found["samples"]} for each in found["times_in_committed_work"])


def tables(found: dict[str, Any]) -> list[Table]:
    """The section's tables."""
    times = "; ".join(
        ", ".join(f"{count:,} samples {times} times" for times, count in each.items())
        for each in found["times_in_committed_work"]
    )
    return [
        Table(
            "Leased data: how often each sample is in committed work, and what leases cost",
            ["python -m benchmarks.leases"],
            ["what", "measured"],
            [
                [
                    f"{found['epochs']} epochs of {found['samples']:,} samples, "
                    f"{found['kills']} kills, {found['joins']} joins, {found['rounds']} rounds",
                    times,
                ],
                [
                    "samples a second with leases, of those without (asked: 98 %)",
                    f"{found['throughput']:.1%} ({found['samples_per_s_leased']:,.0f} "
                    f"of {found['samples_per_s_plain']:,.0f})",
                ],
                *(
                    [f"journal, bytes a round, {int(length):,} samples", f"{count:.0f}"]
                    for length, count in found["journal_bytes_a_round"].items()
                ),
            ],
            [
                "The counts are those of the last version, by epoch, equal in all peers' models. Kills are of "
                "daemon and trainer at once; each comes back. Throughput: two peers, steps in which "
                f"the script waits for 20 ms, as for a GPU, medians of {TURNS} runs in turns; journal: all "
                f"records of {JOURNAL_ROUNDS} rounds.",
            ],
        )
    ]


def leases() -> Measured:
    """The section of RESULTS.md."""
    found = measure()
    return tables(found), found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stop_on_signals()
    try:
        found = measure(options.seed)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    keep_json(found, options.json)
    print_tables(tables(found))
    return 0 if exact(found) else 1


if __name__ == "__main__":
    sys.exit(main())

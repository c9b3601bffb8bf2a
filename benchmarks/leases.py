"""The section about leased data: each sample once an epoch, what that costs, what the journal keeps of it.

    python -m benchmarks.leases --json leases.json

Three epochs of 10,007 samples: peers are killed with their trainers and come back, trainers are killed alone,
others join. The model itself counts what each peer trains it on (``leases_trainer``), so the last version says how
often each sample is in committed work; the journal says how often each position was spent. Then the same script
with leases and without, in turns, with steps that wait and with steps that compute; then data sets of three sizes.
"""

from __future__ import annotations

import argparse
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import ROOT, BenchError
from benchmarks.grounds import Loopback
from benchmarks.lab_run import LabRun, Status, stop_on_signals
from benchmarks.progress import say
from benchmarks.report import Table, keep_json, print_tables
from benchmarks.sections import Measured
from holdfast.daemon.master.journal.journal_repair import read_rows
from holdfast.daemon.paths import JOURNAL_FILE
from holdfast.membership.master.state.journal import RoundCommitted

SAMPLES, EPOCHS, KILLS = 10_007, 3, 5
TRAINER_KILLS = 2  # of trainers alone, after the first kills
FIRST, LATE = ("alder", "birch", "cedar"), ("dogwood", "elder")
STEP_S = 0.03  # of 16 samples: an epoch takes some ten seconds of all peers, so that kills fall into each
TURNS, MEASURED_S = 3, 12.0
STEP_OWN_S = 0.02  # of a step whose throughput is measured
# How a step takes its time: the script waits, as for a GPU; or it computes, which takes the processor.
KINDS = {
    "waits": ("--step-s", str(STEP_OWN_S)),
    "waits, 2 workers load": ("--step-s", str(STEP_OWN_S), "--workers", "2"),
    "computes": ("--compute-s", str(STEP_OWN_S)),
}
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
                    more=("--row", str(host - 1), "--save", str(folder / f"{name}.pt")),
                )

            for name in FIRST:
                join(name)
            _committed(run, 3)
            kills, trainer_kills, joined, here = 0, 0, list(LATE), list(FIRST)
            began, bytes_before = run.master()["committed"], _bytes_of(folder)
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
                if trainer_kills < TRAINER_KILLS:
                    other = chance.choice([name for name in here if name != victim])
                    run.note_trainers()
                    trainer_kills += run.signal_trainer(other, signal.SIGKILL)
                    say(f"the trainer of {other} is killed")
                status = _committed(run, chance.randint(2, 5))
                if status["state"] == "finished":
                    break
            run.until(lambda s: s["state"] == "finished", "the end", WAIT_S)
            ended = run.master()
            churn_bytes = (_bytes_of(folder) - bytes_before) / (ended["committed"] - began)
            until_s = time.monotonic() + WAIT_S
            while any(run.ended(name) is None for name in here) and time.monotonic() < until_s:
                time.sleep(0.1)
            saved = [folder / f"{name}.pt" for name in here]
            return {
                "samples": SAMPLES,
                "epochs": EPOCHS,
                "kills": kills,
                "trainer_kills": trainer_kills,
                "joins": len(LATE) - len(joined),
                "rounds": ended["committed"],
                "peers_counted": sum(path.exists() for path in saved),
                "journal_bytes_a_round_of_churn": churn_bytes,
                "times_spent_in_the_journal": _spent(folder),
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


def _spent(folder: Path) -> list[dict[str, int]]:
    """Return how many positions of each epoch the journal's commits have spent so often."""
    times: Counter[int] = Counter()
    path = f"file:{folder / 'master' / JOURNAL_FILE}?mode=ro"
    with sqlite3.connect(path, uri=True) as base:
        records = read_rows(base).records
    for record in records:
        if isinstance(record, RoundCommitted):
            times.update(p for each in record.spent for p in range(each.start, each.stop))
    counts = [
        Counter(times[position] for position in range(epoch * SAMPLES, (epoch + 1) * SAMPLES))
        for epoch in range(EPOCHS)
    ]
    return [{str(each): count for each, count in sorted(found.items())} for found in counts]


def _samples_per_s(step: Sequence[str], *, leased: bool) -> float:
    """Return the samples a second that went into committed work of two peers, from commit to commit."""
    with tempfile.TemporaryDirectory(prefix="holdfast-leases-") as place:
        script = [SCRIPT, *step, "--uncounted", "--samples", str(10**6)]
        script += [] if leased else ["--plain"]
        with Loopback() as ground, LabRun(ground, Path(place), script) as run:
            run.start_master(SPEC)
            for host, name in enumerate(FIRST[:2], 1):
                run.join(name, host, founder=host == 1)
            began = _committed(run, 10)
            until_s = began["now_s"] + MEASURED_S
            run.until(lambda s: s["now_s"] >= until_s, "some seconds", WAIT_S)
            ended = _committed(run, 1)
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
    found["throughput"] = {kind: _throughput(kind, step) for kind, step in KINDS.items()}
    found["journal_bytes_a_round"] = {str(each): _journal_bytes(each) for each in LENGTHS}
    return found


def _throughput(kind: str, step: Sequence[str]) -> dict[str, Any]:
    """Return the samples a second with leases and without, all runs, in turns."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(TURNS):
        for leased in (True, False) if turn % 2 else (False, True):
            rates[leased].append(_samples_per_s(step, leased=leased))
            say(
                f"{kind}, {'with' if leased else 'without'} leases: {rates[leased][-1]:.0f} samples/s"
            )
    share = statistics.median(rates[True]) / statistics.median(rates[False])
    return {"leased": rates[True], "plain": rates[False], "share": share}


def exact(found: dict[str, Any]) -> bool:
    """Return whether all kills and joins happened and each sample is in committed work once an epoch."""
    once = [{"1": found["samples"]}] * found["epochs"]
    happened = (found["kills"], found["trainer_kills"], found["joins"], found["peers_counted"])
    return found["times_in_committed_work"] == found[
        "times_spent_in_the_journal"
    ] == once and happened == (KILLS, TRAINER_KILLS, len(LATE), len(FIRST + LATE))


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
                    f"{found['epochs']} epochs of {found['samples']:,} samples, {found['kills']} kills, "
                    f"{found['trainer_kills']} of trainers alone, {found['joins']} joins, "
                    f"{found['rounds']} rounds",
                    times,
                ],
                *(
                    [
                        f"samples a second with leases, of those without (asked: 98 %); a step {kind}",
                        f"{each['share']:.1%} ({_rates(each['leased'])} of {_rates(each['plain'])})",
                    ]
                    for kind, each in found["throughput"].items()
                ),
                *(
                    [f"journal, bytes a round, {int(length):,} samples", f"{count:.0f}"]
                    for length, count in found["journal_bytes_a_round"].items()
                ),
                [
                    "journal, bytes a round, under these kills and joins",
                    f"{found['journal_bytes_a_round_of_churn']:.0f}",
                ],
            ],
            [
                "The counts are sums over the counters of all peers in the last version, by epoch, equal in all "
                "peers' models; the journal's commits have spent each position as often. Kills are of daemon and "
                f"trainer at once; each comes back. Throughput: two peers, steps of {1000 * STEP_OWN_S:.0f} ms, "
                f"{TURNS} runs each in turns, shares of medians; journal: all records of {JOURNAL_ROUNDS} rounds.",
            ],
        )
    ]


def _rates(rates: Sequence[float]) -> str:
    return ", ".join(f"{each:,.0f}" for each in rates)


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

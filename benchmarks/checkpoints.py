"""The section about checkpoints: what one at every round takes from trainers that fill all cores.

    python -m benchmarks.checkpoints --json checkpoints.json

Two peers on loopback, whose trainers compute without a pause: whatever their daemons do, they take
from a trainer. Phases without and with a checkpoint at every round follow each other in one run: the
master is started again with the other ``run.toml``, peers and trainers go on. A step's time is what
passes outside of the hook, by the trainers' own count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from benchmarks.commands import BenchError
from benchmarks.grounds import Loopback
from benchmarks.lab_run import LabRun, Status, stop_on_signals
from benchmarks.progress import say
from benchmarks.report import Table, keep_json
from benchmarks.sections import Measured

PEERS = ("a", "b")
MILLIONS = 16.0
SYNC_EVERY = 100
ROUNDS = 4  # in a phase; one before them is not counted
PAIRS = 4  # of phases
PROMISED = 0.02
WAIT_S = 600.0

SPEC = """\
[run]
name = "checkpoints"
[diloco]
sync_every = {sync_every}
overlap = {overlap}
[membership]
contributors = 2
min_members = 2
deadline_s = 20
[checkpoint]
every_s = 0.0
every_rounds = {every_rounds}
keep_count = 2
"""


@frozen
class Phase:
    """Some rounds, with or without checkpoints.

    Attributes:
      step_s: mean of all steps of both trainers.
      round_s: from commit to commit, mean.
      written: checkpoints that the first peer wrote.
    """

    checkpoints: bool
    steps: int
    step_s: float
    round_s: float
    written: int


def phases(pairs: int, millions: float, sync_every: int) -> list[Phase]:
    """Without and with, so many times."""
    script = [str(Path(__file__).with_name("checkpoint_trainer.py")), f"--millions={millions:g}"]
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        Loopback() as ground,
        LabRun(ground, Path(directory), script) as run,
    ):
        run.start_master(_spec(sync_every, every_rounds=0))
        for host, name in enumerate(PEERS, 1):
            run.join(name, host, founder=host == 1)
        for turn in range(2 * pairs):
            checkpoints = turn % 2 == 1
            if turn:
                run.kill("master")
                run.start_master(_spec(sync_every, every_rounds=int(checkpoints)))
            found.append(_phase(run, Path(directory) / "a" / "checkpoints", checkpoints))
            say(f"{turn + 1}: {found[-1]}")
    return found


def _spec(sync_every: int, every_rounds: int) -> str:
    return SPEC.format(sync_every=sync_every, overlap=sync_every // 5, every_rounds=every_rounds)


def _phase(run: LabRun, folder: Path, checkpoints: bool) -> Phase:
    def whole(status: Status) -> bool:
        members = status["members"]
        return len(members) == len(PEERS) and all(m["in_sync"] and m["trainer"] for m in members)

    first = run.until(whole, "both train", WAIT_S)["committed"]
    begun = run.until(lambda s: s["committed"] > first, "a round", WAIT_S)
    before, there = _counts(run), _written(folder)
    goal = begun["committed"] + ROUNDS
    ended = run.until(lambda s: s["committed"] >= goal, f"{ROUNDS} rounds", WAIT_S)
    after = _counts(run)
    steps = sum(after[n][0] - before[n][0] for n in PEERS)
    stepped_s = sum(after[n][1] - before[n][1] for n in PEERS)
    if not steps:
        raise BenchError("the trainers took no step")
    return Phase(
        checkpoints,
        steps,
        stepped_s / steps,
        (ended["now_s"] - begun["now_s"]) / (ended["committed"] - begun["committed"]),
        len(_written(folder) - there),
    )


def _counts(run: LabRun) -> dict[str, tuple[int, float]]:
    """Steps, and seconds outside of the hook, of each trainer."""
    found = {}
    for name in PEERS:
        status = run.peer(name)
        found[name] = int(status["tokens"]), float(status["stepped_s"])
    return found


def _written(folder: Path) -> set[str]:
    return {name for name in (os.listdir(folder) if folder.exists() else ()) if ".part" not in name}


def growth(found: list[Phase]) -> float:
    """Of step time with checkpoints, over the phase just before: the median of the pairs."""
    pairs = zip(found[::2], found[1::2], strict=True)
    return statistics.median(on.step_s / off.step_s - 1 for off, on in pairs)


def checkpoints() -> Measured:
    """The section of RESULTS.md."""
    say("a checkpoint at every round, and none, by turns")
    found = phases(PAIRS, MILLIONS, SYNC_EVERY)
    rows = [
        [
            "every round" if each.checkpoints else "none",
            f"{1e3 * each.step_s:.2f}",
            f"{each.round_s:.2f}",
            str(each.written),
        ]
        for each in found
    ]
    table = Table(
        f"Step time of two trainers on {os.cpu_count()} cores, each computing without a pause; "
        f"{MILLIONS:g} million values ({8 * MILLIONS:g} MB a checkpoint), {SYNC_EVERY} steps a round",
        ["python -m benchmarks.checkpoints"],
        ["checkpoints", "a step, ms", "a round, s", "new files at the end"],
        rows,
        [
            f"Growth with a checkpoint at every round, median of {PAIRS} pairs: "
            f"{100 * growth(found):.1f} % (promised: {100 * PROMISED:g} % at most)."
        ],
    )
    return [table], {"phases": [asdict(each) for each in found], "growth": growth(found)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--millions", type=float, default=MILLIONS)
    parser.add_argument("--sync-every", type=int, default=SYNC_EVERY)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stop_on_signals()
    try:
        found = phases(options.pairs, options.millions, options.sync_every)
    except BenchError as error:
        print(f"checkpoints: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    written = all(each.written for each in found if each.checkpoints)
    verdict: dict[str, Any] = {
        "phases": [asdict(each) for each in found],
        "growth": growth(found),
        "ok": growth(found) <= PROMISED and written,
    }
    print(keep_json(verdict, options.json))
    return 0 if verdict["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())

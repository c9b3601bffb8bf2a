"""The section about GPUs that fail and return: a peer's group of processes becomes smaller, and whole again.

    python -m benchmarks.gpus --times 2 --json gpus.json

Two peers train ``examples/fsdp.py``: one as a single process, the other as three processes of torchrun, one
for each GPU of a file that plays NVML's part. A GPU fails: the daemon starts the command again with two
processes. It returns, and they are three again. All times are the master's, of its events. For comparison
torchrun starts as many processes that only import what the script imports, and end.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from benchmarks.commands import HOLDFAST, ROOT, BenchError
from benchmarks.grounds import Loopback
from benchmarks.lab_run import LabRun, Status, all_equal, stop_on_signals
from benchmarks.report import Table, keep_json, print_tables
from benchmarks.sections import Measured

TIMES = 2
RANKS = 3
SICK = "it has fallen off the bus"
WAIT_S = 120.0
EXAMPLE = str(ROOT / "examples" / "fsdp.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
IMPORTS = "import torch._dynamo, torch.distributed.fsdp, holdfast; holdfast.attach"
SPEC = """\
[run]
name = "gpus"
[diloco]
sync_every = 20
[membership]
min_members = 1
deadline_s = 30
"""


@frozen
class Change:
    """A change of the number of healthy GPUs, in seconds.

    Attributes:
      ranks: of the new group.
      seen_s: until the old group had ended.
      untrained_s: from then until the new group had attached.
      start_s: torchrun takes to start as many processes that only import.
      same: the digests of all peers were equal after the next rounds.
    """

    ranks: int
    seen_s: float
    untrained_s: float
    start_s: float
    same: bool


def measure(times: int) -> list[Change]:
    """Let a GPU fail and return so often.

    Raises:
      BenchError: a peer did not come back.
    """
    changes = []
    with tempfile.TemporaryDirectory(prefix="holdfast-gpus-") as place:
        folder = Path(place)
        with Loopback() as ground, LabRun(ground, folder, [*TORCHRUN, "{gpus}", EXAMPLE]) as run:
            run.start_master(SPEC)
            for host, (name, ranks) in enumerate((("single", 1), ("group", RANKS)), 1):
                gpus = _write(folder, name, ranks, ranks)
                program = ["env", f"HOLDFAST_GPUS={gpus}", *HOLDFAST]
                run.join(name, host, founder=name == "single", program=program)
            run.until(lambda s: _contribute(s) == 2, "both contribute", WAIT_S)
            for _ in range(times):
                changes += [_change(run, folder, ranks) for ranks in (RANKS - 1, RANKS)]
    return changes


def _write(folder: Path, name: str, ranks: int, of: int) -> Path:
    """Write how many GPUs of a peer are healthy; the daemon may read at any moment."""
    path = folder / f"{name}.gpus"
    lines = [f"{number} {'' if number < ranks else SICK}" for number in range(of)]
    whole = path.with_suffix(".new")
    whole.write_text("\n".join(lines))
    whole.rename(path)
    return path


def _change(run: LabRun, folder: Path, ranks: int) -> Change:
    began = run.master()
    _write(folder, "group", ranks, RANKS)
    lost_s = _event_s(run, "has lost its trainer", began["now_s"])
    back_s = _event_s(run, "has a trainer", lost_s)
    goal = run.master()["committed"] + 2
    run.until(lambda s: s["committed"] >= goal and _contribute(s) == 2, "rounds of both", WAIT_S)
    wanted = f"{ranks} of {RANKS} GPUs"
    run.until(lambda s: _member(s)["accelerators"] == wanted, wanted, WAIT_S)
    run.act("pause", {})
    run.until(lambda s: not s["rounds"], "no round is under way", WAIT_S)
    same = all_equal(run)
    start_s = _start_s(ranks)
    run.act("resume", {})
    return Change(ranks, lost_s - began["now_s"], back_s - lost_s, start_s, same)


def _member(status: Status) -> dict[str, Any]:
    return next(row for row in status["members"] if row["name"] == "group")


def _event_s(run: LabRun, what: str, after_s: float) -> float:
    """Wait for an event of the group, and return its time."""

    def found(status: Status) -> list[float]:
        return [
            event["at_s"]
            for event in status["events"]
            if event["at_s"] > after_s
            and event["text"].startswith("group (")
            and what in event["text"]
        ]

    return found(run.until(found, what, WAIT_S))[0]


def _contribute(status: Status) -> int:
    """Return how many peers contributed to the last round."""
    ended = [each for each in status["past_rounds"] if each["outcome"] == "committed"]
    return len(ended[-1]["contributors"]) if ended else 0


def _start_s(ranks: int) -> float:
    """Return what torchrun takes to start processes that import what the script does, beside the other peer."""
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "imports.py"
        script.write_text(IMPORTS)
        began_s = time.monotonic()
        subprocess.run(
            [sys.executable, *TORCHRUN, str(ranks), str(script)],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        return time.monotonic() - began_s


def tables(changes: list[Change]) -> list[Table]:
    """The section's table."""
    return [
        Table(
            "A GPU fails, and returns: the command starts again with as many processes",
            ["python -m benchmarks.gpus"],
            [
                "processes",
                "old group ended, s",
                "without training, s",
                "of that torchrun and imports, s",
                "digests",
            ],
            [
                [
                    str(each.ranks),
                    f"{each.seen_s:.1f}",
                    f"{each.untrained_s:.1f}",
                    f"{each.start_s:.1f}",
                    "equal" if each.same else "DIFFERENT",
                ]
                for each in changes
            ],
            [
                "examples/fsdp.py as 2 or 3 processes beside a peer of one, on two cores. The GPUs are looked at "
                "every 2 s. The fourth column is what torchrun takes for as many processes that import what the "
                "script imports, and end, measured while the other peer waits.",
            ],
        )
    ]


def gpus() -> Measured:
    """The section of RESULTS.md."""
    changes = measure(TIMES)
    return tables(changes), [asdict(each) for each in changes]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stop_on_signals()
    try:
        changes = measure(options.times)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    keep_json([asdict(each) for each in changes], options.json)
    print_tables(tables(changes))
    return 0 if all(each.same for each in changes) else 1


if __name__ == "__main__":
    sys.exit(main())

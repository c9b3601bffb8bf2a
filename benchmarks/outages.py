"""What an outage costs a round on slow lines: the master killed in the middle of it, and a gap.

    python -m benchmarks.outages --json outages.json

Three peers with a trainer each, whose steps are sleeps, on lines of 50 Mbit/s in the lab; a reduction
takes about ten seconds of them. Without overlap, so that whatever passes is in the time from one
commit to the next. In *master* the master's process is killed so long after the reduction's order and
started again ``AWAY_S`` later; in *gap* nothing passes one peer's line for ``GAP_S``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import BenchError
from benchmarks.lab_run import LabRun, Status, stop_on_signals
from benchmarks.namespaces import LabError
from benchmarks.progress import say
from benchmarks.report import Table, keep_json
from benchmarks.sections import Measured
from benchmarks.wan_lab import Host, WanLab

PEERS = ("alder", "birch", "cedar")
MBIT = 50.0
DELAY_MS = 10.0  # of a host's line, one way
AFTER_S = 3.0  # from the reduction's order to the outage
AWAY_S = 5.0
GAP_S = 4.0
STEP_S = 0.2
QUIET = 2  # rounds that are not disturbed, before each outage
WAIT_S = 180.0
REPEATS = 3
DEADLINE_S = 10.0
SCRIPT = ["-m", "benchmarks.overlap_trainer", "--width=396", "--layers=6", f"--step-s={STEP_S}"]
SPEC = f"""
[run]
name = "outages"
[diloco]
sync_every = 10
[reduce]
codec_up = "fp32"
codec_down = "fp32"
[membership]
contributors = {len(PEERS)}
min_members = {len(PEERS)}
deadline_s = {{deadline_s}}
"""

Outage = Callable[[WanLab, LabRun], None]


def master(_lab: WanLab, run: LabRun) -> None:
    run.kill("master")
    time.sleep(AWAY_S)
    run.restart_master()


def gap(lab: WanLab, _run: LabRun) -> None:
    lab.set(1, loss=1.0)
    time.sleep(GAP_S)
    lab.set(1, loss=0.0)


OUTAGES: dict[str, Outage] = {"master": master, "gap": gap}
SAID = {
    "master": f"the master is killed, and started again after {AWAY_S:g} s",
    "gap": f"nothing passes one peer's line for {GAP_S:g} s",
}


def measure(
    names: Sequence[str], repeats: int, deadline_s: float, keep: Path | None
) -> dict[str, Any]:
    """Live through each outage so many times; seconds from one commit to the next."""
    hosts = [Host(delay_ms=DELAY_MS)]
    hosts += [Host(up_mbit=MBIT, down_mbit=MBIT, delay_ms=DELAY_MS)] * len(PEERS)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        WanLab(hosts) as lab,
        LabRun(lab, keep or Path(directory), SCRIPT) as run,
    ):
        run.start_master(SPEC.format(deadline_s=deadline_s))
        for host, name in enumerate(PEERS, 1):
            log = str(Path(directory) / f"{name}.steps")
            run.join(name, host, founder=host == 1, more=["--log", log])
        run.until(lambda s: s["committed"] >= 2, "the first rounds", WAIT_S)
        run.note_trainers()
        found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(repeats):
            for name in names:
                quiet_s = statistics.median(_round_s(run) for _ in range(QUIET))
                found[name].append({"quiet_s": quiet_s, **_disturbed(lab, run, OUTAGES[name])})
                say(f"{name}: {found[name][-1]}")
    return {
        "mbit": MBIT,
        "away_s": AWAY_S,
        "gap_s": GAP_S,
        "deadline_s": deadline_s,
        "outages": found,
    }


def _round_s(run: LabRun) -> float:
    """Seconds to the next commit from the last one; begins at a commit and ends at one."""
    began_s, _ = _next_commit(run)
    return _next_commit(run)[0] - began_s


def _next_commit(run: LabRun) -> tuple[float, Status]:
    before = int(run.master()["committed"])
    status = run.until(lambda s: s["committed"] > before, "a commit", WAIT_S)
    return float(status["asked_s"]), status


def _disturbed(lab: WanLab, run: LabRun, outage: Outage) -> dict[str, float]:
    began_s, status = _next_commit(run)
    committed = int(status["committed"])
    run.until(lambda s: any(r["phase"] == "reducing" for r in s["rounds"]), "an order", WAIT_S)
    time.sleep(AFTER_S)
    outage_s = time.monotonic()
    outage(lab, run)
    status = run.until(lambda s: s["committed"] > committed, "the next commit", WAIT_S)
    return {
        "round_s": status["asked_s"] - began_s,
        "outage_to_commit_s": status["asked_s"] - outage_s,
    }


def outages() -> Measured:
    raw = measure(list(OUTAGES), REPEATS, DEADLINE_S, None)
    rows = []
    for name, cases in raw["outages"].items():
        quiet_s = statistics.median(case["quiet_s"] for case in cases)
        rounds = sorted(case["round_s"] for case in cases)
        to_commit_s = statistics.median(case["outage_to_commit_s"] for case in cases)
        median_s, worst_s = statistics.median(rounds), rounds[-1]
        cells = [quiet_s, median_s, worst_s, median_s - quiet_s, to_commit_s]
        rows.append([SAID[name], *(f"{cell:.1f}" for cell in cells)])
    table = Table(
        f"An outage in the middle of a round; {len(PEERS)} peers on {MBIT:g} Mbit/s, deadline "
        f"{DEADLINE_S:g} s",
        [f"python -m benchmarks.outages --repeats {REPEATS} --deadline-s {DEADLINE_S:g}"],
        [
            "what",
            "a quiet round, s",
            "this one, s",
            "worst, s",
            "more, s",
            "from it to the commit, s",
        ],
        rows,
        [
            f"Medians of {REPEATS}. From one commit to the next, which is all that trainers wait for."
        ],
    )
    return [table], raw


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--outages", default=",".join(OUTAGES), help=", ".join(OUTAGES))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S, help="the run's")
    parser.add_argument("--keep", type=Path, help="an empty folder for the processes' logs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    stop_on_signals()
    try:
        names = options.outages.split(",")
        if unknown := set(names) - OUTAGES.keys():
            raise BenchError(
                f"no outages {', '.join(sorted(unknown))}; there are {', '.join(OUTAGES)}"
            )
        document = measure(names, options.repeats, options.deadline_s, options.keep)
    except (BenchError, LabError) as error:
        print(f"outages: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(keep_json(document, options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())

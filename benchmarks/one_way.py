"""The section about lines that carry nothing in one direction for a while, and the run afterwards.

    python -m benchmarks.one_way --json one_way.json
    python -m benchmarks.one_way --simulated 500

Four peers and their master in network namespaces on one switch, as root. Ten times nothing that one of
them sends reaches another one, for 3 to 60 s around the deadline of 10 s; no connection is closed and
nobody is told. The median of ten rounds before is compared with that of ten rounds which begin
``RECOVER_S`` after the cut's end; nobody may be removed after that end. ``--simulated`` lives through so
many seeds of the same in virtual time, where all ordered pairs and phases of a round come (see
``benchmarks.one_way_run``).
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from benchmarks.commands import BenchError
from benchmarks.grounds import Switch
from benchmarks.lab_run import LabRun, Status, stop_on_signals
from benchmarks.namespaces import LabError
from tests.swarm.one_way import RECOVER_S, SLOWER_MAX, OneWay, live_through
from benchmarks.progress import say
from benchmarks.report import Table, keep_json
from benchmarks.sections import Measured
from holdfast.simulation.witness import ViolationError

MASTER = "master"
HOSTS = {MASTER: 0, "alder": 1, "birch": 2, "cedar": 3, "doum": 4}
PEERS = tuple(name for name in HOSTS if name != MASTER)
# Who is cut off from whom, and for how long. Of two peers the later one dials.
CUTS = (
    ("alder", "birch", 25.0),
    ("birch", "alder", 25.0),
    ("doum", "alder", 10.0),
    ("birch", "cedar", 60.0),
    ("cedar", "birch", 3.0),
    ("doum", "cedar", 60.0),
    ("birch", MASTER, 10.0),
    ("cedar", MASTER, 60.0),
    (MASTER, "doum", 25.0),
    (MASTER, "alder", 3.0),
)
SCRIPT = [str(Path(__file__).with_name("chaos_trainer.py")), "--step-s=0.2"]
ROUNDS = 10
WAIT_S = 180.0
POLL_S = 0.5

SPEC = f"""\
[run]
name = "one way"
[diloco]
sync_every = 10
[membership]
contributors = {len(PEERS)}
min_members = 2
deadline_s = 10
"""


@frozen
class Case:
    """What came of one cut.

    Attributes:
      before_s, after_s: from one commit to the next, the median of ten.
      during_s: the cut's length over the rounds committed meanwhile; 0: there were none.
      whole_s: from the cut's end until all were in sync, had their places and links to each other;
        None: not within ``RECOVER_S``.
      removed_during, removed_after: how often the master lost or removed somebody before the cut's
        end, and after it.
    """

    source: str
    target: str
    cut_s: float
    before_s: float
    during_s: float
    after_s: float
    whole_s: float | None
    removed_during: int
    removed_after: int

    @property
    def slowdown(self) -> float:
        return self.after_s / self.before_s

    @property
    def recovered(self) -> bool:
        whole = self.whole_s is not None and self.removed_after == 0
        return whole and self.slowdown <= SLOWER_MAX


def cut_and_heal(lab: Switch, run: LabRun, source: str, target: str, cut_s: float) -> Case:
    """Live through one cut of a run that is whole."""
    before_s = _round_s(run)
    began = run.master()
    lab.cut(HOSTS[source], HOSTS[target])
    time.sleep(cut_s)
    lab.heal(HOSTS[source], HOSTS[target])
    healed = run.master()
    whole_s = _whole_after_s(run, healed)
    time.sleep(max(0.0, RECOVER_S - (run.master()["now_s"] - healed["now_s"])))
    after_s = _round_s(run)
    rounds = healed["committed"] - began["committed"]
    return Case(
        source,
        target,
        cut_s,
        before_s,
        cut_s / rounds if rounds else 0.0,
        after_s,
        whole_s,
        _removed(healed, began["now_s"]),
        _removed(run.master(), healed["now_s"]),
    )


def whole(status: Status, count: int = len(PEERS)) -> bool:
    """So many peers are in sync, have their places, and links to each other."""
    members = status["members"]
    return bool(
        len(members) == count
        and all(member["in_sync"] for member in members)
        and status["places"]["taken"] == count
        and all(route["works"] for route in status["routes"])
    )


def _whole_after_s(run: LabRun, healed: Status) -> float | None:
    while (status := run.master())["now_s"] - healed["now_s"] < RECOVER_S:
        if whole(status):
            return float(status["now_s"] - healed["now_s"])
        time.sleep(POLL_S)
    return None


def _round_s(run: LabRun) -> float:
    """The median time from one commit to the next, of rounds that begin now."""
    target = run.master()["committed"] + ROUNDS + 1
    status = run.until(lambda s: s["committed"] >= target, f"{ROUNDS} rounds more", WAIT_S)
    ended_s = [
        each["opened_s"] + each["open_s"] + each["reduce_s"]
        for each in status["past_rounds"]
        if each["outcome"] == "committed"
    ]
    return float(statistics.median(b - a for a, b in pairwise(ended_s[-ROUNDS - 1 :])))


def _removed(status: Status, since_s: float) -> int:
    return sum(
        event["kind"] == "leave" and since_s < event["at_s"] <= status["now_s"]
        for event in status["events"]
    )


def in_namespaces(heard: Callable[[Case], None]) -> list[Case]:
    """Live through ``CUTS``, one after the other, in one run.

    Raises:
      LabError: there are no namespaces here.
      BenchError: the run does not go on at all.
    """
    cases = []
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        Switch(len(HOSTS)) as lab,
        LabRun(lab, Path(directory), SCRIPT) as run,
    ):
        run.start_master(SPEC)
        for name in PEERS:
            run.join(name, HOSTS[name], founder=name == PEERS[0])
        run.until(lambda s: whole(s) and s["committed"] >= 2, "all are in sync", WAIT_S)
        for source, target, cut_s in CUTS:
            cases.append(cut_and_heal(lab, run, source, target, cut_s))
            heard(cases[-1])
    return cases


def summary(cases: list[Case]) -> dict[str, Any]:
    return {
        "cases": len(cases),
        "recovered": sum(case.recovered for case in cases),
        "slowdown_max": max((case.slowdown for case in cases), default=None),
        "removed_after": sum(case.removed_after for case in cases),
        "each": [{**asdict(case), "slowdown": case.slowdown} for case in cases],
    }


def simulated(seeds: int, start: int) -> dict[str, Any]:
    """Live through so many seeds in virtual time."""
    logging.getLogger("holdfast").addHandler(logging.NullHandler())
    recovered, slowdowns, removed, failed = 0, [], 0, []
    for seed in range(start, start + seeds):
        try:
            recovery = live_through(OneWay.of(seed))
        except (ViolationError, BaseExceptionGroup) as error:
            failed.append(seed)
            say(f"seed {seed}: {error!r}")
            continue
        recovered += 1
        slowdowns.append(recovery.slowdown)
        removed += recovery.removed[1]
        if seed % 20 == 19:
            say(f"{seed + 1 - start} seeds, {len(failed)} failed")
    return {
        "cases": seeds,
        "recovered": recovered,
        "slowdown_max": max(slowdowns, default=None),
        "removed_after": removed,
        "start": start,
        "failed": failed,
    }


def _told(case: Case) -> str:
    whole = "never" if case.whole_s is None else f"after {case.whole_s:.1f} s"
    return (
        f"{case.source} to {case.target} for {case.cut_s:g} s: rounds of {case.before_s:.2f} s, "
        f"{case.during_s:.2f} s meanwhile, {case.after_s:.2f} s afterwards; whole {whole}, "
        f"{case.removed_during} removed meanwhile, {case.removed_after} afterwards"
    )


def one_way() -> Measured:
    raw = summary(in_namespaces(lambda case: say(_told(case))))
    rows = [
        [
            f"{each['source']} to {each['target']}",
            f"{each['cut_s']:g}",
            f"{each['before_s']:.2f}",
            f"{each['during_s']:.2f}" if each["during_s"] else "none ended",
            f"{each['after_s']:.2f}",
            "never" if each["whole_s"] is None else f"{each['whole_s']:.1f}",
            f"{each['removed_during']}, {each['removed_after']}",
        ]
        for each in raw["each"]
    ]
    table = Table(
        "A line that carries nothing in one direction; four peers, deadline 10 s",
        ["python -m benchmarks.one_way --json one_way.json"],
        [
            "nothing comes from",
            "for, s",
            "a round before, s",
            "meanwhile, s",
            "afterwards, s",
            "whole again after, s",
            "removed: meanwhile, afterwards",
        ],
        rows,
        [
            "Medians of 10 rounds, the later ones beginning 30 s after the cut's end; meanwhile: the "
            "cut's length over the rounds that were committed in it. Between peers nobody is removed; "
            "who the master hears nothing of for a deadline is, and comes back."
        ],
    )
    return [table], raw


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.one_way", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--simulated", type=int, default=0, metavar="SEEDS")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    stop_on_signals()
    try:
        if options.simulated:
            raw = simulated(options.simulated, options.start)
        else:
            raw = summary(in_namespaces(lambda case: say(_told(case))))
    except (BenchError, LabError) as error:
        print(f"one way: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json:
        keep_json(raw, options.json)
    print(f"{raw['recovered']} of {raw['cases']} recovered, slowdown {raw['slowdown_max']}")
    return 0 if raw["recovered"] == raw["cases"] else 1


if __name__ == "__main__":
    sys.exit(main())

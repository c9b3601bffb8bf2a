"""Training on spot machines that are lost and come back: several systems, the same schedule.

    python -m benchmarks.spot --minutes 8 --systems holdfast,ddp10
    python -m benchmarks.spot --trace Z1.json Z2.json Z3.json --points 2273-2345 --torchft DIR

``--trace`` takes a file a zone as skypilot-org/spot-traces has them: how many of four nodes run at
each point, every ``gap_seconds``. Without it the schedule is made up, at the rates of a day of
those traces: 62 losses of twelve nodes, 6.9 running on average. ``--points`` says which part is
played, ``--minutes`` how long that takes. ``--torchft`` is a folder with torchft and what it needs
but torch (``pip install --no-deps --target DIR``); without it two systems are left out. ``ddp10``
is DDP under elastic torchrun with a checkpoint every 10 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cattrs
import psutil
from attrs import Factory, asdict, define, frozen

from benchmarks.report import (
    ROOT,
    BenchError,
    Measured,
    Table,
    bench_parser,
    listed,
    run_main,
    say,
    tell,
)
from holdfast.membership.spec.spec import RunSpec

ZONES, NODES = 3, 4  # and of places in each zone
LOSSES_A_DAY, RUNNING, POINTS_A_DAY, GAP_S = 62, 6.93, 288, 300.0
POINTS, MINUTES, STEP_S = "0-72", 8.0, 0.5
QUIET_S = 60.0  # before the schedule begins
START_S = 120.0  # for all places to train, and for the weights at the end
PRICE = 0.92  # dollars an hour: about a V100's as a spot machine when the traces were made
SYSTEMS = ("holdfast", "ddp10", "torchft-ddp", "torchft-diloco")
RUN_TOML = """\
[run]
name = "spot"
rounds = 0
preset = "streaming"
[membership]
min_members = 1
"""
FRAGMENTS = RunSpec.parse(RUN_TOML).diloco.fragments
USEFUL = 0.5  # share of a step that must be in the run's model to call the step useful

Counts = list[list[int]]  # running nodes by zone and point
Diaries = list[tuple[int, list[list[str]]]]  # of processes: the place, and the words of each line
Found = dict[str, Any]


# ---------------------------------------------------------------- the schedule


@frozen(order=True)
class Change:
    """A place is lost, or comes back."""

    at_s: float
    place: int
    comes: bool


@frozen
class Schedule:
    """The places that run first, and what changes in so many seconds."""

    first: tuple[int, ...]
    changes: tuple[Change, ...]
    seconds: float

    def of(self, *, comes: bool) -> list[Change]:
        """Return the returns, or the losses."""
        return [each for each in self.changes if each.comes == comes]

    def running_s(self) -> float:
        """Return the seconds that places run, added up."""
        ends = (self.seconds - each.at_s if each.comes else each.at_s for each in self.changes)
        gone = len(self.of(comes=False))
        return sum(ends) + self.seconds * (len(self.first) - gone)

    def running(self, at_s: float) -> int:
        """Return how many places run just after a time."""
        past = [each.comes for each in self.changes if each.at_s <= at_s]
        return len(self.first) + 2 * sum(past) - len(past)


def read_traces(paths: Sequence[Path]) -> tuple[Counts, float]:
    """Return the counts of traces, one file a zone, and the seconds between two points.

    Raises:
      BenchError: a file is no such trace.
    """
    counts, gaps = [], set()
    for path in paths:
        try:
            found = json.loads(path.read_text())
            counts.append([int(each) for each in found["data"]])
            gaps.add(float(found["metadata"]["gap_seconds"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path} is no trace of running nodes ({error!r})") from None
        if not set(counts[-1]) <= set(range(NODES + 1)):
            raise BenchError(f"{path}: each point has from 0 to {NODES} nodes")
    if len(gaps) != 1 or len(counts) != ZONES:
        raise BenchError(f"give {ZONES} traces with the same gap_seconds")
    return counts, gaps.pop()


def changes_of(counts: Counts) -> tuple[int, int]:
    """Return how many nodes are lost, and how many come back."""
    steps = [after - before for zone in counts for before, after in itertools.pairwise(zone)]
    return -sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)


def mean_running(counts: Counts) -> float:
    return sum(map(sum, counts)) / len(counts[0])


def made_up() -> Counts:
    """Return a day of nodes that are lost and come back independently, at the rates of the trace's:
    the first of a row of random days with as many losses and as many running nodes.
    """
    up_points = RUNNING * POINTS_A_DAY / LOSSES_A_DAY
    down_points = (ZONES * NODES - RUNNING) * POINTS_A_DAY / LOSSES_A_DAY
    for seed in itertools.count():
        chance = random.Random(seed)
        counts = [[0] * (POINTS_A_DAY + 1) for _ in range(ZONES)]
        for zone in counts * NODES:
            up = chance.random() < RUNNING / (ZONES * NODES)
            for point in range(POINTS_A_DAY + 1):
                zone[point] += up
                up ^= chance.random() < 1 / (up_points if up else down_points)
        alike = abs(mean_running(counts) - RUNNING) < 0.05
        if alike and changes_of(counts)[0] == LOSSES_A_DAY:
            return counts
    raise AssertionError


def schedule(counts: Counts, first: int, last: int, seconds: float) -> Schedule:
    """Return what happens between two points, in so many seconds; which node of a zone it is, and
    when before its point, is drawn.

    Raises:
      BenchError: there are no such points.
    """
    newest = min(map(len, counts)) - 1
    if not 0 <= first < last <= newest:
        raise BenchError(f"no points {first}-{last}: there are 0 to {newest}")
    chance, changes, initial = random.Random(0), [], []
    for zone, row in enumerate(counts):
        places = range(zone * NODES, (zone + 1) * NODES)
        up = set(places[: row[first]])
        initial += sorted(up)
        for point in range(first + 1, last + 1):
            at_s = (point - first - chance.random()) * seconds / (last - first)
            comes = row[point] > len(up)
            possible = sorted(set(places) - up if comes else up)
            for place in chance.sample(possible, abs(row[point] - len(up))):
                changes.append(Change(at_s, place, comes))
                up ^= {place}
    return Schedule(tuple(initial), tuple(sorted(changes)), seconds)


# ---------------------------------------------------------------- what came of it


@define
class Life:
    """What a process did: its steps, each with the share of it that is in the run's model."""

    place: int
    began_s: float
    steps: list[tuple[float, float]] = Factory(list)  # when it ended, the share

    def next_useful_s(self, since_s: float) -> float | None:
        """Return when the first useful step has ended that began then or later."""
        later = [step for step in self.steps if step[0] > since_s]
        began_before = self.began_s < since_s  # and so did the step that ends next
        return next((end for end, share in later[began_before:] if share >= USEFUL), None)


def lives_of(diaries: Diaries) -> list[Life]:
    """Return what processes did; the trainers' module says what a diary's lines are."""
    rewinds = [
        (float(t), int(w[0])) for _, lines in diaries for t, kind, *w in lines if kind == "r"
    ]
    lives = []
    for place, lines in filter(lambda each: each[1], diaries):
        kinds = {line[1] for line in lines}
        ends: list[float] = []
        shares: list[float] = []
        settled, merged = 0, {}
        for at, kind, *words in lines:
            if kind == "s":
                ends.append(float(at))
                lost = any(ends[-1] < t and step < int(words[0]) for t, step in rewinds)
                shares.append(float("r" in kinds and not lost))
            elif kind == "c":
                shares[settled:] = [float(words[0])] * (len(shares) - settled)
                settled = len(shares)
            elif kind == "m" and words[1] == "1":
                merged[words[0]] = len(shares) - 1
        if "m" in kinds:
            shares = [sum(at < m for m in merged.values()) / FRAGMENTS for at in range(len(ends))]
        lives.append(Life(place, float(lines[0][0]), list(zip(ends, shares, strict=True))))
    return lives


def figures(
    lives: Sequence[Life], plan: Schedule, began_s: float, quiet_s: float, step_s: float
) -> Found:
    """Return useful steps, and the seconds after losses and returns; it began at ``began_s``."""
    steps = sorted(step for life in lives for step in life.steps)
    quiet = [share for end, share in steps if began_s - quiet_s <= end < began_s]
    during = [share for end, share in steps if began_s <= end < began_s + plan.seconds]
    losses, returns = plan.of(comes=False), plan.of(comes=True)
    after_loss, after_return = [], []
    for each in losses:
        at_s = began_s + each.at_s
        ends = [life.next_useful_s(at_s) for life in lives if life.place != each.place]
        waits = sorted(end - at_s for end in ends if end is not None)
        # Processes that are started later are no survivors: there are as many as run now.
        after_loss += [statistics.median(waits[: plan.running(each.at_s)])] if waits else []
    for each in returns:
        at_s = began_s + each.at_s
        gone = (x.at_s for x in losses if x.place == each.place and x.at_s > each.at_s)
        until_s = began_s + next(gone, plan.seconds)
        ends = [life.next_useful_s(at_s) for life in lives if life.place == each.place]
        after_return += [end - at_s for end in ends if end is not None and end < until_s][:1]
    return {
        "possible": plan.running_s() / step_s,
        "done": len(during),
        "useful": sum(during),
        "quiet_share": sum(quiet) * step_s / (len(plan.first) * quiet_s),
        "after_loss_s": after_loss,
        "after_return_s": after_return,
        "losses": len(losses),
        "returns": len(returns),
    }


def at_own_pace(found: Found, faster: float) -> float:
    """Return the useful share if losses and returns came ``faster`` times as rarely: arithmetic, in
    which each of them costs what it cost.
    """
    share = float(found["useful"] / found["possible"])
    return float(found["quiet_share"] - (found["quiet_share"] - share) / faster)


def table(all_found: dict[str, Found], plan: Schedule, faster: float, command: str) -> Table:
    rows = []
    for name, found in all_found.items():
        useful, own = max(1.0, found["useful"]), at_own_pace(found, faster)
        started = f"{len(found['after_return_s'])} of {found['returns']}"
        rows.append(
            [
                name,
                f"{found['quiet_share']:.1%}",
                f"{found['useful'] / found['possible']:.1%}",
                f"{1 - found['useful'] / max(1, found['done']):.1%}",
                _spread(found["after_loss_s"]),
                f"{_spread(found['after_return_s'])}, {started}",
                f"{found['loss']:.3f}",
                f"{found['processor_s'] / useful:.3f}",
                f"{found['sent_bytes'] / useful / 1e3:,.0f}",
                f"{found['dollars_a_million']:.2f}",
                f"{own:.1%}",
            ]
        )
    changes = f"{len(plan.of(comes=False))} losses and {len(plan.of(comes=True))} returns"
    return Table(
        f"{changes} of {ZONES * NODES} places in {plan.seconds / 60:g} minutes, {faster:.0f} times"
        f" as fast as they came; {plan.running_s() / plan.seconds:.1f} places run on average",
        [command],
        [
            *("system", "useful, undisturbed", "useful", "lost", "s from a loss"),
            *("s from a return", "loss", "processor s a step", "kB a step", "$ a million tokens"),
            "useful, at the trace's pace",
        ],
        rows,
        [
            "*Useful*: steps that are in the run's model at the end, of those that all running"
            " places could have ended; *undisturbed*: before the first loss. *Lost*: steps that"
            " ended and are not in it, of those that ended. *s from a loss, from a return*: until"
            " half of the survivors, or the newcomer, have ended a useful step that began after it:"
            " median (largest), and how many newcomers did. *Loss*: validation, at the end."
            " *At the trace's pace* is arithmetic: each loss and return costs what it cost here.",
        ],
    )


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({max(values):.1f})" if values else "none"


# ---------------------------------------------------------------- playing it


def measured(name: str, plan: Schedule, options: argparse.Namespace) -> Found:
    """Play the schedule with a system, and return its figures."""
    from benchmarks.spot_places import Machines, System, Zones  # which import torch
    from benchmarks.spot_trainers import DIARIES, MODEL, TOKENS

    with tempfile.TemporaryDirectory(prefix="holdfast-spot-") as directory:
        folder = options.keep / name if options.keep else Path(directory)
        (folder / DIARIES).mkdir(parents=True)
        used_s, load = Machines.processor_s(), os.getloadavg()[0]
        with Zones() as zones, Machines(zones, folder) as machines:
            system = System(name, machines, options.step_s)
            for place in plan.first:
                system.come(place)
            _await(lambda: _training(folder / DIARIES) == set(plan.first))
            say(f"{name}: {len(plan.first)} places train")
            began_s = time.monotonic() + options.quiet_s
            _wait(system, began_s)
            sent, between, _late_ms = zones.carried()
            busy_s = _busy_s()
            for change in plan.changes:
                _wait(system, began_s + change.at_s)
                (system.come if change.comes else system.lose)(change.place)
                word = "comes" if change.comes else "is lost"
                say(f"{name}: {change.at_s:.0f} of {plan.seconds:.0f} s, {change.place} {word}")
            _wait(system, began_s + plan.seconds)
            now_sent, now_between, late_ms = zones.carried()
            busy_s = _busy_s() - busy_s
            system.end()
            with contextlib.suppress(BenchError):  # then its last checkpoint has to do
                _await((folder / MODEL).exists)
        found: Found = {
            "loss": _loss(folder),
            "processor_s": Machines.processor_s() - used_s,
            "sent_bytes": now_sent - sent,
            "sent_between_zones_bytes": now_between - between,
            "restarts": system.restarts,
            "hub_late_ms_max": late_ms,
            "load_before": load,
            "machine_busy_s": busy_s,
            "began_s": began_s,
            "plan": asdict(plan),
        }
        lives = lives_of(read_diaries(folder / DIARIES))
    found |= figures(lives, plan, began_s, options.quiet_s, options.step_s)
    dollars = options.price * plan.running_s() / 3600
    found["dollars_a_million"] = 1e6 * dollars / max(1.0, found["useful"] * TOKENS)
    say(f"{name}: {found['useful']:.0f} of {found['possible']:.0f} steps, loss {found['loss']:.3f}")
    return found


def _loss(folder: Path) -> float:
    """Return the validation loss of the weights at the end."""
    import torch

    from benchmarks.spot_trainers import CHECKPOINT, CORPUS, MODEL
    from examples.train import GPT, validate

    for name in (MODEL, CHECKPOINT):
        if (folder / name).exists():
            model = GPT()
            model.load_state_dict(torch.load(folder / name)["model"])
            return validate(model, CORPUS[1], 64, 16)
    raise BenchError("nobody wrote the weights; --keep DIR keeps the logs of all places")


def _await(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > until_s:
            raise BenchError("the places do not train; --keep DIR keeps the logs of all places")
        time.sleep(0.2)


def _wait(system: Any, until_s: float) -> None:
    while (left_s := until_s - time.monotonic()) > 0:
        system.watch()
        time.sleep(min(0.1, left_s))


def _busy_s() -> float:
    """Return the seconds for which this machine's cores were busy, with anything."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


def read_diaries(folder: Path) -> Diaries:
    """Return the diaries of all processes so far, the oldest first."""
    paths = sorted(folder.iterdir(), key=lambda path: int(path.name.split("-")[1]))
    return [
        (int(path.name.split("-")[0]), [line.split() for line in path.read_text().splitlines()])
        for path in paths
    ]


def _training(folder: Path) -> set[int]:
    return {place for place, lines in read_diaries(folder) if any(line[1] == "s" for line in lines)}


# ---------------------------------------------------------------- the command


def parser() -> argparse.ArgumentParser:
    made = bench_parser("spot", __doc__)
    made.add_argument("--trace", type=Path, nargs=ZONES, metavar="FILE", help="one for each zone")
    made.add_argument("--points", default=POINTS, metavar="A-B", help=f"default: {POINTS}")
    made.add_argument("--minutes", type=float, default=MINUTES, help="that the schedule takes")
    made.add_argument("--systems", default=",".join(SYSTEMS), metavar="NAME[,...]")
    made.add_argument("--torchft", type=Path, metavar="DIR", help="where it is installed")
    made.add_argument("--step-s", type=float, default=STEP_S, help="that a step takes")
    made.add_argument("--quiet-s", type=float, default=QUIET_S, help="before it begins")
    made.add_argument("--price", type=float, default=PRICE, help="dollars an hour of a place")
    made.add_argument("--keep", type=Path, metavar="DIR", help="for the logs of all places")
    return made


def played(options: argparse.Namespace, command: str) -> Measured:
    """Play the schedule that the options ask for with each of their systems."""
    counts, gap_s = read_traces(options.trace) if options.trace else (made_up(), GAP_S)
    try:
        first, last = map(int, options.points.split("-"))
    except ValueError:
        raise BenchError(f"--points {options.points}: give two numbers, such as {POINTS}") from None
    plan = schedule(counts, first, last, options.minutes * 60)
    names = listed(options.systems)
    if bad := [
        name for name in names if name not in SYSTEMS and not re.fullmatch(r"ddp[1-9]\d*", name)
    ]:
        raise BenchError(f"no system {', '.join(bad)}; there are {', '.join(SYSTEMS)}, and ddpN")
    if options.torchft:
        sys.path.append(str(options.torchft.resolve()))
    elif left := [name for name in names if name.startswith("torchft")]:
        say(f"left out: {', '.join(left)}, since --torchft does not say where torchft is")
        names = [name for name in names if name not in left]
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})  # forks need one thread
    found = {name: measured(name, plan, options) for name in names}
    faster = (last - first) * gap_s / plan.seconds
    return [table(found, plan, faster, command)], {"faster": faster, "systems": found}


def spot() -> Measured:
    """The section of RESULTS.md, measured in a process of its own: a fork needs one thread."""
    command = ["-m", "benchmarks.spot"]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        words = [sys.executable, *command, "--json", file.name]
        if subprocess.run(words, stdout=subprocess.DEVNULL, cwd=ROOT, check=False).returncode:
            raise BenchError("the schedule was not played; what was said of it is above")
        found = json.load(file)
    (some, *_) = found["systems"].values()
    plan = cattrs.structure(some["plan"], Schedule)
    shown = table(found["systems"], plan, found["faster"], " ".join(["python", *command]))
    return [shown], found


def main() -> int:
    options = parser().parse_args()
    return tell(played(options, " ".join(["python -m benchmarks.spot", *sys.argv[1:]])), options)


if __name__ == "__main__":
    sys.exit(run_main("spot", main))

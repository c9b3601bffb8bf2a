"""Training on spot machines that are lost and come back: four systems under the same schedule.

    python -m benchmarks.spot --minutes 8 --systems holdfast,ddp10
    python -m benchmarks.spot --trace Z1.json Z2.json Z3.json --points 2273-2345 --torchft DIR

``--trace`` takes a file for each zone as skypilot-org/spot-traces has them: running nodes at each
point, every ``gap_seconds``; of four nodes each. Without it the schedule is made up, with the rates
of a day of those traces: 62 losses of twelve nodes, 6.9 running on average. ``--points`` says which
stretch is played, ``--minutes`` how long that takes. ``--torchft`` is a folder with torchft and what
it needs but torch, as ``pip install --no-deps --target DIR`` makes it; without it two systems are
left out. ``ddp10`` is DDP under elastic torchrun with a checkpoint every 10 steps.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from attrs import Factory, asdict, define, frozen

from benchmarks.report import (
    BenchError,
    Measured,
    Table,
    bench_parser,
    listed,
    run_main,
    say,
    tell,
)

ZONES, NODES = 3, 4
LOSSES_A_DAY, RUNNING, POINTS_A_DAY = 62, 6.93, 288
GAP_S = 300.0
POINTS, MINUTES, STEP_S = "0-72", 8.0, 0.5
QUIET_S = 60.0  # without losses and returns, first
START_S, MODEL_S, TOLD_S = 120.0, 90.0, 30.0
PRICE = 0.92  # dollars an hour: about what a spot machine with a V100 cost when the trace was made
SYSTEMS = ("holdfast", "ddp10", "torchft-ddp", "torchft-diloco")
NEEDS_TORCHFT = "torchft"
FRAGMENTS = 5  # of the streaming preset

Counts = list[list[int]]  # running nodes by zone and point
Found = dict[str, Any]
Diaries = list[tuple[int, list[list[str]]]]  # of a process: its place, and lines of words


# ---------------------------------------------------------------- the schedule


@frozen(order=True)
class Change:
    """A place is lost, or comes back."""

    at_s: float
    place: int
    comes: bool


@frozen
class Schedule:
    """Which places run first, and what changes, in ``seconds``."""

    first: tuple[int, ...]
    changes: tuple[Change, ...]
    seconds: float

    def running_s(self) -> float:
        """Return the sum over places of the time that each runs."""
        there = self.seconds * len(self.first)
        return there + sum(
            (self.seconds - each.at_s) * (1 if each.comes else -1) for each in self.changes
        )

    def losses(self) -> list[Change]:
        return [each for each in self.changes if not each.comes]

    def returns(self) -> list[Change]:
        return [each for each in self.changes if each.comes]


def read_traces(paths: Sequence[Path]) -> tuple[Counts, float]:
    """Return the counts of traces, one file a zone, and the seconds between two points.

    Raises:
      BenchError: a file is no such trace.
    """
    counts, gaps = [], set()
    for path in paths:
        try:
            found = json.loads(path.read_text())
            gaps.add(float(found["metadata"]["gap_seconds"]))
            counts.append([int(each) for each in found["data"]])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path} is no trace of running nodes ({error!r})") from None
        if not 0 <= min(counts[-1], default=-1) <= max(counts[-1]) <= NODES:
            raise BenchError(f"{path}: from 0 to {NODES} nodes at each point are possible")
    if len(gaps) != 1 or len(counts) > ZONES:
        raise BenchError(f"give up to {ZONES} traces, all with the same gap_seconds")
    return counts, gaps.pop()


def changes_of(counts: Counts) -> tuple[int, int]:
    """Return how many nodes are lost and how many come back."""
    steps = [
        after - before for zone in counts for before, after in zip(zone, zone[1:], strict=False)
    ]
    return -sum(step for step in steps if step < 0), sum(step for step in steps if step > 0)


def mean_running(counts: Counts) -> float:
    return sum(map(sum, counts)) / len(counts[0])


def made_up() -> Counts:
    """Return a day whose nodes are lost and come back independently, at the rates of the trace's.

    It is the first of a row of random days that has as many losses and as many running nodes.
    """
    up_points = RUNNING * POINTS_A_DAY / LOSSES_A_DAY
    down_points = (ZONES * NODES - RUNNING) * POINTS_A_DAY / LOSSES_A_DAY
    for seed in range(100_000):
        chance = random.Random(seed)
        counts = [[0] * (POINTS_A_DAY + 1) for _ in range(ZONES)]
        for zone in counts * NODES:
            up = chance.random() < RUNNING / (ZONES * NODES)
            for point in range(POINTS_A_DAY + 1):
                zone[point] += up
                up ^= chance.random() < 1 / (up_points if up else down_points)
        running = [sum(each) for each in zip(*counts, strict=True)]
        alike = abs(mean_running(counts) - RUNNING) < 0.05 and min(running) >= ZONES
        if alike and changes_of(counts)[0] == LOSSES_A_DAY:
            return counts
    raise BenchError("no day with these rates was found")


def schedule(counts: Counts, first: int, last: int, seconds: float) -> Schedule:
    """Return what happens from one point to another, in so many seconds.

    Which node of a zone it is, and when between two points, is drawn.

    Raises:
      BenchError: there are no such points.
    """
    if not 0 <= first < last < min(map(len, counts)):
        raise BenchError(f"no points {first}-{last}; there are 0 to {min(map(len, counts)) - 1}")
    chance, changes, initial = random.Random(0), [], []
    for zone, row in enumerate(counts):
        places = range(zone * NODES, (zone + 1) * NODES)
        up = set(places[: row[first]])
        initial += sorted(up)
        for point in range(first + 1, last + 1):
            at_s = (point - first - chance.random()) * seconds / (last - first)
            comes = row[point] > len(up)
            others = sorted(set(places) - up if comes else up)
            for place in chance.sample(others, abs(row[point] - len(up))):
                changes.append(Change(at_s, place, comes))
                up ^= {place}
    return Schedule(tuple(initial), tuple(sorted(changes)), seconds)


# ---------------------------------------------------------------- what came of it


@define
class Life:
    """What one process did: its steps, each with the share of it that is in the run's model."""

    place: int
    began_s: float = 0.0
    steps: list[tuple[float, float]] = Factory(list)  # (end, share)

    def next_useful_s(self, since_s: float) -> float | None:
        """Return the end of the first useful step that began then or later."""
        ends = [end for end, _share in self.steps]
        at = bisect.bisect_left(ends, since_s)  # the first that ends later: it began earlier
        at += bool(at < len(ends) and self.began_s < since_s)
        return next((end for end, share in self.steps[at:] if share >= 0.5), None)


def lives_of(diaries: Diaries) -> list[Life]:
    """Return the lives that diaries tell of, each a place and lines of words."""
    rewinds = sorted((float(t), int(w[0])) for _, d in diaries for t, k, *w in d if k == "r")
    lives = []
    for place, lines in diaries:
        life = Life(place, float(lines[0][0]) if lines else 0.0)
        kinds = {line[1] for line in lines}
        ends, numbers, round_from, merged = [], [], 0, {}
        shares: list[float] = []
        for time_s, kind, *words in lines:
            if kind == "s":
                ends.append(float(time_s))
                numbers.append(int(words[0]))
                shares.append(0.0)
            elif kind == "c":
                shares[round_from:] = [float(words[0])] * (len(shares) - round_from)
                round_from = len(shares)
            elif kind == "m" and words[1] == "1":
                merged[words[0]] = len(shares) - 1  # the step that has just ended is not in it
        if "r" in kinds:
            shares = [
                float(not _undone(*each, rewinds)) for each in zip(ends, numbers, strict=True)
            ]
        elif "c" not in kinds:
            held = sorted(merged.values())
            shares = [
                (len(held) - bisect.bisect_right(held, at)) / FRAGMENTS for at in range(len(ends))
            ]
        life.steps = list(zip(ends, shares, strict=True))
        lives.append(life)
    return lives


def _undone(end_s: float, number: int, rewinds: Sequence[tuple[float, int]]) -> bool:
    later = rewinds[bisect.bisect_right(rewinds, (end_s, 2**60)) :]
    return any(step < number for _at_s, step in later)


def figures(
    lives: Sequence[Life], plan: Schedule, began_s: float, quiet_s: float, step_s: float
) -> Found:
    """Return useful steps, and the seconds after losses and returns; it began at ``began_s``."""

    def within(from_s: float, to_s: float) -> list[float]:
        return [share for life in lives for end, share in life.steps if from_s <= end < to_s]

    during = within(began_s, began_s + plan.seconds)
    quiet = within(began_s - quiet_s, began_s)
    after_loss, after_return, never = [], [], 0
    for each in plan.losses():
        at_s = began_s + each.at_s
        waits = [life.next_useful_s(at_s) for life in lives if life.place != each.place]
        by_place = [end - at_s for end in waits if end is not None]
        # A process of before and one of after a restart are one survivor: as many as run then.
        survivors = sorted(by_place)[: max(1, _running(plan, each))]
        after_loss += [statistics.median(survivors)] if survivors else []
    for each in plan.returns():
        at_s = began_s + each.at_s
        own = [life.next_useful_s(at_s) for life in lives if life.place == each.place]
        until_s = next(
            (c.at_s for c in plan.losses() if c.place == each.place and c.at_s > each.at_s),
            plan.seconds,
        )
        ends = [end - at_s for end in own if end is not None and end < began_s + until_s]
        never += not ends
        after_return += [min(ends)] if ends else []
    return {
        "possible": plan.running_s() / step_s,
        "done": len(during),
        "useful": sum(during),
        "quiet_share": sum(quiet) * step_s / (len(plan.first) * quiet_s),
        "losses": len(plan.losses()),
        "returns": len(plan.returns()),
        "after_loss_s": after_loss,
        "after_return_s": after_return,
        "returns_without_step": never,
    }


def _running(plan: Schedule, at: Change) -> int:
    """Return how many places run just after a change."""
    before = [each for each in plan.changes if each.at_s <= at.at_s]
    return len(plan.first) + sum(1 if each.comes else -1 for each in before)


def at_own_pace(found: Found, faster: float) -> float:
    """Return the useful share at the trace's pace, ``faster`` times slower than what was played.

    Arithmetic: what a loss and a return cost stays, and they come so much more rarely.
    """
    share = float(found["useful"] / found["possible"])
    return float(found["quiet_share"] - (found["quiet_share"] - share) / faster)


def table(all_found: dict[str, Found], plan: Schedule, faster: float, command: str) -> Table:
    rows = []
    for name, found in all_found.items():
        share, own = found["useful"] / found["possible"], at_own_pace(found, faster)
        rows.append(
            [
                name,
                f"{found['quiet_share']:.1%}",
                f"{share:.1%}",
                f"{found['done'] - found['useful']:.0f} of {found['done']}",
                _spread(found["after_loss_s"]),
                _spread(found["after_return_s"])
                + (
                    f" (none: {found['returns_without_step']})"
                    * (found["returns_without_step"] > 0)
                ),
                f"{found['loss']:.3f}",
                f"{found['processor_s'] / max(1.0, found['useful']):.3f}",
                f"{found['sent_bytes'] / max(1.0, found['useful']) / 1e3:,.0f}",
                f"{own:.1%}",
                f"{found['dollars_a_million']:.2f}",
            ]
        )
    return Table(
        f"{len(plan.losses())} losses and {len(plan.returns())} returns of"
        f" {ZONES * NODES} places in {plan.seconds / 60:.0f} minutes,"
        f" {plan.running_s() / plan.seconds:.1f} running on average",
        [command],
        [
            *("system", "undisturbed", "useful steps", "lost", "s from a loss", "s from a return"),
            *(
                "loss",
                "processor s a step",
                "kB a step",
                "at the trace's pace",
                "$ a million tokens",
            ),
        ],
        rows,
        [
            "Shares are of the steps that all running places could have ended. *Lost*: steps that"
            " ended and are not in the run's model. Seconds: median (largest), until the survivors'"
            " or the newcomer's first useful step has ended; a step alone takes half a second."
            f" *At the trace's pace* is arithmetic: losses and returns {faster:.0f} times as rare.",
        ],
    )


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({max(values):.1f})" if values else "-"


# ---------------------------------------------------------------- playing it


def measured(name: str, plan: Schedule, options: argparse.Namespace) -> Found:
    """Play the schedule with a system, and return its figures."""
    import torch

    from benchmarks.spot_places import Machines, System, Zones
    from benchmarks.spot_trainers import CHECKPOINT, CORPUS, MODEL, TOKENS
    from examples.train import GPT, validate

    with tempfile.TemporaryDirectory(prefix="holdfast-spot-") as directory:
        folder = options.keep / name if options.keep else Path(directory)
        (folder / "steps").mkdir(parents=True)
        used_s, load = Machines.processor_s(), os.getloadavg()[0]
        with Zones() as zones, Machines(zones, folder) as machines:
            system = System(name, machines, options.step_s)
            for place in plan.first:
                system.start(place)
            _await(lambda: len({p for p, d in diaries(folder) if _stepped(d)}) == len(plan.first))
            began_s = time.monotonic() + options.quiet_s
            say(f"{name}: {len(plan.first)} places train")
            _wait(machines, began_s)
            sent, between, _late_ms = zones.carried()
            busy_s = _busy_s()
            for change in plan.changes:
                _wait(machines, began_s + change.at_s)
                say(f"{name}: {'+' if change.comes else '-'} {change.place}, {_told(folder)}")
                (system.start if change.comes else machines.lose)(change.place)
            _wait(machines, began_s + plan.seconds)
            now_sent, now_between, late_ms = zones.carried()
            busy_s = _busy_s() - busy_s
            system.end()
            path = folder / MODEL
            with contextlib.suppress(BenchError):
                _await(path.exists)
        model = GPT()
        kept = path if path.exists() else folder / CHECKPOINT
        model.load_state_dict(torch.load(kept)["model"])
        found: Found = {
            "loss": validate(model, CORPUS[1], 64, 16),
            "tokens_a_step": TOKENS,
            "processor_s": Machines.processor_s() - used_s,
            "sent_bytes": now_sent - sent,
            "sent_between_zones_bytes": now_between - between,
            "hub_late_ms_max": late_ms,
            "load_before": load,
            "machine_busy_s": busy_s,
            "began_s": began_s,
            "plan": asdict(plan),
        }
        found |= figures(lives_of(diaries(folder)), plan, began_s, options.quiet_s, options.step_s)
    hours = plan.running_s() / 3600
    found["dollars_a_million"] = 1e6 * options.price * hours / max(1.0, found["useful"] * TOKENS)
    say(f"{name}: {found['useful']:.0f} of {found['possible']:.0f} steps, loss {found['loss']:.3f}")
    return found


def _busy_s() -> float:
    """Return the seconds for which cores of this machine were busy, with anything."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


def _await(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > until_s:
            raise BenchError("the places do not train; --keep DIR keeps their logs")
        time.sleep(0.2)


def _wait(machines: Any, until_s: float) -> None:
    while (left_s := until_s - time.monotonic()) > 0:
        machines.reap()
        time.sleep(min(0.1, left_s))


def diaries(folder: Path) -> Diaries:
    """Return the places and lines of all processes so far."""
    paths = sorted((folder / "steps").iterdir(), key=lambda path: path.stat().st_ctime)
    texts = [(int(path.name.split("-")[0]), path.read_text()) for path in paths]
    return [(place, [line.split() for line in text.splitlines()]) for place, text in texts]


def _stepped(lines: Sequence[Sequence[str]]) -> bool:
    return any(line[1] == "s" for line in lines)


def _told(folder: Path) -> str:
    steps = sum(line[1] == "s" for _place, lines in diaries(folder) for line in lines)
    return f"{steps} steps so far"


def spot(options: argparse.Namespace | None = None) -> Measured:
    """The section of RESULTS.md, or what the command asks for."""
    options = options or parser().parse_args([])
    counts, gap_s = read_traces(options.trace) if options.trace else (made_up(), GAP_S)
    try:
        first, last = (int(each) for each in options.points.split("-"))
    except ValueError:
        raise BenchError(f"--points {options.points}: give two numbers, such as {POINTS}") from None
    plan = schedule(counts, first, last, options.minutes * 60)
    faster = (last - first) * gap_s / plan.seconds
    names = listed(options.systems)
    if bad := [name for name in names if name not in SYSTEMS and not name[3:].isdigit()]:
        raise BenchError(f"no system {', '.join(bad)}; there are {', '.join(SYSTEMS)} and ddpN")
    if options.torchft:
        sys.path.append(str(Path(options.torchft).resolve()))
    elif left := [name for name in names if name.startswith(NEEDS_TORCHFT)]:
        say(f"left out: {', '.join(left)}, which need --torchft DIR")
        names = [name for name in names if name not in left]
    say(f"{len(plan.losses())} losses, {len(plan.returns())} returns, {faster:.0f} times as fast")
    found: dict[str, Found] = {name: measured(name, plan, options) for name in names}
    told = " ".join(["python -m benchmarks.spot", *sys.argv[1:]]) if sys.argv[1:] else ""
    return [table(found, plan, faster, told or "python -m benchmarks.spot")], found


def parser() -> argparse.ArgumentParser:
    made = bench_parser("spot", __doc__)
    made.add_argument("--trace", type=Path, nargs="+", metavar="FILE", help="one for each zone")
    made.add_argument("--points", default=POINTS, metavar="A-B", help=f"default: {POINTS}")
    made.add_argument("--minutes", type=float, default=MINUTES, help="that a system's run takes")
    made.add_argument("--systems", default=",".join(SYSTEMS), metavar="NAME[,...]")
    made.add_argument("--torchft", metavar="DIR", help="where torchft and what it needs is")
    made.add_argument("--step-s", type=float, default=STEP_S, help="that a step takes")
    made.add_argument("--quiet-s", type=float, default=QUIET_S, help="before it begins")
    made.add_argument("--price", type=float, default=PRICE, help="dollars an hour of a place")
    made.add_argument("--keep", type=Path, metavar="DIR", help="for logs of places")
    return made


def main() -> int:
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})  # forks need one thread
    options = parser().parse_args()
    return tell(spot(options), options)


if __name__ == "__main__":
    sys.exit(run_main("spot", main))

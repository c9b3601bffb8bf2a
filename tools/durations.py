"""What the parts of ``make test`` cost, in processor seconds: timed, kept and compared.

python tools/durations.py time NAME GROUP COMMAND...   run a command, and note what it took
python tools/durations.py keep                         keep what the last whole run took

Each process of a run writes lines of JSON into the folder that ``DURATIONS`` names; without it
nothing is written. ``keep`` reads ``build/durations``, where ``make test`` has left them. It writes
the expensive tests to ``tests/durations.json`` and the table of groups to CONTRIBUTING.md. Only the
standard library is imported: this stands before every static check.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEPT_FILE = ROOT / "tests" / "durations.json"
PAPER = ROOT / "CONTRIBUTING.md"
LAST_RUN = ROOT / "build" / "durations"
MARKS = ("<!-- durations: made by `make durations` -->", "<!-- end of durations -->")

KEPT_MIN_S = 1.0  # processor seconds; cheaper tests are not kept
SLOWER = 1.5  # times what was kept, on a machine of the same speed
SLOWER_MIN_S = 1.0  # and at least so many processor seconds more: less is chance
UNKEPT_MIN_S = 3.0  # from where a test that was not kept is named: it was cheap, or is new

STATIC = "static checks"
COLLECTION = "collection"
ROOMS = "rooms"
SEEDS = "seeds"
SWARM = "simulated runs"
PROCESSES = "processes"
WITH_TORCH = "processes with torch"
BROWSER = "browser"
PACKAGING = "packaging"
LABS = "labs"
RUNNER = "pytest itself"
GROUPS = (
    *(STATIC, COLLECTION, ROOMS, SEEDS, SWARM, PROCESSES, WITH_TORCH, BROWSER, PACKAGING, LABS),
    RUNNER,
)
RUN = "the run"  # the line that says whether all tests were asked for


@dataclass(frozen=True)
class Cost:
    """What a test or another part of a run took.

    Attributes:
      id: the test's, or a name.
      passed: it ended well; of ``RUN``, no test was left out by a path or ``-k``.
    """

    id: str
    group: str
    wall_s: float
    processor_s: float
    passed: bool = True

    def append_to(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as out:
            out.write(json.dumps(asdict(self)) + "\n")


def folder() -> Path | None:
    """Return where costs are written, if anywhere."""
    named = os.environ.get("DURATIONS")
    return Path(named).resolve() if named else None


def costs_in(folder: Path) -> list[Cost]:
    """Read what all processes of a run have written."""
    return [
        Cost(**json.loads(line))
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def of_tests(costs: Iterable[Cost]) -> dict[str, float]:
    """Return the processor seconds of the tests that passed, by id."""
    return {cost.id: cost.processor_s for cost in costs if cost.passed and "::" in cost.id}


# ---------------------------------------------------------------- compare


def kept_seconds() -> dict[str, float]:
    """Return the processor seconds of the expensive tests, by id, as they were kept."""
    if not KEPT_FILE.exists():
        return {}
    kept: dict[str, float] = json.loads(KEPT_FILE.read_text())
    return kept


def slower(now: Mapping[str, float], kept: Mapping[str, float]) -> list[str]:
    """Name the tests that take half more processor seconds than kept ones, the worst first.

    Two machines differ in speed, and so does one that computes something else meanwhile. What tests
    take is compared as if this machine were as fast as the kept run's: the median of all ratios
    tells.
    """
    both = sorted(now.keys() & kept.keys())
    speed = statistics.median(now[each] / kept[each] for each in both) if both else 1.0
    more: dict[str, float] = {}
    for name, seconds in now.items():
        scaled = seconds / (speed or 1.0)
        if name in kept:
            if scaled > SLOWER * kept[name] and scaled - kept[name] > SLOWER_MIN_S:
                line = f"{name}: {scaled:.1f} instead of {kept[name]:.1f} s"
                more[line] = scaled - kept[name]
        elif kept and scaled > UNKEPT_MIN_S:
            more[f"{name}: {scaled:.1f} s; new, or less than {KEPT_MIN_S:g} s before"] = scaled
    return sorted(more, key=lambda line: -more[line])


# ---------------------------------------------------------------- time


def time_command(name: str, group: str, command: Sequence[str]) -> int:
    """Run a command, note what it took with its children, and return its exit status."""
    began_s, before = time.monotonic(), os.times()
    status = subprocess.run(command, check=False).returncode
    after, into = os.times(), folder()
    if into is not None:
        seconds = after.children_user + after.children_system
        seconds -= before.children_user + before.children_system
        wall_s = round(time.monotonic() - began_s, 3)
        Cost(name, group, wall_s, round(seconds, 3), not status).append_to(
            into / f"{name.replace(' ', '-')}.jsonl"
        )
    return status if status >= 0 else 1


# ---------------------------------------------------------------- keep


def table(costs: Sequence[Cost]) -> list[str]:
    """Return the table of groups, for CONTRIBUTING.md."""
    lines = ["| group | tests | processor seconds |", "| --- | ---: | ---: |"]
    total = 0.0
    for group in GROUPS:
        found = [cost for cost in costs if cost.group == group and cost.id != RUN]
        if found:
            tests = sum("::" in cost.id for cost in found)
            seconds = sum(cost.processor_s for cost in found)
            total += seconds
            lines.append(f"| {group} | {f'{tests:,}' if tests else ''} | {seconds:,.0f} |")
    return [*lines, f"| together | {len(of_tests(costs)):,} | {total:,.0f} |"]


def put_between_marks(text: str, lines: Sequence[str]) -> str:
    """Return a page with these lines between its two marks."""
    before, begin, rest = text.partition(MARKS[0])
    _old, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise SystemExit(f"{PAPER.name} lacks a line {MARKS[1] if begin else MARKS[0]}")
    return "\n".join([before + begin, *lines, end + after])


def keep(costs: Sequence[Cost]) -> None:
    """Write the expensive tests and the table of a whole run."""
    runs = [cost for cost in costs if cost.id == RUN]
    if not (runs and all(run.passed for run in runs)) or not any(
        cost.group == STATIC for cost in costs
    ):
        raise SystemExit(f"{LAST_RUN} holds no whole run: `make test` leaves one there")
    seconds = {name: took for name, took in of_tests(costs).items() if took >= KEPT_MIN_S}
    kept = {name: round(seconds[name], 1) for name in sorted(seconds)}
    KEPT_FILE.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n")
    PAPER.write_text(put_between_marks(PAPER.read_text(), ["", *table(costs), ""]))


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["time"] and len(arguments) > 3:
        return time_command(arguments[1], arguments[2], arguments[3:])
    if list(arguments) == ["keep"]:
        keep(costs_in(LAST_RUN))
        return 0
    sys.stderr.write(f"{__doc__}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

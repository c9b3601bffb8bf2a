"""A copy of the state beside rounds that leave little of the lines, and what it costs them.

Real processes in the lab: some members whose rounds follow each other, and a newcomer that copies the
state from them, until it is in sync. Lines are slow, long and lossy.

    python -m benchmarks.beside_rounds                              two donors, equal lines of 50 Mbit/s
    python -m benchmarks.beside_rounds --congestion bbr
    python -m benchmarks.beside_rounds --donors 3 --fast-mbit 300 --joiner-mbit 100
                                                                    one of the donors has a fast line

*What rounds leave* is counted in the lab, every quarter of a second: of all donors' uplinks together what
they did not send to each other, or the newcomer's downlink if that is less. All that the newcomer receives
goes through it: blocks of the state, and the results of the rounds meanwhile, which it needs as well. So

    idle_needs_s    the time in which these bytes pass if nothing of what rounds leave stays unused
    ratio           the copy's time, divided by that

What rounds leave is an upper bound: a part of it are moments in which a round's connections begin slowly.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from benchmarks.commands import BenchError
from benchmarks.join import JOINER, TRAINER, WAIT_S, copied_bytes, reductions, row_of
from benchmarks.lab_run import LabRun, Status, stop_on_signals
from benchmarks.namespaces import LabError
from benchmarks.progress import say
from benchmarks.report import Table, keep_json
from benchmarks.sections import Measured
from benchmarks.wan_lab import Host, WanLab

STEP_S = 0.2
DISCARDED_COUNT = 3
BEFORE_COUNT = 8  # rounds before the newcomer comes
LOOK_S = 0.05
WINDOW_S = 0.25
SAID_S = 5.0

SPEC = """\
[run]
name = "beside"
[diloco]
sync_every = {sync_every}
[membership]
min_members = 2
[reduce]
codec_up = "{codec}"
codec_down = "{codec}"
congestion = "{congestion}"
"""


@frozen
class Look:
    """The copy and the lines at one moment.

    Attributes:
      at_s: by this process's clock.
      up_bytes: that all donors sent, packets with their headers.
      down_bytes: that came to the newcomer.
      copied_bytes: of the state, that came to it.
    """

    at_s: float
    up_bytes: int
    down_bytes: int
    copied_bytes: int


@frozen
class Beside:
    """One copy beside rounds.

    Attributes:
      before_s, during_s: reductions without the newcomer, and those that began during its copy.
      copy_s: from the first blocks to the last.
      copied_bytes: of the state, that came in ``copy_s``.
      down_bytes: all that came to the newcomer in ``copy_s``.
      idle_bytes: that rounds left in ``copy_s``; see the top of this file.
      joined_to_sync_s: from the newcomer's attachment to its being in sync.
    """

    before_s: list[float]
    during_s: list[float]
    copy_s: float
    copied_bytes: int
    down_bytes: int
    idle_bytes: float
    joined_to_sync_s: float

    @property
    def ratio(self) -> float:
        return self.idle_bytes / self.down_bytes

    @property
    def idle_needs_s(self) -> float:
        return self.copy_s / self.ratio

    @property
    def slowdown(self) -> float:
        """How many times as long rounds take beside the copy; 0.0 if none began meanwhile."""
        if not self.during_s:
            return 0.0
        return statistics.median(self.during_s) / statistics.median(self.before_s)


def hosts(options: argparse.Namespace) -> list[Host]:
    """The master's, the donors', and last the newcomer's."""

    def host(mbit: float) -> Host:
        return Host(
            up_mbit=mbit,
            down_mbit=mbit,
            delay_ms=options.delay_ms,
            loss=options.loss,
            congestion=options.congestion,
        )

    donors = [host(options.mbit)] * options.donors
    if options.fast_mbit:
        donors[-1] = host(options.fast_mbit)
    return [Host(delay_ms=options.delay_ms), *donors, host(options.joiner_mbit or options.mbit)]


def scene(options: argparse.Namespace) -> Beside:
    """One run to which one newcomer comes."""
    names = [f"donor{number}" for number in range(options.donors)]
    sync_every = max(1, round(options.every_s / STEP_S))
    values_mib = options.state_mib // 2  # the other half is the outer momentum
    # Every block of values and momentum has to travel: none is as empty as a newcomer's memory.
    script = {"mib": values_mib, "step-s": STEP_S, "all-in": sync_every}
    spec = SPEC.format(sync_every=sync_every, codec=options.codec, congestion=options.congestion)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        WanLab(hosts(options), seed=options.seed) as lab,
        LabRun(
            lab,
            Path(directory),
            [str(TRAINER), *(f"--{name}={value}" for name, value in script.items())],
        ) as run,
    ):
        run.start_master(spec)
        for number, name in enumerate(names, 1):
            run.join(name, number, founder=number == 1)
        count = DISCARDED_COUNT + BEFORE_COUNT
        before = run.until(
            lambda status: len(reductions(status, len(names))) >= count, "rounds of all", WAIT_S
        )
        run.note_trainers()
        run.join(JOINER, len(names) + 1)
        return _follow(lab, run, before)


def _look(lab: WanLab, status: Status) -> Look:
    lines: list[dict[str, Any]] = lab.stats()["hosts"]
    return Look(
        at_s=time.monotonic(),
        up_bytes=sum(line["up"]["bytes"] for line in lines[1:-1]),
        down_bytes=lines[-1]["down"]["bytes"],
        copied_bytes=copied_bytes(status),
    )


def _follow(lab: WanLab, run: LabRun, before: Status) -> Beside:
    """Watch the newcomer until it is in sync."""
    looks: list[Look] = []  # from the first blocks on
    first: Status | None = None
    begun_s = said_s = time.monotonic()
    while True:
        status = run.master()
        row = row_of(status, JOINER)
        if row is not None and row["in_sync"]:
            break
        if first is None and copied_bytes(status):
            first = status
        if first is not None:
            looks.append(_look(lab, status))
        if row is not None and time.monotonic() - said_s > SAID_S:
            said_s = time.monotonic()
            say(f"{copied_bytes(status) / 2**20:.0f} MiB; {row['why']}")
        if time.monotonic() - begun_s > WAIT_S:
            raise BenchError(f"not in sync within {WAIT_S:g} s: {row and row['why']}")
        time.sleep(LOOK_S)
    if first is None:
        raise BenchError("the copy was over before it was seen: take a larger state")
    whole = max(look.copied_bytes for look in looks)
    looks = looks[: 1 + next(i for i, look in enumerate(looks) if look.copied_bytes == whole)]
    copy_s = looks[-1].at_s - looks[0].at_s
    if copy_s < SAID_S:
        raise BenchError(f"the copy took only {copy_s:.1f} s: take a larger state")
    donors = len(lab.hosts) - 2
    all_during = [
        each["reduce_s"]
        for each in reductions(status, donors)
        if 0 <= each["opened_s"] + each["open_s"] - first["now_s"] < copy_s
    ]
    return Beside(
        before_s=[each["reduce_s"] for each in reductions(before, donors)][DISCARDED_COUNT:],
        during_s=all_during,
        copy_s=copy_s,
        copied_bytes=whole - looks[0].copied_bytes,
        down_bytes=looks[-1].down_bytes - looks[0].down_bytes,
        idle_bytes=left_by_rounds(looks, lab.hosts),
        joined_to_sync_s=float(row["attached_s"]),
    )


def left_by_rounds(looks: list[Look], hosts: list[Host]) -> float:
    """Return the bytes that the newcomer could have received beside the rounds.

    Args:
      hosts: the master's, the donors', and last the newcomer's.
    """
    windows = [looks[0]]
    for look in looks:
        if look.at_s - windows[-1].at_s >= WINDOW_S:
            windows.append(look)
    windows[-1] = looks[-1]
    up_bytes_per_s = sum(host.up_mbit for host in hosts[1:-1]) * 1e6 / 8
    down_bytes_per_s = hosts[-1].down_mbit * 1e6 / 8
    left = 0.0
    for begin, end in pairwise(windows):
        span_s = end.at_s - begin.at_s
        came = end.down_bytes - begin.down_bytes
        rounds = end.up_bytes - begin.up_bytes - came
        left += min(max(0.0, up_bytes_per_s * span_s - rounds), down_bytes_per_s * span_s)
    return left


# What the section of RESULTS.md measures: so little time between rounds that they take most of the lines.
ROWS = (("bbr", 0.4), ("cubic", 0.4), ("bbr", 2.0))
COMMAND = "python -m benchmarks.beside_rounds --congestion {} --every-s {:g}"


def beside() -> Measured:
    """Measure the section of RESULTS.md; takes about five minutes."""
    found = []
    for congestion, every_s in ROWS:
        say(f"{congestion}, {every_s:g} s of training between rounds")
        found.append(
            scene(_parser().parse_args([f"--congestion={congestion}", f"--every-s={every_s}"]))
        )
    table = Table(
        "A copy of 64 MiB beside rounds: two donors, 50 Mbit/s each way, 100 ms, 0.02 % loss",
        [COMMAND.format(*row) for row in ROWS],
        [
            "congestion control",
            "training between rounds, s",
            "the copy, s",
            "what the idle part of the lines needs, s",
            "ratio",
            "a round before, s",
            "a round meanwhile, s",
        ],
        [
            [
                congestion,
                f"{every_s:g}",
                f"{each.copy_s:.1f}",
                f"{each.idle_needs_s:.1f}",
                f"{each.ratio:.2f}",
                f"{statistics.median(each.before_s):.2f}",
                f"{statistics.median(each.during_s):.2f}" if each.during_s else "",
            ]
            for (congestion, every_s), each in zip(ROWS, found, strict=True)
        ],
        [
            "What rounds leave is counted on the lines, every quarter of a second. Results for the newcomer, which"
            " it needs as well, are part of what passes there; rounds meanwhile have one receiver more."
        ],
    )
    return [table], [_raw(each) for each in found]


def _raw(found: Beside) -> dict[str, Any]:
    return {
        **asdict(found),
        "ratio": found.ratio,
        "idle_needs_s": found.idle_needs_s,
        "slowdown": found.slowdown,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--state-mib", type=int, default=64)
    parser.add_argument("--donors", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=50.0, help="of every line, each way")
    parser.add_argument("--fast-mbit", type=float, default=0.0, help="of the last donor's line")
    parser.add_argument("--joiner-mbit", type=float, default=0.0, help="of the newcomer's line")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="a host's, one way")
    parser.add_argument("--loss", type=float, default=0.0001, help="a host's, each way")
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--every-s", type=float, default=2.0, help="of training between rounds")
    parser.add_argument("--seed", type=int, default=0, help="of the losses")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def main() -> int:
    options = _parser().parse_args()
    stop_on_signals()
    try:
        found = scene(options)
    except (BenchError, LabError) as error:
        print(f"beside_rounds: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    say(
        f"{found.copied_bytes / 2**20:.0f} MiB in "
        f"{found.copy_s:.1f} s, {found.ratio:.2f} times the {found.idle_needs_s:.1f} s that the idle "
        f"part of the lines needs; {len(found.during_s)} rounds meanwhile took "
        f"{found.slowdown:.2f} times as long ({statistics.median(found.before_s):.2f} s before)"
    )
    print(keep_json(_raw(found), options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())

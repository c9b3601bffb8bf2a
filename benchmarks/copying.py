"""The section about copies over slow lines: nothing but the copy, and donors that die or lie.

Real processes in the lab, as in the section about joins, with no rounds beside the copy: the run is
paused once every value of the state has changed twice.

    python -m benchmarks.copying --state-mib 64      a small one by itself
    make bench ARGS='--only copy'                    1 GiB, into RESULTS.md

*The limit* is what the lines of the moment can carry: the joiner's downlink, or those of the donors
that are left. Rates of the lab count whole packets; what counts here is what TCP carries in them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from attrs import asdict, frozen

from benchmarks.commands import BenchError
from benchmarks.join import (
    CARRIED,
    DONORS,
    DOWN_MBIT,
    FRAGMENTS,
    HOSTS,
    JOINER,
    SPEC,
    STATE_MIB,
    UP_MBIT,
    WAIT_S,
    copied_bytes,
    joined_s,
    line_bytes,
    reductions,
    row_of,
    script,
)
from benchmarks.lab_run import LabRun, Status, all_equal
from benchmarks.namespaces import LabError
from benchmarks.progress import say
from benchmarks.report import Table, keep_json
from benchmarks.sections import MIB, Measured
from benchmarks.wan_lab import WanLab

LIAR = (sys.executable, "-m", "benchmarks.lying_peer")
VICTIM = DONORS[-1]
LOOK_S = 0.1
# Of each fragment. What one round has made of momentum are the codec's few values, which compress as
# no trained state does.
ROUNDS_BEFORE = 2
PLAIN, KILLED, LYING = (
    "three donors",
    "one is killed half-way",
    "one block of one's in 100 is wrong",
)
CASES = (PLAIN, KILLED, LYING)


@frozen
class Copied:
    """One copy, by the master's clock.

    Attributes:
      copy_s: from the first to the last look at which blocks were still missing.
      copied_bytes: that came in ``copy_s``.
      line_bytes: as which they travelled, some of them compressed.
      limit_s: what the lines need for those at the least.
      joined_to_sync_s: from the joiner's attachment to its being in sync.
      named: donors that were found to have served wrong blocks.
      same: all peers' memories are equal in the end, byte for byte.
    """

    case: str
    state_bytes: int
    copy_s: float
    copied_bytes: int
    line_bytes: int
    limit_s: float
    joined_to_sync_s: float
    named: list[str]
    same: bool

    @property
    def share(self) -> float:
        return self.limit_s / self.copy_s


def copies(state_mib: int = STATE_MIB, cases: tuple[str, ...] = CASES) -> Measured:
    found = []
    for case in cases:
        say(f"{case}: {state_mib} MiB, donors at {UP_MBIT:g} Mbit/s up, joiner {DOWN_MBIT:g} down")
        found.append(scene(case, state_mib))
        say(_said(found[-1]))
    plain_s = next((each.copy_s for each in found if each.case == PLAIN), None)
    table = Table(
        f"A newcomer copies {state_mib} MiB of state from three donors; nothing else is on the lines "
        f"(donors send {UP_MBIT:g} Mbit/s, it receives {DOWN_MBIT:g}, 40 ms round trip)",
        ["make bench ARGS='--only copy'"],
        [
            "case",
            "copy, s",
            "MB/s",
            "saved",
            "the lines need, s",
            "share",
            "times plain",
            "named",
            "equal",
        ],
        [
            [
                each.case,
                f"{each.copy_s:.1f}",
                f"{each.copied_bytes / each.copy_s / 1e6:.1f}",
                f"{1 - each.line_bytes / each.copied_bytes:.0%}",
                f"{each.limit_s:.1f}",
                f"{each.share:.0%}",
                f"{each.copy_s / plain_s:.2f}" if plain_s else "",
                ", ".join(each.named) or "-",
                "yes" if each.same else "NO",
            ]
            for each in found
        ],
        [
            "Saved: by compression, of the bytes copied; the lines need their time for the rest. With "
            "all three donors the joiner's downlink is the limit, with two their "
            "uplinks are. So a death half-way must cost a quarter of the time whoever copies; the "
            "share says what it costs beyond that. A liar is dropped at its first wrong block, and "
            "the lines are still counted as three. Equal: what the status says of all copies at the end."
        ],
    )
    return [table], [asdict(each) for each in found]


def _said(copied: Copied) -> str:
    return (
        f"{copied.case}: {copied.copied_bytes / MIB:.0f} MiB in {copied.copy_s:.1f} s, "
        f"{copied.share:.0%} of what the lines give; named: {', '.join(copied.named) or 'nobody'}"
    )


def scene(case: str, state_mib: int) -> Copied:
    """One run to which one newcomer comes."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        WanLab(HOSTS) as lab,
        LabRun(lab, Path(directory), script(state_mib)) as run,
    ):
        run.start_master(SPEC)
        for host, name in enumerate(DONORS, 1):
            lies = case == LYING and name == VICTIM
            program = {"program": LIAR} if lies else {}
            run.join(name, host, founder=host == 1, **program)
        run.until(_all_changed, "two rounds of every fragment", WAIT_S)
        run.act("pause", {})
        run.until(lambda status: not status["rounds"], "the rounds' end", WAIT_S)
        run.note_trainers()
        run.join(JOINER, len(DONORS) + 1)
        return _follow(run, case, state_mib * MIB)


def _all_changed(status: Status) -> bool:
    done = Counter(each["fragment"] for each in reductions(status, len(DONORS)))
    return len(done) == FRAGMENTS and min(done.values()) >= ROUNDS_BEFORE


def _follow(run: LabRun, case: str, state_bytes: int) -> Copied:
    first: Status | None = None  # when the first blocks had come
    last: Status | None = None  # when the last ones had
    killed: Status | None = None
    begun_s = time.monotonic()
    while True:
        status = run.master()
        row, count = row_of(status, JOINER), copied_bytes(status)
        if first is None and count:
            first = status
        if first is not None and (last is None or count > copied_bytes(last)):
            last = status
        if case == KILLED and killed is None and count > state_bytes / 2:
            say(f"{VICTIM} is killed")
            run.kill(VICTIM)
            killed = status
        if row is not None and row["in_sync"]:
            break
        if time.monotonic() - begun_s > WAIT_S:
            raise BenchError(f"not in sync within {WAIT_S:g} s: {row and row['why']}")
        time.sleep(LOOK_S)
    if first is None or last is None or first is last:
        raise BenchError("the copy was over before it was seen: take a larger state")
    all_bytes = copied_bytes(last) - copied_bytes(first)
    travelled_bytes = line_bytes(last) - line_bytes(first)
    after_bytes = 0 if killed is None else line_bytes(last) - line_bytes(killed)
    return Copied(
        case=case,
        state_bytes=state_bytes,
        copy_s=last["now_s"] - first["now_s"],
        copied_bytes=all_bytes,
        line_bytes=travelled_bytes,
        limit_s=_needs_s(travelled_bytes - after_bytes, len(DONORS))
        + _needs_s(after_bytes, len(DONORS) - 1),
        joined_to_sync_s=joined_s(status),
        named=sorted(m["name"] for m in status["members"] if m["bad_blocks"]),
        same=all_equal(run),
    )


def _needs_s(count: int, donors: int) -> float:
    return count * 8 / (CARRIED * min(DOWN_MBIT, donors * UP_MBIT) * 1e6)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--state-mib", type=int, default=STATE_MIB)
    parser.add_argument("--case", choices=("plain", "killed", "lying"), action="append")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    names = {"plain": PLAIN, "killed": KILLED, "lying": LYING}
    cases = tuple(names[name] for name in options.case or names)
    try:
        found = [scene(case, options.state_mib) for case in cases]
    except (BenchError, LabError) as error:
        print(f"copy: {error}", file=sys.stderr)
        return 1
    for each in found:
        say(_said(each))
    keep_json([{**asdict(each), "share": each.share} for each in found], options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

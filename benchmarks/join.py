"""The section about joins: a newcomer copies the state while rounds go on.

Real processes in the lab: three members with slow uplinks, a joiner with a fast downlink. Rounds of
one fragment after the other go on all the time; while the newcomer copies, it also gets the results
of all rounds of the fragments that it copies, or has copied.

    python -m benchmarks.join --state-mib 128        a small one; of 1 GiB unless said

*What its link gives* is the least of its own downlink and of what the donors' uplinks have left
when their rounds are served: their number times the rate, less what they sent and was no block, in
the time of the copy. Rates of the lab count whole packets; what counts here is what TCP carries in
them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from attrs import asdict, frozen

from benchmarks.lab_run import ONE_FRAGMENT, LabRun, running
from benchmarks.report import BenchError, Measured, Table, bench_parser, run_main, say, tell
from benchmarks.wan_lab import HEADER_BYTES, MTU, Host, WanLab
from holdfast.daemon.cli.fleet import Status

DONORS = ("a", "b", "c")  # on hosts 1 to 3; the master is on host 0, the joiner on the last one
JOINER = "late"
UP_MBIT, DOWN_MBIT, DELAY_MS = 100.0, 300.0, 10.0
MIB = 2**20
CARRIED = (MTU - HEADER_BYTES) / MTU  # of a packet, by TCP over IPv4 with time stamps
HOSTS = [
    Host(delay_ms=DELAY_MS),
    *[Host(up_mbit=UP_MBIT, down_mbit=1_000, delay_ms=DELAY_MS)] * len(DONORS),
    Host(up_mbit=UP_MBIT, down_mbit=DOWN_MBIT, delay_ms=DELAY_MS),
]
FRAGMENTS = 8
STEP_S = 0.25
ROUND_EVERY_STEPS = 24  # 6 s
# Every block of values and momentum has to travel: none is as empty as a newcomer's memory.
ALL_IN_STEPS = ROUND_EVERY_STEPS
STATE_MIB = 1_024
BEFORE_COUNT = 8  # rounds before the newcomer comes
DISCARDED_COUNT = 3
WAIT_S = 900.0  # for anything

SPEC = f"""\
[run]
name = "join"
[diloco]
sync_every = {FRAGMENTS * ROUND_EVERY_STEPS}
fragments = {FRAGMENTS}
[membership]
min_members = 2
[reduce]
codec_up = "int8"
codec_down = "int8"
"""


@frozen
class Join:
    """One newcomer, by the master's clock.

    Attributes:
      before_s, during_s: reductions, without the newcomer and beside its copy.
      joined_to_sync_s: from its attachment to its being in sync.
      copy_s: from the first to the last look at which blocks were still missing.
      copied_bytes: that came in ``copy_s``.
      round_bytes: that the donors sent in ``copy_s`` and were no blocks.
      given_bytes_per_s: what its link gives; see the top of this file.
    """

    case: str
    state_bytes: int
    before_s: list[float]
    during_s: list[float]
    joined_to_sync_s: float
    copy_s: float
    copied_bytes: int
    round_bytes: int
    given_bytes_per_s: float

    @property
    def ratio(self) -> float:
        return statistics.median(self.during_s) / statistics.median(self.before_s)

    @property
    def share(self) -> float:
        return self.copied_bytes / self.copy_s / self.given_bytes_per_s


CASES = (("three donors", False), ("one is killed half-way", True))


def joins(state_mib: int = STATE_MIB, cases: Sequence[tuple[str, bool]] = CASES) -> Measured:
    found = []
    for case, kill in cases:
        say(f"{case}: {state_mib} MiB of state, three donors at {UP_MBIT:g} Mbit/s")
        found.append(scene(case, state_mib, kill=kill))
        say(" | ".join(_shown(found[-1])))
    table = Table(
        f"A newcomer copies {state_mib} MiB of state (float32 values and momentum, {FRAGMENTS} "
        f"fragments) while a round of one fragment begins every {STEP_S * ROUND_EVERY_STEPS:g} s "
        f"(int8); donors send {UP_MBIT:g} Mbit/s, it receives {DOWN_MBIT:g}, "
        f"{4 * DELAY_MS:g} ms round trip",
        ["make bench ARGS='--only join'"],
        [
            *("case", "round before, s", "round during the copy, s", "times", "copy, s", "MB/s"),
            *("its link gives, MB/s", "share", "attached to in sync, s"),
        ],
        [_shown(each) for each in found],
        [
            "`holdfast master` and `holdfast join` as processes in the lab; times by the master's"
            " clock. Rounds: from the order to reduce to the commit, medians. What its link gives:"
            f" the less of {DOWN_MBIT:g} Mbit/s and of what the live donors' uplinks have left"
            f" beside what they sent for rounds, of which TCP carries {CARRIED:.1%}; the share of"
            " it is of blocks. When a donor is killed, the round that it dies in counts, too."
        ],
    )
    return [table], [{**asdict(each), "ratio": each.ratio, "share": each.share} for each in found]


def _shown(join: Join) -> list[str]:
    return [
        join.case,
        f"{statistics.median(join.before_s):.2f}",
        f"{statistics.median(join.during_s):.2f}",
        f"{join.ratio:.2f}",
        f"{join.copy_s:.1f}",
        f"{join.copied_bytes / join.copy_s / 1e6:.1f}",
        f"{join.given_bytes_per_s / 1e6:.1f}",
        f"{join.share:.0%}",
        f"{join.joined_to_sync_s:.1f}",
    ]


def scene(case: str, state_mib: int, *, kill: bool) -> Join:
    """One run to which one newcomer comes."""
    # The other half of the state is the outer momentum.
    options = {
        "mib": state_mib // 2,
        "step-s": STEP_S,
        "tensors": FRAGMENTS,
        "all-in": ALL_IN_STEPS,
    }
    script = [str(ONE_FRAGMENT), *(f"--{name}={value}" for name, value in options.items())]
    with WanLab(HOSTS) as lab, running(lab, script, SPEC, DONORS) as run:
        before = run.until(
            lambda s: len(reductions(s, len(DONORS))) >= DISCARDED_COUNT + BEFORE_COUNT,
            "rounds with all donors",
            WAIT_S,
        )
        run.join_on(len(DONORS) + 1, JOINER)
        return _follow(run, case, before, state_mib * MIB, victim=DONORS[-1] if kill else "")


def reductions(status: Status, contributors: int) -> list[dict[str, Any]]:
    return [
        each
        for each in status["past_rounds"]
        if each["outcome"] == "committed" and len(each["contributors"]) >= contributors
    ]


def row_of(status: Status, name: str) -> dict[str, Any] | None:
    return next((m for m in status["members"] if m["name"] == name), None)


def _sent_bytes(status: Status) -> int:
    """By all donors; one that is gone, as far as it said."""
    rows = [*status["departed"], *status["members"]]
    last = {row["name"]: row["bytes"]["bulk_sent"] for row in rows if row["name"] in DONORS}
    return sum(last.values())


def copied_bytes(status: Status) -> int:
    row = row_of(status, JOINER)
    return 0 if row is None else int(row["bytes"]["state_received"])


def _follow(run: LabRun, case: str, before: Status, state_bytes: int, victim: str) -> Join:
    """Watch the newcomer until it is in sync; kill a donor when half of the state is there."""
    first: Status | None = None  # when the first blocks had come
    last: Status | None = None  # when the last ones had
    killed_s = 0.0
    said_s = time.monotonic()
    begun_s = time.monotonic()
    while True:
        status = run.master()
        row = row_of(status, JOINER)
        copied = copied_bytes(status)
        if row is not None and time.monotonic() - said_s > 5:
            said_s = time.monotonic()
            say(f"{copied / MIB:.0f} MiB; {row['why']}")
        if first is None and copied:
            first = status
        if first is not None and (last is None or copied > copied_bytes(last)):
            last = status
        if victim and not killed_s and copied > state_bytes / 2:
            say(f"{victim} is killed")
            run.kill(victim)
            killed_s = status["now_s"]
        if row is not None and row["in_sync"]:
            attached_s = float(row["attached_s"])
            break
        if time.monotonic() - begun_s > WAIT_S:
            raise BenchError(f"not in sync within {WAIT_S:g} s: {row and row['why']}")
        time.sleep(0.1)
    if first is None or last is None or first is last:
        raise BenchError("the copy was over before it was seen: take a larger state")
    copy_s = last["now_s"] - first["now_s"]
    all_bytes = copied_bytes(last) - copied_bytes(first)
    round_bytes = max(0, _sent_bytes(last) - _sent_bytes(first) - all_bytes)
    donor_s = len(DONORS) * copy_s - (last["now_s"] - killed_s if killed_s else 0.0)
    left = (donor_s * CARRIED * UP_MBIT * 1e6 / 8 - round_bytes) / copy_s
    begun = [each for each in reductions(status, 2) if _closed_s(each) >= first["now_s"]]
    during_s = [each["reduce_s"] for each in begun if _closed_s(each) < last["now_s"]]
    if not during_s:
        raise BenchError(
            f"no round began during the copy of {all_bytes / MIB:.0f} MiB in {copy_s:.1f} s: "
            "take a larger state"
        )
    return Join(
        case=case,
        state_bytes=state_bytes,
        before_s=[e["reduce_s"] for e in reductions(before, len(DONORS))][DISCARDED_COUNT:],
        during_s=during_s,
        joined_to_sync_s=attached_s,
        copy_s=copy_s,
        copied_bytes=all_bytes,
        round_bytes=round_bytes,
        given_bytes_per_s=min(CARRIED * DOWN_MBIT * 1e6 / 8, left),
    )


def _closed_s(round_: dict[str, Any]) -> float:
    return float(round_["opened_s"] + round_["open_s"])


def main() -> int:
    parser = bench_parser("join", __doc__)
    parser.add_argument("--state-mib", type=int, default=STATE_MIB)
    parser.add_argument("--no-kill", action="store_true", help="only the case without a death")
    options = parser.parse_args()
    return tell(joins(options.state_mib, CASES[:1] if options.no_kill else CASES), options)


if __name__ == "__main__":
    sys.exit(run_main("join", main))

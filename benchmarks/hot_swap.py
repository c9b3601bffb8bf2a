"""The section about hot swaps: SIGKILL of a contributor, and the first commit with the spare in it.

    python -m benchmarks.hot_swap --times 10 --json hot_swap.json

Three contributors and a spare on loopback, a model of a size that makes a reduction last a while.
A contributor (daemon and trainer) is killed, in turns in the middle of training and of a reduction;
it is started again and is the next spare. All times are the master's: its events say when the dead
is gone and when the spare is a contributor, its rounds when they opened, closed and were committed.
What the kill itself takes to happen is at most a look of ours.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from typing import Any

from attrs import asdict, frozen

from benchmarks.grounds import Loopback
from benchmarks.lab_run import ONE_FRAGMENT, LabRun, running, said_s
from benchmarks.report import Measured, Table, bench_parser, run_main, say, tell
from holdfast.daemon.cli.fleet import Status

TIMES = 10
PEERS = ("a", "b", "c", "d")
CONTRIBUTORS = 3
MIB = 16
STEP_S = 0.02
SYNC_EVERY = 25  # half a second
UNDISTURBED = 5  # rounds between two kills, of which the interval is measured
PROMISED_S = 1.0  # and one round
WAIT_S = 120.0

SPEC = f"""\
[run]
name = "hot-swap"
[diloco]
sync_every = {SYNC_EVERY}
overlap = {SYNC_EVERY - 5}
[membership]
contributors = {CONTRIBUTORS}
min_members = 2
deadline_s = 10
grace_s = 5
"""


@frozen
class Swap:
    """One swap, in seconds after the kill, by the master's clock.

    Attributes:
      phase: of the run when it was killed: "open" (training) or "reducing".
      round_s: what an undisturbed round took before it, from commit to commit.
      gone_s: the master says that the dead is gone.
      seated_s: it says that the spare is a contributor.
      opened_s: the round opens to which the spare contributes first.
      closed_s: its contributors are known and are told to reduce.
      commit_s: it is committed.
      state_bytes: that the spare received between the kill and that commit.
    """

    victim: str
    spare: str
    phase: str
    round_s: float
    gone_s: float
    seated_s: float
    opened_s: float
    closed_s: float
    commit_s: float
    state_bytes: int

    @property
    def over_s(self) -> float:
        """What it took beside a round."""
        return self.commit_s - self.round_s


def swaps(times: int) -> list[Swap]:
    """So many swaps, one after the other."""
    script = [str(ONE_FRAGMENT), f"--mib={MIB}", f"--step-s={STEP_S}"]
    found = []
    with Loopback() as ground, running(ground, script, SPEC, PEERS) as run:
        for turn in range(times):
            status = _quiet(run)
            spare = _spare(status)
            rotated = [PEERS[(turn + step) % len(PEERS)] for step in range(2)]
            victim = next(name for name in rotated if name != spare)
            found.append(_swap(run, status, victim, spare, reducing=turn % 2 == 1))
            say(f"{turn + 1}: {found[-1]}")
            run.join_on(run.hosts[victim], victim)
    return found


def _spare(status: Status) -> str:
    return next(str(m["name"]) for m in status["members"] if m["role"] == "spare")


def _quiet(run: LabRun) -> Status:
    """Wait for some rounds with everybody in place; the status after them."""

    def whole(status: Status) -> bool:
        members = status["members"]
        return (
            len(members) == len(PEERS)
            and all(m["in_sync"] and m["trainer"] for m in members)
            and status["places"]["taken"] == CONTRIBUTORS
        )

    first = run.until(whole, "all are in sync and have a trainer", WAIT_S)["committed"]
    enough = 1 + UNDISTURBED
    return run.until(lambda s: whole(s) and s["committed"] >= first + enough, "rounds", WAIT_S)


def _round_s(status: Status) -> float:
    """From commit to commit, the median of the last undisturbed ones."""
    ends = [r["opened_s"] + r["open_s"] + r["reduce_s"] for r in status["past_rounds"]]
    last = ends[-1 - UNDISTURBED :]
    return float(statistics.median(b - a for a, b in itertools.pairwise(last)))


def _swap(run: LabRun, before: Status, victim: str, spare: str, *, reducing: bool) -> Swap:
    wanted = "reducing" if reducing else "open"

    def now(status: Status) -> bool:
        return any(each["phase"] == wanted for each in status["rounds"])

    moved = run.peer(spare)["state_received_bytes"]
    status = run.until(now, f"a round that is {wanted}", WAIT_S)
    run.kill(victim)
    killed_s = status["now_s"] + time.monotonic() - status["asked_s"]
    peer = next(m["peer"] for m in before["members"] if m["name"] == spare)

    def swapped(status: Status) -> dict[str, Any] | None:
        for each in status["past_rounds"]:
            peers = {contributor["peer"] for contributor in each["contributors"]}
            ended_s = each["opened_s"] + each["open_s"] + each["reduce_s"]
            if each["outcome"] == "committed" and peer in peers and ended_s > killed_s:
                found: dict[str, Any] = each
                return found
        return None

    status = run.until(lambda s: swapped(s) is not None, f"{spare} contributes", WAIT_S)
    each = swapped(status)
    assert each is not None

    closed_s = each["opened_s"] + each["open_s"]
    return Swap(
        victim=victim,
        spare=spare,
        phase=wanted,
        round_s=_round_s(before),
        gone_s=said_s(status, "leave", victim) - killed_s,
        seated_s=said_s(status, "role", spare) - killed_s,
        opened_s=each["opened_s"] - killed_s,
        closed_s=closed_s - killed_s,
        commit_s=closed_s + each["reduce_s"] - killed_s,
        state_bytes=run.peer(spare)["state_received_bytes"] - moved,
    )


def hot_swap(times: int = TIMES) -> Measured:
    """The section of RESULTS.md."""
    say(f"{times} contributors are killed, one after the other")
    found = swaps(times)
    rows = []
    for phase, shown in (("open", "training"), ("reducing", "a reduction")):
        if some := [each for each in found if each.phase == phase]:
            rows.append([shown, *_row(some)])
    table = Table(
        f"From SIGKILL of one of {CONTRIBUTORS} contributors to the first commit with the former "
        f"spare in it; {MIB} MiB of float32 on loopback, {times} kills, medians (worst)",
        ["python -m benchmarks.hot_swap"],
        [
            *("killed during", "gone, s", "spare has the place, s", "its round opens, s"),
            *("closes, s", "is committed, s", "an undisturbed round, s", "beyond a round, s"),
            "state bytes",
        ],
        rows,
        [
            f"Seconds after the kill, by the master's clock. Promised: a round and {PROMISED_S:g}"
            " s, and no state bytes. A round is negative before the kill if it was open already:"
            " the spare joined it."
        ],
    )
    return [table], [{**asdict(each), "over_s": each.over_s} for each in found]


def _row(some: list[Swap]) -> list[str]:
    names = ("gone_s", "seated_s", "opened_s", "closed_s", "commit_s", "round_s", "over_s")
    cells = []
    for name in names:
        values = [float(getattr(each, name)) for each in some]
        cells.append(f"{statistics.median(values):.2f} ({max(values):.2f})")
    return [*cells, str(max(each.state_bytes for each in some))]


def main() -> int:
    parser = bench_parser("hot_swap", __doc__)
    parser.add_argument("--times", type=int, default=TIMES)
    options = parser.parse_args()
    tables, found = hot_swap(options.times)
    tell((tables, found), options)
    kept = all(each["over_s"] < PROMISED_S and not each["state_bytes"] for each in found)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(run_main("hot_swap", main))

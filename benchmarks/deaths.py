"""The section about deaths: real processes in the lab, and one of four goes in mid-round.

Two ways to go. *Killed*: SIGKILL of daemon and trainer; the machine lives, so its kernel closes the
connections, which counts at once. *Cut off*: its link carries nothing any more, in either
direction, and nobody is told; silence has to be noticed within the spec's ``deadline_s``.

Each time another peer goes, in the middle of a reduction (half of what an undisturbed one takes);
then it comes back, and two more rounds pass before the next one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from attrs import asdict, frozen

from benchmarks.lab_run import ONE_FRAGMENT, LabRun, running, said_s
from benchmarks.lines import FAR_FIBRE
from benchmarks.report import Measured, Table, say
from benchmarks.wan_lab import WanLab
from holdfast.daemon.cli.fleet import Status

PEERS = ("a", "b", "c", "d")  # on hosts 1 to 4; the master is on host 0
MIB = 64
STEP_S = 0.05
SCRIPT = [str(ONE_FRAGMENT), f"--mib={MIB}", f"--step-s={STEP_S}"]
SYNC_EVERY = 10
DEADLINE_S = 15.0  # the spec's default
UNDISTURBED_COUNT = 5
DISCARDED_COUNT = 2
TIMES = 3
WAIT_S = 600.0  # for anything; a joiner's state alone is as much as a round

SPEC = f"""\
[run]
name = "deaths"
[diloco]
sync_every = {SYNC_EVERY}
[membership]
min_members = 2
deadline_s = {DEADLINE_S}
"""


@frozen
class Death:
    """One peer's end, by the master's clock.

    Attributes:
      at_s: since the reduction began.
      detected_s: until the master says that the peer is gone.
      ended_s: until the round is over.
      reduce_s: the disturbed reduction, from its first attempt to its end.
      outcome: "committed", or what else became of the round.
      attempts: of the reduction, 1 if the first was enough.
      contributors: whose updates the commit names.
    """

    victim: str
    at_s: float
    detected_s: float
    ended_s: float
    reduce_s: float
    outcome: str
    attempts: int
    contributors: int


def deaths() -> Measured:
    rows, raw = [], {}
    for name, text in (("killed", "SIGKILL, connections close"), ("cut off", "silence")):
        say(f"four peers, {MIB} MiB; one of them is {name}, {TIMES} times")
        undisturbed_s, found = scene(cut_off=name == "cut off")
        raw[name] = {"undisturbed_s": undisturbed_s, "deaths": [asdict(each) for each in found]}
        rows.append(_shown(text, statistics.median(undisturbed_s), found))
    table = Table(
        f"One of four peers goes in the middle of a round of {MIB} MiB of float32, 300 Mbit/s each "
        f"way, 100 ms, 0.02 % loss; medians of {TIMES}",
        ["make bench ARGS='--only kill'"],
        [
            *("how", "undisturbed round, s", "goes after, s", "detected in, s"),
            *("from there to the commit, s", "the whole round, times undisturbed"),
            "outcomes (attempts)",
        ],
        rows,
        [
            "`holdfast master` and `holdfast join` as processes in the lab; times by the master's "
            f"clock. `deadline_s` is {DEADLINE_S:g}. Rounds: from the order to reduce to the "
            f"commit; undisturbed: median of {UNDISTURBED_COUNT}, {DISCARDED_COUNT} discarded."
        ],
    )
    return [table], raw


def _shown(how: str, undisturbed_s: float, found: list[Death]) -> list[str]:
    def middle(figure: Callable[[Death], float]) -> float:
        return statistics.median(figure(each) for each in found)

    return [
        how,
        f"{undisturbed_s:.2f}",
        f"{middle(lambda each: each.at_s):.2f}",
        f"{middle(lambda each: each.detected_s):.2f}",
        f"{middle(lambda each: each.ended_s - each.detected_s):.2f}",
        f"{middle(lambda each: each.reduce_s) / undisturbed_s:.2f}",
        ", ".join(f"{each.outcome} ({each.attempts})" for each in found),
    ]


def scene(*, cut_off: bool) -> tuple[list[float], list[Death]]:
    """A run in which peers go and come back; undisturbed reductions' seconds, and the deaths."""
    found = []
    with (
        WanLab([FAR_FIBRE] * (1 + len(PEERS))) as lab,
        running(lab, SCRIPT, SPEC, PEERS) as run,
    ):
        undisturbed_s = _full_rounds(run, DISCARDED_COUNT + UNDISTURBED_COUNT)[DISCARDED_COUNT:]
        for turn in range(TIMES):
            victim = 1 + turn % (len(PEERS) - 1)  # the founder stays: it is nobody special
            name, host = PEERS[victim], victim + 1
            status = _await_middle(run, statistics.median(undisturbed_s))
            if cut_off:
                lab.set(host, loss=1.0)
            else:
                run.kill(name)
            gone_s = time.monotonic()
            found.append(_follow(run, name, status, gone_s))
            say(f"{name}: {found[-1]}")
            if cut_off:
                lab.set(host, loss=FAR_FIBRE.loss)
            else:
                run.join_on(host, name)
            _full_rounds(run, DISCARDED_COUNT)
    return undisturbed_s, found


def _full_rounds(run: LabRun, count: int) -> list[float]:
    """Wait for so many more rounds to which all contribute; how long their reductions took."""
    first = run.master()["committed"]

    def full(status: Status) -> list[float]:
        return [
            each["reduce_s"]
            for each in status["past_rounds"]
            if each["version"] >= first
            and each["outcome"] == "committed"
            and len(each["contributors"]) == len(PEERS)
            and each["attempts"] == 1
        ]

    status = run.until(lambda s: len(full(s)) >= count, f"{count} rounds with all", WAIT_S)
    return full(status)


def _await_middle(run: LabRun, undisturbed_s: float) -> Status:
    """Return half-way through a reduction, with the status from which that was seen."""

    def reducing(status: Status) -> bool:
        return any(
            each["phase"] == "reducing" and each["reduce_s"] < undisturbed_s / 2
            for each in status["rounds"]
        )

    status = run.until(reducing, "a reduction", WAIT_S)
    (round_,) = status["rounds"]
    passed_s = round_["reduce_s"] + time.monotonic() - status["asked_s"]
    time.sleep(max(0.0, undisturbed_s / 2 - passed_s))
    return status


def _follow(run: LabRun, victim: str, before: Status, gone_s: float) -> Death:
    """See what becomes of the round that was running ``before``."""
    (running,) = before["rounds"]
    master_gone_s = before["now_s"] + gone_s - before["asked_s"]

    def ended(status: Status) -> dict[str, Any] | None:
        past = (each for each in status["past_rounds"] if each["round"] == running["round"])
        return next(past, None)

    status = run.until(
        lambda s: ended(s) is not None and said_s(s, "leave", victim) >= master_gone_s,
        f"{victim} is missed and the round ends without it",
        WAIT_S,
    )
    round_, detected_at_s = ended(status), said_s(status, "leave", victim)
    assert round_ is not None
    closed_s = round_["opened_s"] + round_["open_s"]
    return Death(
        victim=victim,
        at_s=master_gone_s - closed_s,
        detected_s=detected_at_s - master_gone_s,
        ended_s=closed_s + round_["reduce_s"] - master_gone_s,
        reduce_s=round_["reduce_s"],
        outcome=round_["outcome"],
        attempts=round_["attempts"],
        contributors=len(round_["contributors"]),
    )

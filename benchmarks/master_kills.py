"""The section about the master's deaths: SIGKILL, a second of silence, and it is back; twenty times.

    python -m benchmarks.master_kills --kills 20 --json master_kills.json

Three contributors and a spare with the demo's model on loopback, as ``holdfast demo`` starts them.
Trainers go on while a round runs (``overlap``), so whatever they wait for shows in ``waited_s``, which
each peer's status adds up over its trainer's life. Between kills passes a random while, so they fall
into all phases of a round.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.chaos_checks import Parity, check_journal, read_journal
from benchmarks.commands import ROOT
from benchmarks.grounds import Loopback
from benchmarks.lab_run import LabRun, Status, main_of_kills
from benchmarks.progress import say
from benchmarks.report import Table
from benchmarks.sections import Measured

KILLS = 20
RESTART_S = 1.0
BETWEEN_S = (3.0, 7.0)  # from one master's start to its end
PEERS = ("alder", "birch", "cedar", "spruce")
CONTRIBUTORS = 3
TRAINER = ROOT / "examples" / "train.py"
WAIT_S = 120.0
SAMPLE_S = 0.2  # between two looks at the peers
IDLE_MAX = 0.02

SPEC = f"""\
[run]
name = "master-kills"
[diloco]
sync_every = 20
overlap = 10
outer_lr = 0.7
outer_momentum = 0.7
[membership]
contributors = {CONTRIBUTORS}
min_members = {CONTRIBUTORS}
deadline_s = 10
grace_s = 10
"""


def run_with_kills(kills: int, seed: int) -> dict[str, Any]:
    """Rounds, restarts and waiting of a run whose master dies so many times."""
    chance = random.Random(f"master kills {seed}")
    parity = Parity()
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory,
        Loopback() as ground,
        LabRun(ground, Path(directory), [str(TRAINER), "--validate-every=0"]) as run,
    ):
        run.start_master(SPEC)
        for host, name in enumerate(PEERS, 1):
            run.join(name, host, founder=host == 1)
        run.until(_ready, "all are in sync and train", WAIT_S)
        before = {name: run.peer(name) for name in PEERS}
        began_s = time.monotonic()
        slowest_s = 0.0
        for number in range(1, kills + 1):
            _watch(run, parity, chance.uniform(*BETWEEN_S))
            version = max(parity.newest.values(), default=0)
            run.kill("master")
            killed_s = time.monotonic()
            _watch(run, parity, RESTART_S)
            run.restart_master()
            status = run.until(_beyond(version), "rounds go on", WAIT_S)
            slowest_s = max(slowest_s, time.monotonic() - killed_s)
            say(f"kill {number}: version {version}, then {status['committed']}")
        after = {name: run.peer(name) for name in PEERS}
        took_s = time.monotonic() - began_s
        run.act("pause", {})
        rest = run.until(_at_rest, "all hold the last version", WAIT_S)
        round_table = check_journal(read_journal(Path(directory) / "master" / "journal.sqlite"))
    held = min(int(head["version"]) for m in rest["members"] for head in m["heads"])
    roots = {head["root"] for m in rest["members"] for head in m["heads"]}
    restarts = sum(after[n]["trainer_restarts"] - before[n]["trainer_restarts"] for n in PEERS)
    idle = _idle(before, after, took_s)
    moved = sum(after[n]["state_received_bytes"] - before[n]["state_received_bytes"] for n in PEERS)
    return {
        "kills": kills,
        "seconds": took_s,
        "rounds_committed": round_table.committed,
        "rounds_lost": round_table.committed - held + len(parity.rolled_back),
        "rounds_aborted": round_table.aborted,
        "journal_faults": list(round_table.faults),
        "parity_violations": len(parity.violations) + (len(roots) > 1),
        "trainer_restarts": restarts,
        "state_bytes_moved": moved,
        "idle_share": idle,
        "slowest_to_commit_s": slowest_s,
    }


def _beyond(version: int) -> Callable[[Status], bool]:
    return lambda status: int(status["committed"]) > version


def _ready(status: Status) -> bool:
    return bool(
        sum(m["in_sync"] for m in status["members"]) == len(PEERS)
        and status["places"]["taken"] == CONTRIBUTORS
        and status["committed"] >= 2
    )


def _at_rest(status: Status) -> bool:
    return (
        not status["rounds"]
        and len(status["members"]) == len(PEERS)
        and all(
            head["state"] == "held" and head["version"] == status["committed"]
            for member in status["members"]
            for head in member["heads"]
        )
    )


def _watch(run: LabRun, parity: Parity, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        for name in PEERS:
            parity.saw(name, run.pid(name), run.peer(name)["heads"])
        time.sleep(min(SAMPLE_S, left_s))


def _idle(before: dict[str, Status], after: dict[str, Status], took_s: float) -> float | None:
    """The largest share of its time that a contributor's trainer waited; None: peers do not say."""
    shares = [
        (after[name]["waited_s"] - before[name]["waited_s"]) / took_s
        for name in PEERS
        if "waited_s" in after[name]
        and before[name]["role"] == after[name]["role"] == "contributor"
    ]
    return max(shares, default=None)


def master_kills() -> Measured:
    """The section of RESULTS.md."""
    say(f"the master dies {KILLS} times")
    found = run_with_kills(KILLS, seed=1)
    idle = found["idle_share"]
    table = Table(
        f"A master that is killed {KILLS} times, each time started again after {RESTART_S:g} s",
        ["python -m benchmarks.master_kills"],
        ["what", "measured", "promised"],
        [
            ["rounds committed", str(found["rounds_committed"]), ""],
            ["rounds lost", str(found["rounds_lost"]), "0"],
            ["rounds aborted and tried again", str(found["rounds_aborted"]), ""],
            ["digests that differ", str(found["parity_violations"]), "0"],
            ["trainers started again", str(found["trainer_restarts"]), "0"],
            ["bytes of state moved", str(found["state_bytes_moved"]), "0"],
            [
                "trainers' waiting, the largest share",
                "not told" if idle is None else f"{idle:.2%}",
                f"{IDLE_MAX:.0%}",
            ],
            [
                "from a kill to the next commit, s, at most",
                f"{found['slowest_to_commit_s']:.1f}",
                "",
            ],
        ],
        [
            "Three contributors and a spare with the demo's model on loopback, 20 steps a round of "
            "which 10 overlap it. Kills come at random instants. Lost is a round that the journal "
            "commits and a peer does not hold in the end, or goes back behind."
        ],
    )
    return [table], found


def main() -> int:
    return main_of_kills("master_kills", __doc__, KILLS, run_with_kills, _broken)


def _broken(found: dict[str, Any]) -> bool:
    lost = found["rounds_lost"] + found["parity_violations"] + found["trainer_restarts"]
    return bool(lost or found["journal_faults"] or (found["idle_share"] or 0) > IDLE_MAX)


if __name__ == "__main__":
    sys.exit(main())

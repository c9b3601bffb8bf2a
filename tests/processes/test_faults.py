"""Real kills of real processes: what the run and the others make of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.daemon.process.exit_codes import ExitCode
from tests.processes.harness import (
    Fleet,
    alive,
    contributing,
    in_sync,
    member,
    own_host,
    role,
    spec,
    why_gone,
)

pytestmark = pytest.mark.slow


def start_three_and_a_spare(fleet: Fleet, **scripts: tuple[str, ...]) -> None:
    """Contributors a, b, c and the spare d, all in sync and at work."""
    fleet.start_master(spec(contributors=3, min_members=2))
    for rank, name in enumerate("abcd"):
        fleet.join(
            name,
            "--rank",
            str(rank),
            *scripts.get(name, ()),
            role="spare" if name == "d" else "contributor",
            founder=name == "a",
        )
    fleet.until(
        lambda s: contributing(s, *"abc") and in_sync(s, *"abcd"), "a, b and c train, d is in sync"
    )


@pytest.mark.fault("a contributor dies, at any phase of a round")
def test_a_killed_contributor_is_replaced_by_the_spare_and_comes_back(fleet: Fleet) -> None:
    start_three_and_a_spare(fleet)
    identity = member(fleet.master(), "b")
    moved = fleet.peer("d")["state_received_bytes"]

    fleet.kill("b")
    status = fleet.until(
        lambda s: role(s, "d") == "contributor" and contributing(s, "d"), "d steps in"
    )
    assert "no sign of life" not in why_gone(status, "b"), "at once, not after the deadline"
    assert fleet.peer("d")["state_received_bytes"] == moved, "a promotion moves no state"
    fleet.until_committed(3)

    fleet.join("b", "--rank", "1")
    status = fleet.until(lambda s: in_sync(s, "b"), "b is back")
    back = member(status, "b")
    assert identity is not None
    assert back is not None
    assert back["peer"] == identity["peer"]
    assert role(status, "b") == "spare", "its place is taken"
    fleet.until_committed(3)
    fleet.check_equal(*"abcd")
    fleet.act("resume", {})

    # Ctrl+C, one after the other: each leaves in good order, with its trainer, and nobody minds.
    trainers = {name: fleet.peer(name)["command_pid"] for name in "abcd"}
    fleet.end("c")
    assert not alive(trainers["c"])
    fleet.until(lambda s: role(s, "b") == "contributor", "the spare takes the place of who left")
    fleet.until_committed(2)
    fleet.end(*"abd")
    assert not [name for name in "abd" if alive(trainers[name])]
    fleet.end("master")
    for name in fleet.nodes:
        assert "Traceback" not in fleet.nodes[name].log, name


@pytest.mark.fault("the master dies")
def test_a_crash_of_the_trainer_and_one_of_the_master_move_no_state(
    fleet: Fleet, tmp_path: Path
) -> None:
    crash = tmp_path / "crash"
    start_three_and_a_spare(fleet, b=("--crash", str(crash)))
    before = {name: fleet.peer(name)["state_received_bytes"] for name in "abcd"}

    # The trainer dies. Its daemon starts it again and gives it the state out of memory; it is back
    # before the spare would take its place.
    trainer = fleet.peer("b")["command_pid"]
    crash.touch()
    fleet.until(lambda _: fleet.peer("b")["trainer_restarts"] == 1, "b's daemon starts it again")
    assert not alive(trainer)
    fleet.until(lambda s: contributing(s, *"abc"), "b's new trainer contributes")

    # The master dies; its successor goes on from the journal with the peers that come back.
    roles = {name: role(fleet.master(), name) for name in "abcd"}
    committed = fleet.master()["committed"]
    term = fleet.master()["term"]
    fleet.kill("master")
    fleet.restart_master()
    status = fleet.until(
        lambda s: s["committed"] > committed + 3 and in_sync(s, *"abcd"), "rounds go on"
    )
    assert {name: role(status, name) for name in "abcd"} == roles
    assert status["term"] == term + 1
    fleet.check_equal(*"abcd")
    assert {name: fleet.peer(name)["state_received_bytes"] for name in "abcd"} == before
    assert all(os.getpgid(fleet.nodes[name].process.pid) for name in "abcd"), "none was restarted"


def test_a_standby_takes_the_run_over_and_the_old_master_gives_way(
    fleet: Fleet, tmp_path: Path
) -> None:
    second = f"{own_host()}:29700"
    standby = ("--also", second)
    fleet.start_master(spec(contributors=2, min_members=2), more=standby)
    for rank, name in enumerate("ab"):
        fleet.join(name, "--rank", str(rank), founder=name == "a")
    fleet.until(lambda s: contributing(s, *"ab"), "a and b train")
    copy = fleet.folder / "standby"
    backup = fleet.spawn("backup", "backup", str(copy), "--state", str(fleet.folder / "master"))
    assert backup.wait() == 0, backup.log
    fleet.until_committed(3)  # the copy lacks these
    fleet.settle(*"ab")  # which both hold; nor has the copy this pause
    status = fleet.master()
    received = {name: fleet.peer(name)["state_received_bytes"] for name in "ab"}
    first = fleet.nodes["master"]
    first.process.kill()
    first.process.wait()

    http = ("--http", "127.0.0.1:0", "--no-invite")
    listen = ("--listen", second)
    fleet.nodes["first"] = fleet.nodes.pop("master")
    fleet.nodes["first"].awaited = True
    node = fleet.spawn("standby", "master", "--journal", str(copy), *listen, *http)
    fleet.nodes["master"] = fleet.nodes.pop("standby")
    node.control()
    fleet.until(lambda s: s["committed"] > status["committed"] + 2, "rounds go on", 60)
    assert fleet.master()["term"] > 1_000
    assert {name: fleet.peer(name)["state_received_bytes"] for name in "ab"} == received

    anywhere = ("--listen", "127.0.0.1:0", *http, *standby)
    old = fleet.spawn("old", "master", "--state", str(fleet.folder / "master"), *anywhere)
    assert old.wait() == ExitCode.SUPERSEDED, old.log
    assert "another master has taken this run over" in old.log
    fleet.until_committed(2)
    fleet.check_equal(*"ab")

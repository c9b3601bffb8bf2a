"""Real training processes that fail in every way: the run goes on, and the reason is reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.protocol.errors import UserError
from tests.processes.harness import (
    TRAINER,
    WITH_TORCH,
    Fleet,
    Status,
    alive,
    contributing,
    in_sync,
    member,
    role,
    spec,
)

pytestmark = pytest.mark.slow


def events(status: Status) -> list[str]:
    return [str(event["text"]) for event in status["events"]]


@pytest.mark.fault(
    "a trainer crashes", "its socket closes", "restarted; state from the daemon's memory"
)
def test_each_kind_of_failure_is_told_apart_and_costs_no_state(
    fleet: Fleet, tmp_path: Path
) -> None:
    fault = tmp_path / "fault"
    fleet.start_master(spec(min_members=1) + "[trainer]\nnan_steps = 3\n")
    fleet.join("a", "--pause", "0.01", founder=True, command=WITH_TORCH)
    faulty = ("--rank", "1", "--pause", "0.01", "--fault", str(fault))
    fleet.join("b", *faulty, command=WITH_TORCH)
    fleet.until(lambda s: contributing(s, "a", "b"), "a and b train")
    moved = fleet.peer("b")["state_received_bytes"]

    def fails(kind: str, text: str) -> None:
        pid = fleet.peer("b")["command_pid"]
        whole = fault.with_suffix(".new")  # a trainer may look at any moment
        whole.write_text(kind)
        whole.rename(fault)
        fleet.until(lambda s: any(text in each for each in events(s)), f"b's trainer: {text}")
        if kind == "nan":
            assert fleet.peer("b")["command_pid"] == pid, "the process goes on"
        else:
            fleet.until(lambda s: not alive(pid), "nothing is left of it")
        fleet.until(lambda s: contributing(s, "a", "b"), f"b trains again after {kind}")

    fails("nan", "weights not finite: ")  # three losses or an update tell of it, as it comes first
    fails("memory", "out of memory: MemoryError")
    fails("cuda", "CUDA error: RuntimeError: CUDA error: an illegal memory access")

    status = fleet.peer("b")
    assert status["trainer_restarts"] == 2
    assert status["state_received_bytes"] == moved, "its state came out of its daemon's memory"
    assert status["trainer_state"] == "running"
    assert status["stepped_s"] > 0
    assert "MemoryError" in fleet.nodes["b"].log, "the script's own traceback"
    fleet.check_equal("a", "b")


@pytest.mark.fault(
    "it fails again and again",
    "failures in a row",
    "a spare without a trainer, until it is started again",
)
def test_a_command_that_fails_again_and_again_leaves_a_spare_until_somebody_mends_it(
    fleet: Fleet, tmp_path: Path
) -> None:
    mended, once, crash = (tmp_path / name for name in ("mended", "once", "crash"))
    fleet.start_master(spec(min_members=1))
    fleet.join("a", "--pause", "0.05", founder=True)  # it takes 15 seconds until b gives up
    train = f"exec {sys.executable} {TRAINER} --rank 1 --pause 0.05"
    script = (
        f"test -e {once} || {{ touch {once}; {train} --crash {crash}; }}; "
        f"test -e {mended} || exit 17; {train}"
    )
    fleet.join("b", command=("sh", "-c", script))
    fleet.until(lambda s: contributing(s, "a", "b"), "b trains")
    crash.touch()
    status = fleet.until(
        lambda s: in_sync(s, "b") and "given up" in str(member(s, "b")), "b gives its trainer up"
    )
    found = member(status, "b")
    assert found is not None
    assert "after 5 failures in a row" in found["trainer_state"]
    assert "exit status 17" in found["trainer_state"]
    assert role(status, "b") == "spare"
    assert "then start this peer again" in fleet.peer("b")["trainer_state"]
    assert "until then this peer keeps a copy" in fleet.nodes["b"].log
    fleet.until_committed(2)
    assert in_sync(fleet.master(), "b")

    mended.touch()
    fleet.ask("b", "retry", {})
    fleet.until(lambda s: contributing(s, "a", "b"), "b trains")
    with pytest.raises(UserError, match="the training command runs"):
        fleet.ask("b", "retry", {})

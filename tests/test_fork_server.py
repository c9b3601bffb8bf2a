"""Processes that are forked behave as those that are started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import WITH_TORCH, WITHOUT_TORCH, ForkedPopen, kind_of
from tests.processes.harness import TRAINER, environment

HOLDFAST = [sys.executable, "-m", "holdfast"]


def test_a_command_of_holdfast_is_a_fork(tmp_path: Path) -> None:
    before = ForkedPopen.forks
    done = subprocess.run(
        [*HOLDFAST, "status", "--state", "nowhere"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert ForkedPopen.forks == before + 1
    assert done.returncode not in (0, 1)
    assert done.stdout == ""
    assert done.stderr.startswith("holdfast: ")


@pytest.mark.new_interpreter
def test_a_marked_test_starts_new_interpreters() -> None:
    before = ForkedPopen.forks
    done = subprocess.run([*HOLDFAST, "--version"], env=environment(), capture_output=True)
    assert (ForkedPopen.forks, done.returncode) == (before, 0)


def test_variables_that_are_read_early_start_a_new_interpreter() -> None:
    before = ForkedPopen.forks
    env = environment({"PYTHONHASHSEED": "7"})
    done = subprocess.run([*HOLDFAST, "--version"], env=env, capture_output=True)
    assert (ForkedPopen.forks, done.returncode) == (before, 0)


def test_what_can_be_forked(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    join = ("-m", "holdfast", "join", "INVITE")
    assert kind_of(["-m", "holdfast", "status"], tmp_path) is WITHOUT_TORCH
    assert kind_of([*join, "--", "sleep", "60"], tmp_path) is WITHOUT_TORCH
    assert kind_of([*join, "--", sys.executable, str(TRAINER)], tmp_path) is WITHOUT_TORCH
    assert kind_of([*join, "--", sys.executable, "train.py"], tmp_path) is WITH_TORCH
    assert kind_of(["train.py"], tmp_path) is WITH_TORCH
    assert kind_of(["absent.py"], tmp_path) is None
    assert kind_of(["-c", "pass"], tmp_path) is None
    assert kind_of(["-m", "json"], tmp_path) is None

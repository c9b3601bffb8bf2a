"""Processes that are forked behave as those that are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fork_server import WITH_TORCH, WITHOUT_TORCH, ForkedPopen, kind_of, reap_orphans
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


def start(*words: str, folder: Path, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=environment(more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


SCRIPT = """
import os, sys
print(sys.argv, os.getcwd(), os.environ["MORE"], os.getsid(0) == os.getpid(), __name__, sys.path[0], flush=True)
print("no end of line", end="", flush=True)
if sys.argv[1] == "raise":
    raise LookupError("of the script")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("status", ["0", "7", "raise"])
def test_a_script_is_as_python_runs_it(tmp_path: Path, status: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with start("script.py", status, folder=tmp_path, MORE="more") as process:
        said, _ = process.communicate()
    assert process.returncode == (1 if status == "raise" else int(status))
    first, rest = said.split("\n", 1)
    assert first == f"['script.py', '{status}'] {tmp_path} more True __main__ {tmp_path}"
    assert rest.startswith("no end of line")
    if status == "raise":
        assert said.endswith('raise LookupError("of the script")\nLookupError: of the script\n')
        assert "fork_server" not in said


@pytest.mark.slow
def test_signals_and_the_end_of_a_group_are_those_of_a_child(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        with start("script.py", folder=tmp_path) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            os.killpg(process.pid, number)
            assert process.wait() == -number


@pytest.mark.slow
def test_its_processor_time_is_counted_as_a_childs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time\nwhile time.process_time() < 0.3:\n    pass\n")
    before = os.times()
    with start("script.py", folder=tmp_path) as process:
        process.communicate()
    after = os.times()
    assert after.children_user + after.children_system >= (
        before.children_user + before.children_system + 0.25
    )


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


def test_an_orphan_of_a_child_is_reaped(tmp_path: Path) -> None:
    """It became a child of this process, which is nobody's to wait for."""
    orphan = subprocess.run(
        ["sh", "-c", "sleep 0 & echo $!"], capture_output=True, text=True, check=True
    ).stdout.strip()
    while Path(f"/proc/{orphan}").exists():
        reap_orphans()
        time.sleep(0.01)

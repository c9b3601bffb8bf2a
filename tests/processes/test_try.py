"""``holdfast try`` with real daemons: what it finds of a script, and scripts that it cannot try."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from holdfast.daemon.cli import trial
from holdfast.daemon.cli.command_line import commands
from holdfast.daemon.cli.fleet import FleetError
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.membership.spec.spec import RunSpec
from tests.processes.harness import (
    HOLDFAST,
    TRAINER,
    WAIT_S,
    Polls,
    alive,
    environment,
)

SPEC = RunSpec.parse("[diloco]\nsync_every = 4\n")
COMMAND = (sys.executable, "train.py")
RUN_TOML = "[diloco]\nsync_every = 4\nouter_lr = 1.0\nouter_momentum = 0.0\n"
OPTIONS = ("--peers=2", "--steps=40", "--run-toml=short.toml")
SCRIPT = f"""
import sys
sys.path.insert(0, {str(TRAINER.parents[2])!r})
from attrs import evolve
from tests.processes.tiny_trainer import TinyRun, make_layout
"""
BEGIN = "run = TinyRun(make_layout(16))\n"
GO_ON = "while not run.machine.finished: run.step(run.fragments[0].train(0, run.machine.step))\n"
WAITS = """
import os, pathlib, time
pathlib.Path("pid").write_text(str(os.getpid()))
time.sleep(1_000)
"""
SAME = """
announced = TinyRun.announce
TinyRun.announce = lambda *of: evolve(announced(*of), first_batches=bytes(32))
"""


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # forks have one thread
    Path("short.toml").write_text(RUN_TOML)


def test_a_script_is_tried_alone_and_as_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.daemon.cli.fleet.interrupt_on_signals", lambda: None)
    Path("cut.toml").write_text("[diloco]\nsync_every = 4\nfragments = 4")
    options = (*OPTIONS, "--run-toml=cut.toml", "--json")
    arguments = ["try", *options, str(TRAINER), "--", "--pause=0.003", "--width=2000"]
    done = CliRunner().invoke(commands, arguments)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    alone, replicas = found["rows"]
    assert found["take"] == replicas["outcome"]["trial"]["label"] == "2 x short.toml, every 4"
    assert alone["outcome"]["tokens"] == replicas["outcome"]["tokens"] == 80 * 16
    assert alone["outcome"]["round_bytes"] == 0
    # Two peers, a chunk each, out and in; the state's copy before the first round is no round.
    values = replicas["outcome"]["value_count"]
    assert values == 20_001
    assert replicas["outcome"]["round_bytes"] == pytest.approx(4 * values, rel=0.02)
    assert 0.003 < alone["outcome"]["step_s"] < 1
    assert 0 < replicas["against"] < 3, "half as many steps"
    assert Path("try.svg").read_text().count("<polyline") == 4
    assert "run 2 of 3" in done.stderr
    assert "left out: 2 x cut.toml, every 4: the model cannot be cut into 4" in done.stderr


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('no run')", "the training command ended without holdfast.attach"),
        (SCRIPT + BEGIN + "for _ in range(7): run.step(1.0)", "ended at step 7 of 40, before"),
        ("raise RuntimeError('CUDA out of memory')", "1 at a time do not fit this machine"),
        ("raise RuntimeError('no such file')", "ended with exit status 1"),
        ("import time; time.sleep(1_000)", "the script has not called holdfast.attach"),
    ],
)
def test_what_is_wrong_with_a_script_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    Path("train.py").write_text(script)
    if "sleep" in script:
        monkeypatch.setattr(trial, "STALLED_S", 0.0)
    with pytest.raises(FleetError, match=r"^alone: ") as failed:
        trial.run_trial(trial.script_alone(SPEC, 40, 4), Path("run"), COMMAND, print)
    assert said in str(failed.value)
    before = "raise" in script or "print" in script  # it had attached
    assert failed.value.exit_code == (ExitCode.TRAINER if before else ExitCode.FAILED)


def test_data_that_repeats_ends_the_trial() -> None:
    Path("train.py").write_text(SCRIPT + SAME + BEGIN + GO_ON)
    with pytest.raises(FleetError, match=r"^r: 2 members train on the same samples"):
        trial.run_trial(trial.replicas("r", SPEC, 2, 40_000), Path("run"), COMMAND, print)


def test_ctrl_c_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    Path("train.py").write_text(WAITS)
    command = [*HOLDFAST, "try", *OPTIONS, "train.py"]
    env = environment({"TMPDIR": str(tmp_path)})
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    polls, pid = Polls(WAIT_S), tmp_path / "pid"
    while not (pid.exists() and pid.read_text()):
        assert polls.wait()
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == ExitCode.INTERRUPTED
    assert not alive(int(pid.read_text()))
    assert not list(tmp_path.glob("holdfast-try-*"))

"""The simulator's command from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from holdfast.collectives.arithmetic import MeanFactors
from holdfast.daemon.exit_codes import ExitCode
from holdfast.simulation.__main__ import simulate

STARTED_S = 120.0


def say(*arguments: str) -> Result:
    return CliRunner().invoke(simulate, list(arguments))


@pytest.mark.slow
def test_a_few_seeds_are_counted_and_written_as_json(tmp_path: Path) -> None:
    told = [tmp_path / "one.json", tmp_path / "two.json"]
    for jobs, path in zip(("1", "2"), told, strict=True):
        said = say("--start", "40", "--seeds", "3", "--jobs", jobs, "--json", str(path))
        assert said.exit_code == 0, said.output
        assert "3 seeds" in said.output
    one, two = (json.loads(path.read_text()) for path in told)
    assert (one["start"], one["seeds"], one["violations"]) == (40, 3, [])
    assert one["events"] > 100
    one.pop("seconds")
    two.pop("seconds")
    assert one == two, "the number of processes changes nothing"


@pytest.mark.slow
def test_json_can_go_to_stdout_alone() -> None:
    result = say("--start", "5", "--seeds", "1", "--json", "-")
    assert json.loads(result.stdout)["seeds"] == 1
    assert "happened" in result.stderr


@pytest.mark.slow
def test_one_seed_tells_its_story_the_same_one_each_time() -> None:
    once, again = (say("--start", "5", "--seeds", "1").output for _ in range(2))
    assert once.splitlines()[:-1] == again.splitlines()[:-1]
    assert "planned    crash" in once
    assert "happened" in once
    traced = say("--start", "5", "--seeds", "1", "--trace").output
    assert "RoundCommitted" in traced


@pytest.mark.slow
def test_a_violation_is_printed_with_its_faults_and_a_command_that_reproduces_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = MeanFactors.of
    patched = lambda those, present=None: MeanFactors(  # noqa: E731
        original(those, present).factors, original(those).divisor
    )
    monkeypatch.setattr(MeanFactors, "of", patched)
    said = say("--start", "4", "--seeds", "4", "--jobs", "1", "--json", str(tmp_path / "j"))
    assert said.exit_code == ExitCode.VIOLATION
    violations = json.loads((tmp_path / "j").read_text())["violations"]
    assert violations
    for violation in violations:
        assert set(violation) == {"seed", "what", "faults", "shrunk", "reproduce"}
        assert len(violation["shrunk"]) <= len(violation["faults"])
        assert violation["reproduce"] in said.output
        assert f"--start {violation['seed']} --seeds 1" in violation["reproduce"]


@pytest.mark.slow
def test_the_number_of_peers_can_be_fixed() -> None:
    said = say("--start", "5", "--seeds", "1", "--peers", "8")
    assert said.exit_code == 0, said.output
    assert "8 peers" in said.output


@pytest.mark.parametrize(
    "arguments",
    [("--seeds", "0"), ("--peers", "1"), ("--start", "-1"), ("--trace",), ("--jobs", "0")],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...]) -> None:
    said = say(*arguments)
    assert said.exit_code == ExitCode.USAGE
    assert arguments[0] in said.output


@pytest.mark.slow
def test_ctrl_c_reports_what_was_done(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "holdfast.simulation", "--seeds", "100000", "--jobs", "2"]
    process = subprocess.Popen(
        [*command, "--json", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "dumb"},
        start_new_session=True,
    )
    try:
        until_s = time.monotonic() + STARTED_S
        while len(psutil.Process(process.pid).children()) < 2:  # its workers start
            assert time.monotonic() < until_s
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        out, error = process.communicate(timeout=STARTED_S)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == ExitCode.INTERRUPTED, error
    report = json.loads(path.read_text())
    assert report["interrupted"]
    assert report["violations"] == []
    assert f"{report['seeds']} seeds" in out
    assert "Traceback" not in error

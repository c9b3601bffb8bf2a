"""The simulator's command from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from click.testing import CliRunner, Result

from holdfast.collectives.arithmetic import MeanFactors
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.simulation.__main__ import simulate
from holdfast.simulation.batch import broken_by
from holdfast.simulation.scenario import Scenario
from tests.planting import Note, Patch, what_shows

STARTED_S = 120.0


def say(*arguments: str) -> Result:
    return CliRunner().invoke(simulate, list(arguments))


@pytest.mark.slow
def test_a_few_seeds_are_summed_up_whatever_the_number_of_processes() -> None:
    one, two = (say("--start", "40", "--seeds", "2", "--jobs", jobs) for jobs in "12")
    assert (one.exit_code, two.exit_code) == (0, 0), one.output + two.output
    assert "2 seeds" in one.output
    assert "0 violations" in one.output
    assert one.output.rpartition(",")[0] == two.output.rpartition(",")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "planned"), [("--failover", "alone leader"), ("--hostile", "s0 sends")]
)
def test_other_kinds_of_runs_tell_what_was_planned(kind: str, planned: str) -> None:
    said = say("--start", "40", "--seeds", "1", "--jobs", "1", kind)
    assert said.exit_code == 0, said.output
    assert f"  planned    {planned}" in said.output


@pytest.mark.slow
def test_one_seed_tells_its_story_and_every_event_if_asked() -> None:
    told, traced = (
        say("--start", "5", "--seeds", "1", "--jobs", "1", *more).output
        for more in ([], ["--trace"])
    )
    assert "planned    crash" in told
    assert "happened" in told
    assert "RoundCommitted" not in told
    assert "RoundCommitted" in traced


@pytest.mark.slow
def test_a_violation_is_printed_with_the_fault_that_shows_it_and_a_command_that_reproduces_it(
    monkeypatch: Patch, record_property: Note
) -> None:
    """Planted bug: chunk owners divide by the weight of all contributors, so one loss shows it."""
    original = MeanFactors.of
    patched = lambda those, present=None: MeanFactors(  # noqa: E731
        original(those, present).factors, original(those).divisor
    )
    monkeypatch.setattr(MeanFactors, "of", patched)
    many = (seed for seed in range(100) if len(Scenario.of(seed).faults) > 1)
    seed = what_shows(63, lambda seed: broken_by(Scenario.of(seed)), many, record_property)
    said = say("--start", str(seed), "--seeds", "1", "--jobs", "1")
    assert said.exit_code == ExitCode.VIOLATION
    assert f"seed {seed} violated an invariant: " in said.output
    assert "1 violations" in said.output
    assert f"  reproduce  python -m holdfast.simulation --start {seed} --seeds 1" in said.output
    assert said.output.count("  minimal    ") == 1 < said.output.count("  fault      ")


@pytest.mark.slow
def test_the_number_of_peers_can_be_fixed() -> None:
    said = say("--start", "5", "--seeds", "1", "--jobs", "1", "--peers", "2")
    assert said.exit_code == 0, said.output
    assert "2 peers" in said.output


@pytest.mark.parametrize(
    "arguments",
    [("--seeds", "0"), ("--peers", "1"), ("--start", "-1"), ("--trace",), ("--jobs", "0")],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...]) -> None:
    said = say(*arguments)
    assert said.exit_code == ExitCode.USAGE
    assert arguments[0] in said.output


@pytest.mark.slow
def test_ctrl_c_reports_what_was_done() -> None:
    command = [sys.executable, "-m", "holdfast.simulation", "--seeds", "100000", "--jobs", "2"]
    process = subprocess.Popen(
        command,
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
    assert " 0 violations" in out
    assert "of 100000 seeds" in error
    assert "Traceback" not in error

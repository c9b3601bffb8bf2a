"""What tests take is attributed, compared and told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.durations import Reading, add_processor_seconds, got, group_of
from tools import durations
from tools.durations import Cost, costs_in, kept_seconds, of_tests, slower, table

ROOT = Path(__file__).resolve().parents[1]

# A child that something else waits for, one that the test waits for, and one that still runs.
TESTS = """
import subprocess, sys, time
from tests.durations import add_processor_seconds
BURN = "import time\\nwhile time.process_time() < 0.3: pass\\nprint(flush=True)"
def test_that_passes():
    add_processor_seconds(20.0)
def test_that_fails():
    subprocess.run([sys.executable, "-c", BURN], check=True)
    still = subprocess.Popen(
        [sys.executable, "-c", BURN + "\\ntime.sleep(60)"], stdout=subprocess.PIPE
    )
    still.stdout.readline()
    try:
        assert not "it fails"
    finally:
        # Only after the report of the call: as daemons of a fixture do.
        import atexit
        atexit.register(still.kill)
"""
CONFTEST = """
from tests.durations import Durations
from tools.durations import folder
def pytest_configure(config):
    config.pluginmanager.register(Durations(config, folder()))
"""


def test_a_test_that_got_slower_by_half_is_named_whatever_the_machines_speed() -> None:
    kept = {f"test_{number}": 2.0 + number for number in range(9)}
    twice = {name: 2 * seconds for name, seconds in kept.items()}

    assert slower(kept, kept) == []
    assert slower(twice, kept) == []
    assert slower({**twice, "test_0": 7.0, "test_8": 40.0}, kept) == [
        "test_8: 20.0 instead of 10.0 s",
        "test_0: 3.5 instead of 2.0 s",
    ]


def test_chance_is_not_named_and_what_was_not_kept_only_if_it_is_dear() -> None:
    kept = {"a": 1.0, "b": 10.0, "c": 10.0}

    assert slower({**kept, "a": 1.9, "new": 2.9}, kept) == []
    assert slower({**kept, "new": 4.0}, kept) == ["new: 4.0 s; new, or less than 1 s before"]
    assert slower({"new": 4.0}, {}) == []


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("membership/test_rounds.py", "rooms"),
        ("swarm/test_simulation.py", "seeds"),
        ("swarm/test_swarm.py", "simulated runs"),
        ("processes/test_kills.py", "processes"),
        ("processes/test_sharded.py", "processes with torch"),
        ("browser/test_page.py", "browser"),
        ("lab/test_nat.py", "labs"),
        ("packaging/test_wheel.py", "packaging"),
    ],
)
def test_every_test_has_a_group(path: str, group: str) -> None:
    assert group_of(ROOT / "tests" / path) == group
    assert group in durations.GROUPS


def test_children_count_and_a_test_that_fails_says_what_it_got(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    written = tmp_path / "written"

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DURATIONS": str(written)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1, done.stdout
    costs = {cost.id.partition("::")[2] or cost.id: cost for cost in costs_in(written)}
    assert costs["test_that_passes"].passed
    assert 20.0 <= costs["test_that_passes"].processor_s < 25.0
    assert not costs["test_that_fails"].passed
    assert 0.3 <= costs["test_that_fails"].processor_s < 10.0
    assert costs["collection"].processor_s > 0.0
    assert not costs[durations.RUN].passed, "only one file was asked for"
    told = done.stdout.partition("- Processor -")[2].split()
    running_s = float(told[told.index("ended,") + 1])
    assert 0.3 <= running_s < 10.0
    assert "load" in told


def test_what_a_test_got_is_in_a_sentence() -> None:
    begun = Reading(0.0, 0.0, 1.0, 10.0, idle_ticks=0, stolen_ticks=0, ticks=0)
    now = Reading(20.0, 20.0, 2.5, 25.0, idle_ticks=1_000, stolen_ticks=2_000, ticks=4_000)

    told = " ".join(got(begun, now, 0.5).split())

    assert "20.0 s by the clock. Processor: 1.5 s in the test" in told
    assert "0.5 s in children that run" in told
    assert "waited for a processor 75% of the time" in told
    assert "idle 25%, stolen by other machines 50%" in told


def test_a_command_is_timed_and_keeps_its_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DURATIONS", str(tmp_path))
    burn = "import time\nwhile time.process_time() < 0.2: pass\nraise SystemExit(7)"

    status = durations.main(["time", "burn", durations.STATIC, sys.executable, "-c", burn])

    (cost,) = costs_in(tmp_path)
    assert status == 7
    assert (cost.id, cost.group, cost.passed) == ("burn", durations.STATIC, False)
    assert 0.2 <= cost.processor_s < 5.0


def test_a_whole_run_is_kept_and_no_part_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durations, "KEPT_FILE", tmp_path / "kept.json")
    monkeypatch.setattr(durations, "PAPER", tmp_path / "paper.md")
    begin, end = durations.MARKS
    durations.PAPER.write_text(f"Before\n\n{begin}\n| old |\n{end}\n\nAfter\n")
    run = [
        Cost("types", durations.STATIC, 9.0, 15.0),
        Cost("a.py::dear", durations.ROOMS, 2.0, 3.04),
        Cost("a.py::cheap", durations.ROOMS, 2.0, 0.5),
        Cost("a.py::failed", durations.ROOMS, 2.0, 50.0, passed=False),
        Cost(durations.RUN, durations.RUNNER, 0.0, 0.0),
    ]

    with pytest.raises(SystemExit, match="holds no whole run"):
        durations.keep(run[1:])
    with pytest.raises(SystemExit, match="holds no whole run"):
        durations.keep(run[:-1])
    durations.keep(run)

    assert json.loads(durations.KEPT_FILE.read_text()) == {"a.py::dear": 3.0} == kept_seconds()
    assert of_tests(run) == {"a.py::dear": 3.04, "a.py::cheap": 0.5}
    paper = durations.PAPER.read_text()
    assert paper.startswith(f"Before\n\n{begin}\n\n| group | tests | processor seconds |\n")
    assert "| rooms | 3 | 54 |\n" in paper
    assert paper.endswith(f"| together | 2 | 69 |\n\n{end}\n\nAfter\n")
    assert table(run)[2] == "| static checks |  | 15 |"


def test_what_is_added_is_the_running_tests() -> None:
    before = Reading.now()
    add_processor_seconds(2.0)

    assert 1.9 < Reading.now().processor_s - before.processor_s < 3.0
    add_processor_seconds(-2.0)

"""What tests take is attributed, compared and told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.durations import group_of
from tools import durations
from tools.durations import Cost, kept_seconds, of_tests, slower, table

ROOT = Path(__file__).resolve().parents[1]


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

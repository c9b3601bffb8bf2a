"""The schedule of spot machines, and which steps count as useful; no process and no network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import spot
from benchmarks.report import BenchError
from benchmarks.spot import Change, Schedule

DAY_S = 86_400.0
AGAIN = ["110 r 3", "111 s 4", "112 s 5"]  # what was done behind a checkpoint at step 3


def trace(path: Path, row: list[int]) -> Path:
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": row}))
    return path


def steps(*ends: int) -> list[str]:
    return [f"{100 + end} s {end}" for end in ends]


def shares(*diaries: list[str]) -> list[list[float]]:
    lives = spot.lives_of([(0, [line.split() for line in diary]) for diary in diaries])
    return [[share for _, share in life.steps] for life in lives]


def test_a_trace_becomes_losses_and_returns(tmp_path: Path) -> None:
    rows = [4, 4, 2, 3], [0, 1, 1, 1], [4, 4, 4, 0]
    counts, gap_s = spot.read_traces([trace(tmp_path / f"{n}", row) for n, row in enumerate(rows)])
    plan = spot.schedule(counts, 1, 3, 60.0)

    assert (gap_s, spot.changes_of(counts)) == (300, (6, 2))
    assert plan.first == (0, 1, 2, 3, 4, 8, 9, 10, 11)
    found = [(each.place // 4, each.comes, int(each.at_s // 30)) for each in plan.changes]
    assert sorted(found) == [(0, False, 0)] * 2 + [(0, True, 1)] + [(2, False, 1)] * 4
    with pytest.raises(BenchError, match="there are 0 to 3"):
        spot.schedule(counts, 0, 4, 60.0)
    with pytest.raises(BenchError, match="five: each point"):
        spot.read_traces([trace(tmp_path / "five", [5]), tmp_path / "0", tmp_path / "1"])


def test_the_day_that_is_made_up_has_the_rates_of_the_real_one() -> None:
    plan = spot.schedule(spot.made_up(), 0, 288, DAY_S)
    up = set(plan.first)
    for each in plan.changes:
        assert (each.place in up) != each.comes
        up ^= {each.place}

    assert len(plan.of(comes=False)) == 62
    assert plan.running_s() / DAY_S == pytest.approx(6.93, abs=0.1)


def test_only_steps_that_are_in_the_runs_model_are_useful() -> None:
    assert shares(["100 r 0", *steps(1, 2, 3, 4)], AGAIN) == [[1, 1, 1, 0], [1, 1]]
    rounds = [*steps(1, 2), "102 c 1", *steps(3, 4), "104 c 0", *steps(5)]
    assert shares(rounds) == [[1, 1, 0, 0, 0]]
    merges = [*steps(1, 2, 3), "103 m 0 1", "103 m 1 1", "103 m 2 0", *steps(4), "104 m 0 1"]
    assert shares(merges) == [pytest.approx([0.4, 0.4, 0.2, 0])]


def test_the_seconds_end_with_a_useful_step_that_began_after_the_change() -> None:
    plan = Schedule((0, 1), (Change(2.5, 1, comes=False), Change(4.5, 1, comes=True)), 10.0)
    survivor = ["100 r 0", *steps(1, 2), "103.5 s 3", "104.5 s 4"]  # step 3 was under way
    diaries = [(0, survivor), (1, ["100 r 0", *steps(1, 2)]), (1, ["106 r 4", "108 s 5"])]
    lives = spot.lives_of([(place, [line.split() for line in lines]) for place, lines in diaries])
    found = spot.figures(lives, plan, began_s=100.0, quiet_s=60.0, step_s=1.0)

    assert found["possible"] == 10 + 2.5 + 5.5
    assert (found["done"], found["useful"]) == (7, 7)
    assert found["after_loss_s"] == [pytest.approx(2.0)]
    assert found["after_return_s"] == [pytest.approx(3.5)]
    assert spot.at_own_pace({"useful": 60.0, "possible": 100.0, "quiet_share": 0.8}, 20) == 0.79

"""The schedule of spot machines and what is counted as useful; no process and no network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import spot
from benchmarks.report import BenchError
from benchmarks.spot import Change, Schedule

BEGAN_S, STEP_S = 100.0, 1.0


def trace(folder: Path, name: str, data: list[int]) -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": data}))
    return path


def diary(*lines: str) -> list[list[str]]:
    return [line.split() for line in lines]


def steps(first: int, last: int, before: float = BEGAN_S) -> list[str]:
    return [f"{before + step} s {step}" for step in range(first, last + 1)]


def test_a_trace_becomes_losses_and_returns(tmp_path: Path) -> None:
    rows = [4, 4, 2, 3], [0, 1, 1, 1], [4, 4, 4, 0]
    counts, gap_s = spot.read_traces([trace(tmp_path, f"{n}", row) for n, row in enumerate(rows)])
    plan = spot.schedule(counts, 1, 3, 60.0)

    assert gap_s == 300
    assert spot.changes_of(counts) == (6, 2)
    assert plan.first == (0, 1, 2, 3, 4, 8, 9, 10, 11)
    zones = [(each.place // 4, each.comes, int(each.at_s // 30)) for each in plan.changes]
    assert sorted(zones) == [(0, False, 0)] * 2 + [(0, True, 1)] + [(2, False, 1)] * 4
    assert plan.running(60.0) == 4


def test_a_place_is_lost_only_while_it_runs() -> None:
    plan = spot.schedule(spot.made_up(), 0, 288, 86_400.0)
    up = set(plan.first)
    for each in plan.changes:
        assert (each.place in up) != each.comes
        up ^= {each.place}


def test_the_day_that_is_made_up_has_the_rates_of_the_real_one() -> None:
    counts = spot.made_up()
    plan = spot.schedule(counts, 0, 288, 86_400.0)

    assert len(plan.of(comes=False)) == 62
    assert spot.mean_running(counts) == pytest.approx(6.93, abs=0.05)
    assert plan.running_s() / 86_400 == pytest.approx(6.93, abs=0.1)
    assert max(map(max, counts)) <= 4


@pytest.mark.parametrize("text", ["", "{}", '{"metadata": {"gap_seconds": 300}, "data": [5]}'])
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "zone.json"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"zone\.json"):
        spot.read_traces([path] * 3)


def test_points_that_are_not_there_are_refused() -> None:
    with pytest.raises(BenchError, match="there are 0 to 2"):
        spot.schedule([[4, 4, 4]], 0, 3, 60.0)


def test_steps_behind_the_checkpoint_are_lost_and_count_once_they_are_done_again() -> None:
    first = diary("100 r 0", *steps(1, 5))
    second = diary("110 r 3", *steps(4, 6, before=110 - 3))
    lives = spot.lives_of([(0, first), (0, second)])

    assert [[share for _, share in life.steps] for life in lives] == [[1, 1, 1, 0, 0], [1, 1, 1]]


def test_steps_count_with_the_round_that_takes_them() -> None:
    lines = diary(*steps(1, 2), "102 c 1", *steps(3, 4), "104 c 0", *steps(5, 5))
    (life,) = spot.lives_of([(0, lines)])

    assert [share for _, share in life.steps] == [1, 1, 0, 0, 0]


def test_a_step_counts_for_the_parts_of_the_model_that_have_it() -> None:
    merges = ["103.1 m 0 1", "103.2 m 1 1", "103.3 m 2 0"]
    (life,) = spot.lives_of([(0, diary(*steps(1, 3), *merges, *steps(4, 4), "104.1 m 0 1"))])

    assert [share for _, share in life.steps] == pytest.approx([0.4, 0.4, 0.2, 0])


def test_the_seconds_end_with_a_useful_step_that_began_after_the_change() -> None:
    """Place 1 is lost at 2.5 s and back at 4.5; place 0's step under way then does not count."""
    plan = Schedule((0, 1), (Change(2.5, 1, comes=False), Change(4.5, 1, comes=True)), 10.0)
    survivor = diary("100 r 0", *steps(1, 2), "103.5 s 3", "104.5 s 4")
    lost, newcomer = diary("100 r 0", *steps(1, 2)), diary("106 r 4", "108 s 5")
    lives = spot.lives_of([(0, survivor), (1, lost), (1, newcomer)])
    found = spot.figures(lives, plan, BEGAN_S, 60.0, STEP_S)

    assert found["possible"] == 10 + 2.5 + 5.5
    assert (found["done"], found["useful"]) == (7, 7)
    assert found["after_loss_s"] == [pytest.approx(2.0)]
    assert found["after_return_s"] == [pytest.approx(3.5)]


def test_rarer_changes_cost_so_much_less() -> None:
    found = {"useful": 60.0, "possible": 100.0, "quiet_share": 0.8}

    assert spot.at_own_pace(found, 1) == pytest.approx(0.6)
    assert spot.at_own_pace(found, 20) == pytest.approx(0.79)

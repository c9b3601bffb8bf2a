"""The number of lanes: a pure rule, tried on paths that are only a curve of goodput over lanes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.collectives.links.lane_count import (
    COUNT_MAX,
    WAIT_S_MAX,
    LaneCount,
    LaneTrials,
    Sample,
)

Curve = Callable[[int], float]
FAR_S = 0.1
STEP_S = 0.1  # between two words of the other side


def fills(line: float, lane: float) -> Curve:
    """Return a curve on which each lane carries the same, until the line is full."""
    return lambda count: min(line, lane * count)


class Path:
    """A link that is busy all the time, or as told, and opens lanes at once."""

    def __init__(
        self, count: LaneCount, curve: Curve, noise: float = 0.0, rtt_s: float = FAR_S
    ) -> None:
        self.count, self.curve, self.noise, self.rtt_s = count, curve, noise, rtt_s
        self.rng = random.Random(0)
        self.now_s = 0.0
        self.carried = 0.0
        self.others = 0.0  # what the node's other links carried
        self.history: list[int] = []
        self.opens = True
        self.lanes = count.wanted

    def run(self, seconds: float, *, busy: bool = True) -> int:
        for _ in range(round(seconds / STEP_S)):
            self.now_s += STEP_S
            rate = self.curve(self.lanes) if busy else 0.0
            self.carried += rate * STEP_S * max(0.0, self.rng.gauss(1, self.noise))
            sample = Sample(self.now_s, int(self.carried), self.lanes, busy, int(self.others))
            wanted = self.count.sample(sample, self.rtt_s)
            if self.opens:
                self.lanes = wanted
            self.history.append(wanted)
        return self.count.wanted

    def share_at(self, count: int, last: int) -> float:
        return self.history[-last:].count(count) / last


@pytest.mark.parametrize(("lane", "best"), [(1e6, 16), (2e6, 8), (3e6, 8), (5e6, 4), (20e6, 2)])
def test_lanes_are_added_until_the_line_is_full(lane: float, best: int) -> None:
    path = Path(LaneCount(), fills(16e6, lane))
    path.run(100)
    assert path.share_at(best, 600) > 0.7


def test_the_climb_takes_some_windows_only() -> None:
    path = Path(LaneCount(), fills(100e6, 1e6))
    assert path.run(25) == COUNT_MAX


def test_a_path_on_which_more_lanes_carry_less_keeps_the_first() -> None:
    path = Path(LaneCount(), lambda count: 10e6 / count)
    path.run(300)
    assert path.share_at(2, 2_900) > 0.9


def test_what_is_not_worth_it_is_tried_ever_more_rarely() -> None:
    path = Path(LaneCount(), lambda _count: 10e6)
    path.run(10_000)
    changes = [b != a for a, b in zip(path.history, path.history[1:], strict=False)]
    assert 2 < sum(changes[: len(changes) // 10]) < 40
    assert sum(changes[-int(2 * WAIT_S_MAX / STEP_S) :]) <= 4


def test_when_the_path_gets_worse_lanes_are_added_later() -> None:
    path = Path(LaneCount(), fills(20e6, 20e6))
    path.run(30)
    assert path.count.wanted == 2
    path.curve = fills(20e6, 2e6)
    path.run(120)
    assert path.share_at(16, 300) + path.share_at(8, 300) > 0.7


def test_when_few_lanes_are_enough_the_others_are_closed() -> None:
    path = Path(LaneCount(), fills(16e6, 1e6))
    assert path.run(25) == 16
    path.curve = fills(16e6, 16e6)
    path.run(120)
    assert path.share_at(2, 300) > 0.7


def test_over_a_short_path_nothing_is_tried() -> None:
    path = Path(LaneCount(), fills(1e9, 1e6), rtt_s=0.001)
    assert {path.run(60) for _ in range(3)} == {2}


def test_only_busy_time_counts_and_it_adds_up_over_rounds() -> None:
    path = Path(LaneCount(), fills(100e6, 1e6))
    for _round in range(100):
        path.run(0.5)
        path.run(20, busy=False)
    assert path.count.wanted > 2
    idle = Path(LaneCount(), fills(100e6, 1e6))
    assert idle.run(1_000, busy=False) == 2


def test_lanes_that_cannot_be_opened_are_given_up() -> None:
    path = Path(LaneCount(), fills(100e6, 1e6))
    path.opens = False
    path.run(8)
    assert path.count.wanted == 4
    path.run(11)
    assert path.count.wanted == 2


def test_a_fixed_number_stays() -> None:
    path = Path(LaneCount(3, 3), fills(100e6, 1e6))
    assert path.run(100) == 3


@given(
    line=st.floats(1e5, 1e9),
    lane_share=st.floats(0.02, 2.0),
    noise=st.floats(0.0, 0.5),
    rtt_s=st.floats(0.0, 0.2),
    first=st.integers(1, 8),
    extra=st.integers(0, 60),
    seed=st.integers(0, 10),
)
def test_whatever_is_measured_the_number_stays_in_its_bounds_and_ends_well(
    line: float, lane_share: float, noise: float, rtt_s: float, first: int, extra: int, seed: int
) -> None:
    curve = fills(line, line * lane_share)
    count = LaneCount(first, first + extra)
    path = Path(count, curve, noise, rtt_s)
    path.rng.seed(seed)
    path.run(400)
    assert all(first <= wanted <= first + extra for wanted in path.history)
    if rtt_s >= 0.002 and noise < 0.2:
        best = max(curve(n) for n in range(first, first + extra + 1))
        settled = [curve(n) for n in path.history[-1_000:]]
        # A doubling that brings less than a tenth is not taken; trials cost something, too.
        assert sum(settled) / len(settled) > 0.7 * best


# ---------------------------------------------------------------- links that share a line


def run_side_by_side(lane: float, line: float, trials: LaneTrials) -> list[Path]:
    """Three links for 200 s; of a full line each gets as much as it has lanes."""
    paths = [Path(LaneCount(trials=trials), fills(line, lane), noise=0.02) for _ in range(3)]
    for _step in range(round(200 / STEP_S)):
        total = sum(path.lanes for path in paths)
        for path in paths:
            rate = min(lane * path.lanes, line * path.lanes / total)
            path.curve = lambda _count, rate=rate: rate  # type: ignore[misc]
            path.others = sum(other.carried for other in paths if other is not path)
            path.run(STEP_S)
    return paths


def test_lanes_that_only_take_from_the_nodes_other_links_are_not_kept() -> None:
    for path in run_side_by_side(lane=20e6, line=10e6, trials=LaneTrials()):
        assert path.share_at(2, 1_900) > 0.8


def test_links_that_all_gain_by_more_lanes_get_them_one_after_the_other() -> None:
    paths = run_side_by_side(lane=1e6, line=1e9, trials=LaneTrials())
    assert all(path.count.wanted >= 8 for path in paths)


def test_a_link_that_is_lost_lets_others_try() -> None:
    trials = LaneTrials()
    first = Path(LaneCount(trials=trials), fills(100e6, 1e6))
    first.run(6)
    assert trials.by is first.count
    second = Path(LaneCount(trials=trials), fills(100e6, 1e6))
    assert second.run(20) == 2
    first.count.end_trial()
    assert second.run(20) > 2

"""The number of lanes: a pure rule, tried on paths whose lanes and line carry what they carry."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.collectives.links.lane_count import COUNT_FIRST, COUNT_MAX, HOLD_S, LaneCount, Sample

FAR_S = 0.1
STEP_S = 0.1  # between two words of the other side


class Path:
    """A link whose lanes carry so much each, over a line that carries so much in all."""

    def __init__(self, count: LaneCount, line: float, lane: float, rtt_s: float = FAR_S) -> None:
        self.count, self.line, self.lane, self.rtt_s = count, line, lane, rtt_s
        self.rng, self.noise = random.Random(0), 0.0
        self.now_s = self.carried = 0.0
        self.blind = False  # a line with hardly a queue: that it is full is not seen
        self.opens = True
        self.lanes = count.wanted
        self.history: list[int] = []

    def run(self, seconds: float, *, busy: bool = True) -> int:
        for _ in range(round(seconds / STEP_S)):
            self.now_s += STEP_S
            could = self.lane * self.lanes
            rate = min(self.line, could) if busy else 0.0
            self.carried += rate * STEP_S * max(0.0, self.rng.gauss(1, self.noise))
            room = self.blind or could < 0.9 * self.line
            sample = Sample(self.now_s, int(self.carried), self.lanes, busy, room)
            wanted = self.count.sample(sample, self.rtt_s)
            if self.opens:
                self.lanes = wanted
            self.history.append(wanted)
        return self.count.wanted


@pytest.mark.parametrize(("lane", "least", "most"), [(1e6, 15, 24), (3e6, 5, 8), (20e6, 2, 2)])
def test_lanes_are_added_until_the_line_is_full(lane: float, least: int, most: int) -> None:
    assert least <= Path(LaneCount(), 16e6, lane).run(100) <= most


def test_the_climb_takes_seconds() -> None:
    assert Path(LaneCount(), 100e6, 1e6).run(12) == COUNT_MAX


def test_when_the_path_gets_worse_lanes_are_added_later() -> None:
    path = Path(LaneCount(), 20e6, 20e6)
    assert path.run(30) == COUNT_FIRST
    path.lane = 2e6
    assert path.run(30) >= 9


def test_where_more_lanes_carry_no_more_few_are_added_and_seldom() -> None:
    """The line is full, but nothing shows it: packets that are too many are lost at once."""
    path = Path(LaneCount(), 10e6, 20e6)
    path.blind = True
    assert path.run(HOLD_S / 2) == 3
    assert path.run(3 * HOLD_S) <= 12
    changes = [b - a for a, b in zip(path.history, path.history[1:], strict=False) if a != b]
    assert len(changes) <= 5


def test_over_a_short_path_none_are_added() -> None:
    assert Path(LaneCount(), 1e9, 1e6, rtt_s=0.001).run(60) == COUNT_FIRST


def test_only_busy_time_counts() -> None:
    path = Path(LaneCount(), 100e6, 1e6)
    for _round in range(20):
        path.run(4)
        path.run(20, busy=False)
    assert path.count.wanted == COUNT_MAX
    assert Path(LaneCount(), 100e6, 1e6).run(1_000, busy=False) == COUNT_FIRST


def test_while_lanes_cannot_be_opened_no_more_are_wanted() -> None:
    path = Path(LaneCount(), 100e6, 1e6)
    path.opens = False
    assert path.run(60) == 3


def test_many_links_of_a_node_share_a_limit() -> None:
    count = LaneCount()
    now_s = carried = 0.0
    for _ in range(1_000):
        now_s, carried = now_s + STEP_S, carried + 1e5 * count.wanted
        count.sample(Sample(now_s, int(carried), count.wanted, True, True), FAR_S, link_count=6)
    assert count.wanted == 8


def test_a_fixed_number_stays() -> None:
    count = LaneCount(3, 3)
    count.begin(0.3, 1)
    assert Path(count, 100e6, 1e6).run(100) == 3


@pytest.mark.parametrize(
    ("rtt_s", "links", "first"),
    [(0.3, 1, 18), (0.1, 3, 6), (0.1, 50, 2), (0.02, 1, 12), (0.006, 2, 3), (0.001, 1, 2)],
)
def test_longer_paths_begin_with_more_lanes_and_links_share_them(
    rtt_s: float, links: int, first: int
) -> None:
    count = LaneCount()
    count.begin(rtt_s, links)
    assert count.wanted == first


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
    path = Path(LaneCount(first, first + extra), line, line * lane_share, rtt_s)
    path.rng.seed(seed)
    path.noise = noise
    path.run(400)
    assert all(first <= wanted <= first + extra for wanted in path.history)
    assert all(b >= a for a, b in zip(path.history, path.history[1:], strict=False))
    if rtt_s >= 0.005 and noise < 0.05:
        reached = min(1.0, lane_share * path.count.wanted)
        assert reached >= 0.9 * min(1.0, lane_share * (first + extra))

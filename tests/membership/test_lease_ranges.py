"""Sets of positions as ranges, against plain sets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from holdfast.membership.shared.lease_ranges import RangeSet

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)


def plain(ranges: list[tuple[int, int]]) -> set[int]:
    return {each for start, stop in ranges for each in range(start, stop)}


def same(ranges: RangeSet, expected: set[int]) -> None:
    found = list(ranges)
    assert plain(found) == expected
    assert all(start < stop for start, stop in found)
    assert all(before[1] < after[0] for before, after in pairwise(found))
    assert ranges.count == len(expected)


@given(RANGES, RANGES)
def test_sets_of_ranges_are_sets(
    some: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    one, two = RangeSet(some), RangeSet(others)
    same(one, plain(some))
    same(one | two, plain(some) | plain(others))
    same(one & two, plain(some) & plain(others))
    same(one - two, plain(some) - plain(others))


@given(RANGES, st.integers(0, 30), st.integers(1, 5))
def test_the_lowest_are_taken(some: list[tuple[int, int]], count: int, ranges_max: int) -> None:
    left, all_of = RangeSet(some), plain(some)
    taken = plain(left.take(count, ranges_max))
    assert taken <= all_of
    same(left, all_of - taken)
    assert len(taken) <= count
    assert not taken or max(taken) < min(all_of - taken, default=99)


@given(RANGES)
def test_the_prefix_ends_at_the_first_gap(some: list[tuple[int, int]]) -> None:
    there = plain(some)
    assert RangeSet(some).prefix_stop() == next(n for n in range(99) if n not in there)

"""Sets of positions, kept as ranges: what is leased, spent or free of a run's data.

A position is a place in the run's endless order of samples: position ``epoch * length + place`` is
the ``place``-th sample of that epoch (see ``diloco.permutation``). Sets of millions of positions
are a few ranges.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from ...protocol.messages import ORDER_KEY_BYTES, LeaseRange


def order_key(run_id: str, seed: int) -> bytes:
    """Return the key of a run's order of samples."""
    return hashlib.blake2b(f"{run_id}\0{seed}".encode(), digest_size=ORDER_KEY_BYTES).digest()


class RangeSet:
    """A set of whole numbers, as sorted ranges that do not touch each other.

    Adding and removing a range costs a search and the ranges that it touches.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add(start, stop)

    @classmethod
    def of(cls, leases: Iterable[LeaseRange]) -> RangeSet:
        return cls((each.start, each.stop) for each in leases)

    def leases(self) -> tuple[LeaseRange, ...]:
        return tuple(LeaseRange(start, stop) for start, stop in self)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._stops, strict=True))

    def __len__(self) -> int:
        """Return the number of ranges, not of positions."""
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RangeSet) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RangeSet({list(self)})"

    @property
    def count(self) -> int:
        """The number of positions."""
        return sum(self._stops) - sum(self._starts)

    def add(self, start: int, stop: int) -> None:
        """Add the positions from ``start`` up to ``stop``, which is not included."""
        if start >= stop:
            return
        first = bisect_left(self._stops, start)  # a range that ends at ``start`` is joined
        last = bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def discard(self, start: int, stop: int) -> None:
        """Remove these positions, as far as they are in the set."""
        first = bisect_right(self._stops, start)
        last = bisect_left(self._starts, stop)
        if start >= stop or first >= last:
            return
        left, right = self._starts[first], self._stops[last - 1]
        kept = [pair for pair in ((left, start), (stop, right)) if pair[0] < pair[1]]
        self._starts[first:last] = [pair[0] for pair in kept]
        self._stops[first:last] = [pair[1] for pair in kept]

    def update(self, other: Iterable[tuple[int, int]]) -> None:
        for start, stop in list(other):
            self.add(start, stop)

    def subtract(self, other: Iterable[tuple[int, int]]) -> None:
        for start, stop in list(other):
            self.discard(start, stop)

    def __and__(self, other: RangeSet) -> RangeSet:
        common = RangeSet()
        for start, stop in self:
            index = bisect_right(other._stops, start)
            while index < len(other) and other._starts[index] < stop:
                common.add(max(start, other._starts[index]), min(stop, other._stops[index]))
                index += 1
        return common

    def __or__(self, other: RangeSet) -> RangeSet:
        joined = RangeSet(self)
        joined.update(other)
        return joined

    def __sub__(self, other: RangeSet) -> RangeSet:
        left = RangeSet(self)
        left.subtract(other)
        return left

    def take(self, count: int, ranges_max: int) -> list[tuple[int, int]]:
        """Remove the lowest positions, up to so many in up to so many ranges, and return them."""
        taken: list[tuple[int, int]] = []
        while count > 0 and self._starts and len(taken) < ranges_max:
            start = self._starts[0]
            stop = min(self._stops[0], start + count)
            taken.append((start, stop))
            self.discard(start, stop)
            count -= stop - start
        return taken

    def count_in(self, start: int, stop: int) -> int:
        """Return how many of the positions from ``start`` up to ``stop`` are in the set."""
        return (self & RangeSet([(start, stop)])).count

    def prefix_stop(self) -> int:
        """Return the first position from 0 on that is not in the set."""
        return self._stops[0] if self._starts and self._starts[0] == 0 else 0

"""What the journal knows of leases: which positions are spent, and how far leases may have been
given.

Which peer holds which lease is not recorded: peers tell it to the next master. So a lease costs no
record, and a commit's record names the ranges that its contributors trained on, a few for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from attrs import Factory, define

from ....protocol.errors import LocalProtocolError
from ....protocol.messages import LeaseRange
from ...shared.lease_ranges import RangeSet


@define
class LeaseHistory:
    """The run's data as the records tell it."""

    length: int = 0  # samples of the data set; 0: no sampler has told it yet
    spent: RangeSet = Factory(RangeSet)  # positions whose samples are in committed rounds
    reserved: int = 0  # no position from this one on was ever leased
    # What the last commits spent, oldest first; as long as the history's trail.
    trail: deque[tuple[LeaseRange, ...]] = Factory(deque)

    def know(self, length: int) -> None:
        """Take the length of the data set; raises LocalProtocolError if it is known already."""
        if self.length:
            raise LocalProtocolError("the length of the data set was recorded twice")
        self.length = length

    def spend(self, ranges: Iterable[LeaseRange]) -> None:
        """Note what a commit spends.

        Raises:
          LocalProtocolError: a position is spent already, or was never leased.
        """
        spent = RangeSet.of(ranges)
        if (spent & self.spent).count:
            raise LocalProtocolError(f"leases are spent twice: {list(spent & self.spent)}")
        if any(stop > self.reserved for _start, stop in spent):
            raise LocalProtocolError("a commit spends positions that were never leased")
        self.spent.update(spent)
        self.trail.append(spent.leases())

    def undo(self) -> None:
        """Forget what the last commit spent: the run goes back to the state before it."""
        if self.trail:
            self.spent.subtract(RangeSet.of(self.trail.pop()))

    @property
    def epoch(self) -> int:
        """The first epoch of which not every sample is in committed work."""
        return self.spent.prefix_stop() // self.length if self.length else 0

    def spent_in(self, epoch: int) -> int:
        """Return how many samples of an epoch are in committed work."""
        return self.spent.count_in(epoch * self.length, (epoch + 1) * self.length)

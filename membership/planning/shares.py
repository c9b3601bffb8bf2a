"""The share of a result that each contributor should own, so that a reduction ends soonest.

Every contributor sends each chunk to its owner; the owner adds up and sends the result to every
receiver. With ``n`` contributors, ``r`` receivers, contributions of ``S_up`` bytes, a result of
``S_down`` bytes and an owner's share ``w``, that owner moves

    up    S_up   (1 - w) + S_down (r - 1) w
    down  S_down (1 - w) + S_up   (n - 1) w

and a member that only receives takes ``S_down``. Each owner's load depends on its own share alone,
so the least time T in which every line moves what it must is found by bisection: the shares that
fit into T must add up to 1. For ``S_up = S_down = S``, equal up and down rates b, and contributors
only (n > 2), that is the weighted butterfly

    T* = S * max(1 / min b, 2 (n - 1) / sum b),    w_i  proportional to  max(0, b_i T* / S - 1)

A pair of members with a limit of its own (a relayed one) carries the sender's results and its
contribution to the receiver's chunks. So that the two shares do not depend on each other, each may
be as large as if the other were, too. Nearly all such plans lose nothing by that.

No shares can beat ``bound_s``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import Factory, evolve, frozen

from ...protocol.errors import HoldfastError
from .bandwidth import Bandwidth

BISECTIONS = 60  # halvings of an interval: exact to the last bits of a float
ROUNDING = 1e-12  # relative error of sums of floats
UNEQUAL_GAIN_MIN = 1.1  # shares are equal unless the best ones are faster by this factor

# One direction of a line: its speed, the bytes of a member without any share, and the bytes that a
# share of 1 adds.
Direction = tuple[float, float, float]


class NoReachableOwnerError(HoldfastError):
    """No contributor can be reached by all other members. Plan with fewer or other members."""


@frozen
class Workload:
    """One reduction and the lines it runs over.

    Members are numbers: contributors from 0 in order of member number, then the other receivers.

    Attributes:
      rates: of all members.
      contributor_count: the first members, which contribute.
      up_bytes: one whole contribution on the wire.
      down_bytes: the whole result on the wire.
      pair_limits: bytes per second from one member to another, where that is less than their lines;
        0: the first cannot send to the second.
      delay_s: the longest one-way delay between two members.
    """

    rates: tuple[Bandwidth, ...]
    contributor_count: int
    up_bytes: float
    down_bytes: float
    pair_limits: Mapping[tuple[int, int], float] = Factory(dict)
    delay_s: float = 0.0

    @property
    def contributor_rates(self) -> tuple[Bandwidth, ...]:
        return self.rates[: self.contributor_count]

    def barred(self) -> set[int]:
        """Return the contributors that can own nothing, as some link to or from them is missing."""
        count = self.contributor_count
        barred: set[int] = set()
        for pair, limit in self.pair_limits.items():
            if limit <= 0 and pair[0] < count:  # members that only receive send nothing
                barred.update(member for member in pair if member < count)
        return barred


# ---------------------------------------------------------------- what shares cost


def reduction_s(work: Workload, own_up: Sequence[float], own_down: Sequence[float]) -> float:
    """Return when the busiest line is done, by the bytes that each contributor owns, each way."""
    count, receivers = work.contributor_count, len(work.rates)
    slowest = 0.0
    for member, rate in enumerate(work.rates):
        if member < count:
            sent = work.up_bytes - own_up[member] + (receivers - 1) * own_down[member]
            received = work.down_bytes - own_down[member] + (count - 1) * own_up[member]
            slowest = max(slowest, sent / rate.up_bytes_per_s, received / rate.down_bytes_per_s)
        else:
            slowest = max(slowest, work.down_bytes / rate.down_bytes_per_s)
    for (sender, receiver), limit in work.pair_limits.items():
        if sender < count:
            carried = own_down[sender] + (own_up[receiver] if receiver < count else 0.0)
            if carried > 0:
                slowest = max(slowest, carried / limit if limit > 0 else math.inf)
    return slowest + (2 * work.delay_s if receivers > 1 else 0.0)


def shares_s(work: Workload, shares: Sequence[float]) -> float:
    """Return ``reduction_s`` for shares of the whole."""
    return reduction_s(
        work,
        [share * work.up_bytes for share in shares],
        [share * work.down_bytes for share in shares],
    )


def bound_s(work: Workload) -> float:
    """Return a lower bound on the time of any plan in which every chunk has one owner.

    Each line must carry at least what its member sends and receives with any shares, and all lines
    together every contribution that is not its owner's, and every result. With ``S_up = S_down =
    S`` and contributors only, for n > 2:

        S * max(max 1/u_i, max 1/d_i, 2 (n - 1) / sum u_i, 2 (n - 1) / sum d_i) + 2 delays
    """
    count, receivers = work.contributor_count, len(work.rates)
    if receivers == 1:
        return 0.0
    others, up, down = receivers - 1, work.up_bytes, work.down_bytes
    ups = [rate.up_bytes_per_s for rate in work.contributor_rates]
    downs = [rate.down_bytes_per_s for rate in work.contributor_rates]
    least_sent = min(up, others * down) if count > 1 else others * down
    least_received = min(down, (count - 1) * up)
    listening = [down / rate.down_bytes_per_s for rate in work.rates[count:]]
    return (
        max(
            least_sent / min(ups),
            least_received / min(downs),
            ((count - 1) * up + others * down) / sum(ups),
            (count - 1) * (up + down) / sum(downs),
            *listening,
        )
        + 2 * work.delay_s
    )


# ---------------------------------------------------------------- the best shares


def best_shares(work: Workload) -> list[float]:
    """Return the best shares, adding up to 1; raise NoReachableOwnerError if none can own."""
    barred = work.barred()
    count = work.contributor_count
    if len(barred) == count:
        raise NoReachableOwnerError("no contributor can be reached by all members of the round")
    if count == 1:
        return [1.0]
    lines = _directions(work)
    low_s = high_s = bound_s(work) - 2 * work.delay_s  # members that only receive are in it
    while (fitting := _fitting(lines, barred, high_s)) is None:
        low_s, high_s = high_s, 2 * high_s
    for _halving in range(BISECTIONS if low_s < high_s else 0):
        middle_s = (low_s + high_s) / 2
        found = _fitting(lines, barred, middle_s)
        if found is None:
            low_s = middle_s
        else:
            high_s, fitting = middle_s, found
    least, most = fitting
    spread = sum(most) - sum(least)
    part = (1 - sum(least)) / spread if spread > 0 else 0.0
    return _normalise([a + part * (b - a) for a, b in zip(least, most, strict=True)])


def chosen_shares(work: Workload, cautious: Sequence[Bandwidth] | None = None) -> list[float]:
    """Return equal shares, unless the best ones promise a reduction that is shorter by far.

    Rates are estimates. A plan that follows their errors is slower than equal shares are, so the
    promise is judged by ``cautious`` ones. Delays count: in a small round they are most of the
    time, whatever the shares. NoReachableOwnerError is raised if no contributor can own anything.
    """
    judged = evolve(work, rates=tuple(cautious or work.rates))
    equal = equal_shares(work)
    if shares_s(judged, equal) <= UNEQUAL_GAIN_MIN * shares_s(judged, best_shares(judged)):
        return equal
    return best_shares(work)


def equal_shares(work: Workload) -> list[float]:
    barred, count = work.barred(), work.contributor_count
    return [0.0 if member in barred else 1 / (count - len(barred)) for member in range(count)]


def _directions(work: Workload) -> list[list[Direction]]:
    """Return what limits each contributor's share."""
    receivers, count = len(work.rates), work.contributor_count
    up, down = work.up_bytes, work.down_bytes
    lines = [
        [
            (rate.up_bytes_per_s, up, (receivers - 1) * down - up),
            (rate.down_bytes_per_s, down, (count - 1) * up - down),
        ]
        for rate in work.contributor_rates
    ]
    for (sender, receiver), limit in work.pair_limits.items():
        if limit > 0 and sender < count:
            if receiver < count:
                lines[sender].append((limit, 0.0, up + down))
                lines[receiver].append((limit, 0.0, up + down))
            else:
                lines[sender].append((limit, 0.0, down))
    return lines


def _fitting(
    lines: Sequence[Sequence[Direction]], barred: set[int], seconds: float
) -> tuple[list[float], list[float]] | None:
    """Return each member's least and greatest share in that time; None if none add up to 1."""
    least, most = [], []
    for member, directions in enumerate(lines):
        low, high = 0.0, math.inf
        for speed, base, slope in directions:
            room = seconds * speed - base
            if abs(room) <= ROUNDING * base:
                room = 0.0
            if slope > 0:
                high = min(high, room / slope)
            elif slope < 0:  # with results this small an owner moves fewer bytes
                low = max(low, room / slope)
            elif room < 0:
                return None
        high = high if high < math.inf else 1.0
        if high < low or (member in barred and low > 0):
            return None
        least.append(low)
        most.append(0.0 if member in barred else high)
    if sum(least) > 1 + ROUNDING or sum(most) < 1 - ROUNDING:
        return None
    return least, most


def _normalise(shares: Sequence[float]) -> list[float]:
    """Scale shares to add up to 1, with values below 0 (from rounding) as 0."""
    positive = [max(0.0, share) for share in shares]
    total = sum(positive)
    return [share / total for share in positive]

"""Pairs of members in dispute: one reports that it cannot work with the other, and no third
confirms it. Pure.

No other member can tell which of the two is right: a line may be cut one way, and either may lie.
So neither is removed. For some time the two are *apart*: in a plan neither owns what the other
needs. Then they are paired again; if that fails again, they are apart for twice as long.

    one accuses the other --apart--> APART_DEADLINES, APART_ROUNDS --paired again--> it works
                              ^                                          |
                              '------------- twice as long --------------' it fails

Time alone would not do: where a round takes longer than that, the same two would fail each other in
every round. So the time is measured in rounds as well. For copies of the state time alone counts: a
round may be waiting for the member that copies, or the run may be paused.

A member that is apart from many others is what these pairs have in common. It is left out of
rounds, whichever of the two ends has accused. So a member that accuses all others excludes only
itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from attrs import define

APART_DEADLINES = 1.0  # the first time: until a dead member is known to be dead
# Each retry costs a part of a round, and a healed line may wait this long.
APART_DEADLINES_MAX = 8.0
APART_ROUNDS = 1  # the first time, planned while both are members
APART_ROUNDS_MAX = 8
FORGOTTEN_ROUNDS = 32
FORGOTTEN_DEADLINES = 32.0  # after being paired again: a later failure starts a new dispute
DISPUTES_MAX = 4_096  # honest runs have few; this bounds what false reports can add
QUARRELS_MIN = 2  # fewer disputes do not show which end to leave out

Ends = tuple[str, str]


def ends_of(one: str, other: str) -> Ends:
    return (one, other) if one < other else (other, one)


@define
class Dispute:
    """A dispute between two members."""

    until_s: float  # the time until which they are apart
    lasts_s: float  # the length of that time, from the last accusation on
    lasts_rounds: int  # the rounds for which they are apart
    rounds: int = 0  # planned since the last accusation

    def is_fresh(self, now_s: float) -> bool:
        return now_s < self.until_s

    def is_apart(self, now_s: float) -> bool:
        return self.is_fresh(now_s) or self.rounds < self.lasts_rounds

    def is_forgotten(self, now_s: float, forgotten_s: float) -> bool:
        """Return whether a failure now starts a new dispute."""
        since = self.rounds - self.lasts_rounds
        return now_s >= self.until_s + forgotten_s and since >= FORGOTTEN_ROUNDS


class Disputes:
    """The pairs in dispute; one object per master."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._disputes: dict[Ends, Dispute] = {}

    def note(self, one: str, other: str, now_s: float) -> float:
        """Note that one accuses the other; return for how many seconds they are apart."""
        before = self._disputes.pop(ends_of(one, other), None)
        lasts_s, rounds = APART_DEADLINES * self._deadline_s, APART_ROUNDS
        forgotten_s = FORGOTTEN_DEADLINES * self._deadline_s
        if before is not None and not before.is_forgotten(now_s, forgotten_s):
            factor = 1 if before.is_apart(now_s) else 2
            lasts_s = min(factor * before.lasts_s, APART_DEADLINES_MAX * self._deadline_s)
            rounds = min(factor * before.lasts_rounds, APART_ROUNDS_MAX)
        self._disputes[ends_of(one, other)] = Dispute(now_s + lasts_s, lasts_s, rounds)
        if len(self._disputes) > DISPUTES_MAX:
            del self._disputes[next(iter(self._disputes))]
        return lasts_s

    def apart(self, one: str, other: str, now_s: float) -> bool:
        """Return whether two members are apart."""
        dispute = self._disputes.get(ends_of(one, other))
        return dispute is not None and dispute.is_apart(now_s)

    def fresh(self, one: str, other: str, now_s: float) -> bool:
        """Return whether two members are apart by time."""
        dispute = self._disputes.get(ends_of(one, other))
        return dispute is not None and dispute.is_fresh(now_s)

    def planned(self, peers: Collection[str]) -> None:
        """Count a round that is planned while these are members, whether or not they take part."""
        for ends, dispute in self._disputes.items():
            if ends[0] in peers and ends[1] in peers:
                dispute.rounds += 1

    def pairs(self, inside: Collection[str], now_s: float) -> Iterator[Ends]:
        """Yield the pairs among these peers that are apart."""
        for ends, dispute in self._disputes.items():
            if dispute.is_apart(now_s) and ends[0] in inside and ends[1] in inside:
                yield ends

    def counts(self, inside: Iterable[str], now_s: float) -> Counter[str]:
        """Return from how many of these peers each of them is apart."""
        found = Counter(dict.fromkeys(inside, 0))
        for ends in self.pairs(found, now_s):
            found.update(ends)
        return found

    def quarrelsome(self, contributors: Sequence[str], now_s: float) -> list[str]:
        """Return the contributors to leave out: apart from two others, and from at least half."""
        left, out = list(contributors), list[str]()
        while True:
            counts = self.counts(left, now_s)
            worst = max(left, key=lambda peer: counts[peer], default=None)
            if worst is None or counts[worst] < max(QUARRELS_MIN, (len(left) - 1) / 2):
                return out
            out.append(worst)
            left.remove(worst)

"""Pairs of members that disagree: one says that it cannot work with the other, and nobody joins in. Pure.

Which of the two is right nobody else can tell: a line may be cut one way, and either may lie. So neither is
removed. For some time the two are *apart*: a plan has neither of them own what the other needs. Then it is
tried again; what goes wrong again lasts twice as long.

    one accuses the other --apart--> APART_DEADLINES --tried again--> it works
                              ^                            |
                              '------ twice as long -------' it does not

Who is apart from many is the one whom these pairs have in common: it is left out of rounds, whichever of
the two ends has spoken. So who accuses everybody shuts out nobody but itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from attrs import define

APART_DEADLINES = 1.0  # the first time: as long as it takes until the dead are known to be dead
APART_DEADLINES_MAX = 8.0  # each try costs a part of a round, and a healed line may wait so long
FORGOTTEN_DEADLINES = 32.0  # after it was tried again: what goes wrong then is another matter
# Pairs of which a round's plan knows that they are apart are few; this bounds what liars can note.
DISPUTES_MAX = 4_096
QUARRELS_MIN = 2  # fewer say nothing about which end is the one to be left out

Ends = tuple[str, str]


def ends_of(one: str, other: str) -> Ends:
    return (one, other) if one < other else (other, one)


@define
class Dispute:
    """Between two members.

    Attributes:
      until_s: so long they are apart.
      lasts_s: how long that was, from the word that began it.
    """

    until_s: float
    lasts_s: float


class Disputes:
    """One per master."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._disputes: dict[Ends, Dispute] = {}

    def note(self, one: str, other: str, now_s: float) -> float:
        """One of the two says it of the other; returns for how long they are apart now."""
        before = self._disputes.pop(ends_of(one, other), None)
        lasts_s = APART_DEADLINES * self._deadline_s
        if before is not None and now_s < before.until_s + FORGOTTEN_DEADLINES * self._deadline_s:
            longest_s = APART_DEADLINES_MAX * self._deadline_s
            lasts_s = before.lasts_s if now_s < before.until_s else 2 * before.lasts_s
            lasts_s = min(lasts_s, longest_s)
        self._disputes[ends_of(one, other)] = Dispute(now_s + lasts_s, lasts_s)
        if len(self._disputes) > DISPUTES_MAX:
            del self._disputes[next(iter(self._disputes))]
        return lasts_s

    def apart(self, one: str, other: str, now_s: float) -> bool:
        dispute = self._disputes.get(ends_of(one, other))
        return dispute is not None and now_s < dispute.until_s

    def pairs(self, inside: Collection[str], now_s: float) -> Iterator[Ends]:
        """Those of these that are apart."""
        for ends, dispute in self._disputes.items():
            if now_s < dispute.until_s and ends[0] in inside and ends[1] in inside:
                yield ends

    def counts(self, inside: Iterable[str], now_s: float) -> Counter[str]:
        """From how many of these each is apart."""
        found = Counter(dict.fromkeys(inside, 0))
        for ends in self.pairs(found, now_s):
            found.update(ends)
        return found

    def quarrelsome(self, contributors: Sequence[str], now_s: float) -> list[str]:
        """Whom to leave out: who is apart from at least half of the others, and from two of them."""
        left, out = list(contributors), list[str]()
        while True:
            counts = self.counts(left, now_s)
            worst = max(left, key=lambda peer: counts[peer], default=None)
            if worst is None or counts[worst] < max(QUARRELS_MIN, (len(left) - 1) / 2):
                return out
            out.append(worst)
            left.remove(worst)

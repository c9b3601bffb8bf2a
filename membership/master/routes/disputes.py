"""Pairs of members that disagree: one says that it cannot work with the other, and nobody joins in. Pure.

Which of the two is right nobody else can tell: a line may be cut one way, and either may lie. So neither is
removed. For some time the two are *apart*: a plan has neither of them own what the other needs. Then it is
tried again; what goes wrong again lasts twice as long.

    one accuses the other --apart--> APART_DEADLINES, APART_ROUNDS --tried again--> it works
                              ^                                         |
                              '------------- twice as long -------------' it does not

Time alone would not do: where a round takes longer than all that, the same two would fail each other in every
one. So it is measured in rounds as well.

Who is apart from many is the one whom these pairs have in common: it is left out of rounds, whichever of
the two ends has spoken. So who accuses everybody shuts out nobody but itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from attrs import define

APART_DEADLINES = 1.0  # the first time: as long as it takes until the dead are known to be dead
APART_DEADLINES_MAX = 8.0  # each try costs a part of a round, and a healed line may wait so long
APART_ROUNDS = 1  # the first time, planned while both are members
APART_ROUNDS_MAX = 8
FORGOTTEN_ROUNDS = 32
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
      lasts_rounds: and for how many rounds.
      rounds: planned since that word.
    """

    until_s: float
    lasts_s: float
    lasts_rounds: int
    rounds: int = 0

    def is_apart(self, now_s: float) -> bool:
        return now_s < self.until_s or self.rounds < self.lasts_rounds

    def is_forgotten(self, now_s: float, forgotten_s: float) -> bool:
        """Whether what goes wrong now is another matter."""
        since = self.rounds - self.lasts_rounds
        return now_s >= self.until_s + forgotten_s and since >= FORGOTTEN_ROUNDS


class Disputes:
    """One per master."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._disputes: dict[Ends, Dispute] = {}

    def note(self, one: str, other: str, now_s: float) -> float:
        """One of the two says it of the other; returns for how long they are apart now."""
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
        dispute = self._disputes.get(ends_of(one, other))
        return dispute is not None and dispute.is_apart(now_s)

    def planned(self, peers: Collection[str]) -> None:
        """A round is planned while these are members, whether or not they take part."""
        for ends, dispute in self._disputes.items():
            if ends[0] in peers and ends[1] in peers:
                dispute.rounds += 1

    def pairs(self, inside: Collection[str], now_s: float) -> Iterator[Ends]:
        """Those of these that are apart."""
        for ends, dispute in self._disputes.items():
            if dispute.is_apart(now_s) and ends[0] in inside and ends[1] in inside:
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

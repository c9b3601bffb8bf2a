"""Accusations between the members of one attempt, as data; ``accusations`` weighs them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from attrs import Factory, define


@define
class Blame:
    """Members that others cannot reach, or wait for in vain, and those that say so."""

    receivers: tuple[str, ...]  # of the attempt's order; only they may accuse
    lost: Mapping[str, str]  # of the attempt: what they say, and what is said of them, is void
    accusers: dict[str, set[str]] = Factory(dict)  # by accused member
    since_s: float = math.inf  # time of the first accusation
    ended: set[str] = Factory(set)  # accusers of a bad update; they have nothing to repair with
    vain: dict[str, set[str]] = Factory(dict)  # by accused: members that wait over a working link

    def accuse(self, peer: str, accuser: str, now_s: float) -> None:
        """Note that a member cannot reach a peer that it needs, unless that peer is lost."""
        if peer not in self.lost:
            self.accusers.setdefault(peer, set()).add(accuser)
            self.since_s = min(self.since_s, now_s)

    def wait_in_vain(self, peer: str, accusers: set[str], now_s: float) -> None:
        """Note that members wait for a peer to which they have a working link."""
        self.vain[peer] = accusers
        for accuser in accusers:
            self.accuse(peer, accuser, now_s)

    def accused(self) -> list[str]:
        """Return the members that the attempt has not lost and that members in it accuse."""
        return [p for p in self.accusers if p not in self.lost and self.against(p, {})]

    def most_accused(self, without: Mapping[str, Collection[str]]) -> str | None:
        """Return the member with the most accusers; of equals, the last in the attempt.

        Args:
          without: by peer, the members that report having no link to it. They count in addition to
            accusers of this attempt, but not alone.
        """
        order = {peer: index for index, peer in enumerate(self.receivers)}
        counts = {peer: len(self.against(peer, without)) for peer in self.accused()}
        return max(counts, key=lambda p: (counts[p], order[p]), default=None)

    def against(self, peer: str, without: Mapping[str, Iterable[str]]) -> set[str]:
        """Return the accusers of a peer, without those that are lost themselves."""
        named = self.accusers.get(peer, set()).union(without.get(peer, ()))
        return named.intersection(self.receivers) - self.lost.keys()

    def accused_by(self, peer: str) -> list[str]:
        """Return the members that this peer accuses."""
        return [accused for accused, accusers in self.accusers.items() if peer in accusers]

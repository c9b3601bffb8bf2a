"""Who is at fault when an attempt does not get on, or ends in different results. Pure.

Whoever is alive can keep a contribution from an owner, or a result from a receiver, or give each receiver
another one. Nobody's connection breaks then, so nobody is accused. The master asks all who take part what
they wait for, and what they hold (``Diagnose``, ``Diagnosis``):

    lacks a contribution    of whom it should come from: that waits for nobody
    lacks a result          of its owner, unless that one lacks contributions itself
    holds another result    than the owner says that it gave, or than most hold if the owner does not say

Each of these is one member's word about another, and weighs as much as any such word: see ``course``. Who
names more than half of the others says something about itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from attrs import Factory, define

from ..protocol.messages import Diagnosis


@define
class Findings:
    """What answers come to.

    Attributes:
      against: by member, who says that it is at fault.
      lagging: members that wait for more than half of the others.
    """

    against: dict[str, set[str]] = Factory(dict)
    lagging: set[str] = Factory(set)

    @property
    def culprits(self) -> list[str]:
        """Of whom two or more say so."""
        return [peer for peer, accusers in self.against.items() if len(accusers) > 1]


def waiting(told: Mapping[str, Diagnosis], taking_part: Collection[str]) -> Findings:
    """Who holds up those that have not finished.

    Args:
      told: the answers.
      taking_part: who adds or owns, without the lost.
    """
    named: dict[str, set[str]] = {}
    for speaker, answer in told.items():
        lacked = set(answer.contributions)
        lacked |= {o for o in answer.results if o not in told or not told[o].contributions}
        named[speaker] = lacked.intersection(taking_part) - {speaker}
    return _weighed(named, len(taking_part) - 1)


def differing(told: Mapping[str, Diagnosis], taking_part: Collection[str]) -> Findings:
    """Whose results are not the same everywhere; arguments as for ``waiting``."""
    named: dict[str, set[str]] = {speaker: set() for speaker in told}
    holds = {
        speaker: {owned.owner: owned.digest for owned in answer.owned}
        for speaker, answer in told.items()
    }
    for owner in taking_part:
        digests = {speaker: held[owner] for speaker, held in holds.items() if owner in held}
        right = digests.get(owner) or _commonest(list(digests.values()))
        for speaker, digest in digests.items():
            if digest != right and speaker != owner:
                named[speaker].add(owner)
    return _weighed(named, len(taking_part) - 1)


def _commonest(digests: list[bytes]) -> bytes:
    """What more than one holds, and most do; empty: all hold something else."""
    found = Counter(digests).most_common(1)
    return found[0][0] if found and found[0][1] > 1 else b""


def _weighed(named: Mapping[str, set[str]], others_count: int) -> Findings:
    findings = Findings()
    for speaker in sorted(named):
        if others_count > 1 and 2 * len(named[speaker]) > others_count:
            findings.lagging.add(speaker)
            continue
        for peer in sorted(named[speaker]):
            findings.against.setdefault(peer, set()).add(speaker)
    return findings

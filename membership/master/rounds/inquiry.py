"""Who is at fault when an attempt does not get on, or ends in different results. Pure.

Whoever is alive can keep a contribution from an owner, or a result from a receiver, or give each receiver
another one. Nobody's connection breaks then, so nobody is accused. The master asks all who take part what
they wait for, and what they hold (``Diagnose``, ``Diagnosis``):

    lacks a contribution    of whom it should come from: that waits for nobody
    lacks a result          of its owner, unless that one lacks contributions itself
    holds another result    than its maker says that it gave, or than most hold if that one does not say

Each of these is one member's word about another, and weighs as much as any such word: see ``reduction_driver``. Who
names more than half of the others says something about itself.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Hashable, Mapping

from attrs import Factory, define

from ....protocol.messages import Diagnosis


class Question(enum.Enum):
    """Why everybody is asked; each once under one number of an attempt."""

    STALL = "nothing moves"
    LAG = "some have not finished long after the others"
    DIFFERENCE = "the results differ"


@define
class Inquiry:
    """One that is under way.

    Attributes:
      asked: who is to answer.
      began_s: when they were asked.
      told: what they have answered.
    """

    question: Question
    asked: tuple[str, ...]
    began_s: float
    told: dict[str, Diagnosis] = Factory(dict)


@define
class Findings:
    """What answers come to.

    Attributes:
      against: by member, who says that it is at fault.
    """

    against: dict[str, set[str]] = Factory(dict)

    def by_voice(self, voices: Mapping[str, Hashable]) -> Findings:
        """The same, where several that count as one voice have said one thing once."""
        heard: dict[str, set[str]] = {}
        for peer, accusers in self.against.items():
            each = {voices.get(accuser, accuser): accuser for accuser in sorted(accusers)}
            heard[peer] = set(each.values())
        return Findings(heard)

    @property
    def culprits(self) -> list[str]:
        """Of whom two or more say so."""
        return [peer for peer, accusers in self.against.items() if len(accusers) > 1]


def waiting(
    told: Mapping[str, Diagnosis], taking_part: Collection[str], done: Collection[str] = ()
) -> Findings:
    """Who holds up those that have not finished.

    Args:
      told: the answers.
      taking_part: who adds or owns, without the lost.
      done: who has reported a result, and so lacks nothing.
    """
    others_count = len(taking_part) - 1
    lacks = {
        speaker: set(answer.contributions).intersection(taking_part) - {speaker}
        for speaker, answer in told.items()
        if speaker not in done
    }
    # Whose own chunks wait for others, so that its results may.
    excused = {
        speaker for speaker, named in lacks.items() if named and not _most(named, others_count)
    }
    for speaker, named in lacks.items():
        named |= set(told[speaker].results).intersection(taking_part) - excused - {speaker}
    return _weighed(lacks, others_count)


def is_done(answer: Diagnosis) -> bool:
    """It lacks nothing, and is about to report."""
    return bool(answer.made) and not answer.contributions and not answer.results


def differing(told: Mapping[str, Diagnosis], makers: Collection[str]) -> Findings:
    """Whose results are not the same everywhere.

    Args:
      told: the answers.
      makers: who has added up anything; the lost, too, whose results others spread.
    """
    named: dict[str, set[str]] = {speaker: set() for speaker in told}
    holds = {
        speaker: {each.maker: each.digest for each in answer.made}
        for speaker, answer in told.items()
    }
    for maker in sorted(makers):
        digests = {speaker: held[maker] for speaker, held in holds.items() if maker in held}
        right = digests.get(maker) or _commonest(list(digests.values()))
        for speaker, digest in digests.items():
            if digest != right and speaker != maker:
                named[speaker].add(maker)
    return _weighed(named, len(makers) - 1)


def _commonest(digests: list[bytes]) -> bytes:
    """What more than one holds, and most do; empty: all hold something else."""
    found = Counter(digests).most_common(1)
    return found[0][0] if found and found[0][1] > 1 else b""


def _most(named: Collection[str], others_count: int) -> bool:
    return others_count > 1 and 2 * len(named) > others_count


def _weighed(named: Mapping[str, set[str]], others_count: int) -> Findings:
    findings = Findings()
    for speaker in sorted(named):
        if _most(named[speaker], others_count):
            continue
        for peer in sorted(named[speaker]):
            findings.against.setdefault(peer, set()).add(speaker)
    return findings

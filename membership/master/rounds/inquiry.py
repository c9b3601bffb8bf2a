"""Inquiries: which members hold an attempt up, or spread different results. Pure.

A live member can keep a contribution from an owner or a result from a receiver, or give receivers
different results. No connection breaks then, so no member is accused. The master asks the members
of the attempt what they wait for and what they hold (``Diagnose``, ``Diagnosis``), and an answer
accuses:

    lacks a contribution    its contributor, which need not wait for anything
    lacks a result          its owner, unless that owner lacks contributions itself
    holds another result    its maker, if the maker reports another digest, or if most members hold
                            one

Each answer is one member's word about another and weighs as much (see ``accusations``). An answer
that accuses more than half of the others is ignored, and excuses nobody.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping

from attrs import Factory, define

from ....protocol.messages import Diagnosis


class Question(enum.Enum):
    """Reason of an inquiry; each is made once under one number of an attempt."""

    STALL = "nothing moves"
    LAG = "some have not finished long after the others"
    DIFFERENCE = "the results differ"


@define
class Inquiry:
    """An inquiry in progress."""

    question: Question
    asked: tuple[str, ...]  # the members that are to answer
    began_s: float  # when they were asked
    answers: dict[str, Diagnosis] = Factory(dict)  # by member


@define
class Inquiries:
    """The inquiries of one attempt."""

    current: Inquiry | None = None  # in progress
    asked: set[Question] = Factory(set)  # questions asked under the attempt's present number
    patience_s: float = -math.inf  # until then no member is left behind
    two_faced: list[str] = Factory(list)  # owners that gave two or more others different results
    misled: dict[str, str] = Factory(dict)  # by member with another result: the owner it is from

    def begin(self, question: Question, asked: Iterable[str], now_s: float) -> bool:
        """Begin an inquiry. Returns False if the question was asked before under this number."""
        if question in self.asked:
            return False
        self.asked.add(question)
        self.current = Inquiry(question, tuple(asked), now_s)
        return True

    def end(self) -> Inquiry:
        inquiry, self.current = self.current, None
        assert inquiry is not None
        return inquiry


@define
class Findings:
    """Conclusions from the answers."""

    against: dict[str, set[str]] = Factory(dict)  # by member, its accusers

    def by_voice(self, voices: Mapping[str, Hashable]) -> Findings:
        """Return the findings with one accuser for each voice."""
        heard: dict[str, set[str]] = {}
        for peer, accusers in self.against.items():
            each = {voices.get(accuser, accuser): accuser for accuser in sorted(accusers)}
            heard[peer] = set(each.values())
        return Findings(heard)

    @property
    def culprits(self) -> list[str]:
        """Return the members with two or more accusers."""
        return [peer for peer, accusers in self.against.items() if len(accusers) > 1]


def waiting(
    answers: Mapping[str, Diagnosis], taking_part: Collection[str], done: Collection[str] = ()
) -> Findings:
    """Find the members that hold others up.

    Args:
      answers: by member.
      taking_part: contributors and owners, without the lost.
      done: members that have reported a result, and so lack nothing.
    """
    others_count = len(taking_part) - 1
    waiting_for = {speaker: answer for speaker, answer in answers.items() if speaker not in done}
    lacks = {
        speaker: set(answer.contributions).intersection(taking_part) - {speaker}
        for speaker, answer in waiting_for.items()
    }
    # Owners that wait for contributions themselves: their results may be late.
    excused = {speaker for speaker, named in lacks.items() if named}
    while True:
        named = {
            speaker: lacks[speaker]
            | set(answer.results).intersection(taking_part) - excused - {speaker}
            for speaker, answer in waiting_for.items()
        }
        # An answer that is ignored does not excuse its speaker either.
        ignored = {speaker for speaker in excused if _most(named[speaker], others_count)}
        if not ignored:
            return _weighed(named, others_count)
        excused -= ignored


def is_done(answer: Diagnosis) -> bool:
    """Return whether a member lacks nothing, and is about to report."""
    return bool(answer.made) and not answer.contributions and not answer.results


def differing(answers: Mapping[str, Diagnosis], makers: Collection[str]) -> Findings:
    """Find the members whose results are not the same everywhere.

    Args:
      answers: by member.
      makers: members that have added chunks up, including the lost, whose results others spread.
    """
    named: dict[str, set[str]] = {speaker: set() for speaker in answers}
    holds = {
        speaker: {each.maker: each.digest for each in answer.made}
        for speaker, answer in answers.items()
    }
    for maker in sorted(makers):
        digests = {speaker: held[maker] for speaker, held in holds.items() if maker in held}
        right = digests.get(maker) or _commonest(list(digests.values()))
        for speaker, digest in digests.items():
            if digest != right and speaker != maker:
                named[speaker].add(maker)
    return _weighed(named, len(makers) - 1)


def _commonest(digests: list[bytes]) -> bytes:
    """Return the digest that most hold; empty if no two hold the same."""
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

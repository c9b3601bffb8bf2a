"""One round as data: its phases, when it closes, whose update is refused, what was agreed.

    OPEN --enough are ready--> REDUCING --all survivors report one digest--> COMMITTED
      |                         |  ^  |
      |                         +--+  | nobody left, no majority, too many attempts
      |        repaired, or run again |
      |            with the survivors v
      +-- too few are ready ------> ABORTED

A repair goes on with what the survivors hold, see ``attempt``. A rerun begins from nothing with the
contributors that are left; it is for what a repair cannot mend: an update that must not be added, a
stall that nobody can explain, a loss in a tree. An aborted round costs nothing but time: what it would have added is
still in its contributors' local weights.

Nothing here sends or records; ``round_scheduler`` and ``reduction_driver`` do.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Collection, Mapping

from attrs import Factory, define

from ....protocol.messages import Ready
from ...manifest import MeanContents
from .attempt import Attempt

NORM_CLIP = 3.0  # over so many times the median norm an update is scaled down to it
NORM_REFUSE = 10.0  # over so many times it is refused
NORM_FAINT = 0.01  # under so many times the median it is refused, too: it takes part for nothing
NORM_COUNT_MIN = 3  # with fewer updates a median says nothing about who is the odd one
QUORUM_COUNT_MIN = 2  # whatever the share; one of two is no quorum


class RoundPhase(enum.Enum):
    OPEN = "open"
    REDUCING = "reducing"
    COMMITTED = "committed"
    ABORTED = "aborted"


class RoundEvent(enum.Enum):
    """What moves a round on."""

    CLOSE = "close"
    RERUN = "rerun"
    REPAIR = "repair"
    AGREE = "agree"
    VOID = "void"


NEXT_PHASE: dict[tuple[RoundPhase, RoundEvent], RoundPhase] = {
    (RoundPhase.OPEN, RoundEvent.CLOSE): RoundPhase.REDUCING,
    (RoundPhase.OPEN, RoundEvent.VOID): RoundPhase.ABORTED,
    (RoundPhase.REDUCING, RoundEvent.RERUN): RoundPhase.REDUCING,
    (RoundPhase.REDUCING, RoundEvent.REPAIR): RoundPhase.REDUCING,
    (RoundPhase.REDUCING, RoundEvent.AGREE): RoundPhase.COMMITTED,
    (RoundPhase.REDUCING, RoundEvent.VOID): RoundPhase.ABORTED,
}


class PastRole(enum.Enum):
    """What somebody had to do with a round that is over."""

    INVITED = "invited"  # and never answered
    EXCLUDED = "excluded"  # late, declined or refused
    LOST = "lost"
    CONTRIBUTED = "contributed"
    RECEIVED = "received"  # it added nothing, and got the result or is about to
    MISSED = "missed"  # it was to get the result


@define
class RoundTimes:
    """When somebody in a round did what; for people, nothing is decided by it."""

    name: str
    ready_s: float | None = None
    reduced_s: float | None = None  # when it had the result
    gone: bool = False  # before there was a reduction


@define
class Round:
    """One outer step of one fragment."""

    number: int
    fragment: int
    version: int  # before the round
    at_step: int
    opened_s: float
    phase: RoundPhase = RoundPhase.OPEN
    invited: set[str] = Factory(set)  # who was sent Open and has not lost its copy since
    ready: dict[str, Ready] = Factory(dict)
    declined: dict[str, str] = Factory(dict)  # who will not contribute, and why
    nudged: dict[str, float] = Factory(dict)  # who was told to post what it has by now, and when
    reached_s: float | None = None  # when the first contributor came to ``at_step``
    quorum_s: float | None = None  # when the quorum was ready
    closed_s: float = 0.0
    ended_s: float = 0.0
    original_count: int = 0  # contributors of the first attempt
    attempt: Attempt | None = None
    refused: set[str] = Factory(set)  # sent what must not be added; out for this round
    # By peer: who says that it sent what must not be added; one alone is not believed.
    called_bad: dict[str, set[str]] = Factory(dict)
    alone: set[str] = Factory(set)  # of these accusers: on whose word, borne out by none, it reran
    barred: set[str] = Factory(set)  # own nothing in this round: they did not show what they added
    digest: bytes = b""  # of the committed result
    went_in: MeanContents | None = None  # what the committed mean is made of
    stall_count: int = 0  # attempts in which nothing moved
    repair_count: int = 0
    rerun_count: int = 0  # from nothing, after the first attempt
    outcome: str = ""  # a sentence, once it is over
    marks: dict[str, RoundTimes] = Factory(dict)  # by peer: all who were asked or reported

    def turn(self, turn: RoundEvent) -> None:
        self.phase = NEXT_PHASE[self.phase, turn]

    def forget(self, peer: str, why: str) -> None:
        """The member is gone; if it returns it starts anew."""
        self.invited.discard(peer)
        self.ready.pop(peer, None)
        self.declined.pop(peer, None)
        self.nudged.pop(peer, None)
        if why and peer in self.marks:
            self.marks[peer].gone = True
        if self.attempt is not None:
            self.attempt.forget(peer, why)

    def mark(self, peer: str, name: str) -> RoundTimes:
        """Where to note what this peer does."""
        if peer not in self.marks:
            self.marks[peer] = RoundTimes(name)
        return self.marks[peer]

    def running(self) -> Attempt:
        """The present attempt of a round that has one."""
        assert self.attempt is not None
        return self.attempt


def quorum_count(quorum: float, expected_count: int) -> int:
    """How many of the expected contributors must be ready.

    The product is rounded before it is rounded up: 0.6 * 5 is a little over 3 in binary.
    """
    share = math.ceil(round(quorum * expected_count, 9))
    return max(share, min(QUORUM_COUNT_MIN, expected_count), 1)


def gate_norms(
    norms: Mapping[str, float], weights: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, str]]:
    """Judge updates by their norms.

    Who has trained on more has come further: an update of so many times the median weight may be so
    many times as long, one of a part of it may be as much shorter.

    Returns:
      Clip factors of those that may be added, and a reason for each of those that may not.
    """
    median = statistics.median(norms.values()) if norms else 0.0
    if len(norms) < NORM_COUNT_MIN or median == 0.0:
        return dict.fromkeys(norms, 1.0), {}
    median_weight = statistics.median(weights.values())
    scales: dict[str, float] = {}
    refused: dict[str, str] = {}
    for peer, norm in norms.items():
        part = weights[peer] / median_weight if median_weight else 1.0
        share = max(1.0, part)
        times = norm / share / median
        if norm < NORM_FAINT * min(1.0, part) * median:
            refused[peer] = (
                f"its norm {norm:.4g} is {norm / median:.3g} times the median {median:.4g} "
                f"(the limit is {NORM_FAINT * min(1.0, part):.3g})"
            )
        elif times > NORM_REFUSE:
            trained = f", with {share:.3g} times the median's tokens" if share > 1.0 else ""
            refused[peer] = (
                f"its norm {norm:.4g} is {norm / median:.3g} times the median {median:.4g}{trained} "
                f"(the limit is {NORM_REFUSE:g})"
            )
        elif times > NORM_CLIP:
            scales[peer] = NORM_CLIP / times
        else:
            scales[peer] = 1.0
    return scales, refused


def answered(round_: Round, expected: Collection[str]) -> bool:
    return all(peer in round_.ready or peer in round_.declined for peer in expected)


def part_of(round_: Round, peer: str) -> PastRole:
    """What this peer had to do with a round that is over; it has a mark there."""
    attempt, mark = round_.attempt, round_.marks[peer]
    if mark.gone if attempt is None else peer in attempt.lost:
        return PastRole.LOST
    if peer in round_.declined:
        return PastRole.EXCLUDED
    if attempt is None or peer not in attempt.receivers:
        return PastRole.LOST if mark.gone else PastRole.INVITED
    if peer in attempt.peers():
        return PastRole.CONTRIBUTED
    missed = peer in attempt.missed or peer in attempt.gone
    return PastRole.MISSED if missed and mark.reduced_s is None else PastRole.RECEIVED

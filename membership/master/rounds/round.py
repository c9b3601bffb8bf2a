"""One round as data: its phases, its contributors, its norm gate and its outcome.

    OPEN --enough are ready--> REDUCING --all survivors report one digest--> COMMITTED
      |                         |  ^  |
      |                         +--+  | none left, no majority, too many attempts
      |        repaired, or run again |
      |            with the survivors v
      +-- too few are ready ------> ABORTED

A repair goes on with the results that the survivors hold (see ``attempt``). A rerun begins again
from the inputs of the contributors that are left. It is for failures that a repair cannot mend: an
update that must not be added, an unexplained stall. An aborted round costs only time: its updates
are still in its contributors' local weights.

Nothing here sends or records; ``round_scheduler`` and ``reduction_driver`` do.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Collection, Mapping

from attrs import Factory, define

from ....protocol.messages import Ready
from ...shared.manifest import MeanContents
from .attempt import Attempt
from .outer_momentum import OuterMotion

# Multiples of the median norm.
NORM_CLIP = 3.0  # a longer update is scaled down to this
NORM_REFUSE = 10.0  # a longer update is refused
NORM_FAINT = 0.01  # a shorter update is refused, too: it contributes nothing
NORM_COUNT_MIN = 3  # with fewer updates a median does not tell which one is wrong
QUORUM_COUNT_MIN = 2  # for any share; one of two is no quorum

NOTHING_TRAINED = "it has trained nothing since its last sync"  # why an update is none


class RoundPhase(enum.Enum):
    OPEN = "open"
    REDUCING = "reducing"
    COMMITTED = "committed"
    ABORTED = "aborted"


NEXT_PHASES = {
    RoundPhase.OPEN: (RoundPhase.REDUCING, RoundPhase.ABORTED),
    RoundPhase.REDUCING: (RoundPhase.COMMITTED, RoundPhase.ABORTED),
}


class PastRole(enum.Enum):
    """A member's part in a round that is over."""

    INVITED = "invited"  # and did not answer
    EXCLUDED = "excluded"  # late, declined or refused
    LOST = "lost"
    CONTRIBUTED = "contributed"
    RECEIVED = "received"  # a listener that has the result, or is about to
    MISSED = "missed"  # a listener that did not get the result


@define
class RoundTimes:
    """Times of one member in a round, for the dashboard only."""

    name: str
    ready_s: float | None = None
    reduced_s: float | None = None  # when it had the result
    gone: bool = False  # it left before there was a reduction


@define
class Answers:
    """The members that a round has invited, and what they have answered."""

    invited: set[str] = Factory(set)  # sent ``Open``, and in sync ever since
    ready: dict[str, Ready] = Factory(dict)
    declined: dict[str, str] = Factory(dict)  # members that will not contribute, and why
    nudged: dict[str, float] = Factory(dict)  # when a late member was told to post what it has
    reached_s: float | None = None  # when the first contributor reached the round's step
    quorum_s: float | None = None  # when the quorum was ready

    @property
    def idle(self) -> bool:
        """No member failed: all that were asked answered that they have trained nothing.

        So it is while scripts in float16 leave out the first steps, to find the scale of their
        losses.
        """
        return {self.declined.get(peer) for peer in self.invited} == {NOTHING_TRAINED}

    def decline(self, peer: str, why: str) -> None:
        """Note that a member will not contribute."""
        self.ready.pop(peer, None)
        self.declined[peer] = why

    def forget(self, peer: str) -> None:
        self.invited.discard(peer)
        self.ready.pop(peer, None)
        self.declined.pop(peer, None)
        self.nudged.pop(peer, None)

    def complete(self, expected: Collection[str]) -> bool:
        """Return whether all expected contributors are ready or have declined."""
        return all(peer in self.ready or peer in self.declined for peer in expected)


@define
class Distrust:
    """Members whose updates or words do not count in a round."""

    refused: set[str] = Factory(set)  # members whose update must not be added
    called_bad: dict[str, set[str]] = Factory(dict)  # by peer: members that call its update bad
    alone: set[str] = Factory(set)  # accusers on whose word alone the round was run again
    barred: set[str] = Factory(set)  # own and check nothing: audits suspect them


@define
class Round:
    """One outer step of one fragment."""

    number: int
    fragment: int
    version: int  # before the round
    at_step: int
    opened_s: float
    phase: RoundPhase = RoundPhase.OPEN
    answers: Answers = Factory(Answers)
    closed_s: float = 0.0
    ended_s: float = 0.0
    original_count: int = 0  # contributors of the first attempt
    attempt: Attempt | None = None
    distrust: Distrust = Factory(Distrust)
    digest: bytes = b""  # of the committed result
    contents: MeanContents | None = None  # contributors of the committed mean
    motion: OuterMotion | None = None  # of the committed mean
    stall_count: int = 0  # attempts in which nothing moved
    repair_count: int = 0
    rerun_count: int = 0  # attempts after the first
    outcome: str = ""  # a sentence, once the round is over
    marks: dict[str, RoundTimes] = Factory(dict)  # by peer: all that were asked or reported

    def turn(self, phase: RoundPhase) -> None:
        assert phase in NEXT_PHASES[self.phase]
        self.phase = phase

    def forget(self, peer: str, why: str) -> None:
        """Note that a member is gone; if it returns it starts from scratch."""
        self.answers.forget(peer)
        if why and peer in self.marks:
            self.marks[peer].gone = True
        if self.attempt is not None:
            self.attempt.forget(peer, why)

    def mark(self, peer: str, name: str) -> RoundTimes:
        """Return the times of a member, which are noted here."""
        if peer not in self.marks:
            self.marks[peer] = RoundTimes(name)
        return self.marks[peer]

    def running(self) -> Attempt:
        """Return the present attempt of a round that has one."""
        assert self.attempt is not None
        return self.attempt


def quorum_count(quorum: float, expected_count: int) -> int:
    """Return the number of expected contributors that must be ready.

    The product is rounded before it is rounded up: 0.6 * 5 is a little over 3 in binary.
    """
    share = math.ceil(round(quorum * expected_count, 9))
    return max(share, min(QUORUM_COUNT_MIN, expected_count), 1)


def gate_norms(
    norms: Mapping[str, float], weights: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, str]]:
    """Check updates by their norms.

    A contributor that has trained on more tokens has moved further: an update of k times the median
    weight may be k times as long, or as short for k below 1.

    Returns:
      Clip factors of the updates that may be added, and a reason for each that may not.
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
                f"its norm {norm:.4g} is {norm / median:.3g} times the median {median:.4g}{trained}"
                f" (the limit is {NORM_REFUSE:g})"
            )
        elif times > NORM_CLIP:
            scales[peer] = NORM_CLIP / times
        else:
            scales[peer] = 1.0
    return scales, refused


def part_of(round_: Round, peer: str) -> PastRole:
    """Return a peer's part in a round that is over, in which it has a mark."""
    attempt, mark = round_.attempt, round_.marks[peer]
    if mark.gone if attempt is None else peer in attempt.lost:
        return PastRole.LOST
    if peer in round_.answers.declined:
        return PastRole.EXCLUDED
    if attempt is None or peer not in attempt.receivers:
        return PastRole.LOST if mark.gone else PastRole.INVITED
    if peer in attempt.peers():
        return PastRole.CONTRIBUTED
    missed = peer in attempt.missed or peer in attempt.gone
    return PastRole.MISSED if missed and mark.reduced_s is None else PastRole.RECEIVED

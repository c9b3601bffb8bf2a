"""One round as data: its phases, when it closes, whose update is refused, what was agreed.

    OPEN --enough are ready--> REDUCING --all survivors report one digest--> COMMITTED
      |                         |  ^  |
      |                         +--+  | nobody left, no majority, too many attempts
      |         repair, or rerun with |
      |                the survivors  v
      +-- too few are ready ------> ABORTED

A repair goes on with what the survivors hold (flush, then new owners for the lost one's chunks). A
rerun begins from nothing with the contributors that are left; it is for what a repair cannot do: an
update that must not be added, somebody who cannot go on. Both are a new *attempt*. An aborted round
costs nothing but time: what it would have added is still in its contributors' local weights.

Nothing here sends or records; ``conductor`` does.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from attrs import Factory, define

from ..protocol.messages import Assignment, Contributor, ContributorRun, Ready

NORM_CLIP = 3.0  # over so many times the median norm an update is scaled down to it
NORM_REFUSE = 10.0  # over so many times it is refused
NORM_COUNT_MIN = 3  # with fewer updates a median says nothing about who is the odd one
QUORUM_COUNT_MIN = 2  # whatever the share; one of two is no quorum


class Phase(enum.Enum):
    OPEN = "open"
    REDUCING = "reducing"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Turn(enum.Enum):
    """What moves a round on."""

    CLOSE = "close"
    RERUN = "rerun"
    REPAIR = "repair"
    AGREE = "agree"
    VOID = "void"


NEXT_PHASE: dict[tuple[Phase, Turn], Phase] = {
    (Phase.OPEN, Turn.CLOSE): Phase.REDUCING,
    (Phase.OPEN, Turn.VOID): Phase.ABORTED,
    (Phase.REDUCING, Turn.RERUN): Phase.REDUCING,
    (Phase.REDUCING, Turn.REPAIR): Phase.REDUCING,
    (Phase.REDUCING, Turn.AGREE): Phase.COMMITTED,
    (Phase.REDUCING, Turn.VOID): Phase.ABORTED,
}


@define
class Attempt:
    """One reduction: who adds, who receives, and what came back."""

    number: int
    contributors: tuple[Contributor, ...]  # in order of member number
    receivers: tuple[str, ...]
    started_s: float
    moved_s: float  # when it last showed a sign of getting on
    digests: dict[str, bytes] = Factory(dict)  # what receivers reported, contributors or not
    lost: dict[str, str] = Factory(dict)  # contributors that are gone or must go, and why
    gone: set[str] = Factory(set)  # receivers whose connection ended; a new one starts anew
    accusers: dict[str, set[str]] = Factory(dict)  # accused contributor -> who lost it
    accused_s: float = math.inf  # when the first accusation came
    missed: dict[str, str] = Factory(dict)  # receivers that will not get the result
    quorum_s: float | None = None  # when the quorum had reported
    owners: list[str] = Factory(list)  # by chunk, as the plan and the repairs since have it
    manifests: dict[str, tuple[ContributorRun, ...]] = Factory(dict)  # with ``digests``
    broken: bool = False  # a repair cannot mend it: it has to be run again
    shut: set[str] = Factory(set)  # of the lost: those that the survivors are told to shut out
    flush_number: int = 0  # of the repair that is being prepared, or was the last
    flush_s: float = math.inf  # when the flush began that has not ended
    held: dict[str, bytes] = Factory(dict)  # what survivors said they hold in this flush
    blind: dict[str, set[str]] = Factory(dict)  # receivers in ``missed``: only for want of these

    @property
    def flushing(self) -> bool:
        return self.flush_s < math.inf

    def peers(self) -> list[str]:
        return [contributor.peer for contributor in self.contributors]

    def reached(self) -> list[str]:
        """Receivers that still have the connection over which they got the reduction."""
        return [peer for peer in self.receivers if peer not in self.gone]

    def survivors(self) -> list[str]:
        return [peer for peer in self.peers() if peer not in self.lost]

    def unreported(self) -> list[str]:
        return [peer for peer in self.survivors() if peer not in self.digests]

    def agreed(self) -> bytes | None:
        """The digest of more than half of the survivors; None if there is none."""
        reported = Counter(self.digests[peer] for peer in self.survivors() if peer in self.digests)
        if not reported:
            return None
        digest, count = reported.most_common(1)[0]
        return digest if 2 * count > len(self.survivors()) else None

    def manifest(self, digest: bytes) -> tuple[ContributorRun, ...]:
        """Who is in which chunks of the result with this digest, as most of its holders say."""
        said = Counter(
            self.manifests[peer] for peer in self.survivors() if self.digests.get(peer) == digest
        )
        return said.most_common(1)[0][0]

    def begin_flush(self, now_s: float) -> None:
        self.shut = set(self.lost)
        self.flush_number = max(self.number, self.flush_number) + 1
        self.flush_s = now_s
        self.held.clear()

    def begin_repair(self, assignments: Iterable[Assignment], now_s: float) -> None:
        """The flush is over; go on under its number. Everybody reports anew."""
        for assignment in assignments:
            start = assignment.first_chunk
            end = start + assignment.chunk_count
            self.owners[start:end] = [assignment.owner] * assignment.chunk_count
        self.number, self.flush_s, self.moved_s = self.flush_number, math.inf, now_s
        self.digests.clear()
        self.manifests.clear()
        self.accusers.clear()
        self.accused_s, self.quorum_s = math.inf, None
        for peer, wanting in list(self.blind.items()):
            if wanting <= self.shut:  # it is given now what it lacked
                del self.blind[peer]
                self.missed.pop(peer, None)

    def most_accused(self) -> str | None:
        """Whom most contributors lost; of equals the one that comes last in the attempt."""
        order = {peer: index for index, peer in enumerate(self.peers())}
        counts = {  # what the lost have said about others counts for nothing
            peer: len(accusers - self.lost.keys())
            for peer, accusers in self.accusers.items()
            if peer not in self.lost and accusers - self.lost.keys()
        }
        return max(counts, key=lambda p: (counts[p], order[p]), default=None)


@define
class Round:
    """One outer step of one fragment."""

    number: int
    index: int  # place in the schedule; the same again after an abort
    fragment: int
    version: int  # before the round
    at_step: int
    opened_s: float
    phase: Phase = Phase.OPEN
    invited: set[str] = Factory(set)  # who was sent Open and has not lost its copy since
    ready: dict[str, Ready] = Factory(dict)
    declined: dict[str, str] = Factory(dict)  # who will not contribute, and why
    quorum_s: float | None = None  # when the quorum was ready
    closed_s: float = 0.0
    ended_s: float = 0.0
    original_count: int = 0  # contributors of the first attempt
    attempt: Attempt | None = None
    refused: set[str] = Factory(set)  # sent what must not be added; out for this round
    digest: bytes = b""  # of the committed result
    stall_count: int = 0  # attempts in which nothing moved
    rerun_count: int = 0
    repair_count: int = 0
    outcome: str = ""  # a sentence, once it is over

    def turn(self, turn: Turn) -> None:
        self.phase = NEXT_PHASE[self.phase, turn]

    def forget(self, peer: str, why: str) -> None:
        """The member is gone; if it returns it starts anew."""
        self.invited.discard(peer)
        self.ready.pop(peer, None)
        self.declined.pop(peer, None)
        if self.attempt is not None:
            self.attempt.gone.add(peer)
            self.attempt.digests.pop(peer, None)
            self.attempt.manifests.pop(peer, None)
            self.attempt.held.pop(peer, None)
            if peer in self.attempt.peers():
                self.attempt.lost.setdefault(peer, why)

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


def gate_norms(norms: Mapping[str, float]) -> tuple[dict[str, float], dict[str, str]]:
    """Judge updates by their norms.

    Returns:
      Clip factors of those that may be added, and a reason for each of those that may not.
    """
    median = statistics.median(norms.values()) if norms else 0.0
    if len(norms) < NORM_COUNT_MIN or median == 0.0:
        return dict.fromkeys(norms, 1.0), {}
    scales: dict[str, float] = {}
    refused: dict[str, str] = {}
    for peer, norm in norms.items():
        if norm > NORM_REFUSE * median:
            refused[peer] = (
                f"its norm {norm:.4g} is {norm / median:.3g} times the median {median:.4g} "
                f"(the limit is {NORM_REFUSE:g})"
            )
        elif norm > NORM_CLIP * median:
            scales[peer] = NORM_CLIP * median / norm
        else:
            scales[peer] = 1.0
    return scales, refused


def answered(round_: Round, expected: Collection[str]) -> bool:
    return all(peer in round_.ready or peer in round_.declined for peer in expected)

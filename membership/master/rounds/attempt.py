"""One attempt of a round's reduction, as data: contributors, losses, reports and results.

An attempt begins with a ``Reduce`` and survives repairs. A *flush* tells all its members to accept
nothing more from the lost and to report which chunks' results they hold. The *repair* that follows
gives the chunks of the lost to others, and the attempt goes on under the flush's number:

    running --a member is lost--> flushing --all have said what they hold--> running, next number
                                  |      ^
                                  +------+ another member is lost: the flush begins again

Nothing here sends or records; ``reduction_driver`` and its parts do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from attrs import Factory, define

from ....protocol.messages import Assignment, Contributor, Reduce
from ...planning.plan import PlanEstimate
from ..state.roster import Roster
from ..state.voting_blocs import elect, voices_of
from .inquiry import Inquiry, Question
from .norms import Report
from .outcome import Audit, ReductionOutcome
from .repair import holds


@define
class Attempt:
    """One reduction: its contributors, its receivers, and their reports.

    Attributes:
      number: reports count under this number; the order's, later the last repair's.
      contributors: of the order, by member number, including the lost.
      receivers: of the order; one that does not contribute is a listener.
      owners: by chunk, by the plan and the repairs since.
      makers: by chunk, the member that added it up; another one may spread the result if it is
        lost.
    """

    number: int
    contributors: tuple[Contributor, ...]
    receivers: tuple[str, ...]
    owners: list[str]
    estimate: PlanEstimate
    started_s: float
    moved_s: float  # time of the last progress
    outcomes: dict[str, ReductionOutcome] = Factory(dict)  # reported results, by receiver
    reports: dict[str, Report] = Factory(dict)  # reported norms of contributions, by receiver
    lost: dict[str, str] = Factory(dict)  # contributors and owners that it goes on without, and why
    gone: set[str] = Factory(set)  # receivers whose connection ended
    missed: dict[str, str] = Factory(dict)  # receivers that will not get the result, and why
    # Of these, the receivers that only cannot reach some members, with those members.
    blind: dict[str, set[str]] = Factory(dict)
    accusers: dict[str, set[str]] = Factory(dict)  # by accused member
    accused_s: float = math.inf  # time of the first accusation
    ended: set[str] = Factory(set)  # accusers of a bad update; they have nothing to repair with
    moves: dict[str, float] = Factory(dict)  # by receiver: when it last reported that bytes move
    quorum_s: float | None = None  # when the quorum had reported
    shut: set[str] = Factory(set)  # the lost that the others were told to shut out
    flush_number: int = 0  # of the last repair, or of the one being prepared
    flush_s: float = math.inf  # when the flush in progress began
    held: dict[str, bytes] = Factory(dict)  # by receiver: the chunks it holds, a bit each
    order: Reduce | None = None
    makers: list[str] = Factory(lambda self: list(self.owners), takes_self=True)
    audit: Audit | None = None  # of the result, before it is committed
    inquiry: Inquiry | None = None  # in progress
    inquired: set[Question] = Factory(set)  # asked under this number
    vain: dict[str, set[str]] = Factory(dict)  # by accused: members that wait over a working link
    patience_s: float = -math.inf  # until then no member is left behind
    adopted: bool = False  # begun under the previous master: its duration is not known
    correction: float = 1.0  # what the estimate's prediction is multiplied by
    two_faced: list[str] = Factory(list)  # owners that gave two or more others different results
    misled: dict[str, str] = Factory(dict)  # by member with another result: the owner it is from
    # Looked up for every report: a list of a thousand takes its time.
    _contributing: frozenset[str] = Factory(
        lambda self: frozenset(each.peer for each in self.contributors), takes_self=True
    )
    _receiving: frozenset[str] = Factory(lambda self: frozenset(self.receivers), takes_self=True)

    @classmethod
    def of(
        cls,
        order: Reduce,
        estimate: PlanEstimate,
        now_s: float,
        *,
        adopted: bool = False,
        correction: float = 1.0,
    ) -> Attempt:
        """Return the attempt that begins, or goes on, with this order."""
        return cls(
            order.attempt,
            order.contributors,
            order.receivers,
            [run.peer for run in order.plan.owners for _ in range(run.chunk_count)],
            estimate,
            started_s=now_s,
            moved_s=now_s,
            order=order,
            adopted=adopted,
            correction=correction,
        )

    @property
    def predicted_s(self) -> float | None:
        """Return how long the attempt should take, or None if a contributor's line is not known."""
        predicted_s = self.estimate.predicted_s
        return None if predicted_s is None else self.correction * predicted_s

    @property
    def undisturbed(self) -> bool:
        """Return whether it is the round's first attempt, lost nobody and was not adopted."""
        return self.number == 1 and not (self.lost or self.adopted or self.gone)

    @property
    def flushing(self) -> bool:
        """Return whether a flush is in progress."""
        return self.flush_s < math.inf

    def peers(self) -> list[str]:
        """Return the contributors of the order."""
        return [contributor.peer for contributor in self.contributors]

    def contributes(self, peer: str) -> bool:
        """Return whether a peer is a contributor of the order."""
        return peer in self._contributing

    def serves(self, peer: str) -> bool:
        """Return whether a peer is one of ``served``."""
        return peer in self._receiving and peer not in self.gone and peer not in self.lost

    def survivors(self) -> list[str]:
        """Return the contributors that are left: their reports decide."""
        return [peer for peer in self.peers() if peer not in self.lost]

    def needed(self) -> list[str]:
        """Return the members that others depend on: survivors, and listeners that took over
        chunks.
        """
        successors = set(self.owners).difference(self.peers(), self.lost)
        return [*self.survivors(), *(peer for peer in self.receivers if peer in successors)]

    def takes_part(self, peers: Iterable[str]) -> list[str]:
        """Return those of ``peers`` that contribute or own chunks, including the lost."""
        those = {*self.peers(), *self.owners, *self.lost}
        return [peer for peer in peers if peer in those]

    def reached(self) -> list[str]:
        """Return the receivers whose connection has not ended since the order."""
        return [peer for peer in self.receivers if peer not in self.gone]

    def served(self) -> list[str]:
        """Return the receivers that still take part, to which flushes and repairs are sent."""
        return [peer for peer in self.reached() if peer not in self.lost]

    def unreported(self) -> list[str]:
        """Return the survivors that have not reported a result."""
        return [peer for peer in self.survivors() if peer not in self.outcomes]

    def agreed(self, roster: Roster) -> ReductionOutcome | None:
        """Return the outcome of more than half of the survivors, if there is one."""
        found = elect(self.outcomes, voices_of(roster, self.survivors()))
        return found.winner if found is not None and found.majority else None

    def disagrees(self) -> bool:
        """Return whether survivors hold different results, when all of them have reported."""
        left = self.survivors()
        return len({outcome for peer, outcome in self.outcomes.items() if peer in left}) > 1

    def norm_reports(self) -> dict[str, Report]:
        """Return the norms reported by members that added chunks up; others cannot know any."""
        added = set(self.makers)
        return {p: self.reports[p] for p in self.needed() if p in added and p in self.reports}

    def gives(self, peer: str, receiver: str) -> bool:
        """Return whether ``peer`` sends ``receiver`` a contribution or a result."""
        adding = {*self.owners, *self.makers}
        return peer in adding or receiver in adding

    # ------------------------------------------------------------ losses

    def lose(self, peer: str, why: str) -> None:
        """Go on without a contributor or an owner; of several reasons the first is kept."""
        self.lost.setdefault(peer, why)
        self.outcomes.pop(peer, None)
        self.held.pop(peer, None)

    def forget(self, peer: str, why: str) -> None:
        """Note that a receiver's connection has ended."""
        self.gone.add(peer)
        self.outcomes.pop(peer, None)
        self.held.pop(peer, None)
        if peer in self.peers() or peer in self.owners:
            self.lose(peer, why)

    def why_lost(self) -> str:
        """Return the reasons for all losses."""
        return "; ".join(self.lost.values())

    def accuse(self, peer: str, accuser: str, now_s: float) -> None:
        """Note that a member cannot reach a peer that it needs, unless that peer is lost
        already.
        """
        if peer not in self.lost:
            self.accusers.setdefault(peer, set()).add(accuser)
            self.accused_s = min(self.accused_s, now_s)

    def is_accused(self) -> bool:
        """Return whether a member is accused that the attempt has not lost."""
        return any(peer not in self.lost and self.against(peer, {}) for peer in self.accusers)

    def most_accused(self, without: Mapping[str, Collection[str]]) -> str | None:
        """Return the member with the most accusers; of equals, the last in the attempt.

        Args:
          without: by peer, the members that report having no link to it. They count in addition to
            accusers of this attempt, but not alone.
        """
        order = {peer: index for index, peer in enumerate(self.receivers)}
        counts = {
            peer: len(self.against(peer, without))
            for peer in self.accusers
            if peer not in self.lost and self.against(peer, {})
        }
        return max(counts, key=lambda p: (counts[p], order[p]), default=None)

    def against(self, peer: str, without: Mapping[str, Collection[str]]) -> set[str]:
        """Return the accusers of a peer, without those that are lost themselves."""
        named = self.accusers.get(peer, set()).union(without.get(peer, ()))
        return named.intersection(self.receivers) - self.lost.keys()

    def accused_by(self, peer: str) -> list[str]:
        """Return the members that this peer accuses."""
        return [accused for accused, accusers in self.accusers.items() if peer in accusers]

    def moved(self, peer: str, now_s: float) -> None:
        """Note that bytes move at a receiver. It takes two receivers: a sender and its
        counterpart.
        """
        self.moves[peer] = now_s
        if len(self.moves) > 1:
            self.moved_s = max(self.moved_s, sorted(self.moves.values())[-2])

    # ------------------------------------------------------------ inquiry

    def begin_inquiry(self, question: Question, asked: Iterable[str], now_s: float) -> bool:
        """Begin an inquiry. Returns False if the question was asked before under this number."""
        if question in self.inquired:
            return False
        self.inquired.add(question)
        self.inquiry = Inquiry(question, tuple(asked), now_s)
        return True

    def end_inquiry(self) -> Inquiry:
        """End the inquiry in progress and return it."""
        inquiry, self.inquiry = self.inquiry, None
        assert inquiry is not None
        return inquiry

    def unanswered(self) -> list[str]:
        """Return the members that were asked and may still answer."""
        if self.inquiry is None:
            return []
        asked, answers = self.inquiry.asked, self.inquiry.answers
        return [peer for peer in self.served() if peer in asked and peer not in answers]

    # ------------------------------------------------------------ flush and repair

    def begin_flush(self, now_s: float) -> None:
        """Begin a flush under the next number."""
        self.shut = set(self.lost)
        self.flush_number = max(self.number, self.flush_number) + 1
        self.flush_s = now_s
        self.held.clear()
        self.inquiry = None  # its answers would be about the time before the loss

    def unheard(self) -> list[str]:
        """Return the members without whose answer to the flush there is no repair."""
        return [peer for peer in self.needed() if peer not in self.held]

    def may_learn_more(self) -> bool:
        """Return whether a listener that has not answered may hold a lost chunk that no other
        holds.
        """
        listeners = [p for p in self.served() if p not in self.held and p not in self.missed]
        return bool(listeners) and any(
            owner in self.lost and not any(holds(bits, chunk) for bits in self.held.values())
            for chunk, owner in enumerate(self.owners)
        )

    def begin_repair(self, assignments: Iterable[Assignment], now_s: float) -> None:
        """End the flush and go on under its number. All members report again."""
        for assignment in assignments:
            start = assignment.first_chunk
            end = start + assignment.chunk_count
            self.owners[start:end] = [assignment.owner] * assignment.chunk_count
            if assignment.from_scratch:
                self.makers[start:end] = [assignment.owner] * assignment.chunk_count
        self.number, self.flush_s, self.moved_s = self.flush_number, math.inf, now_s
        self.outcomes.clear()
        self.accusers.clear()
        self.moves.clear()
        self.accused_s, self.quorum_s = math.inf, None
        self.inquired.clear()
        self.vain.clear()
        for peer, wanting in list(self.blind.items()):
            if wanting <= self.shut:  # the repair gives it what it lacked
                del self.blind[peer]
                self.missed.pop(peer, None)

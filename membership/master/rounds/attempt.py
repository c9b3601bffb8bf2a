"""One try at a round's reduction as data: who adds, who is lost, who holds what, what came out.

An attempt begins with a ``Reduce`` and lives through repairs. A *flush* asks everybody to accept
nothing more of the lost and to say which chunks' results they hold; the *repair* that follows
gives the chunks of the lost to others and goes on under the flush's number:

    running --somebody is lost--> flushing --all have said what they hold--> running, next number
                                  |      ^
                                  +------+ somebody else is lost: the asking begins again

Nothing here sends or records; ``reduction_driver`` does.
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
    """One reduction: who adds, who receives, and what came back.

    Attributes:
      number: under which reports count; the order's, later that of the last repair.
      contributors: of the order, in order of member number; the lost, too.
      receivers: of the order; who is no contributor only listens.
      owners: by chunk, as the plan and the repairs since have it.
      makers: by chunk: who adds it up; somebody else may spread what a lost one has made.
    """

    number: int
    contributors: tuple[Contributor, ...]
    receivers: tuple[str, ...]
    owners: list[str]
    estimate: PlanEstimate
    sites: tuple[tuple[str, ...], ...]  # of a tree; empty: a star
    started_s: float
    moved_s: float  # when it last showed a sign of getting on
    outcomes: dict[str, ReductionOutcome] = Factory(
        dict
    )  # what receivers reported, contributors or not
    reports: dict[str, Report] = Factory(dict)  # what they found of contributions, in all they did
    lost: dict[str, str] = Factory(dict)  # whom it goes on without, and why: all who added or owned
    gone: set[str] = Factory(set)  # receivers whose connection ended; a new one starts anew
    missed: dict[str, str] = Factory(dict)  # receivers that will not get the result
    blind: dict[str, set[str]] = Factory(dict)  # receivers in ``missed``: only for want of these
    accusers: dict[str, set[str]] = Factory(dict)  # accused -> who lost it
    accused_s: float = math.inf  # when the first accusation came
    ended: set[str] = Factory(set)  # whose reduction is over, though not well: they cannot repair
    moves: dict[str, float] = Factory(dict)  # when receivers last said that bytes move
    quorum_s: float | None = None  # when the quorum had reported
    shut: set[str] = Factory(set)  # of the lost: those that the others are told to shut out
    flush_number: int = 0  # of the repair that is being prepared, or was the last
    flush_s: float = math.inf  # when the flush began that has not ended
    held: dict[str, bytes] = Factory(dict)  # what receivers said they hold, in this flush
    order: Reduce | None = None
    makers: list[str] = Factory(lambda self: list(self.owners), takes_self=True)
    look: Audit | None = None  # at what owners made, before it is committed
    inquiry: Inquiry | None = None  # one that is under way
    inquired: set[Question] = Factory(set)  # what everybody was asked, under this number
    vain: dict[str, set[str]] = Factory(dict)  # by accused: who waits for it over a link that works
    patience_s: float = -math.inf  # until then nobody is left behind that lacks nothing any more
    adopted: bool = False  # from the last master: how long it has taken is not known
    two_faced: list[str] = Factory(list)  # owners that gave two or more others different results
    misled: dict[str, str] = Factory(dict)  # who holds another result: by which owner

    @classmethod
    def of(
        cls, order: Reduce, estimate: PlanEstimate, now_s: float, *, adopted: bool = False
    ) -> Attempt:
        """Return the attempt that begins, or goes on, with this order."""
        return cls(
            order.attempt,
            order.contributors,
            order.receivers,
            [run.peer for run in order.plan.owners for _ in range(run.chunk_count)],
            estimate,
            tuple(site.members for site in order.plan.sites),
            started_s=now_s,
            moved_s=now_s,
            order=order,
            adopted=adopted,
        )

    @property
    def flushing(self) -> bool:
        return self.flush_s < math.inf

    def peers(self) -> list[str]:
        """Who was to add."""
        return [contributor.peer for contributor in self.contributors]

    def survivors(self) -> list[str]:
        """Contributors that are left: their reports decide."""
        return [peer for peer in self.peers() if peer not in self.lost]

    def needed(self) -> list[str]:
        """Whom the others depend on: survivors, and listeners that have inherited chunks."""
        successors = set(self.owners).difference(self.peers(), self.lost)
        return [*self.survivors(), *(peer for peer in self.receivers if peer in successors)]

    def takes_part(self, peers: Iterable[str]) -> list[str]:
        """Those of these that add, or own chunks; the lost, too."""
        those = {*self.peers(), *self.owners, *self.lost}
        return [peer for peer in peers if peer in those]

    def reached(self) -> list[str]:
        """Receivers that still have the connection over which they got the reduction."""
        return [peer for peer in self.receivers if peer not in self.gone]

    def served(self) -> list[str]:
        """Of those, who still takes part: flushes and repairs are for them."""
        return [peer for peer in self.reached() if peer not in self.lost]

    def unreported(self) -> list[str]:
        return [peer for peer in self.survivors() if peer not in self.outcomes]

    def agreed(self, roster: Roster) -> ReductionOutcome | None:
        """The outcome of more than half of the survivors; None if there is none."""
        found = elect(self.outcomes, voices_of(roster, self.survivors()))
        return found.winner if found is not None and found.majority else None

    def disagrees(self) -> bool:
        """Whether survivors, all of whom have reported, hold different results."""
        left = self.survivors()
        return len({outcome for peer, outcome in self.outcomes.items() if peer in left}) > 1

    def gauges(self) -> dict[str, Report]:
        """What those have found who added something up: of the chunks of others nobody can know.

        In a tree that are leaders, too.
        """
        added = {*self.makers, *(peer for site in self.sites for peer in site)}
        return {p: self.reports[p] for p in self.needed() if p in added and p in self.reports}

    def gives(self, peer: str, receiver: str) -> bool:
        """Whether a contribution, or a result, goes from one to the other."""
        adding = {*self.owners, *self.makers}
        return bool(self.sites) or peer in adding or receiver in adding

    # ------------------------------------------------------------ losses

    def lose(self, peer: str, why: str) -> None:
        """Go on without a contributor or an heir; of several reasons the first one stays."""
        self.lost.setdefault(peer, why)
        self.outcomes.pop(peer, None)
        self.held.pop(peer, None)

    def forget(self, peer: str, why: str) -> None:
        """The receiver's connection has ended."""
        self.gone.add(peer)
        self.outcomes.pop(peer, None)
        self.held.pop(peer, None)
        if peer in self.peers() or peer in self.owners:
            self.lose(peer, why)

    def why_lost(self) -> str:
        """Return the reasons for all losses."""
        return "; ".join(self.lost.values())

    def accuse(self, peer: str, accuser: str, now_s: float) -> None:
        """Somebody has lost a peer that it needs; of the lost that is no news."""
        if peer not in self.lost:
            self.accusers.setdefault(peer, set()).add(accuser)
            self.accused_s = min(self.accused_s, now_s)

    def is_accused(self) -> bool:
        """Return whether a member is accused that the attempt has not lost."""
        return any(peer not in self.lost and self.against(peer, {}) for peer in self.accusers)

    def most_accused(self, without: Mapping[str, Collection[str]] | None = None) -> str | None:
        """Whom most others lost; of equals the one that comes last in the attempt.

        Args:
          without: by peer, members that say that they have no link to it. They join whoever accuses
            it; by themselves they say nothing about this attempt.
        """
        order = {peer: index for index, peer in enumerate(self.receivers)}
        counts = {
            peer: len(self.against(peer, without or {}))
            for peer in self.accusers
            if peer not in self.lost and self.against(peer, {})
        }
        return max(counts, key=lambda p: (counts[p], order[p]), default=None)

    def against(self, peer: str, without: Mapping[str, Collection[str]]) -> set[str]:
        """Who says that it lost this peer; what the lost have said counts for nothing."""
        named = self.accusers.get(peer, set()).union(without.get(peer, ()))
        return named.intersection(self.receivers) - self.lost.keys()

    def accused_by(self, peer: str) -> list[str]:
        """Whom it says that it lost."""
        return [accused for accused, accusers in self.accusers.items() if peer in accusers]

    def moved(self, peer: str, now_s: float) -> None:
        """A receiver says that bytes move. It takes two: what one sends, another one receives."""
        self.moves[peer] = now_s
        if len(self.moves) > 1:
            self.moved_s = max(self.moved_s, sorted(self.moves.values())[-2])

    # ------------------------------------------------------------ inquiry

    def begin_inquiry(self, question: Question, asked: Iterable[str], now_s: float) -> bool:
        """Under each number everything is asked once; False: it was."""
        if question in self.inquired:
            return False
        self.inquired.add(question)
        self.inquiry = Inquiry(question, tuple(asked), now_s)
        return True

    def end_inquiry(self) -> Inquiry:
        """What was answered is looked at, or of no use any more."""
        inquiry, self.inquiry = self.inquiry, None
        assert inquiry is not None
        return inquiry

    def unanswered(self) -> list[str]:
        """Who may still say what is with it."""
        if self.inquiry is None:
            return []
        asked, told = self.inquiry.asked, self.inquiry.told
        return [peer for peer in self.served() if peer in asked and peer not in told]

    # ------------------------------------------------------------ flush and repair

    def begin_flush(self, now_s: float) -> None:
        self.shut = set(self.lost)
        self.flush_number = max(self.number, self.flush_number) + 1
        self.flush_s = now_s
        self.held.clear()
        self.inquiry = None  # somebody is lost, and the answers would be of before

    def unheard(self) -> list[str]:
        """Without whose answer to the flush nothing can be repaired."""
        return [peer for peer in self.needed() if peer not in self.held]

    def may_learn_more(self) -> bool:
        """Whether a listener that has not answered yet may hold what nobody else does."""
        listeners = [p for p in self.served() if p not in self.held and p not in self.missed]
        return bool(listeners) and any(
            owner in self.lost and not any(holds(bits, chunk) for bits in self.held.values())
            for chunk, owner in enumerate(self.owners)
        )

    def begin_repair(self, assignments: Iterable[Assignment], now_s: float) -> None:
        """The flush is over; go on under its number. Everybody reports anew."""
        for assignment in assignments:
            start = assignment.first_chunk
            end = start + assignment.chunk_count
            self.owners[start:end] = [assignment.owner] * assignment.chunk_count
            if assignment.anew:
                self.makers[start:end] = [assignment.owner] * assignment.chunk_count
        self.number, self.flush_s, self.moved_s = self.flush_number, math.inf, now_s
        self.outcomes.clear()
        self.accusers.clear()
        self.moves.clear()
        self.accused_s, self.quorum_s = math.inf, None
        self.inquired.clear()
        self.vain.clear()
        for peer, wanting in list(self.blind.items()):
            if wanting <= self.shut:  # it is given now what it lacked
                del self.blind[peer]
                self.missed.pop(peer, None)

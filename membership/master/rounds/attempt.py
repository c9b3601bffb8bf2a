"""One attempt of a round's reduction, as data: contributors, losses, reports and results.

An attempt begins with a ``Reduce`` and survives repairs. A *flush* tells all its members to accept
nothing more from the lost and to report which chunks' results they hold. The *repair* that follows
gives the chunks of the lost to others, and the attempt goes on under the flush's number:

    running --a member is lost--> flushing --all have said what they hold--> running, next number
                                  |      ^
                                  +------+ another member is lost: the flush begins again

Nothing here sends or records; ``reduction_driver`` and its parts do. Each part changes an object of
its own: ``repair`` the flush, ``accusations`` the blame, ``inquirer`` the inquiries, ``audits``
the audit, and ``reduction_driver`` the reports.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from attrs import Factory, define, frozen

from ....protocol import messages as m
from ...planning.plan import PlanEstimate
from ..state.roster import Roster
from ..state.voting_blocs import elect, voices_of
from .inquiry import Inquiries
from .norms import Report


@define
class FlushState:
    """The flush in progress, or the last one."""

    number: int = 0  # of the repair that it prepares
    began_s: float = math.inf  # infinity if none is in progress
    shut: set[str] = Factory(set)  # the lost that the others were told to shut out
    held: dict[str, bytes] = Factory(dict)  # by receiver: the chunks it holds, a bit each

    @property
    def in_progress(self) -> bool:
        return self.began_s < math.inf


@define
class Reports:
    """What receivers have reported beside their results."""

    moved_s: float  # time of the last progress
    moves: dict[str, float] = Factory(dict)  # by receiver: when it last reported that bytes move
    norms: dict[str, Report] = Factory(dict)  # of contributions, by receiver
    quorum_s: float | None = None  # when the quorum had reported a result

    def moved(self, peer: str, now_s: float) -> None:
        """Note that bytes move at a receiver. It takes two: a sender and its counterpart."""
        self.moves[peer] = now_s
        if len(self.moves) > 1:
            self.moved_s = max(self.moved_s, sorted(self.moves.values())[-2])


@define
class Attempt:
    """One reduction: its order, its losses and its results."""

    order: m.Reduce
    estimate: PlanEstimate
    started_s: float
    adopted: bool = False  # begun under the previous master: its duration is not known
    # Reports count under this number; the order's, later the last repair's.
    number: int = Factory(lambda self: self.order.attempt, takes_self=True)
    # By chunk, by the plan and the repairs since.
    owners: list[str] = Factory(
        lambda self: [run.peer for run in self.order.plan.owners for _ in range(run.chunk_count)],
        takes_self=True,
    )
    # By chunk, the member that added it up; another one may spread the result if it is lost.
    makers: list[str] = Factory(lambda self: list(self.owners), takes_self=True)
    outcomes: dict[str, ReductionOutcome] = Factory(dict)  # reported results, by receiver
    lost: dict[str, str] = Factory(dict)  # contributors and owners that it goes on without, and why
    gone: set[str] = Factory(set)  # receivers whose connection ended
    missed: dict[str, str] = Factory(dict)  # receivers that will not get the result, and why
    # Of these, the receivers that only cannot reach some members, with those members.
    blind: dict[str, set[str]] = Factory(dict)
    reports: Reports = Factory(lambda self: Reports(self.started_s), takes_self=True)
    flush: FlushState = Factory(FlushState)
    blame: Blame = Factory(lambda self: Blame(self.receivers, self.lost), takes_self=True)
    inquiries: Inquiries = Factory(Inquiries)
    audit: Audit | None = None  # of the result, before it is committed
    # Looked up for every report: a list of a thousand takes its time.
    _contributing: frozenset[str] = Factory(lambda self: frozenset(self.peers()), takes_self=True)
    _receiving: frozenset[str] = Factory(lambda self: frozenset(self.receivers), takes_self=True)

    @property
    def contributors(self) -> tuple[m.Contributor, ...]:
        """Return the contributors of the order, including the lost."""
        return self.order.contributors

    @property
    def receivers(self) -> tuple[str, ...]:
        """Return the receivers of the order; one that does not contribute is a listener."""
        return self.order.receivers

    def peers(self) -> list[str]:
        """Return the contributors of the order."""
        return [contributor.peer for contributor in self.contributors]

    def contributes(self, peer: str) -> bool:
        """Return whether a peer is a contributor of the order."""
        return peer in self._contributing

    def serves(self, peer: str) -> bool:
        return peer in self._receiving and peer not in self.gone and peer not in self.lost

    def survivors(self) -> list[str]:
        """Return the contributors that are left: their reports decide."""
        return [peer for peer in self.peers() if peer not in self.lost]

    def needed(self) -> list[str]:
        """Return those that others depend on: survivors, and listeners that took over chunks."""
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
        added, norms = set(self.makers), self.reports.norms
        return {peer: norms[peer] for peer in self.needed() if peer in added and peer in norms}

    def gives(self, peer: str, receiver: str) -> bool:
        """Return whether ``peer`` sends ``receiver`` a contribution or a result."""
        adding = {*self.owners, *self.makers}
        return peer in adding or receiver in adding

    # ------------------------------------------------------------ losses

    def lose(self, peer: str, why: str) -> None:
        """Go on without a contributor or an owner; of several reasons the first is kept."""
        self.lost.setdefault(peer, why)
        self.outcomes.pop(peer, None)
        self.flush.held.pop(peer, None)

    def forget(self, peer: str, why: str) -> None:
        """Note that a receiver's connection has ended."""
        self.gone.add(peer)
        self.outcomes.pop(peer, None)
        self.flush.held.pop(peer, None)
        if peer in self.peers() or peer in self.owners:
            self.lose(peer, why)

    def why_lost(self) -> str:
        """Return the reasons for all losses."""
        return "; ".join(self.lost.values())

    # ------------------------------------------------------------ answers that are waited for

    def unanswered(self) -> list[str]:
        """Return the members that the inquiry in progress asked and that may still answer."""
        inquiry = self.inquiries.current
        if inquiry is None:
            return []
        asked, answers = inquiry.asked, inquiry.answers
        return [peer for peer in self.served() if peer in asked and peer not in answers]

    def unheard(self) -> list[str]:
        """Return the members without whose answer to the flush there is no repair."""
        return [peer for peer in self.needed() if peer not in self.flush.held]

    def may_learn_more(self) -> bool:
        """Return whether a listener may yet report a lost chunk that no other holds."""
        held = self.flush.held
        listeners = [p for p in self.served() if p not in held and p not in self.missed]
        return bool(listeners) and any(
            owner in self.lost and not any(holds(bits, chunk) for bits in held.values())
            for chunk, owner in enumerate(self.owners)
        )

    # ------------------------------------------------------------ flush and repair

    def begin_flush(self, now_s: float) -> None:
        """Begin a flush under the next number."""
        number = max(self.number, self.flush.number) + 1
        self.flush = FlushState(number, now_s, set(self.lost))
        # Its answers would be about the time before the loss.
        self.inquiries.current = None

    def begin_repair(self, assignments: Iterable[m.Assignment], now_s: float) -> None:
        """End the flush and go on under its number. All members report again."""
        for assignment in assignments:
            start = assignment.first_chunk
            end = start + assignment.chunk_count
            self.owners[start:end] = [assignment.owner] * assignment.chunk_count
            if assignment.from_scratch:
                self.makers[start:end] = [assignment.owner] * assignment.chunk_count
        self.number, self.flush.began_s = self.flush.number, math.inf
        self.outcomes.clear()
        self.reports = Reports(now_s, norms=self.reports.norms)
        self.blame = Blame(self.receivers, self.lost, ended=self.blame.ended)
        self.inquiries.asked.clear()
        for peer, wanting in list(self.blind.items()):
            # The repair gives it what it lacked.
            if wanting <= self.flush.shut:
                del self.blind[peer]
                self.missed.pop(peer, None)


# ---------------------------------------------------------------- the outcome


@frozen
class ReductionOutcome:
    """A complete result, as a receiver reports it."""

    digest: bytes
    manifest: tuple[m.ContributorRun, ...]  # empty: all contributors are in all chunks


@frozen
class Check:
    """One check of a chunk: the member that makes it, and the transfer of the order for it."""

    checker: str
    transfer: int


@define
class Audit:
    """The audit of one attempt's result."""

    number: int  # of the attempt, after repairs
    outcome: ReductionOutcome
    due_s: float  # until when the present checkers are waited for
    lots: dict[int, int]  # by chunk, a random number that selects its first checker
    # Drawn chunks that are not checked yet, with their checks; None: it is to be assigned.
    open: dict[int, Check | None]
    until_s: float = math.inf  # limit of ``due_s``, even if bytes move
    tried: dict[int, set[str]] = Factory(dict)  # by chunk, members that could not check it
    # Findings of other sums, with their checkers.
    different: list[tuple[str, m.ChunkFinding]] = Factory(list)
    silent: dict[str, set[str]] = Factory(dict)  # by member, the checkers that got nothing from it
    order_count: int = 0  # orders to checkers

    @property
    def over(self) -> bool:
        """Return whether no drawn chunk is to be checked any more."""
        return not self.open


# ---------------------------------------------------------------- accusations


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

    def accused(self) -> Iterator[str]:
        """Yield the members that the attempt has not lost and that members in it accuse."""
        return (p for p in self.accusers if p not in self.lost and self.against(p, {}))

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
        return [accused for accused, accusers in self.accusers.items() if peer in accusers]


def holds(bits: bytes, chunk: int) -> bool:
    return chunk // 8 < len(bits) and bool(bits[chunk // 8] >> chunk % 8 & 1)

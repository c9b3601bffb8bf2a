"""The driver of reductions: from the order, over losses and repairs, to a commit or an abort.

    begin --Reduce--> running --all survivors report one outcome--> recorded, Commit
                       |  ^ ^
                       |  | '-- Repair <--all have said what they hold-- Flush <--a member is lost
                       |  '---- Reduce: an update was refused, or nothing moves for a deadline
                       '--> Abort: fewer than the quorum are left, or they do not agree

A loss costs the chunks that the lost member owned (see ``attempt``, ``repair``). Those are given to
others only when all survivors have stopped accepting from the lost, so nothing can arrive from the
lost later and make a second result. Which contributors are in which chunk is part of the outcome
that all have to agree on.

Messages only add facts. ``advance`` looks at the facts and acts, so the order in which a death, an
accusation and a late result arrive does not matter. No member waits for the dead: a death that the
service reports counts at once; an accused member that still looks alive has ``settle_s``; a member
that does not answer a flush, and an attempt in which nothing moves, have ``deadline_s``; a member
that finishes long after the quorum is left behind.

The parts, each in a file of its own: ``reduction_orders`` (begin, run again), ``accusations`` (who
is left out), ``inquirer`` (what members wait for), ``repair`` (flush and repair), ``decision``
(commit).
"""

from __future__ import annotations

import math

from ....protocol.messages import Reduced, ReduceFailed, RefusalCode
from ...planning.bandwidth import Bandwidths
from ...shared.manifest import fits
from ..routes.routes import Routes
from ..state.context import Context, quoted
from ..state.roster import Member
from ..sync.state_sync import StateSync
from .accusations import Accusations
from .attempt import Attempt, ReductionOutcome
from .audits import Auditing
from .contribution_checks import ContributionChecks
from .decision import Decision
from .inquirer import Inquirer
from .inquiry import Question
from .norms import makes_sense
from .reduction_orders import ReductionOrders
from .repair import Repairer
from .round import Round
from .round_table import RoundTable

STALLS_MAX = 2  # attempts of a round in which nothing moved and no member could be blamed


class ReductionDriver:
    """Brings the reductions of a round table to their end."""

    def __init__(
        self,
        context: Context,
        state_sync: StateSync,
        round_table: RoundTable,
        bandwidths: Bandwidths,
        routes: Routes,
    ) -> None:
        self.context = context
        self.state_sync = state_sync
        self.round_table = round_table
        self.audits = Auditing(context, round_table, routes)
        self.orders = ReductionOrders(context, round_table, bandwidths, routes, self.audits)
        self.accusations = Accusations(context, round_table, routes)
        self.inquirer = Inquirer(context, round_table, routes)
        self.repairer = Repairer(context, round_table, routes)
        self.contribution_checks = ContributionChecks(context)
        self.decision = Decision(
            context,
            state_sync,
            round_table,
            self.orders,
            self.audits,
            self.accusations,
            self.inquirer,
            self.repairer,
            self.contribution_checks,
        )

    # ------------------------------------------------------------ facts

    def reduced(self, member: Member, message: Reduced) -> None:
        """Note a receiver's result."""
        attempt = self.round_table.attempt(message.round, message.attempt)
        if attempt is None:
            self._reduced_late(member, message)
            return
        if not attempt.serves(member.peer):
            return
        if not fits(message.manifest, len(attempt.owners), len(attempt.contributors)):
            self._violation(member, "its manifest does not fit the round that it reports")
            return
        if not makes_sense(message.norm_sums, len(attempt.contributors)):
            self._violation(member, "its norm report does not fit the round's contributors")
            return
        attempt.outcomes[member.peer] = ReductionOutcome(message.digest, message.manifest)
        attempt.reports.norms[member.peer] = message.norm_sums, message.momentum_square
        round_ = self.round_table.rounds[message.round]
        round_.mark(member.peer, member.name).reduced_s = self.context.now_s
        attempt.missed.pop(member.peer, None)
        attempt.blind.pop(member.peer, None)
        if attempt.contributes(member.peer) and member.peer not in attempt.lost:
            attempt.reports.moved_s = self.context.now_s
            quorum = self.round_table.quorum(len(attempt.contributors))
            # Counting takes time for each survivor, so it begins when there may be enough.
            if (
                attempt.reports.quorum_s is None
                and len(attempt.outcomes) >= quorum
                and len(attempt.survivors()) - len(attempt.unreported()) >= quorum
            ):
                attempt.reports.quorum_s = self.context.now_s

    def _reduced_late(self, member: Member, message: Reduced) -> None:
        """Compare a result that comes after the decision with the committed one."""
        round_ = self.round_table.committed(message.round)
        if round_ is None or round_.running().number != message.attempt:
            return
        if round_.digest != message.digest:
            self._missed(member, message.round, "its result differs from the one committed")
        elif member.peer in round_.running().receivers:
            round_.mark(member.peer, member.name).reduced_s = self.context.now_s

    def reduce_failed(self, member: Member, message: ReduceFailed) -> None:
        """Note that a receiver cannot finish, and which members it could not reach."""
        attempt = self.round_table.attempt(message.round, message.attempt)
        if attempt is None:
            self._missed(member, message.round, quoted(message.reason))
            return
        if member.peer in attempt.peers():
            if member.peer not in attempt.lost:
                self.accusations.contributor_failed(member, message, attempt)
            return
        attempt.missed[member.peer] = quoted(message.reason)
        attempt.outcomes.pop(member.peer, None)
        named = attempt.takes_part(message.accused)
        if named and not message.bad:
            attempt.blind.setdefault(member.peer, set()).update(named)
            return
        attempt.blind.pop(member.peer, None)
        if member.peer in attempt.owners:
            attempt.lose(member.peer, f"it cannot spread the results it has: {message.reason}")

    def moved(self, member: Member) -> None:
        """Note that bulk bytes leave or reach the member: what it takes part in is not stalled."""
        for round_ in self.round_table.reducing():
            attempt = round_.running()
            if attempt.unreported():
                if attempt.serves(member.peer):
                    attempt.reports.moved(member.peer, self.context.now_s)
            elif attempt.audit is not None:
                self.audits.moved(member, attempt.audit)

    def _missed(self, member: Member, number: int, why: str) -> None:
        round_ = self.round_table.committed(number)
        if round_ is not None and member.copies[round_.fragment].version <= round_.version:
            self.state_sync.late(member, round_.fragment, why, round_.version)

    def _violation(self, member: Member, why: str) -> None:
        self.round_table.evict(member.peer, RefusalCode.PROTOCOL, why)

    # ------------------------------------------------------------ conclusions

    def advance(self, round_: Round) -> bool:
        """Do one thing that the facts call for. Returns True if it did; then call again."""
        if self.orders.abort_below_quorum(round_):
            return True
        attempt, now_s = round_.running(), self.context.now_s
        if round_.distrust.refused.intersection(attempt.peers()):
            self.orders.rerun(round_, attempt.why_lost())  # it may be in chunks that are done
        elif not attempt.unreported():
            return self.decision.decide(round_)
        elif attempt.lost and attempt.blame.ended.intersection(attempt.survivors()):
            self.orders.rerun(round_, attempt.why_lost())  # they hold nothing to repair with
        elif attempt.lost.keys() - attempt.flush.shut:
            self.repairer.flush(round_)
        elif attempt.flush.in_progress and self.repairer.may_repair(attempt):
            if not self.repairer.repair(round_):
                self.orders.rerun(round_, attempt.why_lost())
        elif now_s >= self.repairer.flush_limit_s(attempt):
            self.repairer.remove_mute(round_)
        elif now_s >= self.accusations.limit_s(attempt):
            if why := self.accusations.resolve(round_):
                self.orders.rerun(round_, why)
        elif attempt.inquiries.current is not None and now_s >= self.inquirer.limit_s(attempt):
            self.inquirer.find_blockers(round_)
        elif now_s >= self._lag_limit_s(attempt):
            if not self.inquirer.ask(round_, Question.LAG, attempt.unreported()):
                self._leave_behind(attempt)
        elif now_s >= self._stall_limit_s(attempt):
            if not self.inquirer.ask(round_, Question.STALL, attempt.survivors()):
                self._stalled(round_)
        else:
            return False
        return True

    def next_deadline_s(self) -> float:
        """Return when ``advance`` has something to do at the latest, if nothing else happens."""
        limits = [math.inf]
        for round_ in self.round_table.reducing():
            attempt = round_.running()
            if not attempt.unreported():
                # Only checkers are waited for, or members that were asked about their results.
                limits += [self.audits.due_s(attempt), self.inquirer.limit_s(attempt)]
                continue
            limits += [
                self.repairer.listeners_limit_s(attempt),
                self.repairer.flush_limit_s(attempt),
                self.accusations.limit_s(attempt),
                self.inquirer.limit_s(attempt),
                self._lag_limit_s(attempt),
                self._stall_limit_s(attempt),
            ]
        return min(limits)

    # ------------------------------------------------------------ lag and stall

    def _lag_limit_s(self, attempt: Attempt) -> float:
        """Return when a member that has not finished is left behind.

        That is after twice the time that the quorum took, and at least a deadline after the quorum.
        """
        if attempt.reports.quorum_s is None or attempt.adopted or _is_handled(attempt):
            return math.inf
        taken_s = attempt.reports.quorum_s - attempt.started_s
        limit_s = attempt.reports.quorum_s + max(self.context.spec.membership.deadline_s, taken_s)
        return max(limit_s, attempt.inquiries.patience_s)

    def _stall_limit_s(self, attempt: Attempt) -> float:
        """Return when an attempt in which nothing moves counts as stalled."""
        if _is_handled(attempt):
            return math.inf
        limit_s = attempt.reports.moved_s + self.context.spec.membership.deadline_s
        return max(limit_s, attempt.inquiries.patience_s)

    def _leave_behind(self, attempt: Attempt) -> None:
        why = "it did not finish a reduction that others did"
        for peer in attempt.unreported():
            self.round_table.evict(peer, RefusalCode.LAGGING, why)

    def _stalled(self, round_: Round) -> None:
        """Act on a stall that no member is accused of."""
        attempt = round_.running()
        round_.stall_count += 1
        survivors, unreported = attempt.survivors(), attempt.unreported()
        reported_count = len(survivors) - len(unreported)
        if 2 * reported_count > len(survivors) or (
            reported_count and round_.stall_count >= STALLS_MAX
        ):
            self._leave_behind(attempt)
        elif round_.stall_count >= STALLS_MAX:
            self.round_table.abort(round_, f"nothing moved in {round_.stall_count} attempts")
        else:
            deadline_s = self.context.spec.membership.deadline_s
            self.orders.rerun(round_, f"nothing moved for {deadline_s:g} s")


def _is_handled(attempt: Attempt) -> bool:
    """Return whether the cause of a delay is known, or about to be: another limit applies then."""
    return (
        attempt.flush.in_progress
        or attempt.inquiries.current is not None
        or any(attempt.blame.accused())
    )

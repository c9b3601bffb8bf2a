"""Decisions: what becomes of a reduction whose contributors have all reported a result.

all survivors reported --results agree, checks found them right--> commit
                        '--results differ: ask what differs-----> commit, run again or abort
                        '--a contribution must not be added-----> run again without it
"""

from __future__ import annotations

from attrs import define

from ....protocol.messages import Commit
from ...shared.event_kind import EventKind
from ...shared.manifest import contents_of, format_committed
from ..state.context import Context, quoted
from ..state.journal import RoundCommitted
from ..sync.state_sync import StateSync
from .accusations import Accusations
from .attempt import ReductionOutcome
from .audits import Auditing
from .contribution_checks import ContributionChecks
from .inquirer import Inquirer
from .inquiry import Question
from .reduction_orders import ReductionOrders
from .repair import Repairer
from .round import Round
from .round_table import RoundTable


@define(eq=False)
class Decision:
    """Commits the result of a round, or has the round run again."""

    context: Context
    state_sync: StateSync
    round_table: RoundTable
    orders: ReductionOrders
    audits: Auditing
    accusations: Accusations
    inquirer: Inquirer
    repairer: Repairer
    contribution_checks: ContributionChecks

    def decide(self, round_: Round) -> bool:
        """Decide on a round whose survivors have all reported.

        Returns:
          False if there is nothing to do before checkers or asked members answer.
        """
        attempt = round_.running()
        inquiries = attempt.inquiries
        if inquiries.current and inquiries.current.question is not Question.DIFFERENCE:
            inquiries.end()  # no survivor waits any more
        if inquiries.current is not None:
            if self.context.now_s < self.inquirer.limit_s(attempt):
                return False
            self.inquirer.find_two_faced(attempt)
        elif attempt.disagrees() and self.inquirer.ask(
            round_, Question.DIFFERENCE, attempt.survivors()
        ):
            return True
        outcome = attempt.agreed(self.context.roster)
        if outcome is None:
            self._disagreed(round_)
            return True
        if self._refuse_overlong(round_):
            return True
        why = self.audits.advance(round_, outcome)
        if why:
            if not self.orders.abort_below_quorum(round_):
                self.orders.rerun(round_, why)
            return True
        if attempt.audit is not None and not attempt.audit.over:
            return False
        self.repairer.serve_listeners(round_, outcome)
        self._commit(round_, outcome)
        return True

    def _disagreed(self, round_: Round) -> None:
        attempt = round_.running()
        if not attempt.inquiries.two_faced:
            self.round_table.abort(
                round_, "the contributors' results differ, and none has a majority"
            )
            return
        self._announce_two_faced(round_)
        for peer in attempt.inquiries.two_faced:
            attempt.lose(peer, f"{self.context.name(peer)} gave others different results")
        if not self.orders.abort_below_quorum(round_):
            names = ", ".join(self.context.name(peer) for peer in attempt.inquiries.two_faced)
            self.orders.rerun(round_, f"{names} gave others different results")

    def _announce_two_faced(self, round_: Round) -> None:
        attempt = round_.running()
        for peer in attempt.inquiries.two_faced:
            if peer not in attempt.lost:  # else another member has spread what it made
                text = f"{self.context.name(peer)} gave others different results"
                self.context.announce(EventKind.BAD, peer, f"round {round_.number}: {text}")

    def _refuse_overlong(self, round_: Round) -> bool:
        """Refuse contributions that are longer than announced; check a lone accuser's word by a
        rerun.

        Returns:
          True if there are any.
        """
        overlong = self.contribution_checks.overlong(round_)
        lone = []
        for found in overlong:
            if not found.accuser:
                self.round_table.refuse_update(round_, found.peer, found.why)
            elif not self.accusations.call_bad(round_, found.peer, found.accuser, found.why):
                lone.append(self.accusations.keep_apart(round_, found.accuser, found.peer))
        if lone and not round_.distrust.refused.intersection(round_.running().peers()):
            self.orders.rerun(round_, quoted("; ".join(lone)))
        return bool(overlong)

    def _commit(self, round_: Round, outcome: ReductionOutcome) -> None:
        attempt = round_.running()
        commit = Commit(
            round=round_.number,
            attempt=attempt.number,
            fragment=round_.fragment,
            version=round_.version,
            at_step=round_.at_step,
            contributors=attempt.contributors,
            digest=outcome.digest,
            manifest=outcome.manifest,
        )
        self._announce_two_faced(round_)
        round_.digest = outcome.digest
        round_.contents = contents = contents_of(commit)
        added = [each.contributor.peer for each in contents.added]
        spent = self.round_table.leases.spend(round_.number, added)
        self.context.record(RoundCommitted(commit, spent))
        wrong = dict(attempt.missed)
        for peer, reported in attempt.outcomes.items():
            if reported != outcome:
                kind, why = EventKind.BAD, "differs from the one committed"
                if peer in attempt.inquiries.misled:
                    owner = self.context.name(attempt.inquiries.misled[peer])
                    kind, why = EventKind.SYNC, f"is not what {owner} gave others"
                wrong[peer] = f"its result of round {round_.number} {why}"
                text = f"{self.context.name(peer)}: {wrong[peer]}; it is synced again"
                self.context.announce(kind, peer, text)
        for peer in attempt.reached():
            self.context.send(peer, commit)
        self.state_sync.committed(commit, attempt.reached(), wrong)
        self.contribution_checks.committed(round_)
        self.round_table.commit(round_, format_outcome(round_))


def format_outcome(round_: Round) -> str:
    """Return a sentence about a committed round, for its record."""
    assert round_.contents is not None
    text = format_committed(round_.contents)
    for what, count in (("repaired", round_.repair_count), ("run again", round_.rerun_count)):
        if count:
            text += f", {what} {'once' if count == 1 else f'{count} times'}"
    return text

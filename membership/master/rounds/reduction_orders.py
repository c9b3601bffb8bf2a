"""Orders of reductions: what an attempt adds, who receives the result, and under which plan."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve

from ....protocol.messages import Contributor, Reduce
from ...planning.bandwidth import Bandwidths, LineCapacities
from ...planning.plan import make_plan
from ...planning.shares import NoReachableOwnerError
from ...shared.event_kind import EventKind
from ..routes.routes import Routes
from ..state.context import Context
from ..state.journal import RoundOrdered
from ..state.roster import CopyState, caps_of
from .attempt import Attempt
from .audits import Auditing
from .round import Round
from .round_table import RoundTable

# Attempts from nothing in one round; then it is aborted, and a new round asks all contributors
# again. Repairs need no limit: each costs a contributor.
RERUNS_MAX = 7
# Receivers with whom an order is recorded for the next master. A record grows with them; a larger
# run orders the round again after a restart.
RECORDED_RECEIVERS_MAX = 256
CONTROL_TRIPS = 2  # Reduce and Reduced, one way each; the master counts as far away as a member


@define(eq=False)
class ReductionOrders:
    """Orders the attempts of a round, from the first to the last."""

    context: Context
    round_table: RoundTable
    bandwidths: Bandwidths
    routes: Routes
    audits: Auditing

    def begin(self, round_: Round, contributors: tuple[Contributor, ...]) -> None:
        """Order a reduction of these contributors: the first attempt of the round, or another one.

        All of them must be ready: a member that is gone or refused is in neither.
        """
        assert all(each.peer in round_.answers.ready for each in contributors)
        everybody = [contributor.peer for contributor in contributors]
        wanted = self._receivers(set(everybody), round_.fragment)
        if round_.attempt is None:
            self.routes.disputes.planned(self.context.roster.members)
        adding, receivers = self.routes.together(everybody, wanted)
        if len(adding) < len(everybody):
            contributors = self._without_route(round_, contributors, set(adding))
            if len(adding) < self.round_table.quorum(round_.original_count):
                self.round_table.abort(round_, "too few contributors have a route to one another")
                return
        roster, now_s, before = self.context.roster, self.context.now_s, round_.attempt
        try:
            plan, estimate = make_plan(
                self.context.history.sizes[round_.fragment],
                adding,
                receivers,
                lines := self._lines(receivers, adding),
                self.context.spec,
                fragment=round_.fragment,
                barred=self.audits.barred() | round_.distrust.barred,
            )
        except NoReachableOwnerError as error:
            self.round_table.abort(round_, str(error))
            return
        number = 1 if before is None else max(before.number, before.flush.number) + 1
        message = Reduce(
            round=round_.number,
            attempt=number,
            fragment=round_.fragment,
            version=round_.version,
            view=roster.view_number,
            contributors=contributors,
            receivers=tuple(receivers),
            plan=plan,
        )
        if estimate.predicted_s is not None:
            trips_s = CONTROL_TRIPS * lines.delay_s
            estimate = evolve(estimate, predicted_s=estimate.predicted_s + trips_s)
        round_.attempt = Attempt(message, estimate, now_s)
        self.round_table.leases.ordered(round_.number, [each.peer for each in contributors])
        if len(receivers) <= RECORDED_RECEIVERS_MAX:
            ready = tuple(round_.answers.ready[each.peer] for each in contributors)
            self.context.record(RoundOrdered(message, round_.at_step, ready))
        for peer in receivers:
            round_.mark(peer, roster.members[peer].name)
            self.context.send(peer, message)

    def _without_route(
        self, round_: Round, contributors: tuple[Contributor, ...], adding: set[str]
    ) -> tuple[Contributor, ...]:
        for contributor in contributors:
            if contributor.peer not in adding:
                why = "it has no route to the members that add up"
                round_.answers.declined[contributor.peer] = why
                text = f"is left out of round {round_.number}: {why}"
                self.context.announce_peer(EventKind.ROUTE, contributor.peer, text)
        return tuple(c for c in contributors if c.peer in adding)

    def _lines(self, receivers: Sequence[str], adding: Sequence[str]) -> LineCapacities:
        lines = self.bandwidths.lines(receivers, caps_of(self.context.roster), adding)
        return evolve(lines, pair_limits=self.routes.limits(receivers))

    def _receivers(self, adding: set[str], fragment: int) -> tuple[str, ...]:
        """Return the contributors and all members that stay and have a use for the result.

        A joiner replays the results that it receives while it copies the state. It receives none of
        a fragment whose copy it has not begun, or cannot begin: they would only cost bandwidth.
        """
        in_line = self.context.in_line()
        return tuple(
            member.peer
            for member in self.context.roster.by_number()
            if member.peer in adding
            or (
                not (member.draining or member.relay or member.peer in in_line)
                and member.copies[fragment].state is not CopyState.STALE
            )
        )

    def rerun(self, round_: Round, why: str) -> None:
        """Order the reduction again, from the inputs; abort after too many attempts."""
        attempt = round_.running()
        if round_.rerun_count >= RERUNS_MAX:
            self.round_table.abort(round_, f"{attempt.number} attempts failed, the last one: {why}")
            return
        left = tuple(c for c in attempt.contributors if c.peer in attempt.survivors())
        round_.rerun_count += 1
        self.round_table.rerun_count += 1
        self.context.announce(
            EventKind.ROUND,
            None,
            f"round {round_.number} starts over with {len(left)} contributors: {why}",
        )
        self.begin(round_, left)

    def abort_below_quorum(self, round_: Round) -> bool:
        """Abort the round if too few contributors are left. Returns True if it was aborted."""
        if not self._too_few(round_):
            return False
        attempt = round_.running()
        self.round_table.abort(
            round_,
            f"{len(attempt.survivors())} of {round_.original_count} contributors are left, "
            f"{self.round_table.quorum(round_.original_count)} are needed: {attempt.why_lost()}",
        )
        return True

    def _too_few(self, round_: Round) -> bool:
        attempt = round_.running()
        survivors = attempt.survivors()
        weight = sum(each.weight for each in attempt.contributors if each.peer in survivors)
        return not weight or len(survivors) < self.round_table.quorum(round_.original_count)

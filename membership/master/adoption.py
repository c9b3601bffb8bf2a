"""Reductions that were under way when the master ended: they go on under the next one.

    order in the journal --all who add come back and say that they have it--> a round again
                          '--one comes without it, or not in time-----------> Abort

A peer does not stop a reduction because the master is away. So a master that restarts looks which
orders its journal has without a commit. Until all contributors of before are back, or their time is
over, no view is published: a view that names only some of them would cut their links.

Whoever is to add must be the same process as before; what it reports meanwhile is kept. An attempt
that was repaired or run again after the journal's order is another one, which nobody goes on with.
"""

from __future__ import annotations

from ...protocol.messages import Abort, Hello, Reduced, ReduceFailed
from ..planning.plan import PlanEstimate
from .rounds.attempt import Attempt
from .rounds.reduction_driver import ReductionDriver
from .rounds.round import Round, RoundPhase
from .rounds.round_table import RoundTable
from .state.context import Context
from .state.journal import RoundOrdered
from .state.master_effects import EventKind
from .state.roster import Member

UNKNOWN = PlanEstimate(0.0, 0.0, 0.0, 0)  # what the plan should need was not written down


class Adoption:
    """One per master; has nothing to do in one that runs for long."""

    def __init__(self, context: Context, round_table: RoundTable, driver: ReductionDriver) -> None:
        self.context = context
        self.round_table = round_table
        self.driver = driver
        self._orders: dict[int, RoundOrdered] = {
            record.order.round: record for _, record in sorted(context.history.orders.items())
        }
        self._back: dict[int, set[str]] = {number: set() for number in self._orders}
        self._said: list[tuple[Member, Reduced | ReduceFailed]] = []

    @property
    def waiting(self) -> bool:
        """Whether it is open yet what goes on."""
        return bool(self._orders)

    # ------------------------------------------------------------ facts

    def came(self, member: Member, hello: Hello) -> tuple[int, ...]:
        """A member attaches. Returns the rounds that it is to go on with."""
        held = {(reduced.round, reduced.attempt) for reduced in hello.undecided}
        going_on = []
        for number, record in list(self._orders.items()):
            if (number, record.order.attempt) in held and member.peer in record.order.receivers:
                self._back[number].add(member.peer)
                going_on.append(number)
            else:
                self._missed(number, member.peer)
        return tuple(going_on)

    def removed(self, peer: str) -> None:
        """A member is gone; if it comes back it says again what it has."""
        self._said = [(member, said) for member, said in self._said if member.peer != peer]
        for number in list(self._orders):
            if peer in self._back[number]:
                self._missed(number, peer)

    def hears(self, member: Member, message: Reduced | ReduceFailed) -> bool:
        """Whether a report is about a round that may go on; it is kept until that is known."""
        if message.round not in self._orders:
            return False
        self._said.append((member, message))
        return True

    def _missed(self, number: int, peer: str) -> None:
        self._back[number].discard(peer)
        if peer in _needed(self._orders[number]):
            self._void(number, f"{self.context.name(peer)} does not have it any more")

    # ------------------------------------------------------------ what follows

    def settle(self, missing: bool) -> bool:
        """Go on with what all have who are needed. True if anything changed.

        Args:
          missing: contributors of before are on their way back.
        """
        if missing or not self._orders:
            return False
        for number, record in list(self._orders.items()):
            absent = sorted(_needed(record) - self._back[number])
            if absent:
                self._void(number, f"{self.context.name(absent[0])} did not come back")
            else:
                self._adopt(record)
        said, self._said = self._said, []
        for member, message in said:
            if isinstance(message, Reduced):
                self.driver.reduced(member, message)
            else:
                self.driver.reduce_failed(member, message)
        return True

    def _void(self, number: int, why: str) -> None:
        record, back = self._orders.pop(number), self._back.pop(number)
        self._said = [each for each in self._said if each[1].round != number]
        reason = f"the reduction under way when the master restarted cannot go on: {why}"
        for peer in record.order.receivers:
            if peer in back:
                self.context.send(peer, Abort(number, reason))
        self.context.announce(EventKind.ROUND, None, f"round {number} was aborted: {reason}")

    def _adopt(self, record: RoundOrdered) -> None:
        order, now_s, roster = record.order, self.context.now_s, self.context.roster
        back = self._back.pop(order.round)
        del self._orders[order.round]
        attempt = Attempt.of(order, UNKNOWN, now_s, adopted=True)
        round_ = self.round_table.rounds[order.round] = Round(
            number=order.round,
            fragment=order.fragment,
            version=order.version,
            at_step=record.at_step,
            opened_s=now_s,
            phase=RoundPhase.REDUCING,
            ready={
                each.peer: ready
                for each, ready in zip(order.contributors, record.ready, strict=True)
            },
            closed_s=now_s,
            original_count=len(order.contributors),
            attempt=attempt,
        )
        for peer in order.receivers:
            if (member := roster.get(peer)) is not None and peer in back:
                round_.mark(peer, member.name)
            else:
                attempt.forget(peer, "it did not come back after the master's restart")
        self.context.announce(
            EventKind.ROUND,
            None,
            f"round {order.round} goes on: its reduction was under way when the master restarted",
        )


def _needed(record: RoundOrdered) -> set[str]:
    """Who adds or owns chunks."""
    return {
        *(each.peer for each in record.order.contributors),
        *(run.peer for run in record.order.plan.owners),
    }

"""Adoption of reductions that were in progress when the previous master ended.

    order in the journal --all contributors return with it-----------> the round goes on
                          '--one returns without it, or not in time--> Abort

Peers do not stop a reduction because the master is away. So a master that restarts looks for orders
in its journal that have no commit. No view is published until all contributors from before are
back, or their time is over: a view that names only some of them would close their links.

A contributor must return as the same process; its reports are kept meanwhile. An attempt that was
repaired or run again after the recorded order has another number, and is not continued.

Listeners of the order (spares) get ``LISTENERS_WAIT_S`` more: one that returned after the view
would have lost its links, and with them the result, and would copy the whole state instead.
"""

from __future__ import annotations

import math

from ...protocol.messages import Abort, Hello, Reduced, ReduceFailed
from ...protocol.text import plain
from ..planning.plan import PlanEstimate
from ..shared.event_kind import EventKind
from .rounds.attempt import Attempt
from .rounds.reduction_driver import ReductionDriver
from .rounds.round import Answers, Round, RoundPhase
from .rounds.round_table import RoundTable
from .state.context import Context
from .state.journal import RoundOrdered
from .state.roster import Member

# After the last contributor. Peers try to reach their master every 2 s.
LISTENERS_WAIT_S = 3.0
UNKNOWN = PlanEstimate(None, 0.0, 0)  # the plan's estimate is not in the journal


class Adoption:
    """Decides, after a restart, which reductions go on."""

    def __init__(self, context: Context, round_table: RoundTable, driver: ReductionDriver) -> None:
        self.context = context
        self.round_table = round_table
        self.driver = driver
        self._orders: dict[int, RoundOrdered] = {
            record.order.round: record for _, record in sorted(context.history.orders.items())
        }
        self._back: dict[int, set[str]] = {number: set() for number in self._orders}
        self._reports: list[tuple[Member, Reduced | ReduceFailed]] = []
        self._heard: set[str] = set()  # who has returned since the restart
        self._until_s = math.inf  # listeners are waited for until then

    @property
    def undecided_count(self) -> int:
        """Return the number of rounds that may go on or be aborted."""
        return len(self._orders)

    @property
    def waiting(self) -> bool:
        """Return whether it is not decided yet what goes on."""
        return bool(self._orders)

    # ------------------------------------------------------------ facts

    def came(self, member: Member, hello: Hello) -> tuple[int, ...]:
        """Note which reductions an attaching member still runs; return those to go on with."""
        self._heard.add(member.peer)
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
        """Forget a member that is gone; if it returns it reports again."""
        self._reports = [each for each in self._reports if each[0].peer != peer]
        for number in list(self._orders):
            if peer in self._back[number]:
                self._missed(number, peer)

    def hears(self, member: Member, message: Reduced | ReduceFailed) -> bool:
        """Keep a report about a round that may go on; return False about other rounds."""
        if message.round not in self._orders:
            return False
        self._reports.append((member, message))
        return True

    def _missed(self, number: int, peer: str) -> None:
        self._back[number].discard(peer)
        if peer in _needed(self._orders[number]):
            self._void(number, f"{self.context.name(peer)} does not have it any more")

    def awaited_listeners(self) -> set[str]:
        """Return the listeners that may still return to a reduction that will go on."""
        goes_on = [
            each for number, each in self._orders.items() if _needed(each) <= self._back[number]
        ]
        return {peer for each in goes_on for peer in each.order.receivers} - self._heard

    def next_deadline_s(self) -> float:
        """Return when listeners are no longer waited for; infinity if none is."""
        return self._until_s if self._orders else math.inf

    # ------------------------------------------------------------ conclusions

    def settle(self, missing: bool) -> bool:
        """Go on with the reductions that all needed members still run.

        Args:
          missing: contributors from before the restart may still return.

        Returns:
          True if anything changed.
        """
        if missing or not self._orders:
            return False
        if self.awaited_listeners():
            now_s = self.context.now_s
            if self._until_s == math.inf:
                self._until_s = now_s + LISTENERS_WAIT_S
            if now_s < self._until_s:
                return False
        for number, record in list(self._orders.items()):
            absent = sorted(_needed(record) - self._back[number])
            if absent:
                self._void(number, f"{self.context.name(absent[0])} did not come back")
            else:
                self._adopt(record)
        reports, self._reports = self._reports, []
        for member, message in reports:
            if isinstance(message, Reduced):
                self.driver.reduced(member, message)
            else:
                self.driver.reduce_failed(member, message)
        return True

    def _void(self, number: int, why: str) -> None:
        record, back = self._orders.pop(number), self._back.pop(number)
        self._reports = [each for each in self._reports if each[1].round != number]
        reason = f"the reduction under way when the master restarted cannot go on: {why}"
        for peer in record.order.receivers:
            if peer in back:
                self.context.send(peer, Abort(number, reason))
        round_ = self._enter(record)
        for peer in record.order.receivers:
            round_.mark(peer, self.context.history.members.name_of(peer))
        self.round_table.void(round_, plain(reason))

    def _enter(self, record: RoundOrdered) -> Round:
        """Enter the round of an order into the table, as if it had been opened and closed now."""
        order, now_s = record.order, self.context.now_s
        round_ = self.round_table.rounds[order.round] = Round(
            number=order.round,
            fragment=order.fragment,
            version=order.version,
            at_step=record.at_step,
            opened_s=now_s,
            phase=RoundPhase.REDUCING,
            answers=Answers(
                ready={
                    each.peer: ready
                    for each, ready in zip(order.contributors, record.ready, strict=True)
                }
            ),
            closed_s=now_s,
            original_count=len(order.contributors),
            attempt=Attempt(order, UNKNOWN, now_s, adopted=True),
        )
        return round_

    def _adopt(self, record: RoundOrdered) -> None:
        order, roster = record.order, self.context.roster
        back = self._back.pop(order.round)
        del self._orders[order.round]
        round_ = self._enter(record)
        for peer in order.receivers:
            if (member := roster.get(peer)) is not None and peer in back:
                round_.mark(peer, member.name)
            else:
                round_.running().forget(peer, "it did not come back after the master's restart")
        self.context.announce(
            EventKind.ROUND,
            None,
            f"round {order.round} goes on: its reduction was under way when the master restarted",
        )


def _needed(record: RoundOrdered) -> set[str]:
    """Return the members that contribute or own chunks."""
    return {
        *(each.peer for each in record.order.contributors),
        *(run.peer for run in record.order.plan.owners),
    }

"""The rounds of a run: those in progress, those that are over, and how they end.

``round_scheduler`` opens rounds and closes their sets of contributors; ``reduction_driver`` brings
their reductions to an end. Both use this table.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ....protocol.messages import MEMBERS_MAX, Abort, RefusalCode
from ....protocol.text import plain
from ...shared.event_kind import EventKind
from ..leases import Leases
from ..state.context import Context
from ..state.round_schedule import Backoff
from .attempt import Attempt
from .round import Round, RoundPhase, quorum_count

BAD_MAX = 3  # refused contributions in a row (no commit in between) before the peer is removed
REDUCTIONS_KEPT = 3  # durations whose median is the expected duration of a reduction
PAST_ROUNDS_MAX = 50  # for the dashboard, and for reports that come late

Evict = Callable[[str, RefusalCode, str], None]


class RoundTable:
    """All rounds of a run.

    Args:
      evict: removes a member from the roster.
      leases: of the samples that updates were trained on.
    """

    def __init__(self, context: Context, evict: Evict, leases: Leases) -> None:
        self.context = context
        self.leases = leases
        self.evict = evict
        self.rounds: dict[int, Round] = {}  # open or reducing, by number
        # Committed or aborted, oldest first.
        self.past: deque[Round] = deque(maxlen=PAST_ROUNDS_MAX)
        self.backoff = Backoff()  # how long to wait after rounds that were aborted
        self.abort_count = 0
        self.repair_count = 0
        self.rerun_count = 0
        # Seconds from the close of the set of contributors to the commit, of the last commits.
        self.reductions_s: deque[float] = deque(maxlen=REDUCTIONS_KEPT)
        self._bad_counts: dict[str, int] = {}  # by peer: refusals since the last commit with it

    def opened(self) -> list[Round]:
        """Return the rounds that wait for contributors."""
        return [round_ for round_ in self.rounds.values() if round_.phase is RoundPhase.OPEN]

    def reducing(self) -> list[Round]:
        """Return the rounds whose reduction is in progress."""
        return [round_ for round_ in self.rounds.values() if round_.phase is RoundPhase.REDUCING]

    def attempt(self, number: int, attempt_number: int) -> Attempt | None:
        """Return the attempt that a report is about, if it still has that number."""
        round_ = self.rounds.get(number)
        if round_ is None or round_.phase is not RoundPhase.REDUCING:
            return None
        attempt = round_.running()
        return attempt if attempt.number == attempt_number else None

    def committed(self, number: int) -> Round | None:
        """Return a recent round if it was committed."""
        for round_ in self.past:
            if round_.number == number and round_.phase is RoundPhase.COMMITTED:
                return round_
        return None

    def quorum(self, count: int) -> int:
        """Return how many of ``count`` contributors a round needs."""
        members = self.context.spec.membership
        return max(quorum_count(members.quorum, count), members.min_members)

    # ------------------------------------------------------------ updates that must not be added

    def refuse_update(self, round_: Round, peer: str, why: str) -> None:
        """Refuse a contribution that must not be added; evict its sender after several."""
        count = self._bad_counts.get(peer, 0) + 1
        self._bad_counts[peer] = count
        if len(self._bad_counts) > MEMBERS_MAX:
            del self._bad_counts[next(iter(self._bad_counts))]
        if round_.attempt is not None:
            round_.distrust.refused.add(peer)
            round_.attempt.lose(peer, f"its update was refused: {why}")
        round_.answers.decline(peer, f"refused: {why}")
        name = self.context.name(peer)
        text = f"the update of {name} for round {round_.number} was refused: {why}"
        self.context.announce(EventKind.BAD, peer, text)
        self.context.tell(peer, text)
        if count >= BAD_MAX:
            self.evict(peer, RefusalCode.PROTOCOL, f"{count} updates in a row were refused: {why}")

    # ------------------------------------------------------------ endings

    def commit(self, round_: Round, outcome: str) -> None:
        """End a round whose commit has been recorded and sent."""
        round_.turn(RoundPhase.COMMITTED)
        for contributor in round_.running().contributors:
            self._bad_counts.pop(contributor.peer, None)
        self.backoff.committed()
        self.reductions_s.append(self.context.now_s - round_.closed_s)
        added_count = len(round_.contents.added) if round_.contents is not None else 0
        self.context.totals.committed(
            round_.fragment, round_.at_step, added_count, self.context.roster
        )
        self._end(round_, outcome)

    def abort(self, round_: Round, reason: str) -> None:
        """End a round without a result, and tell its members."""
        reason = plain(reason)
        receivers = set(round_.answers.invited)
        if round_.attempt is not None:
            receivers.update(round_.attempt.reached())
        for member in self.context.roster.by_number():
            if member.peer in receivers:
                self.context.send(member.peer, Abort(round_.number, reason))
        self.backoff.aborted(self.context.now_s, failed=not round_.answers.idle)
        self.void(round_, reason)

    def void(self, round_: Round, reason: str) -> None:
        """End a round without a result; its members have been told, or need not be."""
        round_.turn(RoundPhase.ABORTED)
        self.abort_count += 1
        self.context.announce(EventKind.ROUND, None, f"round {round_.number} was aborted: {reason}")
        self._end(round_, reason)

    def _end(self, round_: Round, outcome: str) -> None:
        round_.outcome = outcome
        round_.ended_s = self.context.now_s
        del self.rounds[round_.number]
        self.leases.ended(round_.number)
        self.past.append(round_)

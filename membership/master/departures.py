"""Members that ask to leave, and contributors that do not return after the master's restart."""

from __future__ import annotations

import math

from attrs import define, field

from ...protocol.messages import Leaving, RefusalCode, Released
from ..shared.event_kind import EventKind
from .removal import Removal
from .rounds.round_scheduler import RoundScheduler
from .state.context import Context, quoted
from .state.journal import PlaceVacated
from .state.roster import RECEIVED_STATES, Member
from .state.succession import Succession
from .sync.state_sync import StateSync

# Deadlines after which a member that wants to leave is released, unless a running reduction needs
# it.
DRAIN_DEADLINES_MAX = 1.5


@define(eq=False)
class Departures:
    """Releases members that want to leave, and gives up contributors that stay away."""

    context: Context
    scheduler: RoundScheduler
    state_sync: StateSync
    succession: Succession
    removal: Removal
    # Set by the first event after a restart.
    _return_until_s: float | None = field(default=None, init=False)

    # ------------------------------------------------------------ members that leave

    def leave(self, member: Member, message: Leaving) -> None:
        """Note that a member wants to leave."""
        if member.draining_s is None:
            member.draining_s = self.context.now_s
            member.draining_why = message.reason
            self.context.announce_peer(
                EventKind.LEAVE, member.peer, f"leaves: {quoted(message.reason)}"
            )

    def release(self) -> bool:
        """Release one leaving member that nothing needs, or that has waited long enough.

        Returns:
          True if a member was released.
        """
        for member in self.context.roster.by_number():
            if member.draining_s is None:
                continue
            patient = self.context.now_s < self._release_s(member.draining_s)
            if self.scheduler.adds(member.peer) or (
                patient and (self.scheduler.awaits(member.peer) or self._copies_need(member))
            ):
                continue
            self.context.send(member.peer, Released())
            self.context.announce_peer(EventKind.LEAVE, member.peer, "has left")
            self.context.drop(member.peer, RefusalCode.LEFT, "you asked to leave")
            self.removal.remove(member, f"it left: {quoted(member.draining_why)}")
            return True
        return False

    def _copies_need(self, member: Member) -> bool:
        """Return whether copies need a member that wants to leave.

        Some transfer would have to start over, or no member that stays would hold a version; or the
        member has yet to apply one, which its last checkpoint would lack.
        """
        staying = [m.copies for m in self.context.roster if not (m.draining or m.relay)]
        held = {
            (fragment, copy.version)
            for copies in staying
            for fragment, copy in enumerate(copies)
            if copy.state in RECEIVED_STATES
        }
        return any(
            copy.fetch is not None and copy.fetch.donors == [member.peer]
            for copies in staying
            for copy in copies
        ) or any(
            copy.version < self.context.history.versions[fragment]
            or (staying and (fragment, copy.version) not in held)
            for fragment, copy in enumerate(member.copies)
            if copy.state in RECEIVED_STATES
        )

    def _release_s(self, draining_s: float) -> float:
        return draining_s + DRAIN_DEADLINES_MAX * self.context.spec.membership.deadline_s

    # --------------------------------------------------- contributors from before a restart

    def expect_return(self, *, again: bool = False) -> None:
        """Start the deadline for the return of contributors from before the restart.

        Args:
          again: start it from now, although it has been started before.
        """
        if again or self._return_until_s is None:
            self._return_until_s = self.context.now_s + self.context.spec.membership.deadline_s

    def give_up_missing(self) -> bool:
        """Vacate the places of contributors that have not returned by the deadline.

        Returns:
          True if it gave up waiting.
        """
        if self.context.now_s < self._give_up_s():
            return False
        for peer in sorted(self.state_sync.missing):
            self.context.record(PlaceVacated(peer))
            self.context.announce_peer(
                EventKind.LEAVE, peer, "did not come back after the master's restart"
            )
        self.state_sync.missing.clear()
        self.state_sync.votes.unheard.clear()
        return True

    def _give_up_s(self) -> float:
        """Return when missing contributors are given up; infinity if none is waited for."""
        none = not (self.state_sync.missing or self.state_sync.votes.unheard)
        if none or self._return_until_s is None or self.succession.waiting:
            return math.inf
        return self._return_until_s

    def next_deadline_s(self) -> float:
        """Return when a leaving member is released, or a missing one given up, at the latest."""
        releases = (
            self._release_s(member.draining_s)
            for member in self.context.roster
            if member.draining_s is not None
        )
        due = (release_s for release_s in releases if release_s > self.context.settled_s)
        return min((self._give_up_s(), *due))

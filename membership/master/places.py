"""Contributors' places, given up and taken; and the founding of a run by one of the members."""

from __future__ import annotations

from ...protocol.messages import SupplyWeights, WeightsSupplied
from ..shared.event_kind import EventKind
from . import trainers
from .attachment import Attachment
from .hello_checks import founding_fault, layout_refusal
from .removal import Removal
from .state.context import Context
from .state.journal import PlaceTaken, PlaceVacated, RunFounded
from .state.roster import Member, next_to_seat
from .state.voting_blocs import format_invite_warning, large_invites
from .sync.state_sync import StateSync


class Places:
    """Assigns places. A place belongs to a peer, so it survives a reconnect (see ``roster``)."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._warned: set[str] = set()  # invites that a warning was given of

    def contributing(self) -> list[Member]:
        """Return the attached members that have a place, by number."""
        places = self.context.history.members.places
        return [member for member in self.context.roster.by_number() if member.peer in places]

    def assign(self) -> bool:
        """Vacate the places of members that cannot use them, and fill free ones.

        Returns:
          True if a place was vacated or taken.
        """
        history, limit = self.context.history, self.context.spec.membership.contributors
        changed = False
        while limit and len(history.members.places) > limit:
            admitted = [peer for peer in history.members.admitted if peer in history.members.places]
            self._vacate(admitted[-1], "the run has fewer places now")
            changed = True
        while (holder := trainers.unseated(self.context)) is not None:
            self._vacate(holder.peer, "it has no trainer")
            changed = True
        while (late := trainers.too_late(self.context)) is not None:
            self._vacate(late.peer, trainers.rest(self.context, late))
            changed = True
        while True:
            member = next_to_seat(
                self.context.roster,
                history.members.places,
                history.members.vacancies,
                limit,
                history.versions,
                self.context.now_s,
                history.members.demoted,
            )
            if member is None:
                return changed
            self.context.record(PlaceTaken(member.peer))
            self.context.announce_peer(EventKind.ROLE, member.peer, "is now a contributor")
            changed = True

    def _vacate(self, peer: str, why: str) -> None:
        self.context.record(PlaceVacated(peer))
        self.context.announce_peer(EventKind.ROLE, peer, f"gives up its place: {why}")

    def warn_of_invites(self) -> None:
        """Warn the operator once of each invite that a large part of the contributors came by."""
        for invite, count in large_invites(self.contributing()).items():
            if invite not in self._warned:
                self._warned.add(invite)
                self.context.announce(EventKind.RUN, None, format_invite_warning(invite, count))


# ---------------------------------------------------------------- founding


class Founding:
    """Asks one member at a time for the first weights."""

    def __init__(
        self, context: Context, state_sync: StateSync, removal: Removal, attachment: Attachment
    ) -> None:
        self.context = context
        self.state_sync = state_sync
        self.removal = removal
        self.attachment = attachment
        self.founder: str | None = None  # the member that was asked and has not answered

    def founders(self) -> list[Member]:
        """Return the members that may found the run: of each invite, only the first to attach."""
        found, invites = [], set()
        for member in self.context.roster.by_number():
            invite = member.grant.invite
            if member.grant.founder and not member.draining and invite not in invites:
                found.append(member)
                invites |= {invite} - {""}
        return found

    def ask(self) -> bool:
        """Ask the first possible founder that has a trainer. Returns True if a member was asked."""
        if self.context.history.founded or self.founder is not None:
            return False
        for member in self.founders():
            if member.trainer.running:
                self.founder = member.peer
                self.context.send(member.peer, SupplyWeights())
                return True
        return False

    def withdraw(self, peer: str) -> None:
        """Expect no weights from a peer that has left or has lost its trainer."""
        if self.founder == peer:
            self.founder = None

    def supplied(self, member: Member, message: WeightsSupplied) -> None:
        """Found the run and send its layout to the other members, as a second ``Welcome``."""
        if self.context.history.founded or self.founder != member.peer:
            return  # its trainer was lost meanwhile, and another member was asked
        fault = founding_fault(member, message, self.context.spec)
        if fault is not None:
            self.removal.violation(member, f"its WeightsSupplied is void: {fault}")
            return
        self.founder = None
        self.context.record(
            RunFounded(message.layout, message.sizes, message.lineage, message.heads)
        )
        self.state_sync.founded(member)
        self.context.announce_peer(EventKind.RUN, member.peer, "supplied the initial weights")
        for other in self.context.roster.by_number():
            refused = layout_refusal(self.context, other.trainer.layout)
            if refused is not None:
                self.removal.evict(other.peer, *refused)
            elif other is not member:
                self.attachment.welcome(other)

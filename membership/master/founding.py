"""Founding: the run's first weights come from the trainer of a member whose invite allows it."""

from __future__ import annotations

from ...protocol.messages import SupplyWeights, WeightsSupplied
from ..shared.event_kind import EventKind
from .attachment import Attachment
from .hello_checks import founding_fault, layout_refusal
from .removal import Removal
from .state.context import Context
from .state.journal import RunFounded
from .state.roster import Member
from .sync.state_sync import StateSync


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

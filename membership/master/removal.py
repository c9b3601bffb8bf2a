"""Removal of members: by a rule of the master, by the operator, or because their connection
ended.
"""

from __future__ import annotations

from collections.abc import Callable

from ...protocol.messages import RefusalCode
from ..shared.event_kind import EventKind
from .state.context import Context
from .state.journal import PlaceVacated
from .state.roster import Member


class Removal:
    """Removes members from the roster.

    Args:
      removed: called with each removed member and the reason; tells the other parts of the master.
    """

    def __init__(self, context: Context, removed: Callable[[Member, str], None]) -> None:
        self.context = context
        self._removed = removed

    def evict(self, peer: str, code: RefusalCode, reason: str) -> None:
        """Close a member's connection and remove it; do nothing if the peer is not attached."""
        member = self.context.roster.get(peer)
        if member is None:
            return
        self.context.announce_peer(EventKind.LEAVE, peer, f"was removed: {reason}")
        self.context.drop(peer, code, reason)
        self.remove(member, reason)

    def violation(self, member: Member, what: str) -> None:
        """Evict a member that has sent what the protocol does not allow."""
        self.evict(member.peer, RefusalCode.PROTOCOL, f"broke the protocol: {what}")

    def remove(self, member: Member, why: str, *, keep_place: bool = False) -> None:
        """Remove a member whose connection is closed, or is being closed.

        Args:
          keep_place: the same process has connected again and keeps its place.
        """
        del self.context.roster.members[member.peer]
        member.gone_s = self.context.now_s
        self.context.departed.append((member, why))
        self.context.detector.forget(member.peer)
        if not keep_place and member.peer in self.context.history.members.places:
            self.context.record(PlaceVacated(member.peer))
        self._removed(member, why)

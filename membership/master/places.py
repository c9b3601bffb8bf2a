"""Contributors' places: which member gives one up, and which takes it."""

from __future__ import annotations

from ..shared.event_kind import EventKind
from . import trainers
from .state.context import Context
from .state.journal import PlaceTaken, PlaceVacated
from .state.roster import Member, next_to_seat
from .state.voting_blocs import format_invite_warning, large_invites


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

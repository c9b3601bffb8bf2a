"""Votes on the root of a version: the root that more than half of the members that reached it
report.

A root in the journal is not voted on any more. Votes are counted by ``voting_blocs``. If all have
reported and there is no majority, the largest group wins, and of equal groups the one with the
oldest member. After a restart of the master, contributors from before count as silent voters until
they report or the deadline is over, so the first member to return cannot decide alone.
"""

from __future__ import annotations

import math

from ....protocol.messages import FragmentHead
from ..state.context import Context
from ..state.roster import CopyState, Member
from ..state.voting_blocs import elect, voice_of

VOTED_VERSIONS = 3  # newest versions of a fragment whose roots are still voted on


class RootVotes:
    """The votes of all members; one object per master."""

    def __init__(self, context: Context) -> None:
        self.context = context
        # Contributors from before the master's restart that have not voted.
        self.unheard = set(context.history.members.places)
        self._cast: dict[tuple[int, int], dict[str, bytes]] = {}  # (fragment, version) -> by peer
        self._heard_s: dict[tuple[int, int], float] = {}  # likewise, of the last vote

    def cast(self, member: Member, head: FragmentHead) -> None:
        """Count a member's vote; a later one replaces it."""
        newest = self.context.history.versions[head.fragment]
        if head.version == newest:
            self.unheard.discard(member.peer)
        if newest - VOTED_VERSIONS < head.version <= newest:
            key = head.fragment, head.version
            self._cast.setdefault(key, {})[member.peer] = head.root
            self._heard_s[key] = self.context.now_s

    def by_peer(self, fragment: int, version: int) -> dict[str, bytes]:
        return self._cast.get((fragment, version), {})

    def heard_s(self, fragment: int, version: int) -> float:
        """Return when the last vote on a version was cast; minus infinity if none was."""
        return self._heard_s.get((fragment, version), -math.inf)

    def voted_on(self) -> list[tuple[int, int]]:
        """Return the fragments and versions that have votes."""
        return list(self._cast)

    def winner(self, fragment: int, version: int, *, force: bool) -> bytes:
        """Return the root that the votes agree on, or ``b""`` while they do not.

        Args:
          force: do not wait for members that have not reported.
        """
        voters = sorted(self._voters(fragment), key=lambda member: member.number)
        voices = {member.peer: voice_of(member) for member in voters}
        unheard = self.unheard - voices.keys()
        found = elect(self.by_peer(fragment, version), voices, len(unheard))
        if found is None:
            return b""
        votes = self.by_peer(fragment, version)
        all_have = not unheard and all(peer in votes for peer in voices)
        return found.winner if found.majority or all_have or force else b""

    def _voters(self, fragment: int) -> list[Member]:
        """Return the members in sync, or while there are none, the holders of unchecked copies."""
        in_sync = [member for member in self.context.roster if member.in_sync]
        if in_sync:
            return in_sync
        return [
            member
            for member in self.context.roster
            if member.copies and member.copies[fragment].state is CopyState.UNCHECKED
        ]

    # ------------------------------------------------------------ forgetting

    def forget_peer(self, peer: str) -> None:
        """Forget the votes of a peer that is no longer in the roster."""
        for votes in self._cast.values():
            votes.pop(peer, None)

    def forget_beyond(self, fragment: int, newest: int) -> None:
        """Forget votes on later versions: the run has gone back to this one."""
        for key in [key for key in self._cast if key[0] == fragment and key[1] > newest]:
            del self._cast[key], self._heard_s[key]

    def prune(self) -> None:
        """Forget votes on versions too old to be asked for."""
        versions = self.context.history.versions
        for fragment, version in list(self._cast):
            if version <= versions[fragment] - VOTED_VERSIONS:
                del self._cast[fragment, version], self._heard_s[fragment, version]

"""Which root a version has: what the members that reached it report, more than half of them.

What the journal knows is not voted on any more. Votes are counted by ``voting_blocs``. All have reported and no
half agrees: the largest group, and of equal ones that with the oldest member.
After a restart of the master, contributors from before count as silent voters until they report or the
deadline is over, so the first to return cannot decide alone.
"""

from __future__ import annotations

from ....protocol.messages import FragmentHead
from ..state.context import Context
from ..state.roster import CopyState, Member
from ..state.voting_blocs import elect, voice_of

VOTED_VERSIONS = 3  # newest versions of a fragment whose roots are still voted on


class RootVotes:
    """One per master.

    Attributes:
      unheard: contributors from before the master's restart that have not voted.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.unheard = set(context.history.places)
        self._cast: dict[tuple[int, int], dict[str, bytes]] = {}  # (fragment, version) -> by peer

    def cast(self, member: Member, head: FragmentHead) -> None:
        newest = self.context.history.versions[head.fragment]
        if head.version == newest:
            self.unheard.discard(member.peer)
        if newest - VOTED_VERSIONS < head.version <= newest:
            self._cast.setdefault((head.fragment, head.version), {})[member.peer] = head.root

    def of(self, fragment: int, version: int) -> dict[str, bytes]:
        """By peer."""
        return self._cast.get((fragment, version), {})

    def asked(self) -> list[tuple[int, int]]:
        """Fragments and versions that somebody has voted on."""
        return list(self._cast)

    def winner(self, fragment: int, version: int, *, force: bool) -> bytes:
        """The root that the votes come to; ``b""``: not agreed yet.

        Args:
          force: do not wait for members that have not reported.
        """
        voters = sorted(self._voters(fragment), key=lambda member: member.number)
        voices = {member.peer: voice_of(member) for member in voters}
        unheard = self.unheard - voices.keys()
        found = elect(self.of(fragment, version), voices, len(unheard))
        if found is None:
            return b""
        votes = self.of(fragment, version)
        all_have = not unheard and all(peer in votes for peer in voices)
        return found.winner if found.majority or all_have or force else b""

    def _voters(self, fragment: int) -> list[Member]:
        """Members in sync; while there is none, whoever holds a copy that nothing speaks against."""
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
        """It is no longer in the roster."""
        for votes in self._cast.values():
            votes.pop(peer, None)

    def forget_beyond(self, fragment: int, newest: int) -> None:
        """The run has gone back to this version."""
        for key in [key for key in self._cast if key[0] == fragment and key[1] > newest]:
            del self._cast[key]

    def prune(self) -> None:
        """Nobody asks for old versions' roots any more."""
        versions = self.context.history.versions
        for fragment, version in list(self._cast):
            if version <= versions[fragment] - VOTED_VERSIONS:
                del self._cast[fragment, version]

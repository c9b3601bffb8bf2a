"""Whose word counts as one: votes go by invite and line, not by identity, of which anybody may have many.

Members that came with one invite from one line are one *voice*; each of them has an equal part of it. Where
all are one voice (a lab behind one router), that is one vote for each, as it must be.

Neither way of counting is safe alone: an address may be had for little, and so may an identity behind one. What
wins by voices and by heads wins. If the two differ, what the member says wins that is here longest:
whoever comes to outvote a run comes later. ``status`` warns of invites that hold many places.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Generic, TypeVar

from attrs import frozen

from ...planning.sites import line_of
from .roster import Member, Roster

T = TypeVar("T", bound=Hashable)
Voice = tuple[str, str]  # invite and line

INVITE_SHARE = 3  # an invite that holds a third of the places can come to outvote the rest
INVITE_MEMBERS_MIN = 2  # what one machine alone holds is its own


@frozen
class Election(Generic[T]):
    """What members' words come to.

    Attributes:
      winner: what most say.
      majority: more than half do, by voices and by heads, also of those who say nothing yet; once all
        have said something, by either.
    """

    winner: T
    majority: bool


def voice_of(member: Member) -> Voice:
    return member.grant.invite, line_of(member.host)


def voices_of(roster: Roster, peers: Iterable[str]) -> dict[str, Voice]:
    """Of those of these that are here, in the same order."""
    members = [(peer, roster.get(peer)) for peer in peers]
    return {peer: voice_of(member) for peer, member in members if member is not None}


def elect(
    votes: Mapping[str, T], voices: Mapping[str, Voice], absent_count: int = 0
) -> Election[T] | None:
    """Count; None: nobody has said anything.

    Args:
      votes: by member; those of others do not count.
      voices: of those who may vote and are here, who is here longest first.
      absent_count: those who may vote, too. By which line they will come nobody knows: they count as
        heads only.
    """
    sizes: dict[Voice, int] = {}
    for voice in voices.values():
        sizes[voice] = sizes.get(voice, 0) + 1
    by_voice: dict[T, Fraction] = {}
    by_head: dict[T, int] = {}  # both in the order of their oldest voters
    for peer, voice in voices.items():
        if peer in votes:
            vote = votes[peer]
            by_voice[vote] = by_voice.get(vote, Fraction()) + Fraction(1, sizes[voice])
            by_head[vote] = by_head.get(vote, 0) + 1
    if not by_head:
        return None
    most = max(by_voice.values()), max(by_head.values())
    winner = next(v for v in by_head if by_voice[v] == most[0] or by_head[v] == most[1])
    count = len(voices) + absent_count
    halves = 2 * by_voice[winner] > len(sizes), 2 * by_head[winner] > count
    all_have = sum(by_head.values()) == count
    return Election(winner, any(halves) if all_have else all(halves))


def large_invites(members: Sequence[Member]) -> dict[str, int]:
    """Of those that have a place: invites by which a third of them came, and how many that is."""
    counts: dict[str, int] = {}
    for member in members:
        if member.grant.invite:
            counts[member.grant.invite] = counts.get(member.grant.invite, 0) + 1
    return {
        invite: count
        for invite, count in counts.items()
        if count >= INVITE_MEMBERS_MIN and INVITE_SHARE * count >= len(members)
    }


def format_invite_warning(invite: str, count: int) -> str:
    """For the run's owner."""
    return (
        f"{count} contributors came by one invite ({invite}), at least a third: whoever has it could come "
        "to outvote the others; `holdfast invite` makes one for each machine, or for each owner"
    )

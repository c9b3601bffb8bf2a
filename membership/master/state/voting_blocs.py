"""Voting blocs: votes are counted by invite and line, because one person may hold many identities.

Members that came with one invite from one line are one *voice*, of which each has an equal part. If
all members are one voice (a lab behind one router), each has one vote.

Neither way of counting is safe alone: addresses are cheap, and so are identities behind one
address. What wins both by voices and by heads wins. If the two differ, the vote of the oldest
member decides: an attacker who wants to outvote a run comes later. ``status`` warns of invites that
hold many places.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Generic, TypeVar

from attrs import frozen

from .roster import Member, Roster

T = TypeVar("T", bound=Hashable)
Voice = tuple[str, str]  # invite and line

# The holder of an invite with a third of the places could come to outvote the rest.
INVITE_SHARE = 3
INVITE_MEMBERS_MIN = 2  # one machine by one invite is the normal case


@frozen
class Election(Generic[T]):
    """Result of a vote."""

    winner: T  # the value with the most votes
    # It has the votes of more than half of the members and of more than half of the voting blocs,
    # of all that may vote. Once all have voted, one of the two is enough.
    majority: bool


def voice_of(member: Member) -> Voice:
    return member.grant.invite, line_of(member.connection.host)


def line_of(host: str) -> str:
    """Return what all hosts behind one line have in common: an IPv4 address, or an IPv6 /64."""
    if ":" not in host:
        return host
    head, gap, tail = host.partition("::")
    front = [part for part in head.split(":") if part]
    back = [part for part in tail.split(":") if part]
    zeros = ["0"] * (8 - len(front) - len(back)) if gap else []
    return ":".join(part.lower().lstrip("0") or "0" for part in [*front, *zeros, *back][:4])


def voices_of(roster: Roster, peers: Iterable[str]) -> dict[str, Voice]:
    """Return the voices of the attached ones among these peers, in the same order."""
    members = [(peer, roster.get(peer)) for peer in peers]
    return {peer: voice_of(member) for peer, member in members if member is not None}


def elect(
    votes: Mapping[str, T], voices: Mapping[str, Voice], absent_count: int = 0
) -> Election[T] | None:
    """Count votes.

    Args:
      votes: by member; only those of members in ``voices`` count.
      voices: of the attached members that may vote, the oldest first.
      absent_count: further members that may vote. Their lines are not known: they count as heads
        only.

    Returns:
      None if there are no votes.
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
    """Return the invites by which a third of the contributors or more came, with their numbers.

    An invite by which all came is none: there is no other contributor to outvote.
    """
    counts: dict[str, int] = {}
    for member in members:
        if member.grant.invite:
            counts[member.grant.invite] = counts.get(member.grant.invite, 0) + 1
    return {
        invite: count
        for invite, count in counts.items()
        if INVITE_MEMBERS_MIN <= count < len(members) and INVITE_SHARE * count >= len(members)
    }


def format_invite_warning(invite: str, count: int) -> str:
    """Return a warning for the run's operator."""
    return (
        f"{count} contributors came by one invite ({invite}), at least a third: its holder could "
        "outvote the others; `holdfast invite` makes one for each machine, or for each owner"
    )

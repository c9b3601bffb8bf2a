"""Whether all copies of the state are equal, from the digests that members report anyway.

A member reports the digest of each version that it reaches, and each report is a vote on the
version's root (see ``root_votes``). So the run's copies are equal at the newest version of a
fragment on which all members have cast a vote for the run's root. Nothing is asked of anybody for
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...shared.run_status import CopyAgreement, UnequalCopyRow
from ..state.roster import RECEIVED_STATES, Member
from ..sync.root_votes import VOTED_VERSIONS

if TYPE_CHECKING:
    from ..coordinator import Coordinator

NAMED_MAX = 3  # members that the sentence names

Agreed = tuple[int, set[str]]  # a version, and the peers that reported the run's root of it


def copy_agreement(coordinator: Coordinator, now_s: float) -> CopyAgreement:
    """Return what is known of the copies of all members that are to hold the state."""
    context, votes = coordinator.context, coordinator.state_sync.votes
    in_line = context.in_line()
    members = [
        member
        for member in context.roster.by_number()
        if member.copies and not member.relay and member.peer not in in_line
    ]
    whole = {member.peer for member in members if _is_whole(member)}
    agreed = [
        _agreed(coordinator, fragment, whole) for fragment in range(context.history.fragment_count)
    ]
    equal = set.intersection(whole, *(peers for _version, peers in agreed))
    versions = tuple(version for version, _peers in agreed)
    unequal = [member for member in members if member.peer not in equal]
    compared_at_s = [votes.heard_s(fragment, version) for fragment, version in enumerate(versions)]
    return CopyAgreement(
        text=_sentence(coordinator, members, unequal, versions),
        all=len(members),
        equal=len(equal),
        versions=versions if equal else (),
        compared_s=now_s - max(compared_at_s) if equal else None,
        unequal=tuple(
            UnequalCopyRow(peer=member.peer, name=member.name, why=_why(member, agreed))
            for member in unequal
        ),
    )


def _is_whole(member: Member) -> bool:
    return all(copy.state in RECEIVED_STATES for copy in member.copies)


def _agreed(coordinator: Coordinator, fragment: int, whole: set[str]) -> Agreed:
    """Return the newest of the versions that most of the whole copies were equal at."""
    history, votes = coordinator.context.history, coordinator.state_sync.votes
    newest = history.versions[fragment]
    best: Agreed = newest, set()
    for version in range(newest, max(-1, newest - VOTED_VERSIONS), -1):
        root = history.root(fragment, version)
        cast = votes.by_peer(fragment, version)
        peers = {peer for peer in whole if root and cast.get(peer) == root}
        if len(peers) > len(best[1]):
            best = version, peers
    return best


def _why(member: Member, agreed: Iterable[Agreed]) -> str:
    for copy in member.copies:
        if copy.state not in RECEIVED_STATES:
            return copy.why
    missing = (n for n, (_version, peers) in enumerate(agreed) if member.peer not in peers)
    return f"it has not reported the newest version of fragment {next(missing)} yet"


def _sentence(
    coordinator: Coordinator,
    members: list[Member],
    unequal: list[Member],
    versions: tuple[int, ...],
) -> str:
    if not members:
        return ""
    low, high = min(versions), max(versions)
    at = f"version {low}" if low == high else f"versions {low} to {high}"
    if not unequal:
        count = f"all {len(members)} copies equal at" if len(members) > 1 else "1 copy, at"
        return f"{count} {at}"
    others = [f"{member.name} {_doing(coordinator, member)}" for member in unequal]
    if len(others) > NAMED_MAX:
        others[NAMED_MAX:] = [f"{len(others) - NAMED_MAX} more"]
    equal = len(members) - len(unequal)
    where = f"equal at {at}" if equal else "compared"
    return f"{equal} of {len(members)} copies {where}; {', '.join(others)}"


def _doing(coordinator: Coordinator, member: Member) -> str:
    history = coordinator.context.history
    for fragment, copy in enumerate(member.copies):
        if copy.root and history.root(fragment, copy.version) not in (b"", copy.root):
            return "is being healed"
    if any(copy.fetch is not None for copy in member.copies):
        return "is copying the state"
    return "has not reported yet" if _is_whole(member) else "is behind"

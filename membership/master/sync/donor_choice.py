"""The choice of donors for a copy of the state: the members with the most spare uplink.

A donor's spare uplink is its uplink, divided by the receivers it would have then. So a fast line is
chosen before a slow one, and an idle slow line before a busy fast one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ....protocol.messages import FragmentHead
from ...planning.bandwidth import Bandwidths
from ..routes.routes import Routes
from ..state.context import Context, format_member
from ..state.master_effects import EventKind
from ..state.roster import CopyState, Fetch, Member, Roster, caps_of

DONORS_MAX = 4  # per transfer: more do not make it faster, and each holds a pin


def choose_donors(
    roster: Roster, member: Member, head: FragmentHead, bandwidths: Bandwidths, routes: Routes
) -> list[Member]:
    """Return the members that hold exactly this version or are about to, best first.

    The list is empty if no member that this one can reach holds it.
    """
    held = [other for other in roster if _holds(other, head, head.version)]
    if not held:
        return []
    # A commit has just been sent to these; they keep the version that they are about to reach.
    coming = [other for other in roster if other.in_sync and _holds(other, head, head.version - 1)]
    able = [
        other
        for other in (*held, *coming)
        if other is not member and routes.may_copy(other.peer, member.peer)
    ]
    trusted = [other for other in able if other.peer not in member.bad_donors]
    if able and not trusted:
        # A member to which all donors seem bad may be at fault itself; its failures count.
        member.bad_donors.clear()
        trusted = able
    return rank_donors(roster, trusted, bandwidths)[:DONORS_MAX]


def rank_donors(roster: Roster, able: Sequence[Member], bandwidths: Bandwidths) -> list[Member]:
    """Sort members by their uplink for one more receiver; members that are leaving come last."""
    lines = bandwidths.lines([other.peer for other in able], caps_of(able))
    receivers: Counter[str] = Counter()
    for receiver in roster:
        fetches = [copy.fetch for copy in receiver.copies if copy.fetch is not None]
        receivers.update({donor for fetch in fetches for donor in fetch.donors})

    def spare(other: Member) -> float:
        return lines.rates[other.peer].up_bytes_per_s / (1 + receivers[other.peer])

    return sorted(able, key=lambda other: (other.draining, -spare(other), other.number))


def note_bad_donors(context: Context, member: Member, fetch: Fetch, bad: Iterable[str]) -> None:
    """Announce and count donors of a transfer that served blocks with wrong digests."""
    for peer in bad:
        donor = context.roster.get(peer)
        if donor is None or peer not in fetch.donors:
            continue
        member.bad_donors.add(peer)
        donor.bad_blocks_count += 1
        donor.called_bad_donor.add(member.peer)
        text = f"{format_member(donor)} served wrong blocks of fragment {fetch.head.fragment} to "
        if len(donor.called_bad_donor) > 1:
            context.announce(EventKind.BAD, peer, f"{text}{format_member(member)}")
        else:
            text = f"{text}{format_member(member)}, which alone says so"
            context.announce(EventKind.SYNC, peer, text)


def _holds(member: Member, head: FragmentHead, version: int) -> bool:
    copy = member.copies[head.fragment]
    return copy.state is CopyState.HELD and copy.version == version

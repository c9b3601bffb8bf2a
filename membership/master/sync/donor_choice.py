"""The choice of donors for a copy of the state: the members with the most spare uplink.

A donor's spare uplink is its uplink, divided by the receivers it would have then. So a fast line is
chosen before a slow one, and an idle slow line before a busy fast one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from ....protocol.messages import FragmentHead
from ...planning.bandwidth import Bandwidths
from ...shared.event_kind import EventKind
from ..routes.routes import Routes
from ..state.context import Context, format_member
from ..state.roster import CopyState, Fetch, Member, Roster, caps_of

DONORS_MAX = 4  # per transfer: more do not make it faster, and each holds a pin
CONSIDERED_MAX = 64  # members that are compared as donors of one transfer


class DonorChoice:
    """Chooses donors for many receivers at one moment, one after the other.

    What depends on all members is found out once, and a receiver's choice is among
    ``CONSIDERED_MAX`` donors: the donors of a crowd that joins would otherwise be compared as often
    as there are pairs.
    """

    def __init__(self, roster: Roster, bandwidths: Bandwidths, routes: Routes) -> None:
        self._members = list(roster)
        self._bandwidths = bandwidths
        self._routes = routes
        self._receivers: Counter[str] = Counter()
        for receiver in self._members:
            fetches = [copy.fetch for copy in receiver.copies if copy.fetch is not None]
            self._receivers.update({donor for fetch in fetches for donor in fetch.donors})

    def choose(self, member: Member, head: FragmentHead) -> list[Member]:
        """Return the members that hold exactly this version or are about to, best first.

        The list is empty if no member that this one can reach holds it.
        """
        start = 0
        if len(self._members) > CONSIDERED_MAX:
            # A crowd's receivers begin with different donors: this puts neighbours far apart
            # (Knuth's multiplicative hash).
            start = member.number * 2_654_435_761 % 2**32 % len(self._members)
        able: list[Member] = []
        coming: list[Member] = []
        held = False
        for other in chain(islice(self._members, start, None), islice(self._members, start)):
            copy = other.copies[head.fragment]
            if copy.state is not CopyState.HELD:
                continue
            holds = copy.version == head.version
            held |= holds
            # A commit has just been sent to these; they keep the version that they are about to
            # reach.
            comes = other.in_sync and copy.version == head.version - 1
            if not (holds or comes) or other is member:
                continue
            if self._routes.may_copy(other.peer, member.peer):
                (able if holds else coming).append(other)
                if len(able) >= CONSIDERED_MAX:
                    break
        if not held:
            return []
        able = [*able, *coming][:CONSIDERED_MAX]
        trusted = [other for other in able if other.peer not in member.transfers.bad_donors]
        if able and not trusted:
            # A member to which all donors seem bad may be at fault itself; its failures count.
            member.transfers.bad_donors.clear()
            trusted = able
        return self._ranked(trusted)[:DONORS_MAX]

    def began(self, donors: Iterable[str]) -> None:
        """Note that a transfer from these begins."""
        self._receivers.update(donors)

    def _ranked(self, able: Sequence[Member]) -> list[Member]:
        """Sort members by their uplink for one more receiver; those that leave come last."""
        lines = self._bandwidths.lines([other.peer for other in able], caps_of(able))

        def spare(other: Member) -> float:
            return lines.rates[other.peer].up_bytes_per_s / (1 + self._receivers[other.peer])

        return sorted(able, key=lambda other: (other.draining, -spare(other), other.number))


def note_bad_donors(context: Context, member: Member, fetch: Fetch, bad: Iterable[str]) -> None:
    """Announce and count donors of a transfer that served blocks with wrong digests."""
    for peer in bad:
        donor = context.roster.get(peer)
        if donor is None or peer not in fetch.donors:
            continue
        member.transfers.bad_donors.add(peer)
        donor.transfers.bad_blocks_count += 1
        donor.transfers.called_bad_donor.add(member.peer)
        text = f"served wrong blocks of fragment {fetch.head.fragment} to {format_member(member)}"
        if len(donor.transfers.called_bad_donor) > 1:
            context.announce_peer(EventKind.BAD, peer, text)
        else:
            context.announce_peer(EventKind.SYNC, peer, f"{text}, which alone says so")

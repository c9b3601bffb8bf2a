"""Members, their copies of the state, contributors' places and the numbered view.

    attach --> WAITING --all copies held--> in sync --a place is free--> CONTRIBUTOR
                  ^                            |                             |
                  +------- a copy differs -----+-----------------------------+

A *place* belongs to a peer, not to a connection. It is given up, and leaves a vacancy, when the
member is removed, is late again and again, or has no trainer while another member has one (see
``trainers``). It survives a reconnect, and a copy that must be fetched again. Peers whose invite
says *contributor* take free places. Peers whose invite says *spare* take only vacancies.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter

import attrs
from attrs import Factory, define, frozen

from ....protocol import messages as m
from ...planning.bandwidth import Bandwidth

_BY_NUMBER = attrgetter("number")
VIEWS_PER_TERM = 1_000_000  # view numbers of a term start at a multiple of this, so they only grow


@frozen
class Grant:
    """The rights that the peer's invite, or the operator's approval, gives."""

    role: m.Role  # CONTRIBUTOR takes free places, SPARE only vacancies, RELAY neither
    founder: bool = False  # may give an empty run its first weights
    invite: str = ""  # id of the peer's invite; empty if it is not known


class CopyState(enum.Enum):
    """State of one member's copy of one fragment, as the master knows it.

    STALE ---- a transfer starts ----> FETCHING ---- Synced ----> HELD | UNCHECKED
      ^                                   |                        |        |
      |<------ failed, donors gone -------+                        |        | version's root
      |<------ differs, or did not apply a commit in time ---------+--------+ agreed: HELD | STALE

    A stale copy that catches up by itself becomes HELD or UNCHECKED, too.
    """

    STALE = "stale"  # missing, too old, or different: must be fetched
    FETCHING = "fetching"  # being fetched from donors
    UNCHECKED = "unchecked"  # complete, but the version's root is not agreed yet
    HELD = "held"  # complete, and its root is the run's


RECEIVED_STATES = (CopyState.HELD, CopyState.UNCHECKED)


@define
class Fetch:
    """One transfer of a fragment to one member."""

    head: m.FragmentHead
    donors: list[str]  # the members that still have the version pinned
    moved_s: float  # time of the last progress
    began_s: float = 0.0  # time from which the following are counted
    # Bytes that the member had received by then; None if not known yet.
    received_before: int | None = None
    needed_bytes: int = 0  # results that the member was to receive since, of all fragments
    # Results of this fragment, which the member keeps for replay.
    log_bytes: int = 0
    log_count: int = 0


@define
class Copy:
    """One member's copy of one fragment."""

    state: CopyState = CopyState.STALE
    version: int = 0
    root: bytes = b""  # as the member reported it
    due_s: float = math.inf  # when it must have applied the newest commit
    fetch: Fetch | None = None  # while FETCHING
    why: str = "the state has not been fetched yet"  # while STALE
    mute: bool = False  # the member was sent the newest result and has not reported on it


@define
class Connection:
    """The ways to reach a member, and what its line may carry."""

    addresses: tuple[str, ...] = ()
    host: str = ""  # the source address that the master sees; empty if unknown
    port: int = 0  # its source port if the master sees the same; 0 if a router maps ports
    reachable: bool = True  # the master can dial it
    # Limits set by its machine's owner; 0: none.
    upload_bytes_per_s: float = 0.0
    download_bytes_per_s: float = 0.0
    offer: m.RelayOffer | None = None  # what it would forward for others
    relayed: m.Relayed | None = None  # what it has forwarded

    @classmethod
    def of(cls, hello: m.Hello, host: str, port: int, reachable: bool) -> Connection:
        """Return the connection over which a ``Hello`` came, from this address."""
        return cls(
            hello.addresses,
            host,
            port if port == hello.local_port else 0,
            reachable,
            hello.upload_bytes_per_s,
            hello.download_bytes_per_s,
            hello.relay,
        )


@define
class Trainer:
    """A member's trainer, and how it keeps up with the run (see ``trainers``)."""

    layout: m.ModelLayout | None = None  # None while there is no trainer
    gone_s: float | None = None  # since when there is none
    # Why there is none, and the remedy; received at ``failed_s``.
    failed: m.TrainerFailed | None = None
    failed_s: float = 0.0
    late_count: int = 0  # rounds in a row that closed without the member
    rest_count: int = 0  # how often the member gave up its place for being late
    rests_until_s: float = -math.inf  # it takes no place before

    @property
    def running(self) -> bool:
        return self.layout is not None

    def start(self, layout: m.ModelLayout) -> None:
        self.layout, self.gone_s, self.failed = layout, None, None

    def stop(self, now_s: float) -> None:
        if self.running or self.gone_s is None:
            self.gone_s = now_s
        self.layout = None


@define
class Transfers:
    """What a member holds as it says, and its transfers so far."""

    reported_heads: dict[int, m.FragmentHead] = Factory(dict)  # by fragment, the last ones
    kept: list[tuple[m.FragmentHead, ...]] = Factory(list)  # states in its checkpoints, by fragment
    bad_donors: set[str] = Factory(set)  # members that served this one wrong blocks
    bad_blocks_count: int = 0  # transfers to others in which it served blocks with wrong digests
    called_bad_donor: set[str] = Factory(set)  # members that report it; one alone may lie
    failures: int = 0  # transfers that failed in a row


@define
class Member:
    """A peer that is attached."""

    peer: str
    name: str
    number: int
    incarnation: int
    grant: Grant
    attached_s: float
    connection: Connection = Factory(Connection)
    trainer: Trainer = Factory(Trainer)
    copies: list[Copy] = Factory(list)  # by fragment; empty before the run is founded
    transfers: Transfers = Factory(Transfers)
    in_sync: bool = False
    software: str = ""  # its daemon's version of holdfast
    draining_s: float | None = None  # since when it wants to leave, for the reason ``draining_why``
    draining_why: str = ""
    progress: m.Progress | None = None
    # What chunk owners found in its updates, and what is odd about it; see ``update_history``.
    measured: dict[str, m.LoggedFigure] = Factory(dict)
    suspicion: str = ""
    gone_s: float | None = None  # when it was removed

    def has_on_disk(self, head: m.FragmentHead) -> bool:
        """Return whether the member needs no donor for this version."""
        return any(heads[head.fragment] == head for heads in self.transfers.kept)

    @property
    def relay(self) -> bool:
        """Return whether the member only forwards for others."""
        offer = self.connection.offer
        return self.grant.role is m.Role.RELAY or (offer is not None and offer.only)

    @property
    def draining(self) -> bool:
        return self.draining_s is not None


class Roster:
    """The members, and the last view that was published."""

    def __init__(self, term: int) -> None:
        self.members: dict[str, Member] = {}
        self.view_number = term * VIEWS_PER_TERM
        self.view_members: tuple[m.MemberInfo, ...] = ()

    def __contains__(self, peer: str) -> bool:
        return peer in self.members

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    def __len__(self) -> int:
        return len(self.members)

    def get(self, peer: str) -> Member | None:
        return self.members.get(peer)

    def by_number(self) -> list[Member]:
        """Return the members in the order of their numbers."""
        return sorted(self.members.values(), key=_BY_NUMBER)

    def next_view(self, places: set[str], *, force: bool) -> bool:
        """Make a view if anything changed, or if ``force``; return whether there is a new one."""
        published = {member.number: member for member in self.view_members}
        members = tuple(
            _info(member, places, published.get(member.number)) for member in self.by_number()
        )
        if members == self.view_members and not force:
            return False
        self.view_members = members
        self.view_number += 1
        return True


def caps_of(members: Iterable[Member]) -> dict[str, Bandwidth]:
    """Return the bandwidth limits set by the machines' owners, for the members that have any."""
    limits = {
        member.peer: (member.connection.upload_bytes_per_s, member.connection.download_bytes_per_s)
        for member in members
    }
    return {
        peer: Bandwidth(up or math.inf, down or math.inf)
        for peer, (up, down) in limits.items()
        if up or down
    }


def role_of(member: Member, places: set[str]) -> m.Role:
    """Return what the member is now; its grant says what it may become."""
    if member.relay:
        return m.Role.RELAY
    return m.Role.CONTRIBUTOR if member.peer in places else m.Role.SPARE


def _info(member: Member, places: set[str], published: m.MemberInfo | None) -> m.MemberInfo:
    """Return a member's entry in the view: the ``published`` one while it is still right.

    Every conclusion of the master asks for the entries of all members. To make and check new ones
    each time was most of the work of a master with many members.
    """
    role = role_of(member, places)
    if (
        published is not None
        and published.role is role
        and published.in_sync == member.in_sync
        and published.addresses == member.connection.addresses
        and published.reachable == member.connection.reachable
        and published.name == member.name
        and published.peer == member.peer
    ):
        return published
    return m.MemberInfo(
        peer=member.peer,
        name=member.name,
        number=member.number,
        addresses=member.connection.addresses,
        role=role,
        in_sync=member.in_sync,
        reachable=member.connection.reachable,
    )


def holds_newest(member: Member, versions: list[int]) -> bool:
    """Return whether every copy is the committed version, with the agreed root."""
    return bool(member.copies) and all(
        copy.state is CopyState.HELD and copy.version == version
        for copy, version in zip(member.copies, versions, strict=True)
    )


def next_to_seat(
    roster: Roster,
    places: set[str],
    vacancies: int,
    place_count: int,
    versions: list[int],
    now_s: float,
    demoted: Collection[str] = (),
) -> Member | None:
    """Return the member that takes a place now, if any may. A ``place_count`` of 0 is no limit."""
    if place_count and len(places) >= place_count:
        return None
    waiting = [
        member
        for member in roster
        if member.peer not in places
        and member.peer not in demoted
        and member.in_sync
        and member.trainer.running
        and not member.draining
        and not member.relay
        and now_s >= member.trainer.rests_until_s
        and holds_newest(member, versions)
        and (member.grant.role is m.Role.CONTRIBUTOR or vacancies > 0)
    ]
    return min(
        waiting,
        key=lambda member: (member.grant.role is not m.Role.CONTRIBUTOR, member.number),
        default=None,
    )


def waiting_in_line(
    roster: Roster, places: set[str], vacancies: int, place_count: int, spare_count: int
) -> set[str]:
    """Return the members that get no state while all places and ``spare_count`` spares are taken.

    A member that can take a free place is not counted as a spare: a contributor with a trainer can
    take any, a spare only a vacancy. Members that are further in sync go first, and of equals the
    older.
    """
    if spare_count < 0:
        return set()
    free = place_count - len(places) if place_count else len(roster)
    left_free = min(free, vacancies)  # of the free places, those that a spare may take
    line = sorted(
        (each for each in roster if not (each.peer in places or each.relay or each.draining)),
        key=lambda each: (
            not each.in_sync,
            not any(copy.fetch is not None for copy in each.copies),
            not each.trainer.running,
            each.number,
        ),
    )
    waiting = set()
    for member in line:
        if member.trainer.running and free > 0 and member.grant.role is m.Role.CONTRIBUTOR:
            free -= 1
            left_free = max(0, left_free - 1)
        elif member.trainer.running and left_free > 0:
            free, left_free = free - 1, left_free - 1
        elif spare_count > 0:
            spare_count -= 1
        else:
            waiting.add(member.peer)
    return waiting


def can_contribute(member: Member, places: set[str]) -> bool:
    """Return whether a member has a place, the state and a trainer, and does not leave."""
    return (
        member.peer in places and member.in_sync and member.trainer.running and not member.draining
    )


attrs.resolve_types(Member)


# ---------------------------------------------------------------- the failure detector


class Detector:
    """Times of the last sign of life, by peer.

    Args:
      deadline_s: a peer that is silent for this long is dead.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._heard_s: dict[str, float] = {}

    def heard(self, peer: str, now_s: float) -> None:
        self._heard_s[peer] = now_s

    def excuse(self, now_s: float) -> None:
        """Restart all silences: the master was not listening."""
        for peer in self._heard_s:
            self._heard_s[peer] = now_s

    def forget(self, peer: str) -> None:
        self._heard_s.pop(peer, None)

    def silent_s(self, peer: str, now_s: float) -> float:
        """Return the seconds since the peer's last sign of life."""
        return now_s - self._heard_s[peer]

    def all_silent_s(self, now_s: float, began_s: float) -> float:
        """Return the seconds since the last sign of life of any peer, or since the beginning."""
        return now_s - max(self._heard_s.values(), default=began_s)

    def silent(self, now_s: float) -> list[str]:
        """Return the peers that are over the deadline, in the order in which they attached."""
        return [peer for peer, at_s in self._heard_s.items() if now_s >= at_s + self.deadline_s]

    def next_deadline_s(self) -> float:
        return min(self._heard_s.values(), default=math.inf) + self.deadline_s

    def watched(self) -> set[str]:
        return set(self._heard_s)

"""Members, their copies of the state, contributors' places and the numbered view.

    attach --> WAITING --all copies held--> in sync --a place is free--> CONTRIBUTOR
                  ^                            |                             |
                  +------- a copy differs -----+-----------------------------+

A *place* belongs to a peer, not to a connection: it is given up (and leaves a vacancy) when the
member is removed, is late again and again, or somebody else has a trainer where it has none (see
``trainers``), and it survives a copy that must be healed and a reconnect.
Peers whose token says *contributor* take free places; those whose token says *spare* take only
vacancies, which the dead and the departed leave behind.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

import attrs
from attrs import Factory, define, frozen

from ....protocol.messages import (
    SITES_MAX,
    FragmentHead,
    Hello,
    MemberInfo,
    ModelLayout,
    Progress,
    Relayed,
    RelayOffer,
    Role,
    TrainerFailed,
)
from ...planning.bandwidth import Bandwidth
from ...planning.sites import same_site

_BY_NUMBER = attrgetter("number")
VIEWS_PER_TERM = 1_000_000  # view numbers of a term start at a multiple of this, so they only grow


@frozen
class Grant:
    """What the peer's token (or the owner's approval) allows.

    Attributes:
      role: CONTRIBUTOR takes free places, SPARE only vacancies, RELAY neither.
      founder: may give an empty run its first weights.
      invite: the id of that by which it came; empty: not known.
    """

    role: Role
    founder: bool = False
    invite: str = ""


class CopyState(enum.Enum):
    """What we know of one member's copy of one fragment."""

    STALE = "stale"  # missing, too old, or different: must be fetched
    FETCHING = "fetching"  # on its way from donors
    UNCHECKED = "unchecked"  # there, but the version's root is not agreed yet
    HELD = "held"  # there, and its root is the run's


@define
class Fetch:
    """One transfer to one member."""

    head: FragmentHead
    donors: list[str]  # those that still have the version pinned
    moved_s: float  # when it last got further
    began_s: float = 0.0  # since when this is counted:
    received_before: int | None = None  # what the member had received by then; None: not known yet
    needed_bytes: int = 0  # of results that it was to get, of all fragments
    log_bytes: int = 0  # and of this one, which it keeps for replay
    log_count: int = 0


@define
class Copy:
    """One member's copy of one fragment."""

    state: CopyState = CopyState.STALE
    version: int = 0
    root: bytes = b""  # as the member reported it
    due_s: float = math.inf  # by then it must have applied the newest commit
    fetch: Fetch | None = None  # while FETCHING
    why: str = "the state has not been fetched yet"  # while STALE
    mute: bool = False  # it was sent the newest result and never said what became of it


@define
class Member:
    """Somebody who is attached right now."""

    peer: str
    name: str
    number: int
    addresses: tuple[str, ...]
    incarnation: int
    grant: Grant
    attached_s: float
    layout: ModelLayout | None = None  # of its trainer; None while there is no trainer
    trainerless_s: float | None = None  # since when there is none
    failed: TrainerFailed | None = None  # why not, and what is done about it; said at ``failed_s``
    failed_s: float = 0.0
    copies: list[Copy] = Factory(list)  # by fragment; empty before the run is founded
    in_sync: bool = False
    upload_bytes_per_s: float = 0.0  # what its person allows it to send; 0: no cap
    download_bytes_per_s: float = 0.0  # and to receive
    host: str = ""  # the address that the master sees it come from; empty: unknown
    port: int = (
        0  # from which it has dialled, if the master sees the same; 0: a router draws others
    )
    reachable: bool = True  # the master can dial it
    offer: RelayOffer | None = None  # what it would forward for others
    relayed: Relayed | None = None  # and what it forwards
    site: str = ""  # what its person calls the site; empty: its address tells
    software: str = ""  # the version of holdfast that its daemon is of
    late_count: int = 0  # rounds in a row that went on without it
    rest_count: int = 0  # how often it gave up its place for that
    rests_until_s: float = -math.inf  # before, it takes none
    draining_s: float | None = None  # since when it wants to leave
    draining_why: str = ""  # as it says
    progress: Progress | None = None
    told: dict[int, FragmentHead] = Factory(dict)  # by fragment: what it last said that it holds
    kept: list[tuple[FragmentHead, ...]] = Factory(list)  # states in its checkpoints, by fragment
    bad_donors: set[str] = Factory(set)  # who served this member wrong blocks
    bad_blocks_count: int = 0  # transfers to others in which it served blocks with wrong digests
    called_bad_donor: set[str] = Factory(set)  # who says so; one alone may lie
    sync_failures: int = 0  # transfers that failed in a row
    direction: float | None = None  # of its last update: cosine with the outer momentum
    against: bool = False  # whether that was against, while most were along

    def has_on_disk(self, head: FragmentHead) -> bool:
        """It needs no donor for this version."""
        return any(heads[head.fragment] == head for heads in self.kept)

    @property
    def relay(self) -> bool:
        """It takes no other part in the run."""
        return self.grant.role is Role.RELAY or (self.offer is not None and self.offer.only)

    @property
    def draining(self) -> bool:
        return self.draining_s is not None


class Roster:
    """Everybody who is attached, and the last view that was published."""

    def __init__(self, term: int) -> None:
        self.members: dict[str, Member] = {}
        self.view_number = term * VIEWS_PER_TERM
        self.view_members: tuple[MemberInfo, ...] = ()

    def __contains__(self, peer: str) -> bool:
        return peer in self.members

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    def __len__(self) -> int:
        return len(self.members)

    def get(self, peer: str) -> Member | None:
        return self.members.get(peer)

    def by_number(self) -> list[Member]:
        return sorted(self.members.values(), key=_BY_NUMBER)

    def next_view(self, places: set[str], *, force: bool) -> bool:
        """Number a new view if anything in it changed (or ``force``); True if there is one."""
        told = {member.number: member for member in self.view_members}
        members = tuple(
            _info(member, places, told.get(member.number)) for member in self.by_number()
        )
        if members == self.view_members and not force:
            return False
        self.view_members = members
        self.view_number += 1
        return True


def new_member(
    peer: str,
    hello: Hello,
    grant: Grant,
    number: int,
    fragment_count: int,
    now_s: float,
    host: str = "",
    *,
    port: int = 0,
    reachable: bool = True,
) -> Member:
    return Member(
        peer=peer,
        name=hello.name,
        number=number,
        addresses=hello.addresses,
        incarnation=hello.incarnation,
        grant=grant,
        attached_s=now_s,
        layout=hello.layout,
        trainerless_s=now_s if hello.layout is None else None,
        copies=[Copy() for _ in range(fragment_count)],
        upload_bytes_per_s=hello.upload_bytes_per_s,
        download_bytes_per_s=hello.download_bytes_per_s,
        host=host,
        port=port if port == hello.local_port else 0,
        reachable=reachable,
        offer=hello.relay,
        site=hello.site,
        software=hello.software,
    )


def caps_of(members: Iterable[Member]) -> dict[str, Bandwidth]:
    """What the members' persons allow them to carry; those who set no cap are left out."""
    return {
        member.peer: Bandwidth(
            member.upload_bytes_per_s or math.inf, member.download_bytes_per_s or math.inf
        )
        for member in members
        if member.upload_bytes_per_s or member.download_bytes_per_s
    }


def sites_of(members: Sequence[Member]) -> list[tuple[str, ...]]:
    """Those of these members that share a line with others of them: as they say, or by address."""
    named: dict[str, list[str]] = {}
    for member in members:
        if member.site:
            named.setdefault(member.site, []).append(member.peer)
    unnamed = [member for member in members if not member.site]
    sites = [tuple(peers) for peers in named.values() if len(peers) > 1]
    for numbers in same_site([member.host for member in unnamed]):
        sites.append(tuple(unnamed[number].peer for number in numbers))
    return sites[:SITES_MAX]


def role_of(member: Member, places: set[str]) -> Role:
    if member.relay:
        return Role.RELAY
    return Role.CONTRIBUTOR if member.peer in places else Role.SPARE


def _info(member: Member, places: set[str], told: MemberInfo | None) -> MemberInfo:
    """What all must know of a member: what they were told, as long as it is still right.

    Every conclusion that the master draws asks for it of everybody; to make it anew and check all
    its fields each time was most of what a master of many members did.
    """
    role = role_of(member, places)
    if (
        told is not None
        and told.role is role
        and told.in_sync == member.in_sync
        and told.addresses == member.addresses
        and told.reachable == member.reachable
        and told.name == member.name
        and told.peer == member.peer
    ):
        return told
    return MemberInfo(
        peer=member.peer,
        name=member.name,
        number=member.number,
        addresses=member.addresses,
        role=role,
        in_sync=member.in_sync,
        reachable=member.reachable,
    )


def holds_newest(member: Member, versions: list[int]) -> bool:
    """Every copy is the committed version, with the agreed root."""
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
) -> Member | None:
    """Who takes a place now, if anybody may. ``place_count`` 0: there is no limit."""
    if place_count and len(places) >= place_count:
        return None
    waiting = [
        member
        for member in roster
        if member.peer not in places
        and member.in_sync
        and member.layout is not None
        and not member.draining
        and not member.relay
        and now_s >= member.rests_until_s
        and holds_newest(member, versions)
        and (member.grant.role is Role.CONTRIBUTOR or vacancies > 0)
    ]
    return min(
        waiting,
        key=lambda member: (member.grant.role is not Role.CONTRIBUTOR, member.number),
        default=None,
    )


def waiting_in_line(
    roster: Roster, places: set[str], vacancies: int, place_count: int, spare_count: int
) -> set[str]:
    """Members that get no state for now: all places and all ``spare_count`` spares are taken.

    Whoever is on the way to a free place needs no spare's: a contributor with a trainer to any, a
    spare to one that somebody has left. Who has come furthest goes first, and of equals who is
    here longest.
    """
    if spare_count < 0:
        return set()
    free = place_count - len(places) if place_count else len(roster)
    left_free = min(free, vacancies)  # of the free places, those that a spare may take
    line = sorted(
        (m for m in roster if m.peer not in places and not m.relay and not m.draining),
        key=lambda m: (
            not m.in_sync,
            not any(copy.fetch is not None for copy in m.copies),
            m.layout is None,
            m.number,
        ),
    )
    waiting = set()
    for member in line:
        if member.layout is not None and free > 0 and member.grant.role is Role.CONTRIBUTOR:
            free -= 1
            left_free = max(0, left_free - 1)
        elif member.layout is not None and left_free > 0:
            free, left_free = free - 1, left_free - 1
        elif spare_count > 0:
            spare_count -= 1
        else:
            waiting.add(member.peer)
    return waiting


def can_contribute(member: Member, places: set[str]) -> bool:
    """It has a place, the state and a trainer, and it means to stay."""
    return (
        member.peer in places
        and member.in_sync
        and member.layout is not None
        and not member.draining
    )


def layout_difference(ours: ModelLayout, theirs: ModelLayout) -> str | None:
    """The first difference, as the end of a sentence about their layout; None if equal."""
    for index, (mine, other) in enumerate(zip(ours.tensors, theirs.tensors, strict=False)):
        if mine == other:
            continue
        if mine.name != other.name:
            return f"tensor {index} is {other.name!r} where the run has {mine.name!r}"
        for name in ("shape", "dtype", "kind", "aliases"):
            has, wants = getattr(other, name), getattr(mine, name)
            if has != wants:
                return f"{mine.name!r} has {name} {_say(has)} where the run has {_say(wants)}"
    have, want = len(theirs.tensors), len(ours.tensors)
    if have > want:
        return f"it has {theirs.tensors[want].name!r}, which the run has not"
    if have < want:
        return f"it lacks {ours.tensors[have].name!r}"
    return None


def _say(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


attrs.resolve_types(Member)

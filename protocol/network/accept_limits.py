"""Connections that have not shown who they are: how many there may be, and who may make more.

Each holds a *place*, in all and per address, until it has shown a certificate or a lane's keys; lanes have
places of their own, for a member opens many at once, and so have newcomers, which stay longer. Where there
is none left, the oldest yields that has said nothing yet, or is in no hurry; and some are kept for lines
from which a member has come before, so that whoever fills all others keeps no member out.

Whoever comes to nothing (junk, silence, a newcomer, whatever becomes of it) costs its address some
*credit*, which grows back with time; without credit it is hung up on before a byte is read. So an address
costs a second's handshakes what it may, and what is kept of it are two numbers, for so many addresses.

One IPv6 line has more addresses than there are strangers in the world: its first 64 bits count. Whoever
has one often has 65,536 of them, so the first 48 count, too.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio
from attrs import define, field, frozen

STRANGERS_MAX = 128  # connections that have not shown who they are; each takes some 80 kB in TLS
STRANGERS_PER_ADDRESS_MAX = 32  # of them from one address: a few machines behind one NAT
STRANGERS_HURRY_S = 2.0  # for a handshake; who takes longer gives way if there are too many
NEWCOMERS_MAX = 64  # that have done it, and have no certificate
NEWCOMERS_PER_ADDRESS_MAX = 16
NEWCOMERS_HURRY_S = 5.0  # to enrol takes three round trips; to be looked at, longer, in quiet times
LANES_UNPROVEN_MAX = 512  # the same for lanes that have not shown their link's keys
LANES_UNPROVEN_PER_ADDRESS_MAX = 128  # a few machines behind one NAT, each with many links
PLACES_PER_SITE = 2  # times an address's: of all addresses that begin with the same 48 bits
KEPT_SHARE = 0.5  # so many more places, of all, for lines from which a member has come before
MEMBERS_LINES_MAX = (
    4_096  # such lines that are known; the one that none came from longest is forgotten
)
CREDIT_MAX = 64.0  # connections of an address that came to nothing, one after the other
CREDIT_PER_S = 1.0  # and then
CREDIT_PER_SITE = 4.0  # times an address's, likewise
ADDRESSES_KNOWN_MAX = 4_096  # with less than all of it; who failed longest ago is forgotten first


@frozen
class AddressGroup:
    """Where somebody comes from, as far as one owner is told from others by it.

    Attributes:
      site: of an IPv6 line, its first 48 bits; empty: it is in none.
    """

    name: str
    site: str = ""


@define(eq=False)
class AcceptSlot:
    """What a connection holds.

    Attributes:
      scope: cancelled when it has to give way.
      silent: nothing has come on it.
      gave_way: it had to.
    """

    line: AddressGroup
    since_s: float
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    silent: bool = True
    gave_way: bool = False
    _give_back: Callable[[], None] = field(default=lambda: None, kw_only=True)

    def release(self) -> None:
        """It has shown who it is; callable once or more."""
        give_back, self._give_back = self._give_back, lambda: None
        give_back()


class Places:
    """So many connections at a time, in all and from one address.

    Args:
      hurry_s: after so long one gives way to another, if there is no other place.
    """

    def __init__(
        self,
        count_max: int,
        per_line_max: int,
        hurry_s: float,
        now: Callable[[], float] = trio.current_time,
    ) -> None:
        self._count_max = count_max
        self._per_line_max = per_line_max
        self._hurry_s = hurry_s
        self._now = now
        self._held: dict[AcceptSlot, None] = {}  # the oldest is first
        self._by_line: Counter[str] = Counter()

    @contextmanager
    def place(self, line: AddressGroup, *, known: bool = False) -> Iterator[AcceptSlot | None]:
        """Hold a place, or None if there is none.

        Args:
          known: a member has come from there before.
        """
        place = self._take(line, known)
        try:
            yield place
        finally:
            if place is not None:
                place.release()

    def _take(self, line: AddressGroup, known: bool) -> AcceptSlot | None:
        if self._by_line[line.name] >= self._per_line_max:
            room = self._clear(lambda place: place.line == line)
        elif line.site and not known and self._by_line[line.site] >= self._per_site_max:
            room = self._clear(lambda place: place.line.site == line.site)
        elif len(self._held) >= self._count_max + known * int(KEPT_SHARE * self._count_max):
            room = self._clear(lambda _place: True)
        else:
            room = True
        if not room:
            return None
        place = AcceptSlot(line, self._now())
        place._give_back = lambda: self._give_back(place)
        self._held[place] = None
        self._by_line.update(filter(None, (line.name, line.site)))
        return place

    @property
    def _per_site_max(self) -> int:
        return PLACES_PER_SITE * self._per_line_max

    def _clear(self, may_yield: Callable[[AcceptSlot], bool]) -> bool:
        """Have the oldest of these give way that can be expected to."""
        due_s = self._now() - self._hurry_s
        for place in self._held:
            if (place.silent or place.since_s <= due_s) and may_yield(place):
                place.gave_way = True
                place.release()
                place.scope.cancel()
                return True
        return False

    def _give_back(self, place: AcceptSlot) -> None:
        del self._held[place]
        for name in filter(None, (place.line.name, place.line.site)):
            self._by_line[name] -= 1
            if not self._by_line[name]:
                del self._by_line[name]


class AddressCredit:
    """What each address may still cost us.

    Args:
      now: seconds, by any clock that only grows.
      times: so much more than one address may.
    """

    def __init__(self, now: Callable[[], float] = trio.current_time, times: float = 1.0) -> None:
        self._now = now
        self._times = times
        self._known: dict[
            str, tuple[float, float]
        ] = {}  # credit, and when; who failed last is last

    def left(self, host: str) -> float:
        full = self._times * CREDIT_MAX
        credit, at_s = self._known.get(host, (full, 0.0))
        return min(full, credit + self._times * CREDIT_PER_S * (self._now() - at_s))

    def charge(self, host: str) -> None:
        """One of its connections came to nothing."""
        left = self.left(host) - 1.0
        self._known.pop(host, None)
        if len(self._known) >= ADDRESSES_KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[host] = (left, self._now())


class AcceptLimits:
    """All of it for one node's port."""

    def __init__(self) -> None:
        self.strangers = Places(STRANGERS_MAX, STRANGERS_PER_ADDRESS_MAX, STRANGERS_HURRY_S)
        self.newcomers = Places(NEWCOMERS_MAX, NEWCOMERS_PER_ADDRESS_MAX, NEWCOMERS_HURRY_S)
        self.lanes = Places(LANES_UNPROVEN_MAX, LANES_UNPROVEN_PER_ADDRESS_MAX, STRANGERS_HURRY_S)
        self._credit = AddressCredit()
        self._site_credit = AddressCredit(times=CREDIT_PER_SITE)
        self._members_lines: OrderedDict[str, None] = OrderedDict()

    def open_to(self, line: AddressGroup) -> bool:
        """Whether a connection from there is looked at."""
        if line.site and not self.knows(line) and self._site_credit.left(line.site) < 1.0:
            return False
        return self._credit.left(line.name) >= 1.0

    def charge(self, line: AddressGroup) -> None:
        """A connection from there came to nothing."""
        self._credit.charge(line.name)
        if line.site:
            self._site_credit.charge(line.site)

    def member_came(self, line: AddressGroup) -> None:
        self._members_lines[line.name] = None
        self._members_lines.move_to_end(line.name)
        if len(self._members_lines) > MEMBERS_LINES_MAX:
            self._members_lines.popitem(last=False)

    def knows(self, line: AddressGroup) -> bool:
        """Whether a member has come from there."""
        return line.name in self._members_lines


def line_of(host: str) -> AddressGroup:
    """By what the owner of an address is told from others."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return AddressGroup(host)
    if isinstance(address, ipaddress.IPv4Address):
        return AddressGroup(str(address))
    if address.ipv4_mapped is not None:
        return AddressGroup(str(address.ipv4_mapped))
    line, site = (ipaddress.ip_network((address, bits), strict=False) for bits in (64, 48))
    return AddressGroup(str(line), str(site))

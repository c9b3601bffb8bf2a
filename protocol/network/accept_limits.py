"""Limits on accepted connections whose other end is not identified yet.

Each such connection holds a *slot*, until it has shown a certificate or a lane's keys. Slots are
limited in all and per address. Lanes have slots of their own, because a member opens many at once,
and so have newcomers, which stay longer. When no slot is free, the oldest connection that is silent
or slow is closed for the next one. Some slots are reserved for networks from which a member has
come before, so that an attacker who fills all others keeps no member out.

A connection that fails (invalid bytes, silence) costs its address some *credit*, which grows back
with time; so does every newcomer. A connection from an address without credit is closed before a
byte is read. So the handshakes that an address can cause each second are bounded, and so is the
memory: two numbers for each of ``ADDRESSES_KNOWN_MAX`` addresses.

An IPv6 customer has 2**64 addresses or more, so the first 64 bits count as one address. A customer
often has 65,536 such networks, so the first 48 bits count together, too, as a *site*.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio
from attrs import define, field, frozen

UNIDENTIFIED_MAX = 128  # connections before the handshake's end; each takes some 80 kB in TLS
UNIDENTIFIED_PER_ADDRESS_MAX = 32  # of them from one address: a few machines behind one NAT
UNIDENTIFIED_SLOW_S = 2.0  # a handshake that takes longer is closed when no slot is free
NEWCOMERS_MAX = 64  # connections that have finished the handshake without a certificate
NEWCOMERS_PER_ADDRESS_MAX = 16
NEWCOMERS_SLOW_S = 5.0  # enrolment takes three round trips; a machine check may take longer
LANES_UNPROVEN_MAX = 512  # lanes that have not shown their link's keys
LANES_UNPROVEN_PER_ADDRESS_MAX = 128  # a few machines behind one NAT, each with many links
SLOTS_PER_SITE = 2  # times an address's slots: for all addresses with the same first 48 bits
RESERVED_SHARE = 0.5  # of all slots, added for networks from which a member has come before
MEMBER_GROUPS_MAX = 4_096  # such networks in memory; the least recent one is forgotten
CREDIT_MAX = 64.0  # failed connections of an address in a row
CREDIT_PER_S = 1.0  # credit that grows back
CREDIT_PER_SITE = 4.0  # times an address's credit: for all addresses of a site
ADDRESSES_KNOWN_MAX = 4_096  # addresses with less than full credit; the least recent is forgotten


@frozen
class AddressGroup:
    """The network of a remote address: the addresses that count together, as one customer's.

    Attributes:
      name: an IPv4 address, or the first 64 bits of an IPv6 address.
      site: the first 48 bits of an IPv6 address; empty for IPv4.
    """

    name: str
    site: str = ""


@define(eq=False)
class AcceptSlot:
    """One connection's slot.

    Attributes:
      scope: cancelled when the connection has to give way to another.
      silent: no byte has come on the connection.
      gave_way: the connection had to give way.
    """

    group: AddressGroup
    since_s: float
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    silent: bool = True
    gave_way: bool = False
    _slots: AcceptSlots = field(kw_only=True)

    def release(self) -> None:
        """Free the slot, because the connection is identified or closed. Harmless twice."""
        self._slots.take_back(self)


@define(eq=False)
class AcceptSlots:
    """A limited number of slots, in all and per address.

    Args:
      slow_s: age from which a connection gives way to another when no slot is free.
    """

    _count_max: int
    _per_group_max: int
    _slow_s: float
    # The oldest is first.
    _held: dict[AcceptSlot, None] = field(factory=dict, init=False)
    _by_group: Counter[str] = field(factory=Counter, init=False)

    @contextmanager
    def slot(self, group: AddressGroup, *, known: bool = False) -> Iterator[AcceptSlot | None]:
        """Hold a slot within the block; yields None if there is none.

        Args:
          known: a member has come from this network before.
        """
        slot = self._take(group, known)
        try:
            yield slot
        finally:
            if slot is not None:
                slot.release()

    def _take(self, group: AddressGroup, known: bool) -> AcceptSlot | None:
        per_site_max = SLOTS_PER_SITE * self._per_group_max
        if self._by_group[group.name] >= self._per_group_max:
            room = self._clear(lambda slot: slot.group == group)
        elif group.site and not known and self._by_group[group.site] >= per_site_max:
            room = self._clear(lambda slot: slot.group.site == group.site)
        elif len(self._held) >= self._count_max + known * int(RESERVED_SHARE * self._count_max):
            room = self._clear(lambda _place: True)
        else:
            room = True
        if not room:
            return None
        slot = AcceptSlot(group, trio.current_time(), slots=self)
        self._held[slot] = None
        self._by_group.update(filter(None, (group.name, group.site)))
        return slot

    def _clear(self, may_yield: Callable[[AcceptSlot], bool]) -> bool:
        """Close the oldest silent or slow connection among these; return whether there was any."""
        due_s = trio.current_time() - self._slow_s
        for slot in self._held:
            if (slot.silent or slot.since_s <= due_s) and may_yield(slot):
                slot.gave_way = True
                slot.release()
                slot.scope.cancel()
                return True
        return False

    def take_back(self, slot: AcceptSlot) -> None:
        if slot not in self._held:
            return
        del self._held[slot]
        for name in filter(None, (slot.group.name, slot.group.site)):
            self._by_group[name] -= 1
            if not self._by_group[name]:
                del self._by_group[name]


class AddressCredit:
    """The credit of each address, or of each site.

    Args:
      times: the factor on a single address's credit.
    """

    def __init__(self, times: float = 1.0) -> None:
        self._times = times
        # By host: the credit and its time, the most recent last.
        self._known: dict[str, tuple[float, float]] = {}

    def left(self, host: str) -> float:
        full = self._times * CREDIT_MAX
        credit, at_s = self._known.get(host, (full, 0.0))
        return min(full, credit + self._times * CREDIT_PER_S * (trio.current_time() - at_s))

    def charge(self, host: str) -> None:
        """Take the credit for a failed connection."""
        left = self.left(host) - 1.0
        self._known.pop(host, None)
        if len(self._known) >= ADDRESSES_KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[host] = (left, trio.current_time())


class AcceptLimits:
    """All limits on the connections that one node accepts."""

    def __init__(self) -> None:
        self.unidentified = AcceptSlots(
            UNIDENTIFIED_MAX, UNIDENTIFIED_PER_ADDRESS_MAX, UNIDENTIFIED_SLOW_S
        )
        self.newcomers = AcceptSlots(NEWCOMERS_MAX, NEWCOMERS_PER_ADDRESS_MAX, NEWCOMERS_SLOW_S)
        self.lanes = AcceptSlots(
            LANES_UNPROVEN_MAX, LANES_UNPROVEN_PER_ADDRESS_MAX, UNIDENTIFIED_SLOW_S
        )
        self._credit = AddressCredit()
        self._site_credit = AddressCredit(CREDIT_PER_SITE)
        self._member_groups: OrderedDict[str, None] = OrderedDict()

    def admits(self, group: AddressGroup) -> bool:
        """Return whether a connection from this network has credit, and may be read."""
        if group.site and not self.is_known(group) and self._site_credit.left(group.site) < 1.0:
            return False
        return self._credit.left(group.name) >= 1.0

    def charge(self, group: AddressGroup) -> None:
        """Take the credit for a failed connection from this network."""
        self._credit.charge(group.name)
        if group.site:
            self._site_credit.charge(group.site)

    def add_member(self, group: AddressGroup) -> None:
        self._member_groups[group.name] = None
        self._member_groups.move_to_end(group.name)
        if len(self._member_groups) > MEMBER_GROUPS_MAX:
            self._member_groups.popitem(last=False)

    def is_known(self, group: AddressGroup) -> bool:
        """Return whether a member has come from this network."""
        return group.name in self._member_groups


def address_group(host: str) -> AddressGroup:
    """Return the network that an address counts in."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return AddressGroup(host)
    if isinstance(address, ipaddress.IPv4Address):
        return AddressGroup(str(address))
    if address.ipv4_mapped is not None:
        return AddressGroup(str(address.ipv4_mapped))
    network, site = (ipaddress.ip_network((address, bits), strict=False) for bits in (64, 48))
    return AddressGroup(str(network), str(site))

"""Connections that have not shown who they are: how many there may be, and who may make more.

Each holds a *place*, in all and per address, until it has shown a certificate or a lane's keys; lanes
have places of their own, for a member opens many at once. Whoever comes to nothing (junk, silence, a
newcomer, whatever becomes of it) costs its address some *credit*, which grows back with time; without
credit it is hung up on before a byte is read. So an address costs a second's handshakes what it may, and
what is kept of it are two numbers, for so many addresses.

One IPv6 line has more addresses than there are strangers in the world: its first 64 bits count.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

STRANGERS_MAX = 128  # connections that have not shown who they are; each takes some 80 kB in TLS
STRANGERS_PER_ADDRESS_MAX = 32  # of them from one address: a few machines behind one NAT
LANES_UNPROVEN_MAX = 512  # the same for lanes that have not shown their link's keys
LANES_UNPROVEN_PER_ADDRESS_MAX = 128  # a few machines behind one NAT, each with many links
CREDIT_MAX = 64.0  # connections of an address that came to nothing, one after the other
CREDIT_PER_S = 1.0  # and then
ADDRESSES_KNOWN_MAX = 4_096  # with less than all of it; who failed longest ago is forgotten first

Release = Callable[[], None]


class Places:
    """So many connections at a time, in all and from one address."""

    def __init__(self, count_max: int, per_host_max: int) -> None:
        self._count_max = count_max
        self._per_host_max = per_host_max
        self._total = 0
        self._by_host: Counter[str] = Counter()

    @contextmanager
    def place(self, host: str) -> Iterator[Release | None]:
        """Take a place; gives its release (callable once or more), or None if there is none."""
        if self._total >= self._count_max or self._by_host[host] >= self._per_host_max:
            yield None
            return
        self._total += 1
        self._by_host[host] += 1
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._total -= 1
                self._by_host[host] -= 1
                if not self._by_host[host]:
                    del self._by_host[host]

        try:
            yield release
        finally:
            release()


class Credit:
    """What each address may still cost us.

    Args:
      now: seconds, by any clock that only grows.
    """

    def __init__(self, now: Callable[[], float] = trio.current_time) -> None:
        self._now = now
        self._known: dict[
            str, tuple[float, float]
        ] = {}  # credit, and when; who failed last is last

    def left(self, host: str) -> float:
        credit, at_s = self._known.get(host, (CREDIT_MAX, 0.0))
        return min(CREDIT_MAX, credit + CREDIT_PER_S * (self._now() - at_s))

    def charge(self, host: str) -> None:
        """One of its connections came to nothing."""
        left = self.left(host) - 1.0
        self._known.pop(host, None)
        if len(self._known) >= ADDRESSES_KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[host] = (left, self._now())


class Door:
    """All of it for one node's port."""

    def __init__(self) -> None:
        self.strangers = Places(STRANGERS_MAX, STRANGERS_PER_ADDRESS_MAX)
        self.lanes = Places(LANES_UNPROVEN_MAX, LANES_UNPROVEN_PER_ADDRESS_MAX)
        self.credit = Credit()

    def open_to(self, host: str) -> bool:
        """Whether a connection from there is looked at."""
        return self.credit.left(host) >= 1.0


def line_of(host: str) -> str:
    """The part of an address by which its owner is told from others."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))

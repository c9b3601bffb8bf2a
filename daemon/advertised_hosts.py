"""The addresses that other machines dial: given by the operator, or guessed."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator, Sequence

from ..protocol.addresses import Address

WILDCARDS = ("0.0.0.0", "::")
# Documentation addresses: connecting a UDP socket to them chooses a route and sends nothing.
OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
# Local networks of a machine without a route to the internet. A useless address costs each dialler
# some seconds; beyond a few, they are bridges of virtual machines and containers.
LOCAL_MAX = 4
DIALABLE_MAX = 16  # the room in a Hello and in an invite


def dialable(
    bound: Sequence[Address], advertised: Sequence[Address], towards: str = ""
) -> tuple[str, ...]:
    """Return the addresses to tell other machines.

    Args:
      bound: the addresses that this process listens on, ports known.
      advertised: the operator's addresses; port 0 means the bound one. If empty, a wildcard is
        replaced by this host's address on its route to the others; without a route by its addresses
        in local networks; without any of these by loopback.
      towards: the host of the run's master. For a name or an empty text, the route to the internet
        is used.
    """
    port = bound[0].port
    if advertised:
        return tuple(str(Address(a.host, a.port or port)) for a in advertised)
    outside: list[Address] = []
    here: list[Address] = []  # reachable from this machine only
    for address in bound:
        if address.host not in WILDCARDS:
            outside.append(address)
            continue
        family = socket.AF_INET6 if address.host == "::" else socket.AF_INET
        hosts = _own_hosts(family, towards)
        outside += [Address(host, address.port) for host in hosts]
        if not hosts:
            here.append(Address(LOOPBACK[family], address.port))
    return tuple(map(str, (outside or here)[:DIALABLE_MAX]))


def only_loopback(addresses: Iterable[Address]) -> bool:
    """Return whether all addresses mean the machine on which they are dialled."""
    return all(is_loopback(address.host) for address in addresses)


def doubt_of_loopback(addresses: Sequence[Address]) -> str:
    """Return a warning if an invite's addresses all mean this machine, else an empty string."""
    if not only_loopback(addresses):
        return ""
    return (
        f"the invite names only this machine ({', '.join(map(str, addresses))}); if the master runs"
        " elsewhere, its operator starts it with --advertise HOST and makes another invite"
    )


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, for programs on it only."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"


def _own_hosts(family: socket.AddressFamily, towards: str) -> list[str]:
    """Return this machine's addresses for other machines, the best first."""
    for target in _targets(family, towards):
        if host := host_towards(target, family):
            return [host]
    return list(_local_hosts(family))[:LOCAL_MAX]


def host_towards(target: str, family: socket.AddressFamily) -> str:
    """Return this machine's address on its route to a host; empty without a route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _local_hosts(family: socket.AddressFamily) -> Iterator[str]:
    """Yield the addresses of interfaces that are up, except loopback and link-local ones."""
    import psutil  # imported only on a machine without a route

    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == family and name in stats and stats[name].isup:
                host = ipaddress.ip_address(each.address.partition("%")[0])
                if not (host.is_loopback or host.is_link_local):
                    yield str(host)


def _targets(family: socket.AddressFamily, towards: str) -> Iterator[str]:
    """Yield hosts to find a route to: the master, which a VPN may route otherwise, the internet."""
    try:
        address = ipaddress.ip_address(towards)
    except ValueError:
        pass
    else:
        # A master on this machine tells nothing about other machines.
        if address.version == (6 if family == socket.AF_INET6 else 4) and not address.is_loopback:
            yield towards
    yield OUTSIDE[family]

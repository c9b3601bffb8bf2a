"""Which addresses others should dial: what the person said, or the best guess."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator, Sequence

from ..protocol.addresses import Address

WILDCARDS = ("0.0.0.0", "::")
# Documentation addresses: connecting a UDP socket to them chooses a route and sends nothing.
OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
# Of local networks that a machine without a way out is in. One that leads nowhere costs whoever dials it
# some seconds; more than a few are bridges of virtual machines and containers.
LOCAL_MAX = 4
DIALABLE_MAX = 16  # as many as a greeting, and an invite, have room for


def dialable(
    bound: Sequence[Address], advertised: Sequence[Address], towards: str = ""
) -> tuple[str, ...]:
    """Addresses to tell others.

    Args:
      bound: what this process listens on, ports known.
      advertised: what the person gave; port 0 means the bound one. Empty: guess, which replaces a
        wildcard by this host's address on the way to the others, or by those in its local networks
        where it knows no way; by loopback's only where that is all there is.
      towards: where the run's master is; a name or nothing: the way to the internet will do.
    """
    port = bound[0].port
    if advertised:
        return tuple(str(Address(a.host, a.port or port)) for a in advertised)
    told: list[Address] = []
    here: list[Address] = []  # where only this machine can reach us
    for address in bound:
        if address.host not in WILDCARDS:
            told.append(address)
            continue
        family = socket.AF_INET6 if address.host == "::" else socket.AF_INET
        hosts = _own_hosts(family, towards)
        told += [Address(host, address.port) for host in hosts]
        if not hosts:
            here.append(Address(LOOPBACK[family], address.port))
    return tuple(map(str, (told or here)[:DIALABLE_MAX]))


def only_loopback(addresses: Iterable[Address]) -> bool:
    """Whether all of these mean the machine on which they are dialled."""
    return all(_is_loopback(address.host) for address in addresses)


def doubt_of_loopback(addresses: Sequence[Address]) -> str:
    """What a machine should be told whose invite leads only to itself; empty: it leads elsewhere."""
    if not only_loopback(addresses):
        return ""
    return (
        f"the invite names only this machine ({', '.join(map(str, addresses))}); if the master runs "
        "elsewhere, its operator starts it with --advertise HOST and makes another invite"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().removesuffix(".") == "localhost"


def _own_hosts(family: socket.AddressFamily, towards: str) -> list[str]:
    """This machine's addresses for others, the best first; empty: it is in no network."""
    for target in _targets(family, towards):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return [str(probe.getsockname()[0])]
        except OSError:
            continue  # no way there
    return list(_local_hosts(family))[:LOCAL_MAX]


def _local_hosts(family: socket.AddressFamily) -> Iterator[str]:
    """Of interfaces that are up; none that mean something else on each link."""
    import psutil  # only a machine without a way out needs it

    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == family and name in stats and stats[name].isup:
                host = ipaddress.ip_address(each.address.partition("%")[0])
                if not (host.is_loopback or host.is_link_local):
                    yield str(host)


def _targets(family: socket.AddressFamily, towards: str) -> Iterator[str]:
    """A local network or a VPN has no way to the internet, or another one."""
    try:
        address = ipaddress.ip_address(towards)
    except ValueError:
        pass
    else:
        # A master on this machine says nothing about others; they find us by the way out.
        if address.version == (6 if family == socket.AF_INET6 else 4) and not address.is_loopback:
            yield towards
    yield OUTSIDE[family]

"""The routers that may have to be asked, and this machine's addresses towards them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...protocol.addresses import Address, is_public
from ..advertised_hosts import OUTSIDE, WILDCARDS, host_towards, only_loopback
from .gateway import Gateway
from .pcp_gateway import PcpGateway
from .upnp_gateway import UpnpGateway

ROUTES = Path("/proc/net/route")
ROUTES_6 = Path("/proc/net/ipv6_route")
RTF_GATEWAY = 0x2


def find_gateways(bound: Sequence[Address]) -> list[list[Gateway]]:
    """Return the gateways to ask, the best first, for each family that needs one.

    A family needs one if this machine has a router to the internet, and an address that machines
    beyond it cannot dial by themselves: any private IPv4 address, and any public IPv6 address,
    which a router's firewall shuts.
    """
    found: list[list[Gateway]] = []
    for address in bound:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        host = host_towards(OUTSIDE[family], family) if address.host in WILDCARDS else address.host
        if not host or only_loopback([address]):
            continue
        own = Address(host, address.port)
        if family == socket.AF_INET and not is_public(host):
            asked: list[Gateway] = []
            for router in routers(family):
                asked += [PcpGateway(router, own), UpnpGateway(router, own)]
            found.append(asked)
        elif family == socket.AF_INET6 and is_public(host):
            found.append([PcpGateway(router, own) for router in routers(family)])
    return [gateways for gateways in found if gateways]


def routers(family: socket.AddressFamily) -> list[str]:
    """Return the next hop of the default route, as Linux tells it; elsewhere none is known."""
    read, path = (_next_hops, ROUTES) if family == socket.AF_INET else (_next_hops_6, ROUTES_6)
    try:
        hops = sorted(read(path.read_text()))
    except (OSError, ValueError):
        return []
    return [host for _metric, host in hops[:1]]


def _next_hops(text: str) -> Iterator[tuple[int, str]]:
    """Yield metric and next hop of each default route of ``/proc/net/route``."""
    for line in text.splitlines()[1:]:
        _device, target, gateway, flags, _, _, metric, *_ = line.split()
        if int(target, 16) == 0 and int(flags, 16) & RTF_GATEWAY:
            yield int(metric), str(ipaddress.IPv4Address(bytes.fromhex(gateway)[::-1]))


def _next_hops_6(text: str) -> Iterator[tuple[int, str]]:
    """Yield metric and next hop of each default route of ``/proc/net/ipv6_route``."""
    for line in text.splitlines():
        target, bits, _, _, hop, metric, _, _, flags, device = line.split()
        if int(target, 16) == int(bits, 16) == 0 and int(flags, 16) & RTF_GATEWAY:
            host = ipaddress.IPv6Address(bytes.fromhex(hop))
            zone = f"%{device}" if host.is_link_local else ""
            yield int(metric, 16), f"{host}{zone}"

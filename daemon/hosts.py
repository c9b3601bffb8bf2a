"""Which addresses others should dial: what the person said, or the best guess."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence

from ..protocol.addresses import Address

WILDCARDS = ("0.0.0.0", "::")
# Documentation addresses: connecting a UDP socket to them chooses a route and sends nothing.
OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def dialable(
    bound: Sequence[Address], advertised: Sequence[Address], towards: str = ""
) -> tuple[str, ...]:
    """Addresses to tell others.

    Args:
      bound: what this process listens on, ports known.
      advertised: what the person gave; port 0 means the bound one. Empty: guess, which replaces a
        wildcard by this host's address on the way to the others.
      towards: where the run's master is; a name or nothing: the way to the internet will do.
    """
    port = bound[0].port
    if advertised:
        return tuple(str(Address(a.host, a.port or port)) for a in advertised)
    return tuple(
        str(Address(_own_host(a.host, towards), a.port) if a.host in WILDCARDS else a)
        for a in bound
    )


def _own_host(wildcard: str, towards: str) -> str:
    family = socket.AF_INET6 if wildcard == "::" else socket.AF_INET
    for target in _targets(family, towards):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue  # no way there
    return "::1" if wildcard == "::" else "127.0.0.1"  # only this machine can reach us


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

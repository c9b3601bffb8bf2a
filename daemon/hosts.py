"""Which addresses others should dial: what the person said, or the best guess."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ..protocol.addresses import Address

WILDCARDS = ("0.0.0.0", "::")
# Documentation addresses: connecting a UDP socket to them chooses a route and sends nothing.
OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def dialable(bound: Sequence[Address], advertised: Sequence[Address]) -> tuple[str, ...]:
    """Addresses to tell others.

    Args:
      bound: what this process listens on, ports known.
      advertised: what the person gave; port 0 means the bound one. Empty: guess, which replaces a
        wildcard by this host's address on the way out.
    """
    port = bound[0].port
    if advertised:
        return tuple(str(Address(a.host, a.port or port)) for a in advertised)
    return tuple(
        str(Address(_own_host(a.host), a.port) if a.host in WILDCARDS else a) for a in bound
    )


def _own_host(wildcard: str) -> str:
    family = socket.AF_INET6 if wildcard == "::" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((OUTSIDE[family], 9))
            return str(probe.getsockname()[0])
    except OSError:  # no way out: only this machine can reach us
        return "::1" if wildcard == "::" else "127.0.0.1"

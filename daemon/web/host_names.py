"""The host names that a daemon's HTTP API answers to, as a defence against DNS rebinding.

A foreign page can have its own domain name resolve to this machine. The visitor's browser then lets
that page read a daemon's answers as its own. The browser sends the name in ``Host``, so requests
are answered only for names that a foreigner cannot give to this machine (RFC 9110, 15.5.20).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ..advertised_hosts import is_loopback
from .json_answers import answer

LOOPBACK = "localhost"  # and its subdomains, which are never looked up at a server (RFC 6761)
MISDIRECTED = 421


class HostNames:
    """The names of one daemon: where it listens, as people type what is printed, and given ones."""

    def __init__(self, bound: str = "", named: Iterable[str] = ()) -> None:
        machine = socket.gethostname().lower()
        label = machine.partition(".")[0]
        self._names = {machine, label, f"{label}.local", *map(_plain, (bound, *named))} - {""}

    def answers_to(self, header: str, connected: str) -> bool:
        """Return whether a ``Host`` header names this daemon; ``connected`` is its own address."""
        try:
            host = _plain(Address.parse(header, default_port=0).host)
        except UserError:
            return False
        if host == LOOPBACK or host.endswith(f".{LOOPBACK}") or host in self._names:
            return True
        return host == _plain(connected) or is_loopback(host)


def _plain(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower().removesuffix(".")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


class Named:
    """Middleware that answers only requests for one of the daemon's names.

    A request without ``Host`` passes: it comes from no browser.
    """

    def __init__(self, app: ASGIApp, names: HostNames) -> None:
        self.app = app
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connected = str((scope.get("server") or ("",))[0])
        for name, value in scope["headers"]:
            header = value.decode("latin-1")
            if name == b"host" and not self.names.answers_to(header, connected):
                refused = {
                    "error": f"this daemon is not {header[:255]!r}",
                    "hint": "if this is a name of the machine, or of a proxy in front of it, start "
                    "the daemon with --http-host NAME",
                }
                await answer(refused, MISDIRECTED)(scope, receive, send)
                return
        await self.app(scope, receive, send)

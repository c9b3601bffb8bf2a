"""Under which names a daemon's HTTP side answers: its own, and no stranger's.

A page from anywhere can have its own name point at this machine ("DNS rebinding"): its visitor's browser
then takes what a daemon here says for that page's, and lets it read. But the browser tells by which name
it came, in ``Host``. No name that somebody else can give to this machine is answered: see RFC 9110, 15.5.20.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from ...protocol.addresses import Address
from ...protocol.errors import UserError
from .json_answers import answer

LOOPBACK = (
    "localhost"  # and all below it: browsers and resolvers ask no server for these (RFC 6761)
)
MISDIRECTED = 421


class HostNames:
    """The names of one daemon.

    Args:
      bound: where it listens; a wildcard is answered to as well, for people type what is printed.
      named: by its owner: of a proxy before it, or of the machine around a container.
    """

    def __init__(self, bound: str = "", named: Iterable[str] = ()) -> None:
        machine = socket.gethostname().lower()
        label = machine.partition(".")[0]
        self._names = {machine, label, f"{label}.local", *map(_plain, (bound, *named))} - {""}

    def answers_to(self, header: str, connected: str) -> bool:
        """Whether a ``Host`` is one of ours.

        Args:
          connected: our end's address of the connection that it came by.
        """
        try:
            host = _plain(Address.parse(header, default_port=0).host)
        except UserError:
            return False
        if host == LOOPBACK or host.endswith(f".{LOOPBACK}") or host in self._names:
            return True
        return host == _plain(connected) or _is_loopback(host)


def _plain(host: str) -> str:
    """One spelling for each host."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host.lower().removesuffix(".")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Named:
    """Lets requests through that come by one of our names.

    A request without ``Host`` is let through: no browser sends one.
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
                    "hint": "if that is a name of this machine, or of a proxy before it, start "
                    "the daemon with --http-host NAME",
                }
                await answer(refused, MISDIRECTED)(scope, receive, send)
                return
        await self.app(scope, receive, send)

"""Addresses in the form in which people write them: ``host:port``, ``[v6]:port``, ``name:port``."""

from __future__ import annotations

import ipaddress
import re

from attrs import field, frozen
from attrs.validators import and_, ge, le, max_len, min_len

from .errors import UserError

HOST_CHARS_MAX = 255  # the longest name that DNS can carry
PORT_MAX = 65_535

# Nobody outside can dial these: of private networks, of a carrier's own translation (RFC 6598), of
# groups, and all of IPv6 but 2000::/3. Python's ``is_global`` excludes networks of documentation,
# too, in which this project's laboratory lies.
NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "224.0.0.0/3",
            "::/3",
            "4000::/2",
            "8000::/1",
        ),
    )
)

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")
_HINT = "write host:port, for example 203.0.113.7:7700, [2001:db8::7]:7700 or node.example:7700"


def _check_host(text: str, host: str) -> None:
    if not host:
        raise UserError(f"the address {text!r} names no host", hint=_HINT)
    if len(host) > HOST_CHARS_MAX:
        raise UserError(f"a host name of {len(host)} characters is too long", hint=_HINT)
    if ":" in host:
        address, _, zone = host.partition("%")
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            raise UserError(f"{host!r} is not an IPv6 address", hint=_HINT) from None
        if "%" in host and not _NAME.fullmatch(zone):
            raise UserError(f"{host!r} has a bad zone", hint=_HINT)
    elif not _NAME.fullmatch(host):
        raise UserError(f"{host!r} is not a host name", hint=_HINT)


@frozen
class Address:
    """A host and port to dial or to listen on; to listen on port 0 means any free port.

    Attributes:
      host: a name, an IPv4 address or an IPv6 address without brackets.
    """

    host: str = field(validator=and_(min_len(1), max_len(HOST_CHARS_MAX)))
    port: int = field(validator=and_(ge(0), le(PORT_MAX)))

    @classmethod
    def parse(cls, text: str, default_port: int | None = None) -> Address:
        """Parse an address that a person typed.

        Args:
          default_port: used where the text has no port; None: a port is required.

        Raises:
          UserError: not an address; its hint shows how to write one.
        """
        text = text.strip()
        if len(text) > HOST_CHARS_MAX + 8:
            raise UserError(f"an address of {len(text)} characters is too long", hint=_HINT)
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            if not bracket or (rest and not rest.startswith(":")) or ":" not in host:
                raise UserError(f"{text!r} is not [IPv6]:port", hint=_HINT)
            port_text = rest[1:] if rest else None
        elif text.count(":") > 1:
            host, port_text = text, None  # a bare IPv6 address: its last group is not a port
        else:
            host, colon, after = text.partition(":")
            port_text = after if colon else None
        _check_host(text, host)
        if port_text is None:
            if default_port is None:
                raise UserError(f"the address {text!r} names no port", hint=_HINT)
            return cls(host, default_port)
        if not (port_text.isascii() and port_text.isdigit()) or int(port_text) > PORT_MAX:
            raise UserError(f"{port_text!r} is not a port (0 to {PORT_MAX})", hint=_HINT)
        return cls(host, int(port_text))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def port_of(remote_address: str) -> int:
    """Return the port of a ``Channel.remote_address``, or 0 if it has none."""
    port = remote_address.rpartition(":")[2]
    return int(port) if port.isdecimal() else 0


def host_of(remote_address: str) -> str:
    """Return the host of a ``Channel.remote_address``, or an empty string if it has none.

    The IPv6 zone is removed. An IPv4 address that a dual-stack socket mapped becomes IPv4.
    """
    host, colon, _port = remote_address.rpartition(":")
    host = host.strip("[]").partition("%")[0] if colon else ""
    return host.removeprefix("::ffff:") if "." in host else host


def is_public(host: str) -> bool:
    """Return whether an IP address can be one that machines everywhere dial."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return "%" not in host and not any(
        address in network for network in NOT_PUBLIC if network.version == address.version
    )

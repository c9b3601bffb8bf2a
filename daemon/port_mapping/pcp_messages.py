"""Messages of PCP (RFC 6887), which routers answer on a UDP port. Pure.

One TCP port of this machine is mapped to a port of the router's public address, for a lifetime. For
an IPv6 address the router's firewall is opened instead, and address and port stay as they are.
"""

from __future__ import annotations

import ipaddress
import struct

from attrs import frozen

from ...protocol.addresses import Address
from .gateway import MappingError

PORT = 5351
PCP_VERSION = 2
NONCE_BYTES = 12
ANSWER_BYTES_MAX = 1_100  # RFC 6887, section 7

_RESPONSE = 0x80  # set in an answer's opcode
_PCP_MAP = 1
_TCP = 6
# Version, opcode, reserved, lifetime, this machine's address.
_PCP_REQUEST = struct.Struct("!BBHI16s")
_PCP_ANSWER = struct.Struct("!BBxBII12x")  # version, opcode, result, lifetime, epoch
# nonce, protocol, this machine's port, the router's port and address
_PCP_MAPPED = struct.Struct("!12sB3xHH16s")

WRONG_VERSION = 1
RESULTS = {
    1: "it does not speak this version",
    2: "it is told to allow nobody that",
    3: "it found the request malformed",
    4: "it does not speak this operation",
    5: "it does not support an option",
    6: "it found an option malformed",
    7: "it has no public address now",
    8: "it has no room for another port",
    9: "it maps no TCP ports",
    10: "this machine has too many ports there",
    11: "it cannot give the port that was asked for",
    12: "another router between translates this machine's address",
    13: "the mapping would be for too many others",
}

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@frozen
class MapRequest:
    """A port to be mapped.

    Attributes:
      own: this machine's address, from which the request is sent, and the port that it listens on.
      suggested: what the router gave before; None: any address, and the same port.
      lifetime_s: whole seconds; 0: the mapping is given back.
      nonce: ``NONCE_BYTES`` by which PCP knows who renews or gives back a mapping.
    """

    own: Address
    nonce: bytes
    lifetime_s: int
    suggested: Address | None = None

    @property
    def suggested_port(self) -> int:
        return self.own.port if self.suggested is None else self.suggested.port


@frozen
class MapAnswer:
    """What the router gave."""

    host: str
    port: int
    lifetime_s: int


def pcp_request(request: MapRequest) -> bytes:
    """Return a request of PCP's operation MAP (RFC 6887, section 11)."""
    own = ipaddress.ip_address(request.own.host)
    unspecified = "::" if own.version == 6 else "0.0.0.0"
    host = unspecified if request.suggested is None else request.suggested.host
    head = _PCP_REQUEST.pack(PCP_VERSION, _PCP_MAP, 0, request.lifetime_s, _packed(own))
    suggested = _packed(ipaddress.ip_address(host))
    return head + _PCP_MAPPED.pack(
        request.nonce, _TCP, request.own.port, request.suggested_port, suggested
    )


def read_pcp_answer(data: bytes, request: MapRequest) -> MapAnswer | None:
    """Return what a datagram says; None if it answers another request, or nothing.

    Raises:
      MappingError: the router maps no port, or speaks another version, or only NAT-PMP.
    """
    if len(data) < 4 or not data[1] & _RESPONSE:
        return None
    if data[0] != PCP_VERSION:
        raise MappingError(RESULTS[WRONG_VERSION])
    if len(data) < _PCP_ANSWER.size:
        return None
    _version, opcode, result, lifetime_s, _epoch = _PCP_ANSWER.unpack_from(data)
    if opcode != _RESPONSE | _PCP_MAP:
        return None
    if len(data) < _PCP_ANSWER.size + _PCP_MAPPED.size:
        if result:
            raise MappingError(_why(result))
        return None
    nonce, protocol, own_port, port, packed = _PCP_MAPPED.unpack_from(data, _PCP_ANSWER.size)
    if (nonce, protocol, own_port) != (request.nonce, _TCP, request.own.port):
        return None
    if result:
        raise MappingError(_why(result))
    host = ipaddress.IPv6Address(packed)
    return MapAnswer(str(host.ipv4_mapped or host), port, lifetime_s)


def _packed(address: IpAddress) -> bytes:
    """Return an address in 16 bytes, as RFC 6887, section 5, has it."""
    if address.version == 4:
        address = ipaddress.IPv6Address(f"::ffff:{address}")
    return address.packed


def _why(result: int) -> str:
    return RESULTS.get(result, f"it answers with error {result}")

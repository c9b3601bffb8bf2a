"""Messages of PCP (RFC 6887) and of NAT-PMP (RFC 6886), which routers answer on one UDP port. Pure.

Both map one TCP port of this machine to a port of the router's public address, for a lifetime. For
an IPv6 address PCP opens the router's firewall instead, and address and port stay as they are. A
router that knows NAT-PMP only answers a PCP request with version 0.
"""

from __future__ import annotations

import ipaddress
import struct

from attrs import frozen

from ...protocol.addresses import Address
from .gateway import MappingError, NotUnderstoodError

PORT = 5351
PCP_VERSION = 2
NAT_PMP_VERSION = 0
NONCE_BYTES = 12
ANSWER_BYTES_MAX = 1_100  # RFC 6887, section 7

_RESPONSE = 0x80  # set in an answer's opcode
_PCP_MAP = 1
_NAT_PMP_ADDRESS = 0
_NAT_PMP_MAP_TCP = 2
_TCP = 6
# Version, opcode, reserved, lifetime, this machine's address.
_PCP_REQUEST = struct.Struct("!BBHI16s")
_PCP_ANSWER = struct.Struct("!BBxBII12x")  # version, opcode, result, lifetime, epoch
# nonce, protocol, this machine's port, the router's port and address
_PCP_MAPPED = struct.Struct("!12sB3xHH16s")
# Version, opcode, this machine's port, the router's, lifetime.
_NAT_PMP_REQUEST = struct.Struct("!BBxxHHI")
_NAT_PMP_ANSWER = struct.Struct("!BBHI")  # version, opcode, result, epoch
_NAT_PMP_MAPPED = struct.Struct("!HHI")  # this machine's port, the router's, lifetime

WRONG_VERSION = 1  # a result of both protocols
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
NAT_PMP_RESULTS = {2: RESULTS[2], 3: RESULTS[7], 4: RESULTS[8], 5: RESULTS[4]}

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
    """What the router gave; NAT-PMP tells the host in an answer of its own: empty in this one."""

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
      NotUnderstoodError: the router speaks NAT-PMP only, or another version.
      MappingError: it maps no port.
    """
    if len(data) < 4 or not data[1] & _RESPONSE:
        return None
    if data[0] != PCP_VERSION:
        raise NotUnderstoodError(RESULTS[WRONG_VERSION])
    if len(data) < _PCP_ANSWER.size:
        return None
    _version, opcode, result, lifetime_s, _epoch = _PCP_ANSWER.unpack_from(data)
    if opcode != _RESPONSE | _PCP_MAP:
        return None
    if result == WRONG_VERSION:
        raise NotUnderstoodError(RESULTS[result])
    if len(data) < _PCP_ANSWER.size + _PCP_MAPPED.size:
        if result:
            raise MappingError(_why(result, RESULTS))
        return None
    nonce, protocol, own_port, port, packed = _PCP_MAPPED.unpack_from(data, _PCP_ANSWER.size)
    if (nonce, protocol, own_port) != (request.nonce, _TCP, request.own.port):
        return None
    if result:
        raise MappingError(_why(result, RESULTS))
    host = ipaddress.IPv6Address(packed)
    return MapAnswer(str(host.ipv4_mapped or host), port, lifetime_s)


def nat_pmp_request(request: MapRequest) -> bytes:
    """Return a request to map a TCP port (RFC 6886, section 3.3)."""
    port = request.suggested_port if request.lifetime_s else 0  # 0 with a lifetime of 0: give back
    return _NAT_PMP_REQUEST.pack(
        NAT_PMP_VERSION, _NAT_PMP_MAP_TCP, request.own.port, port, request.lifetime_s
    )


def nat_pmp_address_request() -> bytes:
    """Return a request for the router's public address (RFC 6886, section 3.2)."""
    return bytes([NAT_PMP_VERSION, _NAT_PMP_ADDRESS])


def read_nat_pmp_address(data: bytes) -> str | None:
    """Return the router's public address; None for another answer; MappingError if refused."""
    rest = _nat_pmp_fields(data, _NAT_PMP_ADDRESS)
    return str(ipaddress.IPv4Address(rest[:4])) if len(rest) >= 4 else None


def read_nat_pmp_answer(data: bytes, own_port: int) -> MapAnswer | None:
    """Return what the router gave; None for another answer; raise MappingError if refused."""
    rest = _nat_pmp_fields(data, _NAT_PMP_MAP_TCP)
    if len(rest) < _NAT_PMP_MAPPED.size:
        return None
    mapped_port, port, lifetime_s = _NAT_PMP_MAPPED.unpack_from(rest)
    return MapAnswer("", port, lifetime_s) if mapped_port == own_port else None


def _nat_pmp_fields(data: bytes, wanted_opcode: int) -> bytes:
    """Return what stands behind the head of an answer; nothing for an answer to another request."""
    if len(data) < _NAT_PMP_ANSWER.size:
        return b""
    version, opcode, result, _epoch = _NAT_PMP_ANSWER.unpack_from(data)
    if version != NAT_PMP_VERSION or not opcode & _RESPONSE:
        return b""
    if result:
        raise MappingError(_why(result, NAT_PMP_RESULTS))
    return data[_NAT_PMP_ANSWER.size :] if opcode == _RESPONSE | wanted_opcode else b""


def _packed(address: IpAddress) -> bytes:
    """Return an address in 16 bytes, as RFC 6887, section 5, has it."""
    if address.version == 4:
        address = ipaddress.IPv6Address(f"::ffff:{address}")
    return address.packed


def _why(result: int, results: dict[int, str]) -> str:
    return results.get(result, f"it answers with error {result}")

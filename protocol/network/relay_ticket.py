"""The first bytes on a connection to a relay: a ticket, then one byte back.

The ticket is a secret that the master made, and that both ends and the relay have. One end *parks*
and waits for the answer. The other end *calls* whenever it needs a stream, and the relay joins it
with the parked one and answers both. All bytes after the answer are the other end's: a TLS
connection or a lane of the two ends, so the relay sees ciphertext only.
"""

from __future__ import annotations

import enum
import struct

import trio
from attrs import frozen

from ..errors import RemoteProtocolError
from .stream import receive_exactly

MAGIC = 0x52  # neither a TLS record nor a lane
VERSION = 1
TICKET_BYTES = 32
PAIRED = b"\x01"

_PREAMBLE = struct.Struct(f">BBB{TICKET_BYTES}s")
PREAMBLE_BYTES = _PREAMBLE.size


class RelayRole(enum.IntEnum):
    PARK = 0
    CALL = 1


@frozen
class RelayPreamble:
    part: RelayRole
    ticket: bytes

    def pack(self) -> bytes:
        return _PREAMBLE.pack(MAGIC, VERSION, self.part, self.ticket)

    @classmethod
    def unpack(cls, data: bytes) -> RelayPreamble:
        """Parse a preamble; raises RemoteProtocolError if it is none of this version."""
        if len(data) != PREAMBLE_BYTES:
            raise RemoteProtocolError(f"a relay's preamble has {PREAMBLE_BYTES} bytes")
        magic, version, part, ticket = _PREAMBLE.unpack(data)
        if magic != MAGIC or version != VERSION or part > RelayRole.CALL:
            raise RemoteProtocolError("not a relay's preamble")
        return cls(RelayRole(part), ticket)


async def receive_preamble(stream: trio.abc.ReceiveStream) -> RelayPreamble:
    """Read a relay preamble; the caller bounds the time.

    Raises:
      RemoteProtocolError: not a preamble, or the stream ended within it.
    """
    return RelayPreamble.unpack(await receive_exactly(stream, PREAMBLE_BYTES))


async def wait_paired(stream: trio.abc.ReceiveStream) -> None:
    """Wait until the relay has found the other end; raises OSError if it hangs up instead."""
    try:
        answer = await receive_exactly(stream, len(PAIRED))
    except (RemoteProtocolError, trio.BrokenResourceError):
        raise OSError("the relay hung up") from None
    if answer != PAIRED:
        raise RemoteProtocolError("the relay sent an invalid answer")

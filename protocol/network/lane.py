"""Lanes: bulk bytes between two peers, one TCP connection each, AES-256-GCM records.

A lane has no handshake of its own. Both sides know its two keys before it exists, from secrets that
they exchanged inside their link's TLS control stream. Only the preamble (link id and lane number)
and the frames' headers travel in clear:

    dialer -> acceptor    magic 'H', version, kind of preamble, lane number, link id     24 bytes
    then, both ways       frames: header (32 bytes, in clear) + records
    record                ciphertext of up to 512 KiB of the payload + tag (16 bytes)

A frame's payload is cut into records that stay in a core's cache between the cipher and the socket;
an empty payload is one record with nothing but its tag. The frame's header is the associated data
of each of its records. Each direction has its own key and counts its records. The count is the
nonce and never travels, so a record that was replayed, reordered, dropped, moved to another frame
or sent back to its sender fails authentication. The first frame of each side is ``OPEN``, without
payload: it proves that the other end has the keys.

``RecordSealer`` and ``RecordOpener`` implement the format without any I/O. ``Lane`` uses them over
any stream of trio, ``socket_lane.SocketLane`` in threads over a real socket.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Awaitable, Callable, Iterator

import trio
from attrs import frozen
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ..errors import LocalProtocolError, RemoteProtocolError
from .stream import receive_exactly

MAGIC = 0x48  # 'H': a TLS connection starts with 0x16
VERSION = 1
LINK_ID_BYTES = 16
SECRET_BYTES = 32
PAYLOAD_BYTES_MAX = 8 * 2**20  # a chunk is about 1 MiB; limits a lane's buffer for the other side
READ_BYTES = 2**18  # per read of a stream

KEY_BYTES = 32
TAG_BYTES = 16
# Payload bytes in one record: small enough for a core's caches, with the ciphertext and the numpy
# operation that follows. With half of it, threads spend a tenth more on system calls.
PIECE_BYTES = 2**19

Buffer = bytes | bytearray | memoryview
Place = Callable[["FrameHeader"], Awaitable[memoryview | None]]

_PREAMBLE = struct.Struct(">BBHI16s")
_HEADER = struct.Struct(">B3xQIIII4x")
_NONCE = struct.Struct(">4xQ")

PREAMBLE_BYTES = _PREAMBLE.size
HEADER_BYTES = _HEADER.size
_FROM_DIALER = 1  # the side that sends a preamble


class FrameKind(enum.IntEnum):
    OPEN = 0  # first record of each side; empty
    CONTRIBUTION = 1  # contributor -> owner: a chunk's encoded pseudo-gradient
    RESULT = 2  # owner -> receivers: a chunk's encoded mean, forwarded verbatim
    BLOCK = 3  # donor -> joiner: a block of state
    PARTIAL = 4  # a RESULT that lacks contributors: its last bytes list those in it


_KINDS = tuple(FrameKind)


@frozen
class FrameHeader:
    """The header of a frame: readable on the way, and authenticated with each of its records.

    Attributes:
      index: of the chunk in its round, or of the block in its fragment.
      transfer: the fragment for contributions and results, the joiner's number for blocks.
    """

    kind: FrameKind
    round: int
    attempt: int
    index: int
    transfer: int
    payload_bytes: int

    def __attrs_post_init__(self) -> None:
        # One expression: a validator a field takes longer than all else that is done here.
        if not (
            0 <= self.round < 2**64
            and 0 <= self.attempt < 2**32
            and 0 <= self.index < 2**32
            and 0 <= self.transfer < 2**32
            and 0 <= self.payload_bytes <= PAYLOAD_BYTES_MAX
        ):
            raise ValueError(f"a frame cannot have the header {self}")

    def pack(self) -> bytes:
        return _HEADER.pack(
            self.kind, self.round, self.attempt, self.index, self.transfer, self.payload_bytes
        )

    @classmethod
    def unpack(cls, data: Buffer) -> FrameHeader:
        """Parse a header; raises RemoteProtocolError for a bad kind, length or padding."""
        kind, round_, attempt, index, transfer, payload_bytes = _HEADER.unpack(data)
        if kind >= len(_KINDS):
            raise RemoteProtocolError(f"{kind} is not a kind of frame")
        if payload_bytes > PAYLOAD_BYTES_MAX:
            raise RemoteProtocolError(f"a frame of {payload_bytes} bytes is over-long")
        header = cls(_KINDS[kind], round_, attempt, index, transfer, payload_bytes)
        if header.pack() != data:
            raise RemoteProtocolError("a frame's padding is not zero")
        return header


OPEN = FrameHeader(FrameKind.OPEN, 0, 0, 0, 0, 0)


@frozen
class LanePreamble:
    """The first bytes of a lane, from its dialer: the link and the lane's number."""

    link_id: bytes
    lane: int

    def pack(self) -> bytes:
        return _PREAMBLE.pack(MAGIC, VERSION, _FROM_DIALER, self.lane, self.link_id)

    @classmethod
    def unpack(cls, data: Buffer) -> LanePreamble:
        """Parse a preamble; raises RemoteProtocolError if it is none of this version."""
        if len(data) != PREAMBLE_BYTES:
            raise RemoteProtocolError(f"a lane's preamble has {PREAMBLE_BYTES} bytes")
        magic, version, side, lane, link_id = _PREAMBLE.unpack(data)
        if magic != MAGIC or side != _FROM_DIALER:
            raise RemoteProtocolError("not a lane's preamble")
        if version != VERSION:
            raise RemoteProtocolError(f"a lane of version {version}; this side has {VERSION}")
        return cls(link_id, lane)


async def send_preamble(stream: trio.abc.Stream, link_id: bytes, lane: int) -> None:
    """Send the dialer's first bytes."""
    await stream.send_all(LanePreamble(link_id, lane).pack())


async def receive_preamble(stream: trio.abc.Stream) -> LanePreamble:
    """Read an accepted lane's preamble; the caller bounds the time.

    Raises:
      RemoteProtocolError: the stream does not begin with a preamble.
    """
    return LanePreamble.unpack(await receive_exactly(stream, PREAMBLE_BYTES))


def derive_lane_keys(
    secret_dialer: bytes, secret_acceptor: bytes, link_id: bytes, lane: int
) -> tuple[bytes, bytes]:
    """Derive both keys of one lane by HKDF-SHA256.

    The dialer is the peer that dialled the link's control stream, and it dials the lanes too.

    Returns:
      The keys (dialer to acceptor, acceptor to dialer).
    """
    if len(secret_dialer) != SECRET_BYTES or len(secret_acceptor) != SECRET_BYTES:
        raise LocalProtocolError(f"a link's secrets have {SECRET_BYTES} bytes")
    material = HKDF(
        algorithm=hashes.SHA256(),
        length=2 * KEY_BYTES,
        salt=link_id,
        info=b"holdfast lane v1 " + lane.to_bytes(4, "big"),
    ).derive(secret_dialer + secret_acceptor)
    return material[:KEY_BYTES], material[KEY_BYTES:]


class RecordSealer:
    """Turns frames into records, in order; one direction of one lane.

    Args:
      key: of this direction (32 bytes); never used by any other lane.
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._count = 0
        # Header, one piece and its tag; grows to the largest piece so far.
        self._buffer = bytearray(HEADER_BYTES + TAG_BYTES)

    def seal(self, header: FrameHeader, payload: Buffer) -> Iterator[memoryview]:
        """Return an iterator over the frame's bytes: header and first record, then each record.

        Each record is sealed when it is asked for and overwritten by the next one. The iterator
        must be exhausted, because the records are counted.

        Raises:
          LocalProtocolError: at once: the header does not fit the payload, or the lane is not open.
        """
        view = memoryview(payload).cast("B")
        if header.payload_bytes != len(view):
            raise LocalProtocolError(f"{len(view)} bytes under a header of {header.payload_bytes}")
        if (header.kind is FrameKind.OPEN) != (self._count == 0):
            raise LocalProtocolError("OPEN is the first record of a lane, and only the first")
        return self._records(header.pack(), view)

    def _records(self, head: bytes, view: memoryview) -> Iterator[memoryview]:
        room_bytes = HEADER_BYTES + min(len(view), PIECE_BYTES) + TAG_BYTES
        if len(self._buffer) < room_bytes:
            self._buffer = bytearray(room_bytes)
        buffer = memoryview(self._buffer)
        buffer[:HEADER_BYTES] = head
        at = 0
        for start in range(0, max(1, len(view)), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            end = HEADER_BYTES + len(piece) + TAG_BYTES
            nonce = _NONCE.pack(self._count)
            self._count += 1
            self._cipher.encrypt_into(nonce, piece, head, buffer[HEADER_BYTES:end])
            yield buffer[at:end]
            at = HEADER_BYTES


class RecordOpener:
    """Checks and decrypts the records of a ``RecordSealer``, in order; one direction of one lane.

    Args:
      key: of this direction (32 bytes).
    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._count = 0
        self._head = b""
        # One piece and its tag; grows to the largest piece so far.
        self._buffer = bytearray(TAG_BYTES)

    def header(self, data: Buffer) -> FrameHeader:
        """Parse a frame's header. It is authentic only once the frame's records are.

        Raises:
          RemoteProtocolError: not a header, or out of place.
        """
        header = FrameHeader.unpack(data)
        if (header.kind is FrameKind.OPEN) != (self._count == 0):
            raise RemoteProtocolError("OPEN is the first record of a lane, and only the first")
        if header.kind is FrameKind.OPEN and header != OPEN:
            raise RemoteProtocolError("an OPEN record is empty")
        self._head = bytes(data)
        return header

    def records(
        self, header: FrameHeader, target: memoryview | None
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Iterate over the frame's records.

        Args:
          target: buffer for the payload, of its exact size; None: it is checked and dropped.

        Returns:
          For each record the buffer to read it into, and the buffer for ``open`` to decrypt it to.

        Raises:
          LocalProtocolError: at once: the target has another size.
        """
        if target is not None and target.nbytes != header.payload_bytes:
            raise LocalProtocolError(f"a buffer of {target.nbytes} bytes for {header}")
        return self._records(header.payload_bytes, None if target is None else target.cast("B"))

    def _records(
        self, payload_bytes: int, target: memoryview | None
    ) -> Iterator[tuple[memoryview, memoryview]]:
        room_bytes = min(payload_bytes, PIECE_BYTES) + TAG_BYTES
        if len(self._buffer) < room_bytes:
            self._buffer = bytearray(room_bytes)
        for start in range(0, max(1, payload_bytes), PIECE_BYTES):
            piece_bytes = min(PIECE_BYTES, payload_bytes - start)
            sealed = memoryview(self._buffer)[: piece_bytes + TAG_BYTES]
            into = sealed[:piece_bytes] if target is None else target[start : start + piece_bytes]
            yield sealed, into

    def open(self, sealed: memoryview, into: memoryview) -> None:
        """Decrypt the next record of the last header's frame.

        Raises:
          RemoteProtocolError: not authentic, or out of sequence.
        """
        try:
            self._cipher.decrypt_into(_NONCE.pack(self._count), sealed, self._head, into)
        except InvalidTag:
            raise RemoteProtocolError("a record is not authentic or out of sequence") from None
        self._count += 1


class Lane:
    """Authenticated frames over a byte stream, both ways.

    One task sends and one task receives at a time. Cancelling a send, or a receive in the middle of
    a frame, breaks that direction for good, as losing the connection would; close the lane then.
    Cancelling a receive that still waits for a frame loses nothing.

    Attributes:
      sealer: the sending direction's records, for code that continues in another way
        (``SocketLane``).
      opener: the same for the receiving direction.

    Args:
      send_key: of this direction (32 bytes); never used by any other lane.
      receive_key: of the other direction.
    """

    def __init__(self, stream: trio.abc.Stream, send_key: bytes, receive_key: bytes) -> None:
        if send_key == receive_key:
            raise LocalProtocolError("both directions of a lane share a key")
        self._stream = stream
        self.sealer = RecordSealer(send_key)
        self.opener = RecordOpener(receive_key)
        self._send_torn = False
        self._receive_torn = False

    async def open(self) -> None:
        """Prove to the other side that this side holds the keys; the first frame of each side."""
        await self.send(OPEN, b"")

    async def wait_open(self) -> None:
        """Wait for the other side's proof; the caller bounds the time.

        Raises:
          RemoteProtocolError: the other side has other keys, or sent no OPEN frame.
        """
        await self.receive(_nowhere)

    async def send(self, header: FrameHeader, payload: Buffer) -> None:
        """Send one frame. ``payload`` must not change until this returns.

        Raises:
          LocalProtocolError: the header does not fit the payload, or the lane is not open yet.
          trio.BrokenResourceError: the connection is gone, or a send was cancelled before.
        """
        records = self.sealer.seal(header, payload)
        if self._send_torn:
            raise trio.BrokenResourceError("an earlier send was cancelled")
        self._send_torn = True
        for record in records:
            await self._stream.send_all(record)
        self._send_torn = False

    async def receive(self, place: Place) -> tuple[FrameHeader, memoryview | bytearray]:
        """Receive one frame.

        Args:
          place: called with the header, *before it is authenticated*. Returns the buffer for the
            payload (a writable view of ``payload_bytes`` bytes), or None to check and drop the
            payload. Neither the header nor the view's bytes may be used before this method returns.

        Returns:
          The header and the view that ``place`` returned; an empty buffer if it returned None.

        Raises:
          RemoteProtocolError: not authentic, out of sequence, or not a frame.
          trio.EndOfChannel: the other side closed, between two frames.
          trio.BrokenResourceError: the connection is gone, perhaps in the middle of a frame, or a
            receive was cancelled before.
        """
        if self._receive_torn:
            raise trio.BrokenResourceError("an earlier receive was cancelled")
        head = bytearray(HEADER_BYTES)
        if not await self._read_into(memoryview(head)):
            raise trio.EndOfChannel
        header = self.opener.header(head)
        target = await place(header)
        for sealed, into in self.opener.records(header, target):
            if not await self._read_into(sealed):
                raise trio.BrokenResourceError("a lane ended in the middle of a frame")
            self.opener.open(sealed, into)
        self._receive_torn = False
        return header, bytearray() if target is None else target

    async def _read_into(self, view: memoryview) -> bool:
        """Fill ``view``; return False if the stream ended before the first byte."""
        done = 0
        while done < len(view):
            data = await self._stream.receive_some(min(len(view) - done, READ_BYTES))
            if not data:
                break
            view[done : done + len(data)] = data
            done += len(data)
            self._receive_torn = True
        if 0 < done < len(view):
            raise trio.BrokenResourceError("a lane ended in the middle of a frame")
        return done > 0


async def _nowhere(_header: FrameHeader) -> None:
    return None

"""Messages over a byte stream: a length of four bytes, then the message.

One task receives; any number of tasks send, one message at a time. Nothing here waits for a reply:
requests and replies are matched by the state machines above. Running a connection's handler and
closing it, which both networks do in the same way, is here too.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar, overload

import trio

from .. import wire
from ..connection_phases import ANY, ConnectionPhase
from ..errors import HoldfastError, LocalProtocolError, RemoteProtocolError
from ..message_quota import Quota
from ..messages import Message

RECEIVE_BYTES = 65_536  # per read of the stream
QUOTA_PAUSE_S_MIN = 0.05  # a peer over its quota waits at least this long, not for each message
CLOSE_S = 1.0  # for a clean close if the other side does not read; then the connection is cut
FINAL_WAIT_S = 2.0  # for the other side to read the last message and hang up

# What the other side can cause in a handler: each ends that connection and nothing else.
CONNECTION_ENDS = (
    HoldfastError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.EndOfChannel,
    trio.TooSlowError,
    OSError,
)

_log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
N = TypeVar("N", bound=Message)
T = TypeVar("T")

_LENGTH = struct.Struct(">I")


async def receive_exactly(stream: trio.abc.ReceiveStream, count: int) -> bytes:
    """Receive a stream's first ``count`` bytes; raises RemoteProtocolError if it ends before."""
    data = b""
    while len(data) < count:
        more = await stream.receive_some(count - len(data))
        if not more:
            raise RemoteProtocolError("the other end hung up within its first bytes")
        data += more
    return data


async def close(stream: trio.abc.Stream) -> None:
    """Close a stream within ``CLOSE_S``, even if the other side does not read or on a cancel."""
    with trio.move_on_after(CLOSE_S):
        await stream.aclose()


async def run_handler(
    handler: Callable[[T], Awaitable[None]], argument: T, stream: trio.abc.Stream, whence: str
) -> None:
    """Run a connection's handler and close its stream.

    Exceptions that the other side can cause end here, also those in a nursery's group. Any other
    exception is a bug in holdfast and propagates.
    """
    try:
        await handler(argument)
    except* LocalProtocolError as group:
        _log.error("a bug in holdfast ended a connection with %s", whence, exc_info=group)
    except* CONNECTION_ENDS as group:
        _log.debug("connection with %s ended: %r", whence, group.exceptions)
    finally:
        await close(stream)


class MessageStream:
    """Messages over a stream, in both directions.

    Attributes:
      sent_bytes: framed bytes handed to the stream since the start.
      received_bytes: bytes read from it.
      phase: the messages that may come; to be set when the connection enters another phase.
      slowed: the other side has exceeded its quota, and had to wait.

    Args:
      quota: the other side's quota; None: no limit.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        phase: ConnectionPhase = ANY,
        quota: Quota | None = None,
    ) -> None:
        self.phase = phase
        self.slowed = False
        self._stream = stream
        self._quota = quota
        self._head_known = False  # of the frame that is being read
        self._send_lock = trio.StrictFIFOLock()
        self._torn = False
        self._buffer = bytearray()
        self.sent_bytes = 0
        self.received_bytes = 0

    async def send(self, message: Message) -> None:
        """Send one message; safe from many tasks.

        A cancelled send leaves half a frame behind, after which the stream cannot be used: later
        sends raise ``trio.BrokenResourceError``, as if the connection had been cut.

        Raises:
          LocalProtocolError: the message cannot be encoded; nothing was sent.
          trio.BrokenResourceError: the connection is gone.
          trio.ClosedResourceError: this side closed it.
        """
        body = wire.encode(message)
        if len(body) > self.phase.frame_bytes_max:
            raise LocalProtocolError(f"a {type(message).__name__} of {len(body)} bytes")
        await trio.lowlevel.checkpoint_if_cancelled()  # before a frame is begun
        try:
            self._send_lock.acquire_nowait()
        except trio.WouldBlock:
            await self._send_lock.acquire()
        try:
            if self._torn:
                raise trio.BrokenResourceError("a send was cancelled in the middle of a frame")
            self._torn = True
            await self._stream.send_all(_LENGTH.pack(len(body)) + body)
            self._torn = False
            self.sent_bytes += _LENGTH.size + len(body)
        finally:
            self._send_lock.release()

    async def receive(self) -> Message:
        """Receive the next message, once the quota allows. Cancellation loses no bytes.

        Raises:
          RemoteProtocolError: not a message, one that may not come in this phase, or an end within
          it. trio.EndOfChannel: the other side closed, between two messages.
          trio.BrokenResourceError, trio.ClosedResourceError: the connection ended.
        """
        return await self._receive(self.phase.types)

    async def _receive(self, types: Collection[type[Message]] | None) -> Message:
        await self._wait_for_quota()
        whole = self._whole(types)
        if whole:
            await trio.lowlevel.checkpoint()
        while not whole:
            await self._read()
            whole = self._whole(types)
        body = bytes(memoryview(self._buffer)[_LENGTH.size : whole])
        del self._buffer[:whole]
        self._head_known = False
        items = whole  # bytes that do not decode count as the most items that they could hold
        try:
            message, items = wire.decode_counted(body, types)
        finally:
            if self._quota is not None:
                self._quota.spend(items, whole, trio.current_time())
        return message

    async def _wait_for_quota(self) -> None:
        """Wait while the other side is over its quota; TCP then stops its sending."""
        while self._quota is not None and (wait_s := self._quota.wait_s(trio.current_time())):
            self.slowed = True
            await trio.sleep(max(wait_s, QUOTA_PAUSE_S_MIN))

    @overload
    async def receive_expected(self, first: type[M], /) -> M: ...
    @overload
    async def receive_expected(self, first: type[M], second: type[N], /) -> M | N: ...
    @overload
    async def receive_expected(self, *types: type[Message]) -> Message: ...

    async def receive_expected(self, *types: type[Message]) -> Message:
        """Receive the next message, which must be of one of these types.

        Raises:
          RemoteProtocolError: it is of another type; and whatever ``receive`` raises.
        """
        return await self._receive(types)

    async def send_final(self, message: Message) -> None:
        """Send a last message (``Refused``), wait until it is read (``FINAL_WAIT_S``), and close.

        Closing at once, with unread bytes of the other side, would make TCP reset the connection
        and drop the message. The other side cannot make this raise an error.
        """
        try:
            with trio.move_on_after(FINAL_WAIT_S):
                await self.send(message)
                while await self._stream.receive_some(RECEIVE_BYTES):
                    pass
        except CONNECTION_ENDS as error:
            _log.debug("a last message may not have been read: %r", error)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close the stream; the other side sees its end."""
        await close(self._stream)

    def _whole(self, types: Collection[type[Message]] | None) -> int:
        """Return the end of the first frame, or 0 if it is not complete yet.

        Raises:
          RemoteProtocolError: by its first bytes, the frame is of another type or over-long.
        """
        if len(self._buffer) < _LENGTH.size:
            return 0
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self.phase.frame_bytes_max:
            raise RemoteProtocolError(f"a frame of {length} bytes is over-long")
        end: int = _LENGTH.size + length
        if len(self._buffer) >= end:
            return end
        if not self._head_known and len(self._buffer) >= _LENGTH.size + wire.HEAD_BYTES_MAX:
            head = bytes(memoryview(self._buffer)[_LENGTH.size :][: wire.HEAD_BYTES_MAX])
            wire.check_head(head, length, types)
            self._head_known = True
        return 0

    async def _read(self) -> None:
        data = await self._stream.receive_some(RECEIVE_BYTES)
        if not data:
            if self._buffer:
                raise RemoteProtocolError("the stream ended in the middle of a frame")
            raise trio.EndOfChannel
        self._buffer += data
        self.received_bytes += len(data)

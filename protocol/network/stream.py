"""Whole messages over a byte stream: a length of four bytes, then the message.

One task receives; any number of tasks send, one message at a time. Nobody here waits for a reply:
who answers what is the business of the state machines above. What both networks do with a
connection, whatever its kind, is here too: run its handler, close it.
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

RECEIVE_BYTES = 65_536  # asked of the stream at once
QUOTA_PAUSE_S_MIN = 0.05  # who is over its quota is not looked at again for every message
CLOSE_S = 1.0  # for the goodbye of a stream whose other side does not read; then it is cut
FINAL_WAIT_S = 2.0  # for the other side to read our last message and hang up

# What the other side can do to a handler: all of it ends that connection and nothing else.
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


async def close(stream: trio.abc.Stream) -> None:
    """Close a stream without waiting long for who does not read; closed even when cancelled."""
    with trio.move_on_after(CLOSE_S):
        await stream.aclose()


async def run_handler(
    handler: Callable[[T], Awaitable[None]], argument: T, stream: trio.abc.Stream, whence: str
) -> None:
    """Run a connection's handler and close its stream.

    What the other side can cause ends here, also out of a nursery's group; anything else is a bug
    of ours and propagates.
    """
    try:
        await handler(argument)
    except* LocalProtocolError as group:
        _log.error("a bug of ours ended a connection with %s", whence, exc_info=group)
    except* CONNECTION_ENDS as group:
        _log.debug("connection with %s ended: %r", whence, group.exceptions)
    finally:
        await close(stream)


class MessageStream:
    """Messages over a stream, in both directions.

    Attributes:
      sent_bytes: framed bytes handed to the stream since the start.
      received_bytes: bytes read from it.
      phase: what may come; to be set when the connection gets further.
      slowed: the other side has said more than its quota, and had to wait.

    Args:
      quota: what the other side may say; None: whatever it likes.
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
          LocalProtocolError: the message cannot travel; nothing was sent.
          trio.BrokenResourceError: the connection is gone.
          trio.ClosedResourceError: this side closed it.
        """
        body = wire.encode(message)
        if len(body) > self.phase.frame_bytes_max:
            raise LocalProtocolError(f"a {type(message).__name__} of {len(body)} bytes")
        await trio.lowlevel.checkpoint_if_cancelled()  # before anything is torn
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
        """The next message, once its quota allows. Cancellation loses nothing: what was read stays for
        the next call.

        Raises:
          RemoteProtocolError: junk, what may not come in this phase, or an end in the middle.
          trio.EndOfChannel: the other side closed, between two messages.
          trio.BrokenResourceError: the connection is gone.
          trio.ClosedResourceError: this side closed it.
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
        items = whole  # of a message that is none, as many as there could be
        try:
            message, items = wire.decode_counted(body, types)
        finally:
            if self._quota is not None:
                self._quota.spend(items, whole, trio.current_time())
        return message

    async def _wait_for_quota(self) -> None:
        """Take nothing from who has said too much; its own sending comes to a stop then."""
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
        """The next message, which must be of one of these types.

        Raises:
          RemoteProtocolError: it is another one; and whatever ``receive`` raises.
        """
        return await self._receive(types)

    async def send_final(self, message: Message) -> None:
        """Send a last message (``Refused``), wait a little until it is read, close.

        Closing at once, with unread bytes of theirs, would make TCP reset the connection and throw
        our message away. Never raises because of the other side.
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
        """Where the first frame ends, if all of it is here; else 0.

        Raises RemoteProtocolError: nothing of these types is so long; what it is stands at its beginning.
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

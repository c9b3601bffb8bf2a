"""Whole messages over a byte stream: a length of four bytes, then the message.

One task receives; any number of tasks send, one message at a time. Nobody here waits for a reply:
who answers what is the business of the state machines above. What both networks do with a
connection, whatever its kind, is here too: run its handler, close it.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

import trio

from . import wire
from .errors import HoldfastError, LocalProtocolError, RemoteProtocolError
from .messages import Message
from .quota import Quota

RECEIVE_BYTES = 65_536  # asked of the stream at once
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

    Args:
      frame_bytes_max: refuse longer frames before reading them; small for strangers.
      quota: what the other side may say; None: whatever it likes.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        frame_bytes_max: int = wire.FRAME_BYTES_MAX,
        quota: Quota | None = None,
    ) -> None:
        self._stream = stream
        self._quota = quota
        self._frame_bytes_max = frame_bytes_max
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
        if len(body) > self._frame_bytes_max:
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
        """The next message. Cancellation loses nothing: what was read stays for the next call.

        Raises:
          RemoteProtocolError: junk, an over-long frame, more than its quota, or an end in the middle.
          trio.EndOfChannel: the other side closed, between two messages.
          trio.BrokenResourceError: the connection is gone.
          trio.ClosedResourceError: this side closed it.
        """
        whole = self._whole()
        if whole:
            await trio.lowlevel.checkpoint()
        while not whole:
            await self._read()
            whole = self._whole()
        body = bytes(memoryview(self._buffer)[_LENGTH.size : whole])
        del self._buffer[:whole]
        if self._quota is not None and (why := self._quota.take(whole, trio.current_time())):
            raise RemoteProtocolError(f"over its quota: {why}")
        return wire.decode(body)

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
        message = await self.receive()
        if not isinstance(message, types):
            wanted = " or ".join(cls.__name__ for cls in types)
            raise RemoteProtocolError(f"{type(message).__name__} instead of {wanted}")
        return message

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

    def _whole(self) -> int:
        """Where the first frame ends, if all of it is here; else 0."""
        if len(self._buffer) < _LENGTH.size:
            return 0
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._frame_bytes_max:
            raise RemoteProtocolError(f"a frame of {length} bytes is over-long")
        end: int = _LENGTH.size + length
        return end if len(self._buffer) >= end else 0

    async def _read(self) -> None:
        data = await self._stream.receive_some(RECEIVE_BYTES)
        if not data:
            if self._buffer:
                raise RemoteProtocolError("the stream ended in the middle of a frame")
            raise trio.EndOfChannel
        self._buffer += data
        self.received_bytes += len(data)

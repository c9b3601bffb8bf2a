"""Messages over the Unix socket to the daemon: blocking calls, no threads, no event loop.

A frame is a length of four bytes and the message, as on the control streams. File descriptors may
come with any bytes; they are kept until the caller takes them.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from contextlib import suppress

from ..protocol import wire
from ..protocol.errors import RemoteProtocolError
from ..protocol.message_limits import FRAME_BYTES_MAX
from ..protocol.messages import Message
from .attach_errors import DaemonGone, NoDaemonError

RECEIVE_BYTES = 65_536  # per read of the socket; nearly all messages are below 100 bytes
LAST_S = 1.0  # for sending the last message
PAUSE_S = 0.005  # between two checks of memory that the daemon writes
DESCRIPTORS_MAX = 8  # held at once; the daemon sends two, once

_LENGTH = struct.Struct(">I")
_DESCRIPTOR = struct.Struct("i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * _DESCRIPTOR.size)
_HANG_UP = getattr(select, "POLLRDHUP", 0)  # Linux; elsewhere POLLHUP, which is always reported
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # Linux; elsewhere children inherit them


class DaemonConnection:
    """One stream of messages to and from the daemon.

    Attributes:
      received_count: messages received so far; the daemon counts the messages sent in its arena.
    """

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._descriptors: list[int] = []
        self.received_count = 0

    @classmethod
    def open(cls, path: str) -> DaemonConnection:
        """Connect to the daemon that listens at ``path``; raises NoDaemonError if none does."""
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.connect(path)
        except OSError as error:
            stream.close()
            raise NoDaemonError(
                f"no holdfast daemon answers at {path} ({error.strerror or error})",
                hint="start the script with `holdfast join INVITE -- python train.py`",
            ) from None
        return cls(stream)

    def send(self, message: Message) -> None:
        """Send one message, and wait while the socket is full; any thread; raises DaemonGone."""
        body = wire.encode(message)
        try:
            with self._sending:
                self._stream.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise _gone(error) from None

    def send_last(self, message: Message) -> None:
        """Send the last message of all if the daemon still reads; raises nothing."""
        with suppress(OSError):  # also if the socket is closed
            self._stream.settimeout(LAST_S)
            body = wire.encode(message)
            self._stream.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Message:
        """Wait for the next message, without a limit. Signals (Ctrl+C) interrupt the wait.

        Raises:
          DaemonGone: the daemon closed the socket; everything sent before was delivered.
          RemoteProtocolError: not a message.
        """
        while True:
            message = self._next_message()
            if message is not None:
                return message
            self._fill(0)

    def receive_nowait(self) -> Message | None:
        """Return the next message, or None if none has arrived; raises what ``receive`` does."""
        while True:
            message = self._next_message()
            if message is not None:
                return message
            try:
                self._fill(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None

    def pause(self) -> None:
        """Wait a moment for the daemon to write to shared memory.

        Raises:
          DaemonGone: the daemon closed the socket or died, even if unread messages remain.
        """
        self.check(PAUSE_S)

    def check(self, wait_s: float = 0.0) -> None:
        """Raise DaemonGone if the daemon ends in this time, even if unread messages remain."""
        poll = select.poll()
        poll.register(self._stream, _HANG_UP)
        if poll.poll(wait_s * 1_000):
            raise _gone(None)

    def take_descriptors(self) -> list[int]:
        """Return the file descriptors that came so far; the caller closes them."""
        taken, self._descriptors = self._descriptors, []
        return taken

    def close(self) -> None:
        """End the connection, also for processes forked from this one. Harmless twice."""
        with suppress(OSError):  # the daemon has closed it, or it was closed before
            self._stream.shutdown(socket.SHUT_RDWR)  # workers of a DataLoader have copies of it
        self._stream.close()
        for descriptor in self.take_descriptors():
            os.close(descriptor)

    def _next_message(self) -> Message | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > FRAME_BYTES_MAX:
            raise RemoteProtocolError(f"a frame of {length} bytes is over-long")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[_LENGTH.size : end])
        del self._buffer[:end]
        self.received_count += 1
        return wire.decode(body)

    def _fill(self, flags: int) -> None:
        try:
            # Not socket.recv_fds, which ignores its flags (in Python 3.11, and perhaps later).
            data, ancillary, _, _ = self._stream.recvmsg(
                RECEIVE_BYTES, _ANCILLARY_BYTES, flags | _CLOSE_ON_EXEC
            )
        except BlockingIOError:
            raise
        except OSError as error:
            raise _gone(error) from None
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(rights) - len(rights) % _DESCRIPTOR.size
                self._descriptors += [each for (each,) in _DESCRIPTOR.iter_unpack(rights[:whole])]
        if len(self._descriptors) > DESCRIPTORS_MAX:
            raise RemoteProtocolError(f"the daemon sent over {DESCRIPTORS_MAX} file descriptors")
        if not data:
            raise _gone(None)
        self._buffer += data


def _gone(error: OSError | None) -> DaemonGone:
    how = "closed the connection" if error is None else f"is gone ({error.strerror or error})"
    return DaemonGone(
        f"the holdfast daemon {how}; this trainer is no longer part of the run. "
        "See the daemon's log for the reason."
    )

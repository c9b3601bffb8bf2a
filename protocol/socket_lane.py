"""A lane over a real socket, worked by threads with blocking calls.

A chunk goes through the event loop of a process at about half the rate at which a blocking call
takes it, and one loop does one thing at a time. So the two directions of an open lane are handed to
two threads; what they wait for is in the kernel, and the interpreter's lock is free meanwhile (also
while they encrypt). Each direction's methods are for one thread at a time; ``close``, from any
thread, ends whatever they wait for.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Callable

import trio

from .errors import RemoteProtocolError
from .lane import HEADER_BYTES, Buffer, FrameHeader, Lane, frame_bytes

SHARE_BYTES_MIN = 1_024  # what is sent at once under a cap that asks for less

Pace = Callable[[int], float]


class SocketLane:
    """Both directions of a lane that is open. It owns a duplicate of the stream's descriptor.

    From here on the socket blocks: nobody may send or receive on ``stream`` any more, only wait for
    it to be readable, and close it.

    Args:
      sender: what has sent on this lane so far; its counts go on.
      receiver: the same for receiving.
      stall_s: the connection is broken if it takes no byte for so long.
      pace: told how many bytes are sent next, says how many seconds to wait first; None: no cap.
      share_bytes: how much to ask ``pace`` for at once.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        sender: Lane,
        receiver: Lane,
        *,
        stall_s: float,
        pace: Pace | None = None,
        share_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._sender = sender
        self._receiver = receiver
        self._stall_s = stall_s
        self._pace = pace
        self._share_bytes = share_bytes
        self._closing = threading.Event()
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._socket = socket.socket(fileno=os.dup(stream.socket.fileno()))
        self._socket.setblocking(True)
        # A timeout of Python's would make the socket non-blocking again, and every piece many calls.
        limit = struct.pack("@ll", int(stall_s), int(stall_s % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)

    # ------------------------------------------------------------ sending

    def send(self, header: FrameHeader, payload: Buffer) -> None:
        """Send one frame; blocks.

        Raises:
          trio.BrokenResourceError: the connection is gone, or stalled.
          trio.ClosedResourceError: ``close`` was called.
        """
        for record in self._sender.sealer.seal(header, payload):
            if self._pace is None:
                self._send_all(record)
            else:
                self._send_paced(record, self._pace)
        self._sender.sent_bytes += frame_bytes(header.payload_bytes)

    def _send_paced(self, record: memoryview, pace: Pace) -> None:
        done = 0
        while done < len(record):
            share_bytes = SHARE_BYTES_MIN if self._share_bytes is None else self._share_bytes()
            piece = record[done : done + share_bytes]
            wait_s = pace(len(piece))
            if wait_s > 0:
                self._closing.wait(wait_s)
            self._send_all(piece)
            done += len(piece)

    def _send_all(self, data: memoryview) -> None:
        done = 0
        try:
            while done < len(data):
                self._check_open()
                done += self._socket.send(data[done:])
        except BlockingIOError:
            raise trio.BrokenResourceError(
                f"nothing could be sent for {self._stall_s:g} s"
            ) from None
        except OSError as error:
            self._check_open()
            raise trio.BrokenResourceError(str(error)) from error

    # ------------------------------------------------------------ receiving

    def receive_header(self, wait_s: float) -> FrameHeader | None:
        """The next frame's header, not authentic yet; None if nothing comes within ``wait_s``.

        Raises:
          RemoteProtocolError: junk.
          trio.EndOfChannel: the other side closed, between two frames.
          trio.BrokenResourceError: the connection is gone.
          trio.ClosedResourceError: ``close`` was called.
        """
        if not self._readable.poll(1_000 * wait_s):
            self._check_open()
            return None
        if not self._receive_into(self._head):
            self._check_open()
            raise trio.EndOfChannel
        return self._receiver.opener.header(self._head)

    def receive_payload(self, header: FrameHeader, target: memoryview | None) -> None:
        """The payload of the frame whose header came last; authentic when this returns.

        Args:
          target: where it goes, of exactly its size; None: it is checked and dropped.

        Raises: as ``receive_header``; RemoteProtocolError also for what is not authentic.
        """
        opener = self._receiver.opener
        for sealed, into in opener.records(header, target):
            if not self._receive_into(sealed):
                self._check_open()
                raise RemoteProtocolError("a lane ended in the middle of a record")
            opener.open(sealed, into)
        self._receiver.received_bytes += frame_bytes(header.payload_bytes)

    def _receive_into(self, view: memoryview) -> bool:
        """Fill ``view``; False if the stream ended before its first byte."""
        done = 0
        try:
            while done < len(view):
                count = self._socket.recv_into(view[done:], 0, socket.MSG_WAITALL)
                if not count:
                    break
                done += count
        except OSError as error:
            self._check_open()
            raise trio.BrokenResourceError(str(error)) from error
        if 0 < done < len(view):
            self._check_open()
            raise RemoteProtocolError("a lane ended in the middle of a record")
        return done > 0

    # ------------------------------------------------------------ ending

    def close(self) -> None:
        """Wake both threads; what they do raises ``trio.ClosedResourceError`` from now on."""
        self._closing.set()
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Give the descriptor back, once no thread uses it any more."""
        self.close()
        self._socket.close()

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise trio.ClosedResourceError("this side closed the lane")

"""A lane over a real socket, driven by threads with blocking calls.

The event loop moves a chunk at about half the rate of a blocking call, and does one thing at a
time. So the two directions of an open lane are handed to two threads. They wait in the kernel, and
the interpreter's lock is free meanwhile (also while they encrypt). Each direction's methods are for
one thread at a time; ``close``, from another one, ends their waiting.

A wait costs what the kernel takes to put a thread to sleep and to wake it: some 20 us, and cold
caches. So pieces are as large as the pace allows, and a receiver wakes for many packets.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable

import trio
from attrs import Factory, frozen

from .lane import HEADER_BYTES, Buffer, FrameHeader, Lane
from .socket_options import PathNow, path_now, shortest_round_trip_s

# A call that blocks this long returns with the bytes done so far, so that the byte counts show that
# the lane moves, however slowly.
LOOK_UP_S = 1.0

# Limit on the unsent bytes in the kernel's buffer. By default it takes megabytes: seconds on a slow
# line, for which a round would wait behind a copy of the state. Over a short path more bytes save
# wake-ups.
UNSENT_BYTES, SHORT_PATH_UNSENT_BYTES = 64 * 1024, 256 * 1024
SHORT_PATH_S = 0.002  # of a round trip

# For how many bytes a thread that receives wakes up, while at least as many are due; by default it
# does for each packet, which took half of its time. More hold up a window that is still to grow.
WAKE_BYTES = 16 * 1024


@frozen
class LanePace:
    """A bandwidth cap, as threads use it.

    Attributes:
      wait_s: takes the bytes that pass, and returns the seconds to wait.
      share_bytes: returns the bytes to pass at once; 0: nothing is limited now.
      turn: is held while bytes wait to pass; it limits how many lanes do at a time.
    """

    wait_s: Callable[[int], float]
    share_bytes: Callable[[], int]
    turn: contextlib.AbstractContextManager[object] = Factory(contextlib.nullcontext)


class SocketLane:
    """Both directions of an open lane. It owns a duplicate of the stream's descriptor.

    The socket blocks from here on: the stream's owner must not send or receive on it any more, only
    wait for it to be readable, and close it.

    Args:
      lane: the lane whose frames have passed over the stream so far; its records are counted on.
      upload, download: bandwidth caps; None: no cap.

    Attributes:
      sent_bytes: bytes given to the kernel so far, parts of frames included.
      received_bytes: bytes taken from it, likewise.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        lane: Lane,
        *,
        upload: LanePace | None = None,
        download: LanePace | None = None,
    ) -> None:
        self._sealer, self._opener = lane.sealer, lane.opener
        self._upload = upload
        self._download = download
        self.sent_bytes = 0
        self.received_bytes = 0
        self._closed = False
        self._open = threading.Lock()  # held until it is closed: who waits for it sleeps
        self._open.acquire()
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._socket = socket.socket(fileno=os.dup(stream.socket.fileno()))
        self._socket.setblocking(True)
        # Python's own timeout would make the socket non-blocking, and take many calls a piece.
        limit = struct.pack("@ll", int(LOOK_UP_S), int(LOOK_UP_S % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux, macOS
            short = shortest_round_trip_s(self._socket) < SHORT_PATH_S
            unsent_bytes = SHORT_PATH_UNSENT_BYTES if short else UNSENT_BYTES
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes)
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)

    # ------------------------------------------------------------ sending

    def send(
        self,
        header: FrameHeader,
        payload: Buffer,
        wait_turn: Callable[[int], None] | None = None,
        piece_bytes: int = sys.maxsize,
    ) -> None:
        """Send one frame; blocks until the kernel took it or another thread calls ``close``.

        Args:
          wait_turn: called before each piece, with its length; None: nothing is.
          piece_bytes: of a piece at most.

        Raises:
          trio.BrokenResourceError: the connection is gone.
          trio.ClosedResourceError: ``close`` was called.
        """
        for record in self._sealer.seal(header, payload):
            upload = self._upload
            share_bytes = 0 if upload is None else upload.share_bytes()
            part_bytes = min(share_bytes or len(record), piece_bytes)
            for start in range(0, len(record), part_bytes):
                piece = record[start : start + part_bytes]
                if wait_turn is not None:
                    wait_turn(len(piece))
                if upload is not None and share_bytes:
                    with upload.turn:
                        self.pause(upload.wait_s(len(piece)))
                self._send_all(piece)

    def pause(self, seconds: float) -> None:
        """Wait in a thread between two pieces of a frame.

        Raises:
          trio.ClosedResourceError: ``close`` was called.
        """
        if self._open.acquire(timeout=max(0.0, seconds)):
            self._open.release()
        self._check_open()

    def _send_all(self, data: memoryview) -> None:
        done = 0
        while done < len(data):
            self._check_open()
            try:
                count = self._socket.send(data[done:])
            except BlockingIOError:
                continue
            except OSError as error:
                self._check_open()
                raise trio.BrokenResourceError(str(error)) from error
            done += count
            self.sent_bytes += count

    def send_eof(self) -> None:
        """End the sending direction; receiving goes on."""
        with contextlib.suppress(OSError):  # the connection is gone
            self._socket.shutdown(socket.SHUT_WR)

    # ------------------------------------------------------------ receiving

    def receive_header(self, wait_s: float) -> FrameHeader | None:
        """Read the next frame's header, which is not authentic yet.

        Returns:
          The header, or None if nothing came within ``wait_s``.

        Raises:
          RemoteProtocolError: not a header.
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
        return self._opener.header(self._head)

    def receive_payload(self, header: FrameHeader, target: memoryview | None) -> None:
        """Read the payload of the last header's frame; both are authentic when this returns.

        Args:
          target: buffer for the payload, of exactly its size; None: it is checked and dropped.

        Raises: as ``receive_header``; RemoteProtocolError also for a record that is not authentic.
        """
        for sealed, into in self._opener.records(header, target):
            if not self._receive_into(sealed):
                self._check_open()
                raise trio.BrokenResourceError("a lane ended in the middle of a frame")
            self._opener.open(sealed, into)

    def _receive_into(self, view: memoryview) -> bool:
        """Fill ``view``; return False if the stream ended before the first byte."""
        if self._download is not None or len(view) <= 2 * WAKE_BYTES:
            return self._receive_all(view)
        self._wake_at(WAKE_BYTES)
        try:
            if not self._receive_all(view[:-WAKE_BYTES]):
                return False
            self._readable.poll(1_000 * LOOK_UP_S)
        finally:
            self._wake_at(1)
        return self._receive_all(view[-WAKE_BYTES:])

    def _wake_at(self, count: int) -> None:
        """Have the kernel wake the thread for so many bytes, no longer for each packet."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _receive_all(self, view: memoryview) -> bool:
        download = self._download
        share_bytes = len(view) if download is None else download.share_bytes()
        done = 0
        while done < len(view):
            self._check_open()
            piece = view[done : done + share_bytes]
            try:
                count = self._socket.recv_into(piece, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                continue
            except OSError as error:
                self._check_open()
                raise trio.BrokenResourceError(str(error)) from error
            if not count:
                break
            done += count
            self.received_bytes += count
            if download is not None:
                self.pause(download.wait_s(count))
        if 0 < done < len(view):
            self._check_open()
            raise trio.BrokenResourceError("a lane ended in the middle of a frame")
        return done > 0

    # ------------------------------------------------------------ its path

    def path(self) -> PathNow | None:
        """Return what the kernel says of the path now; from any thread."""
        return None if self._closed else path_now(self._socket)

    # ------------------------------------------------------------ ending

    def close(self) -> None:
        """Wake both threads; their calls raise ``trio.ClosedResourceError`` from now on."""
        if not self._closed:
            self._closed = True
            self._open.release()
        with contextlib.suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the descriptor; no thread may use it any more."""
        self.close()
        self._socket.close()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this side closed the lane")

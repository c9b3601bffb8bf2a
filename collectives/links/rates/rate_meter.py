"""Meters: the rate of a line while it is busy, seen from this node.

A meter counts bytes, and the time in which at least one transfer is under way: transfers that
overlap count once. A link's meter passes everything on to its node's. All time is trio's; threads,
which cannot ask for it, pass it in. Thread-safe.

What a lane's thread has sent is under way until the other side acknowledges it. The kernel takes
megabytes at once: measured by that, a line on which a round of some megabytes goes out would be as
fast as memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import trio
from attrs import frozen

from ....protocol.network.lane import HEADER_BYTES, PIECE_BYTES, TAG_BYTES, Buffer


@frozen
class Reading:
    """Bytes that were carried, and the seconds in which a transfer was under way."""

    carried_bytes: int
    busy_s: float


@frozen
class Measurements:
    """The readings of a node's links since they were last taken.

    Attributes:
      sent: by the whole node.
      received: by the whole node; a transfer begins with its header, so no wait for it counts.
      sent_to: by member, for members to which anything was sent.
      best_bytes_per_s: at which the whole node has sent in its best second; 0.0: it has not sent
        for so long, or the kernel does not tell.
    """

    sent: Reading
    received: Reading
    sent_to: Mapping[str, Reading]
    best_bytes_per_s: float = 0.0


class Meter:
    """One direction of a link or of a node.

    Args:
      whole: the node's meter, for the meter of a link.
    """

    def __init__(self, whole: Meter | None = None) -> None:
        self._whole = whole
        self._lock = threading.Lock()
        self._under_way_count = 0
        self._since_s = 0.0  # until when busy time is counted, while a transfer is under way
        self._carried_bytes = 0
        self._busy_s = 0.0

    def begin(self, now_s: float | None = None) -> None:
        """Begin a transfer; ``end`` must follow even if it fails."""
        now_s = trio.current_time() if now_s is None else now_s
        with self._lock:
            self._count_time(now_s)
            self._under_way_count += 1
        if self._whole is not None:
            self._whole.begin(now_s)

    def end(self, carried_bytes: int, now_s: float | None = None, count: int = 1) -> None:
        """End a transfer, or ``count`` of them, that carried a number of bytes (together)."""
        now_s = trio.current_time() if now_s is None else now_s
        with self._lock:
            self._count_time(now_s)
            self._under_way_count -= count
            self._carried_bytes += carried_bytes
        if self._whole is not None:
            self._whole.end(carried_bytes, now_s, count)

    def take(self) -> Reading:
        """Return what was counted since the last call. A transfer's bytes count at its end."""
        with self._lock:
            self._count_time(trio.current_time())
            reading = Reading(self._carried_bytes, self._busy_s)
            self._carried_bytes, self._busy_s = 0, 0.0
        return reading

    def _count_time(self, now_s: float) -> None:
        if self._under_way_count:
            self._busy_s += max(0.0, now_s - self._since_s)
        self._since_s = now_s


# ---------------------------------------------------------------- a measured stream


# Bytes given to a stream at once. They must move within the stall time, or the stream looks stuck.
SLICE_BYTES = HEADER_BYTES + PIECE_BYTES + TAG_BYTES


class MeteredStream(trio.abc.Stream):
    """A stream that sends in slices, and counts.

    For streams that tasks use: control streams, and lanes in memory. ``socket_lane`` does the same
    for lanes in threads, and keeps caps, too.

    Attributes:
      sent_bytes: bytes that the transport took so far.
      received_bytes: bytes that came out of it.

    Args:
      meter: counts what is sent, and the time that the transport takes for it.
    """

    def __init__(self, stream: trio.abc.Stream, meter: Meter | None = None) -> None:
        self._stream = stream
        self._meter = meter if meter is not None else Meter()
        self.sent_bytes = 0
        self.received_bytes = 0

    async def send_all(self, data: Buffer) -> None:
        view = memoryview(data)
        for start in range(0, len(view), SLICE_BYTES):
            piece = view[start : start + SLICE_BYTES]
            carried_bytes = 0
            self._meter.begin()
            try:
                await self._stream.send_all(piece)
                carried_bytes = len(piece)
            finally:
                self._meter.end(carried_bytes)
            self.sent_bytes += len(piece)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        data = await self._stream.receive_some(max_bytes)
        self.received_bytes += len(data)
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()

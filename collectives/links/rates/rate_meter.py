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

"""How much a line carries while it is busy, seen from this node.

A meter counts bytes, and the time in which at least one transfer is under way: transfers that
overlap count once. A link's meter passes everything on to its node's. All time is trio's; threads,
which cannot ask for it, tell it themselves. Thread-safe.

What a lane's thread has sent is under way until the other side says that it came. The system takes
megabytes at once: by its word, a line on which a round of some megabytes goes out would be as fast
as memory.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import trio
from attrs import frozen


@frozen
class Reading:
    """Bytes that were carried, and the seconds in which there was something to carry."""

    carried_bytes: int
    busy_s: float


@frozen
class Measurements:
    """What a node's links did since the last time somebody asked.

    Attributes:
      sent: by the whole node.
      received: by the whole node; a transfer begins with its header, so waiting for one is free.
      sent_to: by member, where anything was sent.
    """

    sent: Reading
    received: Reading
    sent_to: Mapping[str, Reading]


class Meter:
    """One direction of a link or of a node.

    Args:
      whole: the meter of the node that this link's transfers are a part of.
    """

    def __init__(self, whole: Meter | None = None) -> None:
        self._whole = whole
        self._lock = threading.Lock()
        self._under_way_count = 0
        self._since_s = 0.0  # until when busy time is counted, while a transfer is under way
        self._carried_bytes = 0
        self._busy_s = 0.0

    def begin(self, now_s: float | None = None) -> None:
        """A transfer begins; ``end`` must follow, whatever comes of it."""
        now_s = trio.current_time() if now_s is None else now_s
        with self._lock:
            self._count_time(now_s)
            self._under_way_count += 1
        if self._whole is not None:
            self._whole.begin(now_s)

    def end(self, carried_bytes: int, now_s: float | None = None) -> None:
        """A transfer ends, having carried so much."""
        now_s = trio.current_time() if now_s is None else now_s
        with self._lock:
            self._count_time(now_s)
            self._under_way_count -= 1
            self._carried_bytes += carried_bytes
        if self._whole is not None:
            self._whole.end(carried_bytes, now_s)

    def take(self) -> Reading:
        """What was counted since the last call. Transfers under way give their bytes at their end."""
        with self._lock:
            self._count_time(trio.current_time())
            reading = Reading(self._carried_bytes, self._busy_s)
            self._carried_bytes, self._busy_s = 0, 0.0
        return reading

    def _count_time(self, now_s: float) -> None:
        if self._under_way_count:
            self._busy_s += max(0.0, now_s - self._since_s)
        self._since_s = now_s

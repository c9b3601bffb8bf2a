"""How much a line carries while it is busy, seen from this node.

A meter counts bytes, and the time in which at least one transfer is under way: transfers that
overlap count once. A link's meter passes everything on to its node's. All time is trio's.
"""

from __future__ import annotations

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
        self._under_way_count = 0
        self._since_s = 0.0  # until when busy time is counted, while a transfer is under way
        self._carried_bytes = 0
        self._busy_s = 0.0

    def begin(self) -> None:
        """A transfer begins; ``end`` must follow, whatever comes of it."""
        if self._under_way_count == 0:
            self._since_s = trio.current_time()
        self._under_way_count += 1
        if self._whole is not None:
            self._whole.begin()

    def end(self, carried_bytes: int) -> None:
        """A transfer ends, having carried so much."""
        self._count_time()
        self._under_way_count -= 1
        self._carried_bytes += carried_bytes
        if self._whole is not None:
            self._whole.end(carried_bytes)

    def take(self) -> Reading:
        """What was counted since the last call. Transfers under way give their bytes at their end."""
        self._count_time()
        reading = Reading(self._carried_bytes, self._busy_s)
        self._carried_bytes, self._busy_s = 0, 0.0
        return reading

    def _count_time(self) -> None:
        if self._under_way_count:
            now_s = trio.current_time()
            self._busy_s += now_s - self._since_s
            self._since_s = now_s

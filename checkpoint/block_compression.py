"""Block compression: a donor decides for each block whether compressing it pays.

Compression costs a core's time at both ends and saves time on the line. So it pays if the line is slow and
the bytes compress well:

    LineRate          per link: the measured rate of blocks
    CompressionGain   per fragment: the gain of its last blocks; after a small one, blocks are sent plain
                      for a while

Until a line is known to be slow, its blocks are sent plain.
"""

from __future__ import annotations

import math
import threading
from collections import deque

from ..collectives.links.rate_meter import Meter

# 400 Mbit/s. A block of 1 MiB takes 21 ms there; compression saves 3 of them, for 1.6 ms of two cores. A
# faster line would gain on paper, but trainers need their cores more than a copy needs its seconds.
PAYS_BELOW_BYTES_PER_S = 50e6
# A line's rate is measured over this many bytes or seconds: the first bytes only fill queues.
MEASURED_BYTES = 8 * 2**20
MEASURED_S = 1.0
SAVING_MIN = 0.05  # share of the bytes; trained float32 gives 0.16, random bytes nothing
RECENT_BLOCKS = 4  # of a fragment, from which the gain is estimated
REST_BLOCKS = 64  # sent plain after a small gain; then compression is tried again


class LineRate:
    """The rate of one link while it sends blocks. Used on the event loop.

    Attributes:
      bytes_per_s: the recent rate, as on the line; infinite while unknown.
    """

    def __init__(self) -> None:
        self.bytes_per_s = math.inf
        self._meter = Meter()
        self._carried_bytes = 0
        self._busy_s = 0.0

    @property
    def slow(self) -> bool:
        """Return whether the line is so slow that compression pays; callable from any thread."""
        return self.bytes_per_s < PAYS_BELOW_BYTES_PER_S

    def begin(self) -> None:
        """Note that blocks wait to be sent; ``end`` must follow. Calls may overlap."""
        self._meter.begin()

    def end(self, carried_bytes: int) -> None:
        """Note that the blocks were sent, as this many bytes, or that the link is lost."""
        self._meter.end(carried_bytes)
        reading = self._meter.take()
        self._carried_bytes += reading.carried_bytes
        self._busy_s += reading.busy_s
        if self._carried_bytes >= MEASURED_BYTES or self._busy_s >= MEASURED_S:
            self.bytes_per_s = self._carried_bytes / self._busy_s if self._busy_s else math.inf
            self._carried_bytes, self._busy_s = 0, 0.0


class CompressionGain:
    """The recent gain from compressing a fragment's blocks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_BLOCKS)  # (plain, compressed)
        self._rest_blocks = 0

    def worth_trying(self) -> bool:
        """Return whether to try to compress the next block; call it once for each block."""
        with self._lock:
            if not self._rest_blocks:
                return True
            self._rest_blocks -= 1
            return False

    def note(self, plain_bytes: int, compressed_bytes: int) -> None:
        """Take note of a block's size before and after compression."""
        with self._lock:
            self._recent.append((plain_bytes, compressed_bytes))
            plain, compressed = (sum(each) for each in zip(*self._recent, strict=True))
            if len(self._recent) == RECENT_BLOCKS and compressed > (1 - SAVING_MIN) * plain:
                self._rest_blocks = REST_BLOCKS
                self._recent.clear()

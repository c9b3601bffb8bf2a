"""Whether a block is worth compressing on its way: a donor decides, block by block.

Compressing takes a core's time at both ends, and saves the line's. So it pays where the line is slow,
and as far as the bytes give way:

    LineRate   of a link: what blocks were seen to go at, over it
    Savings    of a fragment: what its blocks gave last; if that was little, they are let be for a while

Until a line is known to be slow its blocks travel as they are.
"""

from __future__ import annotations

import math
import threading
from collections import deque

from ..collectives.links.rate_meter import Meter

# 400 Mbit/s. A block of 1 MiB takes 21 ms there; compressed, it saves 3 of them, for 1.6 ms of two
# cores. A faster line would gain on paper, but trainers want their cores more than a copy its seconds.
PAYS_BELOW_BYTES_PER_S = 50e6
# A line's rate is what it was over so many bytes, or over so long: the first ones are in no queue yet.
JUDGED_BYTES = 8 * 2**20
JUDGED_S = 1.0
SAVING_MIN = 0.05  # share of the bytes; trained float32 gives 0.16, random bytes nothing
RECENT_BLOCKS = 4  # a fragment's last ones say what the next is worth
REST_BLOCKS = 64  # go as they are when that was little; then it is tried again


class LineRate:
    """How fast blocks go over one link, while there are some to send. On the event loop.

    Attributes:
      bytes_per_s: of what travels, of late; infinite as long as nobody knows.
    """

    def __init__(self) -> None:
        self.bytes_per_s = math.inf
        self._meter = Meter()
        self._carried_bytes = 0
        self._busy_s = 0.0

    @property
    def slow(self) -> bool:
        """Whether it is so slow that compressing pays; from any thread."""
        return self.bytes_per_s < PAYS_BELOW_BYTES_PER_S

    def begin(self) -> None:
        """Blocks wait to be sent; ``end`` must follow. Those that wait at once count once."""
        self._meter.begin()

    def end(self, carried_bytes: int) -> None:
        """The network took them, as so many bytes, or the link is lost."""
        self._meter.end(carried_bytes)
        reading = self._meter.take()
        self._carried_bytes += reading.carried_bytes
        self._busy_s += reading.busy_s
        if self._carried_bytes >= JUDGED_BYTES or self._busy_s >= JUDGED_S:
            self.bytes_per_s = self._carried_bytes / self._busy_s if self._busy_s else math.inf
            self._carried_bytes, self._busy_s = 0, 0.0


class CompressionGain:
    """What compressing a fragment's blocks has saved of late. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_BLOCKS)  # (plain, compressed)
        self._rest_blocks = 0

    def worth_trying(self) -> bool:
        """Asked once for each block."""
        with self._lock:
            if not self._rest_blocks:
                return True
            self._rest_blocks -= 1
            return False

    def note(self, plain_bytes: int, compressed_bytes: int) -> None:
        """What became of a block."""
        with self._lock:
            self._recent.append((plain_bytes, compressed_bytes))
            plain, compressed = (sum(each) for each in zip(*self._recent, strict=True))
            if len(self._recent) == RECENT_BLOCKS and compressed > (1 - SAVING_MIN) * plain:
                self._rest_blocks = REST_BLOCKS
                self._recent.clear()

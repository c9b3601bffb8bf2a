"""Large buffers that are used again, for the first touch of fresh memory costs more than its use.

A round writes a whole encoded fragment, and other peers' contributions chunk by chunk. Memory that the
kernel has to find, clear and map first takes longer to write than the network takes to fill it, so a
buffer without references is kept for the next round.
"""

from __future__ import annotations

import math
import threading
import weakref

import numpy as np
from numpy.typing import NDArray


class BufferPool:
    """A pool that lends buffers, and gets each back when nothing refers to it. Thread-safe.

    Only a buffer of exactly the requested size is used again: the same fragments come every few rounds,
    and their chunks are all alike.

    Args:
      spare_count_max: how many buffers are kept; the last ones that came back.
      spare_bytes_max: the bytes that these may have together.
    """

    def __init__(self, spare_count_max: int, spare_bytes_max: float = math.inf) -> None:
        self._spare_count_max = spare_count_max
        self._spare_bytes_max = spare_bytes_max
        self._spare_bytes = 0
        self._spare: list[NDArray[np.uint8]] = []
        # Buffers come back when their last user is collected, which may happen inside of ``take``.
        self._lock = threading.RLock()

    def take(self, size_bytes: int) -> memoryview:
        """Lend a buffer with any content. It comes back when nothing refers to it, or to part of it."""
        with self._lock:
            for position, spare in enumerate(self._spare):
                if spare.size == size_bytes:
                    memory = self._spare.pop(position)
                    self._spare_bytes -= size_bytes
                    break
            else:
                memory = np.empty(size_bytes, np.uint8)
        lent = memory.view()
        # A memoryview, and whatever is made of it, holds ``lent``; slices of ``lent`` itself would
        # hold ``memory`` and must not be made.
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent.data

    def _give_back(self, memory: NDArray[np.uint8]) -> None:
        with self._lock:
            self._spare.append(memory)
            self._spare_bytes += memory.size
            while (
                len(self._spare) > self._spare_count_max
                or self._spare_bytes > self._spare_bytes_max
            ):
                self._spare_bytes -= self._spare.pop(0).size

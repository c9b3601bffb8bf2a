"""Large buffers that are used again: the first touch of fresh memory costs more than its use.

A round writes a whole encoded fragment. Memory that the system has to find, clear and map first takes
longer to write than the network takes to fill it, so a buffer that nobody refers to any more is kept
for the next round.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
from numpy.typing import NDArray

SPARE_MAX = 2  # buffers kept: an encoded input and an encoded result, or results of two fragments


class BufferPool:
    """Gives out buffers and takes them back by itself. Thread-safe.

    It keeps ``SPARE_MAX`` buffers at most, the last ones that came back, and only gives out one of
    exactly the size that is asked for: fragments come around again.
    """

    def __init__(self) -> None:
        self._spare: list[NDArray[np.uint8]] = []
        # Buffers come back when their last user is collected, which may happen inside of ``take``.
        self._lock = threading.RLock()

    def take(self, size_bytes: int) -> memoryview:
        """A buffer with any content. It comes back when nothing refers to it, or to part of it."""
        with self._lock:
            for position, spare in enumerate(self._spare):
                if spare.size == size_bytes:
                    memory = self._spare.pop(position)
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
            del self._spare[:-SPARE_MAX]

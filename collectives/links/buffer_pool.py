"""Buffers of chunks that are used again: the first touch of fresh memory costs more than its use.

A round writes a whole encoded result, and other peers' contributions, chunk by chunk. Memory that
the kernel has to find, clear and map first takes longer to write than the network takes to fill it,
so a buffer without references is kept for the next chunk, or for the next round.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

# Between two times at which nothing is lent. Fragments follow each other and may differ in size;
# memory that this many rounds did not need is free again.
PERIODS_KEPT = 8
# Linux gives memory in pages of this size if asked to: the first touch of a chunk then takes two
# faults instead of a thousand, a third of the time. Memory that such pages take beyond the chunk is
# wasted.
HUGE_PAGE_BYTES = 2**21
WASTED_SHARE_MAX = 1 / 16
MAPPED_BYTES_MIN = 64 * 2**10  # a buffer of at least so many bytes is a mapping of its own


class BufferPool:
    """A pool that lends buffers, and gets each back when nothing refers to it. Thread-safe.

    Only a buffer of exactly the requested size is used again: the same fragments come every few
    rounds, and their chunks are all alike.

    The pool never has more memory, lent or spare, than was lent at one time in this period, which
    began when all of it was back, or in one of the ``PERIODS_KEPT`` before. So a round uses the
    memory of the rounds before it, and that of an unusual round is free some rounds later.

    Attributes:
      lent_bytes: the bytes of all buffers that are lent now.
    """

    def __init__(self) -> None:
        self.lent_bytes = 0
        self._spare_bytes = 0
        self._most_bytes = 0  # that were lent at one time in this period
        self._most_before_bytes: deque[int] = deque([0], PERIODS_KEPT)  # and in those before
        # Spare buffers by size; the size that came back last is the last one.
        self._spare: dict[int, list[NDArray[np.uint8]]] = {}
        # Buffers come back when their last user is collected, which may happen inside of ``take``.
        self._lock = threading.RLock()

    def take(self, size_bytes: int) -> memoryview:
        """Lend a buffer with any content. It comes back when nothing refers to it any more."""
        with self._lock:
            self.lent_bytes += size_bytes
            self._most_bytes = max(self._most_bytes, self.lent_bytes)
            spare = self._spare.get(size_bytes)
            if spare:
                memory = spare.pop()
                self._spare_bytes -= size_bytes
            else:
                self._free()
                memory = _new_memory(size_bytes)
        lent = memory.view()
        # A memoryview, and whatever is made of it, holds ``lent``; slices of ``lent`` itself would
        # hold ``memory`` and must not be made.
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent.data

    def _give_back(self, memory: NDArray[np.uint8]) -> None:
        with self._lock:
            self.lent_bytes -= memory.size
            self._spare_bytes += memory.size
            alike = self._spare.pop(memory.size, [])
            alike.append(memory)
            self._spare[memory.size] = alike
            if self.lent_bytes == 0:
                self._most_before_bytes.append(self._most_bytes)
                self._most_bytes = 0
                self._free()

    def _free(self) -> None:
        """Free spare buffers that are too many; first those of sizes not used for long."""
        most_bytes = max(self._most_bytes, *self._most_before_bytes)
        while self._spare and self.lent_bytes + self._spare_bytes > most_bytes:
            size_bytes, alike = next(iter(self._spare.items()))
            if alike:
                alike.pop()
                self._spare_bytes -= size_bytes
            if not alike:
                del self._spare[size_bytes]


def _new_memory(size_bytes: int) -> NDArray[np.uint8]:
    """Return fresh memory, given back as soon as it is freed; in huge pages if they fit.

    Chunks of one round may be longer than those of the next one. ``malloc`` keeps what is freed for
    the thread that had taken it, so rounds of changing chunks took twice their memory.
    """
    if size_bytes < MAPPED_BYTES_MIN:
        return np.empty(size_bytes, np.uint8)
    whole_bytes = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    fits = whole_bytes - size_bytes <= WASTED_SHARE_MAX * size_bytes
    huge = fits and hasattr(mmap, "MADV_HUGEPAGE")
    mapped_bytes = whole_bytes if huge else size_bytes
    try:
        mapped = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no further mapping is allowed
        return np.empty(size_bytes, np.uint8)
    if huge:
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8, size_bytes)

"""A digest of pieces that get done in any order, by any thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from blake3 import blake3

# Pieces hashed at once: enough that the lock is rarely changed, still in the cache if just written.
PIECES_MAX = 4


class OrderedHash:
    """BLAKE3 of a buffer, as far as it is done without a gap.

    Whoever reports a piece hashes what can be hashed then, unless somebody else is at it: no thread
    ever waits for another.

    Args:
      data: the whole buffer.
      pieces: its pieces, in order and without gaps.
    """

    def __init__(self, data: memoryview, pieces: Sequence[slice]) -> None:
        self._data = data
        self._pieces = pieces
        self._done = [False] * len(pieces)
        self._position = 0
        self._hasher = blake3()
        self._busy = threading.Lock()

    def piece_done(self, index: int) -> bool:
        """That piece will not change any more; from any thread, once for each piece.

        Returns:
          Whether the whole buffer is hashed now; true at one of the calls only.
        """
        whole = False
        self._done[index] = True
        # Who finds the lock taken may go: its piece was marked before it looked, and who holds the
        # lock looks at the marks again after it gave the lock back.
        while self._has_more() and self._busy.acquire(blocking=False):
            try:
                whole = self._advance()
            finally:
                self._busy.release()
        return whole

    def digest(self) -> bytes:
        """Of what was hashed so far."""
        return self._hasher.digest()

    def _has_more(self) -> bool:
        position = self._position  # another thread may move it meanwhile
        return position < len(self._pieces) and self._done[position]

    def _advance(self) -> bool:
        start = end = self._position
        limit = min(start + PIECES_MAX, len(self._pieces))
        while end < limit and self._done[end]:
            end += 1
        if end == start:
            return False
        self._hasher.update(self._data[self._pieces[start].start : self._pieces[end - 1].stop])
        self._position = end
        return end == len(self._pieces)

"""A digest of pieces that get done in any order, by any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from blake3 import blake3

# Pieces hashed at once: enough that the lock is rarely changed, still in the cache if just written.
PIECES_MAX = 4


class OrderedHash:
    """BLAKE3 of pieces one after the other, as far as they are done without a gap.

    Whoever reports a piece hashes what can be hashed then, unless somebody else is at it: no thread
    ever waits for another.

    Args:
      count: of the pieces.
      pieces: gives the bytes of pieces ``start`` to ``end``, all done, in as few parts as it can.
    """

    def __init__(self, count: int, pieces: Callable[[int, int], Sequence[memoryview]]) -> None:
        self._pieces = pieces
        self._done = [False] * count
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

    def digest(self, suffix: bytes = b"") -> bytes:
        """Of what was hashed so far, and ``suffix`` after it."""
        hasher = self._hasher.copy()
        hasher.update(suffix)
        return hasher.digest()

    def _has_more(self) -> bool:
        position = self._position  # another thread may move it meanwhile
        return position < len(self._done) and self._done[position]

    def _advance(self) -> bool:
        start = end = self._position
        limit = min(start + PIECES_MAX, len(self._done))
        while end < limit and self._done[end]:
            end += 1
        if end == start:
            return False
        for piece in self._pieces(start, end):
            self._hasher.update(piece)
        self._position = end
        return end == len(self._done)

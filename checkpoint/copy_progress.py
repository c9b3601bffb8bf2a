"""How far a copy is, and how fast it goes."""

from __future__ import annotations

from collections import deque

import trio
from attrs import frozen

RATE_S = 10.0  # what comes in is measured over the last so many seconds


@frozen
class FetchProgress:
    """How far a fetch is.

    Attributes:
      done_blocks: of ``all_blocks``; those that were here before the fetch count, too.
      received_bytes: in this fetch, of whole blocks.
      donors: peer ids of those that give, or are asked to.
      bytes_per_s: of late, of whole blocks; 0.0: not known yet.
      saved_bytes: of the received ones, that never travelled: blocks came compressed.
    """

    done_blocks: int
    all_blocks: int
    done_bytes: int
    all_bytes: int
    received_bytes: int
    donors: tuple[str, ...]
    bytes_per_s: float
    saved_bytes: int = 0


class RecentRate:
    """Bytes per second, of late."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, int]] = deque([(trio.current_time(), 0)])  # (when, in all)

    def add(self, count: int) -> None:
        now_s = trio.current_time()
        self._came.append((now_s, self._came[-1][1] + count))
        while now_s - self._came[0][0] > RATE_S:
            self._came.popleft()

    def bytes_per_s(self) -> float:
        (then_s, then_bytes), (_last_s, bytes_) = self._came[0], self._came[-1]
        past_s = trio.current_time() - then_s
        return (bytes_ - then_bytes) / past_s if past_s > 0 else 0.0

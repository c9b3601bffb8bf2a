"""The progress of a fetch and its rate."""

from __future__ import annotations

from collections import deque

import trio
from attrs import frozen

RATE_S = 10.0  # the rate is the mean over this time


@frozen
class FetchProgress:
    """The progress of a fetch.

    Attributes:
      done_blocks: of ``all_blocks``; blocks that were here before the fetch count, too.
      received_bytes: bytes of whole blocks that this fetch received.
      donors: peer ids of donors with requests outstanding.
      bytes_per_s: recent rate of whole blocks; 0.0 while unknown.
      saved_bytes: the part of ``received_bytes`` that compression kept off the line.
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
    """A mean rate over the last ``RATE_S``."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, int]] = deque([(trio.current_time(), 0)])  # (time, total)

    def add(self, count: int) -> None:
        now_s = trio.current_time()
        self._came.append((now_s, self._came[-1][1] + count))
        while now_s - self._came[0][0] > RATE_S:
            self._came.popleft()

    def bytes_per_s(self) -> float:
        (then_s, then_bytes), (_last_s, bytes_) = self._came[0], self._came[-1]
        past_s = trio.current_time() - then_s
        return (bytes_ - then_bytes) / past_s if past_s > 0 else 0.0

"""When the next round is due: every fragment once per ``sync_every`` steps, evenly spread.

    k            0      1      2      3      4   ...      (P = 2 fragments, H = 100)
    fragment     0      1      0      1      0
    at_step     50    100    150    200    250

A round that was aborted is tried again with the same fragment and step. Aborts in a row wait longer
and longer, so that a fault which comes back at once cannot keep everybody busy with nothing else.
"""

from __future__ import annotations

import math

RETRY_S = 1.0  # before the round after one that was aborted
RETRY_S_MAX = 30.0  # doubling stops here


def scheduled(index: int, sync_every: int, fragment_count: int) -> tuple[int, int]:
    """Fragment and step of the ``index``-th round, counted from 0."""
    return index % fragment_count, ((index + 1) * sync_every) // fragment_count


class Backoff:
    """Seconds to wait after aborts in a row; a commit ends the row."""

    def __init__(self) -> None:
        self.abort_count = 0
        self.until_s = -math.inf

    def aborted(self, now_s: float) -> None:
        wait_s = min(RETRY_S_MAX, RETRY_S * 2.0 ** min(self.abort_count, 16))
        self.abort_count += 1
        self.until_s = now_s + wait_s

    def committed(self) -> None:
        self.abort_count = 0
        self.until_s = -math.inf

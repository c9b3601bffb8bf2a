"""How much of a round each link still has to send: links that have more get more of the line.

Owners have unequal shares where lines are unequal. If all links had equal parts of the line, those
to small owners would be done first; the rest would go to the largest one alone, as fast as it
comes, and its results would come at the end. In parts by what is left all links end together.
"""

from __future__ import annotations

import threading

WEIGHT_MIN, WEIGHT_MAX = 0.25, 4.0  # of a link, by the mean of those that have something to send


class SendBacklog:
    """See the top of this file. One per node. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for changes
        self._left: dict[str, int] = {}  # frames of a round, by peer; replaced as a whole

    def set_left(self, peer: str, count: int) -> None:
        """Take note that a link has so many frames of its oldest round left to send."""
        if self._left.get(peer, 0) == count:
            return
        with self._lock:
            left = {each: known for each, known in self._left.items() if each != peer}
            if count:
                left[peer] = count
            self._left = left

    def weight(self, peer: str) -> float:
        """Return how many times the mean part of the line a link should have."""
        left = self._left
        own = left.get(peer)
        if own is None or len(left) == 1:
            return 1.0
        return min(WEIGHT_MAX, max(WEIGHT_MIN, own * len(left) / sum(left.values())))

"""The failure detector: members that have been silent for too long, by the master's clock.

Any message is a sign of life, whatever its content. The sender's clock is not used.
"""

from __future__ import annotations

import math


class Detector:
    """Times of the last sign of life, by peer.

    Args:
      deadline_s: a peer that is silent for this long is dead.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._heard_s: dict[str, float] = {}

    def heard(self, peer: str, now_s: float) -> None:
        self._heard_s[peer] = now_s

    def excuse(self, now_s: float) -> None:
        """Restart all silences: the master was not listening."""
        for peer in self._heard_s:
            self._heard_s[peer] = now_s

    def forget(self, peer: str) -> None:
        self._heard_s.pop(peer, None)

    def silent_s(self, peer: str, now_s: float) -> float:
        """Return the seconds since the peer's last sign of life."""
        return now_s - self._heard_s[peer]

    def all_silent_s(self, now_s: float, began_s: float) -> float:
        """Return the seconds since the last sign of life of any peer, or since the beginning."""
        return now_s - max(self._heard_s.values(), default=began_s)

    def silent(self, now_s: float) -> list[str]:
        """Return the peers that are over the deadline, in the order in which they attached."""
        return [peer for peer, at_s in self._heard_s.items() if now_s >= at_s + self.deadline_s]

    def next_deadline_s(self) -> float:
        return min(self._heard_s.values(), default=math.inf) + self.deadline_s

    def watched(self) -> set[str]:
        return set(self._heard_s)

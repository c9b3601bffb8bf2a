"""A cap on what a node uploads, or downloads: one token bucket that all of its lanes draw from.

Takers are served in the order in which they asked (a virtual queue: each one reserves the next
stretch of time and sleeps until it comes), so no lane starves and a burst of one lane never delays
another by more than what it asked for. All time is trio's; threads pass it in.

A sender takes before it sends. A receiver takes after it received: it is too late to refuse those
bytes, but while the receiver waits, TCP makes the other side wait, too.
"""

from __future__ import annotations

import math
import threading

import trio

from ....protocol.errors import LocalProtocolError

BURST_S, SLICE_S = 0.1, 0.05  # the defaults
SLICE_BYTES_MIN = 1_024


class RateLimiter:
    """At most ``bytes_per_s`` over any stretch of time, plus a burst.

    Args:
      burst_s: what an idle node may send at once, in seconds of the rate.
      slice_s: what a taker should ask for at once, in seconds of the rate.

    Raises:
      LocalProtocolError: ``bytes_per_s`` is not a positive number.
    """

    def __init__(
        self, bytes_per_s: float, *, burst_s: float = BURST_S, slice_s: float = SLICE_S
    ) -> None:
        if not (bytes_per_s > 0 and math.isfinite(bytes_per_s)):
            raise LocalProtocolError(f"a cap of {bytes_per_s} bytes/s is not a positive number")
        self._bytes_per_s = bytes_per_s
        self._burst_s = burst_s
        self._slice_s = slice_s
        self._lock = threading.Lock()  # for ``_full_at_s``, since lanes ask from threads
        # When the bucket is full again if no lane takes any more.
        self._full_at_s = -math.inf

    @property
    def slice_bytes(self) -> int:
        """Return how much to ask for at once, so that takers alternate often."""
        return max(SLICE_BYTES_MIN, int(self._bytes_per_s * self._slice_s))

    def set_rate(self, bytes_per_s: float) -> None:
        """Change the rate for what is asked for from now on."""
        self._bytes_per_s = bytes_per_s

    async def take(self, count: int) -> None:
        """Wait until ``count`` bytes may pass.

        Cancellation: safe; what was reserved is given back, for later takers.
        """
        cost_s = count / self._bytes_per_s
        wait_s = self.reserve(count, trio.current_time())
        try:
            if wait_s > 0:
                await trio.sleep(wait_s)
            else:
                await trio.lowlevel.checkpoint()
        except trio.Cancelled:
            with self._lock:
                self._full_at_s -= cost_s
            raise

    def debt_s(self, now_s: float) -> float:
        """Return how long the last of what has been asked for still has to wait. Thread-safe."""
        return max(0.0, self._full_at_s - self._burst_s - now_s)

    def reserve(self, count: int, now_s: float) -> float:
        """Take ``count`` bytes; return the seconds to wait before they may pass. Thread-safe.

        Args:
          now_s: by trio's clock.
        """
        with self._lock:
            self._full_at_s = max(self._full_at_s, now_s) + count / self._bytes_per_s
            return self._full_at_s - self._burst_s - now_s

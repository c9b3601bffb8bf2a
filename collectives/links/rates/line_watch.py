"""The pace of a node's lanes: the rate of one bucket, from what the kernel says of their paths.

``line_rate`` has the rule. Here the connections are read, a few times a second and only while the
other sides acknowledge something, so that an idle node does nothing. Lanes in memory have no path
to read: they are never paced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from ....protocol.network.socket_lane import UNSENT_BYTES, SocketLane
from .line_rate import LineSample, PaceRule, is_queue
from .rate_limiter import RateLimiter

LOOK_S = 0.1  # between two looks at the connections
BURST_S = 0.02  # of the line's rate, for threads that wake up late
SLICE_S = 0.005  # of the line's rate, for one lane at once
SLICE_BYTES_MIN = 8_192
RECENT_S = 0.5  # an older look says nothing about now


class LineWatch:
    """See the top of this file. One per node; on the event loop: ``add``, ``remove``, ``look``.

    Args:
      cap: the owner's limit of what is sent.

    Attributes:
      rate: what was learnt.
    """

    def __init__(self, cap: RateLimiter | None = None) -> None:
        self._cap = cap
        self.rate = PaceRule()
        self._delivered: dict[SocketLane, int] = {}  # bytes, at the last look
        # By lane that has sent: how long its packets queue.
        self._queues: dict[SocketLane, float] = {}
        self._peers: dict[SocketLane, str] = {}
        self._looked_s = -math.inf
        self._windows_taken = 0  # of those that have ended
        self._limiter: RateLimiter | None = None  # while the rate is finite

    # ------------------------------------------------------------ lanes' threads

    def reserve(self, count: int, now_s: float) -> float:
        """Take ``count`` bytes; return the seconds to wait before they may be sent. Thread-safe."""
        limiter, cap = self._limiter, self._cap
        wait_s = 0.0 if limiter is None else limiter.reserve(count, now_s)
        return wait_s if cap is None else max(wait_s, cap.reserve(count, now_s))

    @property
    def learns(self) -> bool:
        """Return whether the line's rate is to be found: lanes are paced once it is known."""
        return bool(self._delivered) and self.rate.sees_queues and self._limiter is None

    def spare(self, now_s: float) -> bool:
        """Return whether no byte waits and the line is known to have room. Thread-safe."""
        limiters = [each for each in (self._limiter, self._cap) if each is not None]
        if any(limiter.debt_s(now_s) > 0 for limiter in limiters):
            return False
        if self._limiter is not None:
            return True
        rate = self.rate
        return rate.sees_queues and rate.has_room and now_s - self._looked_s < RECENT_S

    @property
    def slice_bytes(self) -> int:
        """Return how much a lane should send at once; 0: nothing limits it now. Thread-safe.

        Little, so that lanes alternate often; over a slow line twice as much, for each slice wakes
        a thread, while the kernel takes it at once.
        """
        limiter, cap = self._limiter, self._cap
        if limiter is None:
            return 0 if cap is None else cap.slice_bytes
        least = limiter.slice_bytes
        most = max(SLICE_BYTES_MIN, least, min(2 * least, UNSENT_BYTES))
        return most if cap is None else min(most, cap.slice_bytes)

    # ------------------------------------------------------------ the event loop

    def add(self, lane: SocketLane, peer: str) -> None:
        """Watch an open lane to a peer."""
        self._delivered[lane] = 0
        self._peers[lane] = peer

    def remove(self, lane: SocketLane) -> None:
        """Watch a lane no more: it will be closed."""
        self._delivered.pop(lane, None)
        self._peers.pop(lane, None)
        self._queues.pop(lane, None)

    def look(self, now_s: float) -> None:
        """Read the connections, if it is time, and pace the lanes by what they say."""
        if now_s - self._looked_s < LOOK_S or not self._delivered:
            return
        self._looked_s = now_s
        delivered, round_trip_s = 0, math.inf
        self._queues.clear()
        for lane, before in self._delivered.items():
            path = lane.path()
            if path is None or path.delivered_bytes <= before:
                continue
            self._delivered[lane] = path.delivered_bytes
            delivered += path.delivered_bytes - before
            round_trip_s = min(round_trip_s, path.shortest_s)
            self._queues[lane] = path.round_trip_s - path.shortest_s
        if not delivered:
            return
        queue_s = min(self._queues.values())
        if len({self._peers[lane] for lane in self._queues}) < min(
            2, len(set(self._peers.values()))
        ):
            queue_s = 0.0  # it may be the queue of the one peer's own line
        rate = self.rate.sample(LineSample(now_s, delivered, round_trip_s, queue_s))
        if rate == math.inf:
            self._limiter = None
        elif self._limiter is None:
            self._limiter = RateLimiter(rate, burst_s=BURST_S, slice_s=SLICE_S)
        else:
            self._limiter.set_rate(rate)

    def take_best_rate(self) -> float:
        """Return bytes per second in the best second since the last call; 0.0: none has ended."""
        fresh = self.rate.windows_ended - self._windows_taken
        self._windows_taken += fresh
        return self.rate.best_rate(fresh)

    def has_room(self, lanes: Iterable[SocketLane | None], round_trip_s: float) -> bool:
        """Return whether the line, and these lanes' path, could carry more at the last look.

        Args:
          round_trip_s: the shortest on that path.
        """
        queues = [self._queues[lane] for lane in lanes if lane in self._queues]
        return bool(queues) and self.rate.has_room and not is_queue(min(queues), round_trip_s)

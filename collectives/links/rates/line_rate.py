"""The rate at which a node may send: learnt from what its lanes deliver and how long that queues.

Whoever sends faster than the line carries fills the queue in front of it: packets are lost, some
flows get far more than others, and everybody behind the line waits. TCP itself finds the line's
rate only by doing so. So all lanes of a node draw from one token bucket (``rate_limiter``) whose
rate follows the line, as a router does that keeps its queue short:

    free ──a queue──> paced at what is delivered ──no queue──> faster, in growing steps
                          ^──────────a queue────────────────────────┘

The first rate is that of a window in which the queue stood all the time: connections begin slowly,
so what they delivered before it says little. Until then each connection finds the line by itself.

A queue shows in the round trips: every lane that sends has its shortest one (an empty queue) and
its present one. What all of them wait longer for than before is the node's own line; a single
receiver's line delays its own lanes only. The idea is LEDBAT's (RFC 6817), with a floor: on a line
that other programs keep full, lanes yield at most to ``FLOOR`` of what they have carried.

No clock, no I/O: ``LaneWatch`` calls ``sample``. Where the kernel tells nothing, and over short
paths, the rate stays infinite.
"""

from __future__ import annotations

import math
from collections import deque

from attrs import frozen

QUEUE_S_MIN = 0.015  # of waiting that counts as a queue; at least
QUEUE_SHARE = 0.15  # of the shortest round trip, likewise
WINDOW_S = 0.25  # what is delivered is measured over windows of this length; at least
WINDOW_ROUND_TRIPS = 3
FIRST_WINDOW_S = 0.2  # the first ones, since the line is full, may be as short; or a round trip
LONG_WINDOW_S = 1.0  # what is remembered is measured over longer ones, in which no burst counts
GAP_S_MAX = 1.0  # between two samples; a longer gap begins a new window
DRAIN = 0.97  # of what is delivered, while there is a queue
STEP_FIRST, STEP_MAX = 0.02, 0.25  # growth by a step without a queue, as a share of the rate
SMALL_STEPS = 2  # then each step is twice the last one
STEP_ROUND_TRIPS = 1.25  # from one step to the next: before, its queue could not be seen
USED_MIN = 0.85  # of the rate is used if it limits anything
FLOOR = 0.94  # of the most that was delivered in a good window lately
LATELY = 30  # long windows
GOOD_WINDOW = 0.9  # the place of a good one among these, from the least to the most
ROUND_TRIP_S_MIN = 0.002  # over shorter paths queues are too short to be seen


@frozen
class LineSample:
    """What the lanes that have sent since the last sample say.

    Attributes:
      delivered_bytes: that the other sides have acknowledged since the last sample.
      round_trip_s: the shortest round trip of these lanes.
      queue_s: the least by which any of them takes longer now.
    """

    now_s: float
    delivered_bytes: int
    round_trip_s: float
    queue_s: float


def is_queue(waits_s: float, round_trip_s: float) -> bool:
    """Return whether packets that take so much longer than the shortest trip are in a queue."""
    return waits_s > max(QUEUE_S_MIN, QUEUE_SHARE * round_trip_s)


class PaceRule:
    """See the top of this file. One per node.

    Attributes:
      bytes_per_s: the rate at which the node may send; infinite while no queue was seen.
      has_room: whether the line could carry more at the last sample.
      sees_queues: whether the paths of that sample are so long that a queue would have shown; true
        before the first one.
      windows_ended: long windows so far.
    """

    def __init__(self) -> None:
        self.bytes_per_s = math.inf
        self.has_room = False
        self.sees_queues = True
        self.windows_ended = 0
        self._step_count = 0  # since the last queue
        self._step_s = -math.inf  # when the last of them was taken
        # Samples of the last long window: when, and the bytes delivered until then.
        self._recent: deque[tuple[float, int]] = deque()
        self._delivered_bytes = 0
        self._windows: deque[float] = deque(maxlen=LATELY)  # bytes per second, by long window
        self._remembered_s = -math.inf  # end of the last of these
        # Since when there has been a queue, until the rate is finite: connections begin slowly, and
        # what they delivered before says nothing of the line.
        self._filled_s = math.inf

    def sample(self, sample: LineSample) -> float:
        """Take note of a sample. Returns ``bytes_per_s``."""
        queue = is_queue(sample.queue_s, sample.round_trip_s)
        if self.bytes_per_s == math.inf:
            self._filled_s = min(self._filled_s, sample.now_s) if queue else math.inf
        delivered = self._measure(sample)
        self.has_room = not queue and (delivered or 0.0) < USED_MIN * self.bytes_per_s
        self.sees_queues = sample.round_trip_s >= ROUND_TRIP_S_MIN
        if not delivered or not self.sees_queues:
            return self.bytes_per_s
        most = self._most()
        if queue:
            # What a line delivers while there is a queue is what it can carry.
            self._step_count = 0
            self.bytes_per_s = max(FLOOR * most, DRAIN * delivered)
        elif (
            delivered >= USED_MIN * self.bytes_per_s
            and sample.now_s - self._step_s >= STEP_ROUND_TRIPS * sample.round_trip_s
        ):
            doublings = max(0, self._step_count - SMALL_STEPS + 1)
            step = min(STEP_FIRST * 2**doublings, STEP_MAX)
            self._step_count += 1
            self._step_s = sample.now_s
            self.bytes_per_s = max(self.bytes_per_s * (1 + step), DRAIN * most)
        return self.bytes_per_s

    def best_rate(self, count: int) -> float:
        """Return bytes per second in the best of the last long windows; 0.0: none has ended.

        Args:
          count: how many windows count; of more than ``LATELY`` these.
        """
        windows = list(self._windows)
        return max(windows[max(0, len(windows) - count) :], default=0.0)

    def _most(self) -> float:
        """Return what the line has delivered in its good windows of late; 0.0: none has ended.

        Not in the best one: a line that has rested takes a burst that it cannot carry for long.
        """
        ranked = sorted(self._windows)
        return ranked[int(GOOD_WINDOW * (len(ranked) - 1))] if ranked else 0.0

    def _measure(self, sample: LineSample) -> float | None:
        """Return bytes per second of the window that this sample ends; None if it is too short."""
        now_s, recent = sample.now_s, self._recent
        if recent and now_s - recent[-1][0] > GAP_S_MAX:
            recent.clear()
        if not recent:
            self._remembered_s = now_s  # of what came before it is not known when it came
        else:
            self._delivered_bytes += sample.delivered_bytes
        recent.append((now_s, self._delivered_bytes))
        while now_s - recent[0][0] > LONG_WINDOW_S and now_s - recent[1][0] >= LONG_WINDOW_S:
            recent.popleft()
        if now_s - self._remembered_s >= LONG_WINDOW_S:
            self._remembered_s = now_s
            self._windows.append(_rate(recent[0], recent[-1]))
            self.windows_ended += 1
        full_s = now_s - self._filled_s
        if full_s < max(FIRST_WINDOW_S, sample.round_trip_s):
            return None
        window_s = min(full_s, max(WINDOW_S, WINDOW_ROUND_TRIPS * sample.round_trip_s))
        began = next((each for each in reversed(recent) if now_s - each[0] >= window_s), None)
        if began is None and now_s - recent[0][0] >= LONG_WINDOW_S:
            began = recent[0]  # a long path's window is no longer than what is kept
        return None if began is None else _rate(began, recent[-1])


def _rate(began: tuple[float, int], ended: tuple[float, int]) -> float:
    return (ended[1] - began[1]) / (ended[0] - began[0])

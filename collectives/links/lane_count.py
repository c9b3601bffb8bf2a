"""The number of lanes of a link: more, as long as the lanes are the limit and not the line.

A congestion control that slows down for every lost packet (CUBIC, what programs may use everywhere)
carries the less over a connection the longer and the more lossy its path is (RFC 9438, section 5).
There a line is filled by several connections:

    measure a window of busy time -> the line has room left -> half as many lanes again
        they carry no more: do not try for a while

The line has room if every lane of the link had something to send all the time, and no queue formed
in front of the line nor was the node paced (``line_watch``). So lanes are not added to a full line,
where they only crowd out its other users. There are never fewer again: idle lanes cost nothing.

A link begins with more lanes over longer paths, divided by the links that share the node's line, so
that its first round need not wait for the search. Over short paths, and under a congestion control
that does not slow down for losses (``lane_pool.STEADY``), it has as many as the spec says.

No clock, no I/O: the owner calls ``sample`` whenever it learns what has arrived.
"""

from __future__ import annotations

import math

from attrs import define, frozen

COUNT_FIRST = 2  # while one pauses for a loss, the other sends
COUNT_MAX = 32
# Of all links of a node that begin over a path at least as long; of one at most the second.
FIRST_BY_ROUND_TRIP = ((0.05, 18), (0.015, 12), (0.005, 6))
SHARED_MAX = 48  # of all links of a node, as far as each has more than it began with
GROWTH = 1.5
GAIN_MIN = 1.05  # if more lanes do not carry this many times as much, none are added for a while
HOLD_S = 60.0
WINDOW_S = 0.5  # of busy time; at least
WINDOW_ROUND_TRIPS = 6
SETTLE_ROUND_TRIPS = 6  # of busy time, in which new connections find their rate
GAP_S_MAX = 1.0  # between two samples; what happened in a longer gap is unknown
ROUND_TRIP_S_MIN = 0.005  # below, a connection recovers from a loss in no time that matters


@frozen
class Sample:
    """A measurement of a link at one moment.

    Attributes:
      carried_bytes: bytes that arrived since the link began.
      lane_count: lanes that work.
      busy: whether every lane is sending.
      room: whether the line could carry more.
    """

    now_s: float
    carried_bytes: int
    lane_count: int
    busy: bool
    room: bool


@define(eq=False)
class NodeLinks:
    """The number of a node's links that are up: they share its line."""

    count: int = 0


class LaneCount:
    """See the top of this file. One per link and side, for what it sends.

    Attributes:
      wanted: lanes that there should be.

    Args:
      first: lanes to start with.
      count_max: the most lanes; the same as ``first`` makes the number fixed.
    """

    def __init__(self, first: int = COUNT_FIRST, count_max: int = COUNT_MAX) -> None:
        self.wanted = first
        self._count_max = count_max
        self._last: Sample | None = None
        self._unsettled_s = 0.0  # busy time still to pass before a window begins
        self._window_s = 0.0
        self._window_bytes = 0
        self._before = 0.0  # bytes per second, before lanes were added; 0.0: none were
        self._hold_until_s = -math.inf

    def begin(self, round_trip_s: float, link_count: int) -> None:
        """Choose the number to begin with, once the path is known.

        Args:
          link_count: links of the node that are up, this one included.
        """
        for least_s, count in FIRST_BY_ROUND_TRIP:
            if round_trip_s >= least_s:
                share = math.ceil(count / max(1, link_count))
                self.wanted = min(max(self.wanted, share), self._count_max)
                return

    def sample(self, sample: Sample, round_trip_s: float, link_count: int = 1) -> int:
        """Take note of what has arrived. Returns ``wanted``.

        Args:
          round_trip_s: the shortest round trip that was seen on the path.
          link_count: links of the node that are up, this one included.
        """
        last, self._last = self._last, sample
        most = min(self._count_max, math.ceil(SHARED_MAX / max(1, link_count)))
        if round_trip_s < ROUND_TRIP_S_MIN or self.wanted >= most:
            return self.wanted
        if last is None or not self._counts(last, sample):
            self._window_s, self._window_bytes = 0.0, 0
            return self.wanted
        span_s = sample.now_s - last.now_s
        if self._unsettled_s > 0:
            self._unsettled_s -= span_s
            return self.wanted
        self._window_s += span_s
        self._window_bytes += sample.carried_bytes - last.carried_bytes
        if self._window_s >= max(WINDOW_S, WINDOW_ROUND_TRIPS * round_trip_s):
            bytes_per_s = self._window_bytes / self._window_s
            self._window_s, self._window_bytes = 0.0, 0
            self._decide(bytes_per_s, sample.now_s, round_trip_s, most)
        return self.wanted

    def _counts(self, last: Sample, sample: Sample) -> bool:
        """Return whether the lanes were the limit all the time between two samples."""
        return (
            last.busy
            and sample.busy
            and last.room
            and sample.room
            and last.lane_count == sample.lane_count >= self.wanted
            and sample.now_s - last.now_s <= GAP_S_MAX
        )

    def _decide(self, bytes_per_s: float, now_s: float, round_trip_s: float, most: int) -> None:
        before, self._before = self._before, 0.0
        if bytes_per_s < GAIN_MIN * before:
            self._hold_until_s = now_s + HOLD_S
        if now_s < self._hold_until_s:
            return
        self._before = bytes_per_s
        self.wanted = min(math.ceil(GROWTH * self.wanted), most)
        self._unsettled_s = SETTLE_ROUND_TRIPS * round_trip_s

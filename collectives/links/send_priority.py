"""The priority of frames on a node's line: rounds first, then results for listeners, then copies.

On one link the order is strict. All links of a node share its line, so they are limited together. While
a frame of a round is under way on any of them, frames of a lower rank get a share of the line, and what
rounds leave of the rest; otherwise they get all of it. A lane takes a round's frame at once, so if none
is under way, none waits either.

The share keeps a copy moving when rounds fill the line without a pause; it is small enough to hardly
delay them. It is a share of the most that this node has been seen to send, because the line's real rate
is not known.

What rounds leave is found as LEDBAT (RFC 6817) does: a full line has a queue, which delays all that
passes. The lower ranks' rate grows with each round trip while the line has no queue, and is halved when
it has one. The line has a queue if all links that send take longer than the shortest round trip that they
have seen; if only some do, the queue is at their receivers, and copies for others do not lengthen it.
Where no round trip is known (in memory, on other systems than Linux), or all are so short that a processor
may be the limit as well as the line, lower ranks get their share only.
"""

from __future__ import annotations

import enum
import math
import threading
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from weakref import WeakKeyDictionary

from attrs import define

SHARE = 0.05  # the default: sending a round takes a nineteenth longer at most
WINDOW_S = 1.0  # what is sent is measured over windows of at least this length
# A round's frames follow each other: it counts as sending until this long after its last frame.
LINGER_S = 0.05
IDLE_S = 0.1  # a longer pause begins a new window
WINDOWS_MAX = 120  # the fastest of this many recent windows is taken for the line's rate
CREDIT_S = 0.5  # how much of its share a lower rank may save up
# After this wait a frame is sent anyway: its receiver must not take this node for dead.
WAIT_S_MAX = 5.0
LOOK_S_MIN, LOOK_S_MAX = 0.01, 1.0  # between two checks of what was saved up
# The delay of a queue that copies may cause, in round trips. A round that fills the line causes more, for
# its connections send until the router's memory is full, which holds a round trip or more as a rule.
QUEUE_ROUND_TRIPS = 0.3
QUEUE_S_MIN = 0.005  # of that delay; less cannot be told from chance
QUEUE_S_MAX = 0.03  # of that delay
ROUND_TRIP_S_MIN = 0.002  # a shorter one says nothing about the line
GROWTH = 0.1  # of the line, by which the lower ranks' rate grows in a round trip without any queue
ADJUST_S_MIN = 0.1  # between two changes of that rate; a longer round trip counts instead
DELAY_S_MAX = 0.5  # an older measurement of a link's round trip says nothing about now
SHORTEST_S_MAX = 60.0  # the shortest round trip is one of these seconds, for routes change


class SendRank(enum.IntEnum):
    """Ranks of frames; lower values go first."""

    ROUND = 0  # a frame that a contributor waits for, or that keeps a member in sync
    LISTENER = 1  # a result for a member that is still being copied to
    COPY = 2  # the copy itself


@define(eq=False)
class _Path:
    """The round trip over one link."""

    shortest_s: float = math.inf
    shortest_at_s: float = -math.inf
    delay_s: float = 0.0  # beyond the shortest
    at_s: float = -math.inf  # when it was measured

    @property
    def fullness(self) -> float:
        """Return the queue's delay as a multiple of the one that copies may cause."""
        queue_s = min(max(QUEUE_ROUND_TRIPS * self.shortest_s, QUEUE_S_MIN), QUEUE_S_MAX)
        return self.delay_s / queue_s


class SendPriority:
    """See the top of this file. One per node. Thread-safe.

    Attributes:
      share: the share of the line that lower ranks get at least while rounds send.
    """

    def __init__(self, share: float = SHARE) -> None:
        self.share = share
        self._lock = threading.Lock()  # held for moments, under the locks of send queues
        self._urgent_count = 0
        self._urgent_s = -math.inf  # when the last of them ended
        self._lower_count = 0
        self._credit_bytes = 0.0
        self._credit_s = 0.0  # until when credit was counted
        self._lower_s = 0.0  # when a lower rank's last frame went, or rounds began to send
        self._refused: dict[Callable[[], None], None] = {}  # in order, for virtual time
        self._idle_s = -math.inf  # when the last frame ended
        self._window_s = 0.0  # when the window began; something has been under way ever since
        self._window_bytes = 0
        self._rates: deque[float] = deque(maxlen=WINDOWS_MAX)
        self._paths: WeakKeyDictionary[object, _Path] = WeakKeyDictionary()  # by link
        self._left_bytes_per_s = 0.0  # what rounds leave of the line beyond the share
        self._adjust_s = -math.inf  # when that may change again

    @property
    def line_bytes_per_s(self) -> float:
        """Return the most that this node has recently been seen to send; 0.0 if nothing was."""
        return max(self._rates, default=0.0)

    def wait_s(self, rank: SendRank, now_s: float, wake: Callable[[], None]) -> float:
        """Return the seconds until a frame of this rank may be taken; 0.0 if it may be now.

        Args:
          wake: called once, from any thread, when a frame that was refused may be sent earlier.
        """
        if rank is SendRank.ROUND:
            return 0.0
        with self._lock:
            if not self._rounds_send(now_s):
                return 0.0
            rate = self._save_up(now_s)
            overdue = now_s >= self._lower_s + WAIT_S_MAX
            # A lane more for each step of growth: one alone may not carry what is left.
            steps = self._left_bytes_per_s // max(GROWTH * self.line_bytes_per_s, 1.0)
            crowded = self._lower_count > steps
            if (self._credit_bytes > 0 or overdue) and not crowded:
                return 0.0
            self._refused[wake] = None
            waits = [ADJUST_S_MIN if self._paths else LOOK_S_MAX]
            if rate and not (crowded and self._paths):  # frames may wait in their middle for long
                waits.append(-self._credit_bytes / rate)
            if not self._urgent_count:
                waits.append(self._urgent_s + LINGER_S - now_s)
            return max(LOOK_S_MIN, min(waits))

    def piece_wait_s(self, count: int, now_s: float) -> float:
        """Return the seconds until ``count`` more bytes of a lower rank's frame may go; 0.0 if they may now.

        Bytes that may go are counted.
        """
        with self._lock:
            if not self._rounds_send(now_s):
                return 0.0
            rate = self._save_up(now_s)
            if self._credit_bytes > 0:
                self._credit_bytes -= count
                return 0.0
            wait_s = -self._credit_bytes / rate if rate else math.inf
            return min(max(wait_s, LOOK_S_MIN), LINGER_S)

    def note_round_trip(
        self, link: object, round_trip_s: float, shortest_s: float, now_s: float
    ) -> None:
        """Take note of a lane's round trip while it sends, and of the shortest one that it has seen.

        Args:
          link: the lane's; any object that is the same for all lanes of a link.
          round_trip_s: with the time that the lane waited for this node's own limit on uploads.
        """
        if shortest_s < ROUND_TRIP_S_MIN:
            return
        with self._lock:
            path = self._paths.setdefault(link, _Path())
            if shortest_s <= path.shortest_s or now_s - path.shortest_at_s > SHORTEST_S_MAX:
                path.shortest_s, path.shortest_at_s = shortest_s, now_s
            path.delay_s, path.at_s = round_trip_s - path.shortest_s, now_s
            if self._rounds_send(now_s) and now_s >= self._adjust_s:
                self._adjust(now_s)

    def _adjust(self, now_s: float) -> None:
        """Let the lower ranks' rate follow the line's queue."""
        sending = [path for path in self._paths.values() if now_s - path.at_s <= DELAY_S_MAX]
        least = min(sending, key=attrgetter("fullness"))
        self._adjust_s = now_s + max(ADJUST_S_MIN, least.shortest_s + least.delay_s)
        if least.fullness >= 1:
            self._left_bytes_per_s /= 2
        elif self._lower_count or self._refused:  # what nobody uses is not known to be left
            line = self.line_bytes_per_s
            growth = GROWTH * line * (1 - least.fullness)
            self._left_bytes_per_s = min(self._left_bytes_per_s + growth, line)

    def _save_up(self, now_s: float) -> float:
        """Count what lower ranks may send by now; return their bytes per second."""
        share = self.share * self.line_bytes_per_s
        rate = share + self._left_bytes_per_s
        most_bytes = share * CREDIT_S + self._left_bytes_per_s * ADJUST_S_MIN
        since_s, self._credit_s = self._credit_s, now_s
        self._credit_bytes = min(self._credit_bytes + rate * (now_s - since_s), most_bytes)
        return rate

    def _rounds_send(self, now_s: float) -> bool:
        return bool(self._urgent_count) or now_s <= self._urgent_s + LINGER_S

    def begin(self, rank: SendRank, now_s: float) -> None:
        """Take note that a frame was taken; ``end`` follows even if it is not sent."""
        with self._lock:
            idle = not self._urgent_count and not self._lower_count
            if idle and now_s - self._idle_s > IDLE_S:
                self._window_s, self._window_bytes = now_s, 0
            if rank is not SendRank.ROUND:
                self._lower_count += 1
                return
            if not self._rounds_send(now_s):
                self._credit_bytes, self._credit_s, self._lower_s = 0.0, now_s, now_s
            self._urgent_count += 1

    def end(self, rank: SendRank, sent_bytes: int, now_s: float, counted_bytes: int = 0) -> None:
        """Take note that a frame was sent (``sent_bytes`` of it), or will not be.

        Args:
          counted_bytes: of them, those that ``piece_wait_s`` was asked for.
        """
        with self._lock:
            self._measure(sent_bytes, now_s)
            self._idle_s = now_s
            if rank is SendRank.ROUND:
                self._urgent_count -= 1
                self._urgent_s = now_s
            else:
                self._lower_count -= 1
                self._lower_s = now_s
                if self._rounds_send(now_s):
                    self._credit_bytes -= max(0, sent_bytes - counted_bytes)
            wakes: dict[Callable[[], None], None] = {}
            if not self._urgent_count:
                wakes, self._refused = self._refused, wakes
        for wake in wakes:
            wake()

    def _measure(self, sent_bytes: int, now_s: float) -> None:
        self._window_bytes += sent_bytes
        if now_s - self._window_s >= WINDOW_S:
            self._rates.append(self._window_bytes / (now_s - self._window_s))
            self._window_s, self._window_bytes = now_s, 0

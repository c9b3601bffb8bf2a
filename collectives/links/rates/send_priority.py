"""The priority of frames on a node's line: rounds first, then results for listeners, then copies.

On one link the order is strict. All links of a node share its line, so they are limited together.
While a frame of a round is under way on any of them, frames of a lower rank get a share of the
line, and what rounds leave of the rest; otherwise they get all of it. A lane takes a round's frame
at once, so if none is under way, none waits either.

The share keeps a copy moving when rounds fill the line without a pause; it is small enough to
hardly delay them. It is a share of the most that this node has been seen to send, because the
line's real rate is not known.

What rounds leave shows in the bucket from which all lanes take (``line_watch``): if no byte of a
round waits for it, rounds wait for something else, slower receivers or the arithmetic, and a piece
of a copy may go. Where nothing is paced and it is not known that the line has room (in memory, on
other systems than Linux, over short paths), lower ranks get their share only.
"""

from __future__ import annotations

import enum
import math
import threading
from collections import deque
from collections.abc import Callable

SHARE = 0.15  # the default: sending a round takes a sixth longer at most
WINDOW_S = 1.0  # what is sent is measured over windows of at least this length
# A round's frames follow each other: it counts as sending until this long after its last frame.
LINGER_S = 0.05
IDLE_S = 0.1  # a longer pause begins a new window
WINDOWS_MAX = 120  # the fastest of this many recent windows is taken for the line's rate
CREDIT_S = 0.5  # how much of its share a lower rank may save up
# After this wait a frame is sent anyway: its receiver must not take this node for dead.
WAIT_S_MAX = 5.0
LOWER_MAX = 8  # frames of lower ranks that may be under way at a time while rounds send
SPARE_LOOK_S = 0.02  # between two looks at what rounds leave
LOOK_S_MIN = 0.01  # between two checks of what was saved up


class SendRank(enum.IntEnum):
    """Ranks of frames; lower values go first."""

    ROUND = 0  # a frame that a contributor waits for, or that keeps a member in sync
    LISTENER = 1  # a result for a member that is still being copied to
    COPY = 2  # the copy itself


class SendPriority:
    """See the top of this file. One per node. Thread-safe.

    Attributes:
      share: the share of the line that lower ranks get at least while rounds send.

    Args:
      spare: returns, given trio's time, whether the line is known to be able to carry more at once.
    """

    def __init__(
        self, share: float = SHARE, spare: Callable[[float], bool] = lambda _now_s: False
    ) -> None:
        self.share = share
        self._spare = spare
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
            if (self._credit_bytes > 0 or overdue) and not self._lower_count:
                return 0.0
            if self._lower_count < LOWER_MAX and self._spare(now_s):
                return 0.0
            self._refused[wake] = None
            waits = [SPARE_LOOK_S]
            if rate:
                waits.append(-self._credit_bytes / rate)
            if not self._urgent_count:
                waits.append(self._urgent_s + LINGER_S - now_s)
            return max(LOOK_S_MIN, min(waits))

    def piece_wait_s(self, count: int, now_s: float) -> float:
        """Return the seconds until ``count`` more bytes of a lower rank's frame may go, or 0.0.

        Bytes that may go are counted.
        """
        with self._lock:
            if not self._rounds_send(now_s):
                return 0.0
            rate = self._save_up(now_s)
            if self._spare(now_s):
                return 0.0
            if self._credit_bytes > 0:
                self._credit_bytes -= count
                return 0.0
            wait_s = -self._credit_bytes / rate if rate else math.inf
            return min(max(wait_s, LOOK_S_MIN), SPARE_LOOK_S)

    def _save_up(self, now_s: float) -> float:
        """Count what lower ranks may send by now; return their share in bytes per second."""
        rate = self.share * self.line_bytes_per_s
        since_s, self._credit_s = self._credit_s, now_s
        self._credit_bytes = min(self._credit_bytes + rate * (now_s - since_s), rate * CREDIT_S)
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


# ---------------------------------------------------------------- what links still have to send


WEIGHT_MIN, WEIGHT_MAX = 0.25, 4.0  # of a link, by the mean of those that have something to send


class SendBacklog:
    """What each link of a node still has to send of a round: links with more get more of the line.

    Owners have unequal shares where lines are unequal. With equal parts of the line, links to small
    owners would be done first, and the largest one's results would come all at once at the end. In
    parts by what is left all links are done together. One per node. From any thread.
    """

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

"""The send queue of a link: sources of frames, served in turn by any lane that is idle.

A *source* makes a frame when a lane asks for one, so nothing is queued, encoded or woken up before
it can be sent. Of sources of one rank those of the oldest round go first: if concurrent rounds
shared the line, the older one would be late and the newer one no earlier. Sources of one round take
turns frame by frame. Sources of a lower rank are asked when no other has a frame, and only as far
as the node's ``SendPriority`` lets them, because all its links share one line.

Lanes are tasks of the event loop, or threads. One lock guards the table of sources and the calls to
them, for some microseconds; a frame's payload is made outside of it. Tasks of the event loop are
woken through ``Loop``.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter
from typing import Protocol

import trio
from attrs import define, field

from ...protocol.messages import Message
from ...protocol.network.lane import Buffer, FrameHeader
from ...protocol.wakeups import Loop
from .rates.send_priority import WAIT_S_MAX, SendPriority, SendRank

Frame = tuple[FrameHeader, Buffer]
# Makes a frame, perhaps in a thread; returns None if there will be none after all. Called again, it
# must make the same frame: a lane may break when the frame was sent but has not arrived. The
# frame's bytes must not change until it is acknowledged or the link is lost; until then a lane or
# the queue holds a reference to the load.
Load = Callable[[], Frame | None]


class FrameSource(Protocol):
    """A sequence of frames for one link, some of which can be sent now.

    Lanes call it, in threads, one at a time: both methods must be quick and must not call the link.
    The owner of the source calls ``Link.wake`` when there is more to send than before.
    """

    def next_frame(self) -> Load | None:
        """Return the next frame; None if there is none at this moment."""
        ...

    def left(self) -> int:
        """Return how many frames ``next_frame`` will still return, now or later."""
        ...


_AGE = attrgetter("age")


@define(eq=False)
class _Feed:
    """A source that is being sent, and its progress."""

    source: FrameSource
    rank: SendRank
    age: int  # the lower, the older
    in_flight: int = 0
    sent: bool = False
    ended: trio.Event = field(factory=trio.Event)


def _frames_left(feeds: Collection[_Feed]) -> int:
    """Return how many frames the oldest sources still have."""
    oldest = min((feed.age for feed in feeds), default=0)
    return sum(feed.source.left() for feed in feeds if feed.age == oldest)


@define(eq=False)
class TakenFrame:
    """A frame that a lane has taken."""

    load: Load
    feed: _Feed | None  # until it is sent
    rank: SendRank
    turn_bytes: int = 0  # of it that had their turn, see ``SendQueue.turn_wait_s``
    held_s: float = math.inf  # when it first had to wait in its middle


class SendQueue:
    """See the top of this file. Made on the event loop.

    Args:
      send_priority: the node's.
      note_left: called, from any thread, with the frames that the oldest sources have left.
    """

    def __init__(
        self,
        send_priority: SendPriority | None = None,
        note_left: Callable[[int], None] = lambda _count: None,
    ) -> None:
        self._loop = Loop()
        self._send_priority = SendPriority() if send_priority is None else send_priority
        self._note_left = note_left
        self._changed = threading.Condition(threading.Lock())
        # Sources that may have more frames, by rank; the one whose turn it is comes first.
        self._feeds: dict[SendRank, deque[_Feed]] = {rank: deque() for rank in SendRank}
        self._open: set[_Feed] = set()  # all that a caller of ``drain`` waits for
        self._under_way: set[TakenFrame] = set()  # taken and not finished
        self._wait_s = math.inf  # until a frame that was refused may go
        self._returned: deque[TakenFrame] = deque()  # from lanes that have ended; these go first
        self._parked_count = 0  # lanes' tasks that wait for a frame
        self._waiting_count = 0  # lanes' threads that do
        self._lot = trio.lowlevel.ParkingLot()
        self._closed = False

    async def drain(
        self, source: FrameSource, rank: SendRank = SendRank.ROUND, age: int = 0
    ) -> bool:
        """Send all frames of a source, after those of older sources.

        Returns:
          Whether all were sent; False if the queue was closed before.

        Cancellation: safe; no further frame is taken, frames on their way are finished.
        """
        if self._closed:
            await trio.lowlevel.checkpoint()
            return False
        if not source.left():
            await trio.lowlevel.checkpoint()
            return True
        feed = _Feed(source, rank, age)
        with self._changed:
            self._feeds[rank].append(feed)
            self._open.add(feed)
        self.wake()
        try:
            await feed.ended.wait()
        finally:
            with self._changed:
                self._open.discard(feed)
                if feed in self._feeds[rank]:
                    self._feeds[rank].remove(feed)
        return feed.sent

    def wake(self) -> None:
        """Ask the sources again for frames; from any thread."""
        with self._changed:
            self._wake_one()

    def _wake_one(self) -> None:
        """Have one idle lane look for a frame, under the lock; if it finds any, it wakes the next.

        If all were woken, dozens of lanes would look for each frame that becomes ready.
        """
        if self._waiting_count:
            self._changed.notify()
        elif self._parked_count:
            self._loop.soon(self._lot.unpark)

    def take_nowait(self) -> TakenFrame | None:
        """Return the next frame, if there is one, to a lane's task."""
        with self._changed:
            return self._take()

    async def take(self) -> TakenFrame:
        """Wait for the next frame, in a lane's task."""
        while True:
            with self._changed:
                taken = self._take()
                if taken is not None:
                    return taken
                # Under the lock: a thread that calls ``wake`` now sees that this task parks.
                self._parked_count += 1
                wait_s = self._wait_s
            try:
                await self._park(wait_s)
            finally:
                with self._changed:
                    self._parked_count -= 1

    async def _park(self, wait_s: float) -> None:
        if wait_s == math.inf:  # nearly always; a cancel scope is not cheap
            await self._lot.park()
            return
        with trio.move_on_after(wait_s):
            await self._lot.park()

    def take_in_thread(self, wait_s: float) -> TakenFrame | None:
        """Wait for the next frame, in a lane's thread; None if there is none within ``wait_s``."""
        with self._changed:
            while not self._closed:
                taken = self._take()
                if taken is not None:
                    return taken
                self._waiting_count += 1
                last = wait_s <= self._wait_s
                try:
                    woken = self._changed.wait(min(wait_s, self._wait_s))
                finally:
                    self._waiting_count -= 1
                if last and not woken:
                    return self._take()
        return None

    def _take(self) -> TakenFrame | None:
        self._wait_s = math.inf
        if self._closed:
            return None
        now_s = self._loop.now_s()
        taken = self._returned.popleft() if self._returned else self._next(now_s)
        if taken is not None:
            self._under_way.add(taken)
            self._send_priority.begin(taken.rank, now_s)
            self._wake_one()
        return taken

    def _next(self, now_s: float) -> TakenFrame | None:
        """Return the next frame of the first source that has one, by rank, age and turn."""
        for rank, feeds in self._feeds.items():
            if rank is SendRank.ROUND:
                self._note_left(_frames_left(feeds))
            if not feeds:
                continue
            self._wait_s = self._send_priority.wait_s(rank, now_s, self.wake) or math.inf
            if self._wait_s < math.inf:
                return None  # lower ranks must wait, too
            for feed in sorted(feeds, key=_AGE):  # stable: sources of one age keep their turns
                frame = feed.source.next_frame()
                feeds.remove(feed)
                if feed.source.left():
                    feeds.append(feed)
                if frame is not None:
                    feed.in_flight += 1
                    return TakenFrame(frame, feed, rank)
        return None

    def turn_wait_s(self, taken: TakenFrame, count: int) -> float:
        """Return the seconds until ``count`` more bytes of a frame may go; 0.0 if they may now.

        A round that begins does not wait for the rest of a frame of a lower rank, but for frames of
        its own here the lane must become free. In a lane's thread, before each piece of a frame.
        """
        if taken.rank is SendRank.ROUND:
            return 0.0
        now_s = self._loop.now_s()
        if not self._feeds[SendRank.ROUND] and now_s < taken.held_s + WAIT_S_MAX:
            wait_s = self._send_priority.piece_wait_s(count, now_s)
            if wait_s:
                taken.held_s = min(taken.held_s, now_s)
                return wait_s
        taken.turn_bytes += count
        return 0.0

    def finish(self, taken: TakenFrame, sent_bytes: int = 0) -> None:
        """Take note that a frame was sent, perhaps not for the first time; from any thread."""
        self._settle([taken], sent_bytes)
        feed, taken.feed = taken.feed, None
        if feed is None:
            return
        with self._changed:
            feed.in_flight -= 1
            over = feed.in_flight == 0 and not feed.source.left()
            feed.sent = over
        if over:
            self._loop.soon(feed.ended.set)

    def _settle(self, frames: Iterable[TakenFrame], sent_bytes: int = 0) -> None:
        """End the frames' being under way; without the lock, as it may wake other queues."""
        with self._changed:
            settled = [taken for taken in frames if taken in self._under_way]
            self._under_way.difference_update(settled)
        now_s = self._loop.now_s()
        for taken in settled:
            self._send_priority.end(taken.rank, sent_bytes, now_s, taken.turn_bytes)

    def put_back(self, frames: Iterable[TakenFrame]) -> None:
        """Send frames again, before all others, for their lane ended first. On the event loop."""
        frames = list(frames)
        self._settle(frames)
        with self._changed:
            if not self._closed:
                self._returned.extendleft(reversed(frames))
        self.wake()

    def close(self) -> None:
        """Send nothing any more, and wake all callers of ``drain``. On the event loop."""
        with self._changed:
            self._closed = True
            for waiting in self._feeds.values():
                waiting.clear()
            self._returned.clear()
            self._note_left(0)
            feeds, under_way = list(self._open), list(self._under_way)
            self._changed.notify_all()
        self._settle(under_way)
        for feed in feeds:
            feed.ended.set()


# ---------------------------------------------------------------- messages of a control stream


@define(eq=False)
class _Job:
    """A message to be sent, and whether it was."""

    message: Message
    sent: bool = False
    ended: trio.Event = field(factory=trio.Event)


class MessageQueue:
    """Messages that wait to be sent, first come, first served, by any writer that is idle.

    Its length is bounded by the number of callers: each waits for the message that it put in.
    """

    def __init__(self) -> None:
        self._queue: deque[_Job] = deque()
        self._taken: set[_Job] = set()
        self._idle = trio.lowlevel.ParkingLot()
        self._closed = False

    @property
    def busy(self) -> bool:
        """Return whether any message waits or is being sent."""
        return bool(self._queue or self._taken)

    def put_if_idle(self, message: Message) -> None:
        """Queue a message, unless another one waits or is being sent; do not wait for it."""
        if not (self._closed or self.busy):
            self._queue.append(_Job(message))
            self._idle.unpark()

    async def put(self, message: Message) -> bool:
        """Queue a message and wait for it; return False if the queue was closed before."""
        if self._closed:
            await trio.lowlevel.checkpoint()
            return False
        job = _Job(message)
        self._queue.append(job)
        self._idle.unpark()
        try:
            await job.ended.wait()
        except trio.Cancelled:
            if job not in self._taken and not job.sent and not self._closed:
                self._queue.remove(job)
            raise
        return job.sent

    async def take(self) -> _Job:
        while not self._queue:
            await self._idle.park()
        job = self._queue.popleft()
        self._taken.add(job)
        return job

    def finish(self, job: _Job) -> None:
        self._taken.discard(job)
        job.sent = True
        job.ended.set()

    def close(self) -> None:
        self._closed = True
        for job in (*self._queue, *self._taken):
            job.ended.set()
        self._queue.clear()
        self._taken.clear()

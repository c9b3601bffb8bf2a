"""Messages that wait to be sent over a control stream."""

from __future__ import annotations

from collections import deque

import trio
from attrs import define, field

from ...protocol.messages import Message


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

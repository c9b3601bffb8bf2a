"""A daemon's live stream: server-sent events, made once for all who listen.

    publish, publish_status --> Listener (a bounded queue each) --> GET /api/live

What is published is put into words and bytes once. Nobody who reads slowly holds up anybody: of
statuses only the newest waits for a listener, and one that leaves too much else lying is hung up on;
its browser comes again and asks for what it has missed. Without listeners nothing is made at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio
from attrs import Factory, define
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from .connections import connections_max
from .json_answers import compact

LISTENERS_MAX = 64
LISTENERS_SHARE = 0.5  # of HTTP's connections, at most: who asks and acts has the others
WAITING_MAX = 256  # frames, besides the newest status
HEARTBEAT_S = 15.0  # without news; so that proxies and browsers see that we are there
LOOK_S = 1.0  # between two statuses
SEND_S = 30.0  # a listener that takes nothing for so long is gone
RETRY_MS = 2_000  # after which a browser dials again

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),  # nginx would collect them
]


@define(eq=False)
class StreamListener:
    """What one of those who listen has not been sent yet."""

    status: bytes = b""  # empty: it knows the newest, ``known``
    known: bytes = b""
    frames: deque[bytes] = Factory(deque)
    overrun: bool = False
    news: trio.Event = Factory(trio.Event)

    def tell(self, status: bytes) -> None:
        if status is not self.known:
            self.status = self.known = status
            self.news.set()

    def take(self) -> bytes:
        """All of it."""
        taken = b"".join(self.frames) + self.status
        self.status = b""
        self.frames.clear()
        self.news = trio.Event()
        return taken


class LiveStream:
    """The stream of one daemon.

    Args:
      status: what is so now.
      stamp: changes whenever that may have changed; compared by ``==``.
    """

    def __init__(self, status: Callable[[], object], stamp: Callable[[], object]) -> None:
        self._status = status
        self._stamp = stamp
        self._listeners: set[StreamListener] = set()
        self._wanted = trio.Event()
        self._told: object = None  # the stamp of ``_frame``
        self._frame = b""  # of the newest status

    @property
    def heard(self) -> bool:
        """Whether anybody listens; else there is no need to publish."""
        return bool(self._listeners)

    def publish(self, kind: str, row: object) -> None:
        """A frame to all who listen."""
        if not self._listeners:
            return
        frame = frame_of(kind, compact(row))
        for listener in self._listeners:
            if len(listener.frames) >= WAITING_MAX:
                listener.overrun = True
            else:
                listener.frames.append(frame)
            listener.news.set()

    async def run(self) -> None:
        """Send a status whenever there is another one, at most every ``LOOK_S``."""
        while True:
            await self._wanted.wait()
            self._look()
            for listener in self._listeners:
                listener.tell(self._frame)
            await trio.sleep(LOOK_S)
            if not self._listeners:
                self._wanted = trio.Event()

    def _look(self) -> None:
        """Put the status into words, if it may have changed."""
        stamp = self._stamp()
        if stamp != self._told or not self._frame:
            self._told, self._frame = stamp, frame_of("status", compact(self._status()))

    # ------------------------------------------------------------ one of those who listen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The route of the stream."""
        most = min(LISTENERS_MAX, int(LISTENERS_SHARE * connections_max()))
        if len(self._listeners) >= most:
            busy = JSONResponse({"error": f"{most} pages listen already"}, 503)
            await busy(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        self._look()
        listener = StreamListener()
        listener.tell(self._frame)
        self._listeners.add(listener)
        self._wanted.set()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_hang_up, receive, nursery.cancel_scope)
                await self._feed(listener, send)
                nursery.cancel_scope.cancel()
        finally:
            self._listeners.discard(listener)
        with trio.move_on_after(SEND_S):
            await send({"type": "http.response.body", "body": b""})

    async def _feed(self, listener: StreamListener, send: Send) -> None:
        body = b"retry: %d\n\n" % RETRY_MS + listener.take()
        while not listener.overrun:
            with trio.move_on_after(SEND_S) as in_time:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if in_time.cancelled_caught:
                return
            with trio.move_on_after(HEARTBEAT_S):
                await listener.news.wait()
            body = listener.take() or b": still here\n\n"


async def _hang_up(receive: Receive, scope: trio.CancelScope) -> None:
    """End when the other side has."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def frame_of(kind: str, body: bytes) -> bytes:
    """JSON has no line breaks, so it is one line of data."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), body)

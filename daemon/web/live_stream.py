"""A daemon's live stream: server-sent events, encoded once for all listeners.

    publish, publish_status --> Listener (a bounded queue each) --> GET /api/live

A slow listener delays no other one: only the newest status waits for it, and when too many other
frames wait, it is disconnected. Its browser reconnects and fetches what it has missed. Without
listeners nothing is encoded.
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
LISTENERS_SHARE = 0.5  # of HTTP's connections at most; the others are for requests
WAITING_MAX = 256  # frames that wait for a listener, besides the newest status
HEARTBEAT_S = 15.0  # without news: shows proxies and browsers that the daemon is there
LOOK_S = 1.0  # between two statuses
SEND_S = 30.0  # a listener that reads nothing for this long is disconnected
RETRY_MS = 2_000  # until a browser reconnects

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),  # else nginx buffers the events
]


@define(eq=False)
class StreamListener:
    """One listener, with what it has not been sent yet."""

    status: bytes = b""  # empty if the newest, ``known``, was sent
    known: bytes = b""
    frames: deque[bytes] = Factory(deque)
    overrun: bool = False
    news: trio.Event = Factory(trio.Event)

    def tell(self, status: bytes) -> None:
        """Queue a status, in place of one that still waits."""
        if status is not self.known:
            self.status = self.known = status
            self.news.set()

    def take(self) -> bytes:
        taken = b"".join(self.frames) + self.status
        self.status = b""
        self.frames.clear()
        self.news = trio.Event()
        return taken


class LiveStream:
    """The stream of one daemon; ``stamp`` changes whenever ``status`` may have changed."""

    def __init__(self, status: Callable[[], object], stamp: Callable[[], object]) -> None:
        self._status = status
        self._stamp = stamp
        self._listeners: set[StreamListener] = set()
        self._wanted = trio.Event()
        self._encoded: object = None  # the stamp of ``_frame``
        self._frame = b""  # the newest status, encoded

    def publish(self, kind: str, row: object) -> None:
        """Queue a row for all listeners; without any this has no effect."""
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
        """Queue each changed status for all listeners, at most every ``LOOK_S``."""
        while True:
            await self._wanted.wait()
            self._look()
            for listener in self._listeners:
                listener.tell(self._frame)
            await trio.sleep(LOOK_S)
            if not self._listeners:
                self._wanted = trio.Event()

    def _look(self) -> None:
        stamp = self._stamp()
        if stamp != self._encoded or not self._frame:
            self._encoded, self._frame = stamp, frame_of("status", compact(self._status()))

    # ------------------------------------------------------------ one listener

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        most = min(LISTENERS_MAX, int(LISTENERS_SHARE * connections_max()))
        if len(self._listeners) >= most:
            busy = JSONResponse({"error": f"{most} pages are connected already"}, 503)
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
    """Cancel the scope when the listener has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def frame_of(kind: str, body: bytes) -> bytes:
    """Encode an event; the JSON has no line breaks, so it is one line of data."""
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), body)

"""HTTP connections: each ends when its client has gone, and all of them leave room for the run's port.

    serve              one nursery, until cancelled
    └── _serve_one     one per connection: Hypercorn's ``TCPServer`` over a ``_Connection``

The run's port lives in the same process, so a descriptor that a browser holds is one that no peer gets.
Hypercorn parses HTTP and speaks ASGI; which connections there are is decided here. Left to itself its
trio worker keeps the descriptor of an idle client that has gone until ``keep_alive_timeout``, takes any
number of clients, and waits for ever for one that does not read.
"""

from __future__ import annotations

import logging
import resource
import socket
from typing import Any, cast

import trio
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import wrap_app
from starlette.types import ASGIApp, Receive, Scope, Send

CONNECTIONS_MAX = 128  # a browser opens up to six, a command one: twenty people and more
CONNECTIONS_MIN = 4  # a page and a command get through whatever the limit on descriptors is
DESCRIPTORS_SHARE = (
    0.25  # of the process's, at most for HTTP: the run's port and lanes have the rest
)
DESCRIPTORS_KEPT = (
    32  # HTTP takes none of the last ones that are free, whatever has taken the others
)
# Longer than clients keep an idle connection: else one is closed as the next request is on its way.
KEEP_ALIVE_S = 75.0
SEND_S = 30.0  # a client that takes nothing for so long is gone
SEND_BYTES = 65_536  # of an answer at a time, so that a slow client shows that it takes something

_log = logging.getLogger("holdfast.http")


def descriptors_max() -> float:
    """How many descriptors this process may have."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def connections_max() -> int:
    """How many HTTP connections a daemon holds, with the limit on descriptors that it has."""
    share = min(float(CONNECTIONS_MAX), DESCRIPTORS_SHARE * descriptors_max())
    return max(CONNECTIONS_MIN, int(share))


class _Connection:
    """One client's connection, in the shape that Hypercorn wants of a stream.

    Attributes:
      context: Hypercorn's, of this connection alone; it ends the idle timer when the client has gone.
      requests: how many are being answered now; none: the connection may yield.
      idle_since: by trio's clock.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.socket = stream.socket
        self.context = WorkerContext(None)
        self.requests = 0
        self.idle_since = trio.current_time()
        self._stream = stream

    def app(self, app: ASGIApp) -> ASGIApp:
        """The application, watched for whether this connection is idle."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            self.requests += 1
            try:
                await app(scope, receive, send)
            finally:
                self.requests -= 1
                self.idle_since = trio.current_time()

        return watched

    def close(self) -> None:
        """Give the descriptor back now; whoever uses the connection finds it closed."""
        self.socket.close()

    # ------------------------------------------------------------ what Hypercorn calls

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        received: bytes | bytearray = b""
        try:
            received = await self._stream.receive_some(max_bytes)
        finally:
            if not received:
                await self.context.terminated.set()
        return received

    async def send_all(self, data: bytes) -> None:
        """Hypercorn shields this from cancellation, so it must come to an end by itself."""
        left = memoryview(data)
        while left:
            with trio.move_on_after(SEND_S) as in_time:
                await self._stream.send_all(left[:SEND_BYTES])
            if in_time.cancelled_caught:
                self.close()
                raise trio.BrokenResourceError(f"the client took nothing for {SEND_S:.0f} s")
            left = left[SEND_BYTES:]

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()


class Connections:
    """All HTTP connections of a daemon."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open: set[_Connection] = set()
        self._config = Config()
        self._config.accesslog = None
        self._config.errorlog = logging.getLogger("holdfast.http")
        self._config.keep_alive_timeout = KEEP_ALIVE_S

    async def serve(self, listener: socket.socket) -> None:
        """Accept until cancelled; closes the listener."""
        accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
        async with trio.open_nursery() as nursery:
            try:
                await trio.serve_listeners(self._serve_one, [accepting], handler_nursery=nursery)
            finally:
                for connection in self._open:  # also those whose client does not read
                    connection.close()

    async def _serve_one(self, stream: trio.SocketStream) -> None:
        if not self._has_room(stream.socket.fileno()):
            _log.warning("%d HTTP connections are busy: no more are taken", len(self._open))
            return
        connection = _Connection(stream)
        self._open.add(connection)
        app = wrap_app(cast(Any, connection.app(self._app)), 0, "asgi")
        server = TCPServer(app, self._config, connection.context, {}, cast(Any, connection))
        try:
            await server.run()
        except Exception:  # noqa: BLE001 of Hypercorn's parsers; no client's bytes end the daemon
            _log.warning("an HTTP connection failed", exc_info=True)
        finally:
            self._open.discard(connection)
            connection.close()

    def _has_room(self, descriptor: int) -> bool:
        """Whether one more may stay; the one that has been idle for longest yields to it.

        Args:
          descriptor: its number. The kernel gives the lowest that is free, so all below are taken.
        """
        scarce = descriptor >= descriptors_max() - DESCRIPTORS_KEPT
        if not scarce and len(self._open) < connections_max():
            return True
        idle = [connection for connection in self._open if not connection.requests]
        if not idle:
            return False
        oldest = min(idle, key=lambda connection: connection.idle_since)
        self._open.discard(oldest)
        oldest.close()
        return True

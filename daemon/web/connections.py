"""HTTP connections of a daemon, limited in number so that the run's port keeps enough descriptors.

    serve              one nursery, until cancelled
    └── _serve_one     one per connection: Hypercorn's ``TCPServer`` over a ``_Connection``

The run's port is in the same process, so a descriptor that a browser holds is not available to a
peer. Hypercorn parses HTTP and speaks ASGI; this module manages the connections. Hypercorn's own
trio worker keeps the descriptor of a closed idle client until ``keep_alive_timeout``, takes any
number of clients, and waits forever for a client that does not read.
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

CONNECTIONS_MAX = 128  # for about twenty people: a browser opens up to six, a command one
CONNECTIONS_MIN = 4  # for a page and a command, whatever the limit on descriptors
DESCRIPTORS_SHARE = 0.25  # for HTTP at most; the run's port and lanes have the rest
DESCRIPTORS_KEPT = 32  # the last free descriptors, which HTTP never takes
# Longer than clients keep an idle connection, or it would be closed while a request is on its way.
KEEP_ALIVE_S = 75.0
SEND_S = 30.0  # a client that reads nothing for this long is disconnected
LINGER_S = 5.0  # after the last answer, for the client to send the rest of its request
SEND_BYTES = 65_536  # of an answer at a time, so that a slow client is seen to read

_log = logging.getLogger("holdfast.http")


def descriptors_max() -> float:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def connections_max() -> int:
    share = min(float(CONNECTIONS_MAX), DESCRIPTORS_SHARE * descriptors_max())
    return max(CONNECTIONS_MIN, int(share))


class _Connection:
    """One client's connection, with the interface that Hypercorn expects of a stream.

    Attributes:
      context: Hypercorn's context for this connection; it stops the idle timer when the client is
        gone.
      requests: the requests that are being answered now; at 0 the connection may be closed.
      idle_since: seconds on trio's clock.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self.socket = stream.socket
        self.context = WorkerContext(None)
        self.requests = 0
        self.idle_since = trio.current_time()
        self._stream = stream
        self._reader: trio.lowlevel.Task | None = None
        self._answered = False  # for the last time; what still comes is discarded

    def app(self, app: ASGIApp) -> ASGIApp:
        """Wrap the application to count this connection's requests."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            self.requests += 1
            try:
                await app(scope, receive, send)
            finally:
                self.requests -= 1
                self.idle_since = trio.current_time()

        return watched

    def close(self) -> None:
        """Close the descriptor now; later reads and writes fail."""
        self.socket.close()

    # ------------------------------------------------------------ Hypercorn's interface

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        received: bytes | bytearray = b""
        self._reader = trio.lowlevel.current_task()
        try:
            received = await self._stream.receive_some(max_bytes)
            if self._answered:
                received = b""
                while await self._stream.receive_some():
                    pass
        finally:
            if not received:
                await self.context.terminated.set()
        return received

    async def send_all(self, data: bytes) -> None:
        """Send within a time limit, because Hypercorn shields this from cancellation."""
        left = memoryview(data)
        while left:
            with trio.move_on_after(SEND_S) as in_time:
                await self._stream.send_all(left[:SEND_BYTES])
            if in_time.cancelled_caught:
                self.close()
                raise trio.BrokenResourceError(f"the client read nothing for {SEND_S:.0f} s")
            left = left[SEND_BYTES:]

    async def send_eof(self) -> None:
        """End the answer, and let the client end its request: a close before would be a reset."""
        await self._stream.send_eof()
        self._answered = True
        with trio.move_on_after(LINGER_S):
            if trio.lowlevel.current_task() is self._reader:
                await self.receive_some()
            else:
                await self.context.terminated.wait()

    async def aclose(self) -> None:
        await self._stream.aclose()


class Connections:
    """The HTTP connections of a daemon."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open: set[_Connection] = set()
        self._config = Config()
        self._config.accesslog = None
        self._config.errorlog = logging.getLogger("holdfast.http")
        self._config.keep_alive_timeout = KEEP_ALIVE_S

    async def serve(self, listener: socket.socket) -> None:
        accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
        async with trio.open_nursery() as nursery:
            try:
                await trio.serve_listeners(self._serve_one, [accepting], handler_nursery=nursery)
            finally:
                for connection in self._open:  # also those with a client that does not read
                    connection.close()

    async def _serve_one(self, stream: trio.SocketStream) -> None:
        if not self._has_room(stream.socket.fileno()):
            _log.warning("%d HTTP connections are busy: a new one was closed", len(self._open))
            return
        connection = _Connection(stream)
        self._open.add(connection)
        app = wrap_app(cast(Any, connection.app(self._app)), 0, "asgi")
        server = TCPServer(app, self._config, connection.context, {}, cast(Any, connection))
        try:
            await server.run()
        except Exception:  # noqa: BLE001 a bug in Hypercorn's parsers must not end the daemon
            _log.warning("an HTTP connection failed", exc_info=True)
        finally:
            self._open.discard(connection)
            connection.close()

    def _has_room(self, descriptor: int) -> bool:
        """Return whether a new connection may stay; close the longest idle one for it if needed."""
        # The kernel gives the lowest free number, so all below are in use.
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

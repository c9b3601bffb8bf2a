"""The HTTP side of a daemon: JSON about what it does, and the few actions its owner may take.

Reading needs no token, since it is bound to loopback unless told otherwise; whatever changes the
run needs the bearer token from the state directory. Served by Hypercorn's trio worker.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path

import hypercorn.config
import hypercorn.trio
import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..protocol.addresses import Address
from ..protocol.errors import UserError
from .exit_codes import ExitCode
from .places import Control, published

BODY_BYTES_MAX = 65_536  # of a request; actions are a handful of fields
BACKLOG_COUNT = 64
TOKEN_BYTES = 24
# Longer than clients keep an idle connection: else one is closed as the next request is on its way.
KEEP_ALIVE_S = 75.0

Json = dict[str, object]
Read = Callable[[], Json]
Action = Callable[[Json], Awaitable[Json]]


def make_app(*, token: str, reads: Mapping[str, Read], actions: Mapping[str, Action]) -> Starlette:
    """An application with ``GET /api/NAME`` per read and ``POST /api/NAME`` per action."""

    def read_route(name: str, read: Read) -> Route:
        async def answer(_request: Request) -> Response:
            return JSONResponse(read())

        return Route(f"/api/{name}", answer, methods=["GET"])

    def action_route(name: str, action: Action) -> Route:
        async def answer(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return JSONResponse(
                    {"error": "this needs the bearer token of the run's state directory"}, 401
                )
            body = await _body(request)
            if body is None:
                return JSONResponse({"error": "the body must be a small JSON object"}, 400)
            try:
                return JSONResponse(await action(body))
            except UserError as error:
                return JSONResponse(
                    {"error": str(error), "hint": error.hint, "exit_code": error.exit_code}, 422
                )

        return Route(f"/api/{name}", answer, methods=["POST"])

    async def healthz(_request: Request) -> Response:
        return JSONResponse({"ok": True})

    routes = [Route("/healthz", healthz)]
    routes += [read_route(name, read) for name, read in reads.items()]
    routes += [action_route(name, action) for name, action in actions.items()]
    return Starlette(routes=routes)


async def _body(request: Request) -> Json | None:
    raw = b""
    async with aclosing(request.stream()) as stream:
        async for part in stream:
            raw += part
            if len(raw) > BODY_BYTES_MAX:
                return None
    if not raw:
        return {}
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):  # the latter: deep nesting
        return None
    return value if isinstance(value, dict) else None


def bind_http(address: Address) -> tuple[socket.socket, str]:
    """A listening socket and its URL.

    Raises:
      UserError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server(
            (address.host, address.port), family=family, backlog=BACKLOG_COUNT
        )
    except OSError as error:
        raise UserError(
            f"cannot serve HTTP at {address}: {error.strerror}",
            exit_code=ExitCode.ADDRESS,
            hint="give another address with --http HOST:PORT (port 0 takes a free one)",
        ) from error
    host, port = listener.getsockname()[:2]
    return listener, f"http://{Address(host, port)}"


@contextlib.contextmanager
def control_side(
    kind: str,
    state: Path,
    address: Address,
    *,
    reads: Mapping[str, Read],
    actions: Mapping[str, Action],
) -> Iterator[tuple[Callable[[], Awaitable[None]], str]]:
    """Bind a daemon's HTTP side and let commands find it, with a bearer token made for this life.

    Yields:
      The task that serves it, and its URL.

    Raises:
      UserError: the address is taken or not ours.
    """
    listener, url = bind_http(address)
    token = secrets.token_urlsafe(TOKEN_BYTES)
    app = make_app(token=token, reads=reads, actions=actions)
    with listener, published(state, Control(kind, url, token, os.getpid())):
        yield partial(serve_http, app, listener), url


async def serve_http(app: Starlette, listener: socket.socket) -> None:
    """Serve until cancelled."""
    config = hypercorn.config.Config()
    config.bind = [f"fd://{listener.detach()}"]  # it closes the descriptor itself
    config.accesslog = None
    config.errorlog = logging.getLogger("holdfast.http")
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.graceful_timeout = 0.5
    config.shutdown_timeout = 1.0
    await hypercorn.trio.serve(app, config, shutdown_trigger=trio.sleep_forever, mode="asgi")  # type: ignore[arg-type]

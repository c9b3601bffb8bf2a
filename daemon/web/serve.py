"""A daemon's HTTP side as a process has it: its socket, its token, Hypercorn's trio worker."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import hypercorn.config
import hypercorn.trio
import trio
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ..exit_codes import ExitCode
from ..places import Control, published
from .app import Action, Read, make_app

BACKLOG_COUNT = 64
TOKEN_BYTES = 24
# Longer than clients keep an idle connection: else one is closed as the next request is on its way.
KEEP_ALIVE_S = 75.0


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
    why_unready: Callable[[], str],
    routes: Iterable[BaseRoute] = (),
) -> Iterator[tuple[Callable[[], Awaitable[None]], str]]:
    """Bind a daemon's HTTP side and let commands find it, with a bearer token made for this life.

    Yields:
      The task that serves it, and its URL.

    Raises:
      UserError: the address is taken or not ours.
    """
    listener, url = bind_http(address)
    token = secrets.token_urlsafe(TOKEN_BYTES)
    app = make_app(
        token=token, reads=reads, actions=actions, why_unready=why_unready, routes=routes
    )
    with listener, published(state, Control(kind, url, token, os.getpid())):
        yield partial(serve_http, app, listener), url


async def serve_http(app: ASGIApp, listener: socket.socket) -> None:
    """Serve until cancelled."""
    config = hypercorn.config.Config()
    config.bind = [f"fd://{listener.detach()}"]  # it closes the descriptor itself
    config.accesslog = None
    config.errorlog = logging.getLogger("holdfast.http")
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.graceful_timeout = 0.5
    config.shutdown_timeout = 1.0
    await hypercorn.trio.serve(app, config, shutdown_trigger=trio.sleep_forever, mode="asgi")  # type: ignore[arg-type]

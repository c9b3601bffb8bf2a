"""A daemon's HTTP server: its socket, its token and its published address."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from starlette.routing import BaseRoute

from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ..process.exit_codes import ExitCode
from ..process.paths import CONTROL_FILE, DaemonAddress, published
from .app import Action, PrivateRead, make_app
from .connections import Connections
from .host_names import HostNames
from .page_files import PAGES

BACKLOG_COUNT = 64
TOKEN_BYTES = 24


def bind_http(address: Address) -> tuple[socket.socket, str]:
    """Return a listening socket and its URL; raise UserError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server(
            (address.host, address.port), family=family, backlog=BACKLOG_COUNT
        )
    except OSError as error:
        raise UserError(
            f"cannot serve HTTP at {address}: {os.strerror(error.errno or errno.EINVAL)}",
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
    actions: Mapping[str, Action],
    private_reads: Mapping[str, PrivateRead] | None = None,
    why_unready: Callable[[], str],
    routes: Iterable[BaseRoute] = (),
    names: Iterable[str] = (),
    with_page: bool = True,
) -> Iterator[tuple[Callable[[], Awaitable[None]], str]]:
    """Bind a daemon's HTTP server and publish its address with a new bearer token.

    Yields:
      The task that serves it, and its URL.
    """
    listener, url = bind_http(address)
    token = secrets.token_urlsafe(TOKEN_BYTES)
    app = make_app(
        token=token,
        actions=actions,
        private_reads=private_reads,
        why_unready=why_unready,
        routes=routes,
        names=HostNames(address.host, names),
        pages=PAGES if with_page else None,
        token_file=(state / CONTROL_FILE).absolute(),
    )
    with listener, published(state, DaemonAddress(kind, url, token, os.getpid())):
        yield partial(Connections(app).serve, listener), url

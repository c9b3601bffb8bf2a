"""The HTTP application of a daemon: JSON, the page, and the operator's actions.

Reading needs no token: by default the daemon listens on loopback, and it answers to no foreign host
name. An action needs the bearer token from the state directory, and so does what a training script
has printed.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...protocol.errors import UserError
from ..advertised_hosts import is_loopback
from .api_description import api_description
from .host_names import HostNames, Named
from .json_answers import answer
from .page_files import PAGES, PageFiles

BODY_BYTES_MAX = 65_536  # of a request; actions have a few fields

# The page loads nothing from other hosts and runs no inline scripts, so a machine's name cannot
# inject one.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Json = dict[str, object]
Action = Callable[[Json], Awaitable[Json]]
PrivateRead = Callable[[Mapping[str, str]], Awaitable[Response]]  # from the query's parameters


def make_app(
    *,
    token: str,
    actions: Mapping[str, Action],
    private_reads: Mapping[str, PrivateRead] | None = None,
    why_unready: Callable[[], str] = str,
    routes: Iterable[BaseRoute] = (),
    pages: PageFiles | None = PAGES,
    names: HostNames | None = None,
    token_file: Path | None = None,
) -> ASGIApp:
    """Make an application with the page, and ``POST /api/NAME`` for each action.

    Args:
      private_reads: answer ``GET /api/NAME``, with the token only.
      why_unready: returns why the daemon cannot do its work now, or an empty string.
      token_file: the file that holds the token; its path is told to clients on this machine.
    """

    async def healthz(_request: Request) -> Response:
        return answer({"ok": True})

    async def readyz(_request: Request) -> Response:
        why = why_unready()
        return answer({"ready": not why, "why": why}, 503 if why else 200)

    async def token_place(request: Request) -> Response:
        here = request.client is not None and is_loopback(request.client.host)
        return answer({"path": str(token_file) if token_file is not None and here else None})

    async def description(_request: Request) -> Response:
        return answer(api_description())

    app = Starlette(
        routes=[
            Route("/healthz", healthz, methods=["GET"]),
            Route("/readyz", readyz, methods=["GET"]),
            Route("/api/openapi.json", description, methods=["GET"]),
            Route("/api/token-file", token_place, methods=["GET"]),
            *(() if pages is None else pages.routes()),
            *(_action_route(name, action, token) for name, action in actions.items()),
            *(_private_route(name, read, token) for name, read in (private_reads or {}).items()),
            *routes,
        ],
        exception_handlers={HTTPException: _refused, UserError: _failed},
    )
    return _Headed(Named(app, names or HostNames()))


class _Headed:
    """Middleware that sends ``HEADERS`` with every answer, including errors."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self.app(scope, receive, headed)


def read_route(name: str, read: Callable[[], object]) -> Route:
    """Make ``GET /api/NAME``, which answers with a record or plain JSON."""

    async def handle(_request: Request) -> Response:
        return answer(read())

    return Route(f"/api/{name}", handle, methods=["GET"])


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = answer({"error": error.detail}, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _failed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    return answer({"error": str(error), "hint": error.hint, "exit_code": error.exit_code}, 422)


def _private_route(name: str, read: PrivateRead, token: str) -> Route:
    async def handle(request: Request) -> Response:
        _check_token(request, token)
        return await read(request.query_params)

    return Route(f"/api/{name}", handle, methods=["GET"])


def _action_route(name: str, action: Action, token: str) -> Route:
    async def handle(request: Request) -> Response:
        _check_token(request, token)
        return answer(await action(await _body(request)))

    return Route(f"/api/{name}", handle, methods=["POST"])


def _check_token(request: Request, token: str) -> None:
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise HTTPException(401, "this needs the bearer token from the run's state directory")


async def _body(request: Request) -> Json:
    """Return the body of an action; none is an empty one."""
    raw = b""
    async with aclosing(request.stream()) as stream:
        async for part in stream:
            raw += part
            if len(raw) > BODY_BYTES_MAX:
                raise HTTPException(413, f"the body has more than {BODY_BYTES_MAX:,} bytes")
    try:
        value = json.loads(raw or "{}")
    except (ValueError, RecursionError):  # RecursionError: deep nesting
        value = None
    if not isinstance(value, dict):
        raise HTTPException(400, "the body must be a JSON object")
    return value

"""HTTP of a master that does not lead: it says why, and sends clients to the leader."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ..process.paths import STANDBY
from ..web.app import Json
from ..web.json_answers import answer
from ..web.prometheus import StandbyCollector, metrics_route


def standby_routes(
    why: Callable[[], str],
    facts: Callable[[], Json],
    page_elsewhere: Callable[[Request], str | None],
) -> Sequence[BaseRoute]:
    """Return the routes; ``page_elsewhere`` returns the leader's URL if the client can reach it."""

    async def front(request: Request) -> Response:
        if (url := page_elsewhere(request)) is not None:
            return RedirectResponse(url)
        text = html.escape(why())
        return HTMLResponse(
            "<!doctype html><meta"
            f" charset=utf-8><title>standby</title><h1>Standby</h1><p>{text}</p>"
        )

    async def status(_request: Request) -> Response:
        return answer({"kind": STANDBY, "state": STANDBY, "why_waiting": why(), **facts()})

    async def elsewhere(request: Request) -> Response:
        if (url := page_elsewhere(request)) is not None:
            return RedirectResponse(url)  # 307: an action stays one
        return answer({"error": why()}, 503)

    return [
        Route("/", front, methods=["GET"]),
        Route("/api/status", status, methods=["GET"]),
        metrics_route(StandbyCollector()),
        Route("/{rest:path}", elsewhere, methods=["GET", "POST"]),
    ]

"""``GET /api/logs``: the newest lines of a peer's own log, for who has the token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct
from starlette.responses import Response

from ..process.log_ring import LINES_KEPT_MAX, LogRing, PeerLog
from .app import PrivateRead
from .json_answers import answer
from .run_history import UnixTime, parse_query

LINES_DEFAULT = 100


class LogQuery(Struct, forbid_unknown_fields=True):
    """The parameters of a request: how many lines, and only those ``after`` a time."""

    lines: Annotated[int, Meta(ge=1, le=LINES_KEPT_MAX)] = LINES_DEFAULT
    after: UnixTime = 0.0


def log_reading(name: str, ring: LogRing) -> PrivateRead:
    async def read(given: Mapping[str, str]) -> Response:
        query = parse_query(given, LogQuery)
        return answer(PeerLog(name, tuple(ring.tail(query.lines, after=query.after))))

    return read

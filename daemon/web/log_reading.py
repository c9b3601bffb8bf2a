"""``GET /api/logs``: the newest lines of a peer's log, for who has the token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated

from attrs import frozen
from msgspec import Meta, Struct
from starlette.responses import Response

from ...membership.master.status.records import about
from ...protocol.messages import LOG_LINES_MAX, NAME_CHARS_MAX
from ..log_ring import LogLine, LogRing
from .app import PrivateRead
from .json_answers import answer
from .run_history import QueryError, UnixTime, parse_query

LINES_DEFAULT = 100


class LogQuery(Struct, forbid_unknown_fields=True):
    """The parameters of a request.

    Attributes:
      peer: name, or first digits of the id.
      after: only later lines.
    """

    peer: Annotated[str, Meta(max_length=NAME_CHARS_MAX)] = ""
    lines: Annotated[int, Meta(ge=1, le=LOG_LINES_MAX)] = LINES_DEFAULT
    after: UnixTime = 0.0


@frozen
class PeerLog:
    """The newest lines of a peer's log."""

    peer: Annotated[str, about("Its name.")]
    lines: Annotated[tuple[LogLine, ...], about("The oldest first.")]


class NoLogError(Exception):
    """A peer's log that cannot be had; the text is shown to people.

    Attributes:
      status: of the HTTP answer: 404 or 503.
    """

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def own_log(name: str, ring: LogRing) -> Callable[[LogQuery], Awaitable[PeerLog]]:
    """Make the ``fetch`` of a peer, which answers for itself, whatever its name in the query."""

    async def fetch(query: LogQuery) -> PeerLog:
        return PeerLog(name, tuple(ring.tail(query.lines, after=query.after)))

    return fetch


def log_reading(fetch: Callable[[LogQuery], Awaitable[PeerLog]]) -> PrivateRead:
    """Make the handler of the route.

    Args:
      fetch: returns the lines; raises NoLogError.
    """

    async def read(given: Mapping[str, str]) -> Response:
        try:
            return answer(await fetch(parse_query(given, LogQuery)))
        except QueryError as error:
            return answer({"error": str(error)}, 400)
        except NoLogError as error:
            return answer({"error": str(error)}, error.status)

    return read

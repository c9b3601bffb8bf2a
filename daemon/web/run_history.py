"""HTTP routes for a run's status, curve, rounds and events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar

import attrs
import msgspec
import trio
from msgspec import Meta, Struct, field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...membership.master.state.master_effects import EventKind
from ...protocol.network.interface import Network
from ..answer_limits import EVENTS_ANSWER_MAX, ROUNDS_ANSWER_MAX
from ..metrics_store import MetricsStore, as_columns
from ..status_records import MasterStatus, PeerStatus
from .json_answers import answer

POINTS_MIN, POINTS_MAX, POINTS_DEFAULT = 10, 5_000, 600
ROUNDS_DEFAULT = 50
EVENTS_DEFAULT = 200
EVENT_KINDS = tuple(kind.value for kind in EventKind)
TEXT_CHARS_MAX = 200  # of a search text
READERS_MAX = 4  # queries at once; further ones wait, the run never does
AT_MAX = 1e11  # unix seconds: the year 5138
COUNT_MAX = 2**53  # the largest exact integer in JavaScript


Count = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
UnixTime = Annotated[float, Meta(ge=0, le=AT_MAX)]
Q = TypeVar("Q", bound=Struct)


class StatusQuery(Struct, forbid_unknown_fields=True):
    past: Annotated[int, Meta(ge=0, le=1)] = 1


class HistoryQuery(Struct, forbid_unknown_fields=True):
    points: Annotated[int, Meta(ge=POINTS_MIN, le=POINTS_MAX)] = POINTS_DEFAULT
    from_at: UnixTime | None = field(name="from", default=None)
    to_at: UnixTime | None = field(name="to", default=None)


class RoundsQuery(Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=ROUNDS_ANSWER_MAX)] = ROUNDS_DEFAULT
    before: Count | None = None


class EventsQuery(Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=EVENTS_ANSWER_MAX)] = EVENTS_DEFAULT
    before: Count | None = None
    kind: str = ""
    text: Annotated[str, Meta(max_length=TEXT_CHARS_MAX)] = ""

    @property
    def kinds(self) -> list[str]:
        """Return the wanted kinds, or nothing for all; raise QueryError for an unknown one."""
        kinds = [word for word in self.kind.split(",") if word]
        for unknown in set(kinds).difference(EVENT_KINDS):
            raise QueryError(f"no such kind: {unknown!r}; there are {', '.join(EVENT_KINDS)}")
        return kinds


class QueryError(ValueError):
    """An invalid query; the text is shown to people."""


def parse_query(given: Mapping[str, str], kind: type[Q]) -> Q:
    """Return the query parameters of a request; raises QueryError if one is invalid."""
    try:
        return msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as error:
        raise QueryError(str(error).replace("`$.", "`")) from error


def status_route(status: Callable[[bool], MasterStatus | PeerStatus]) -> Route:
    """Make the route ``GET /api/status``.

    Args:
      status: returns the status; called with whether ended rounds and events are wanted.
    """

    async def handle(request: Request) -> Response:
        try:
            past = parse_query(request.query_params, StatusQuery).past
        except QueryError as error:
            return answer({"error": str(error)}, 400)
        return answer(status(bool(past)))

    return Route("/api/status", handle, methods=["GET"])


def past_routes(history: MetricsStore, network: Network) -> list[Route]:
    """Make the routes that read the history, in a few threads of their own."""
    readers = trio.CapacityLimiter(READERS_MAX)

    def route(name: str, kind: type[Q], ask: Callable[[Q], Response]) -> Route:
        async def handle(request: Request) -> Response:
            try:
                query = parse_query(request.query_params, kind)
                return await network.run_sync(lambda: ask(query), readers)
            except QueryError as error:
                return answer({"error": str(error)}, 400)

        return Route(f"/api/{name}", handle, methods=["GET"])

    def points(query: HistoryQuery) -> Response:
        columns = as_columns(history.points(query.points, query.from_at, query.to_at))
        at = columns["at"]
        return answer(
            {"columns": columns, "from": at[0] if at else None, "to": at[-1] if at else None}
        )

    def rounds(query: RoundsQuery) -> Response:
        rows = b",".join(history.rounds(query.limit, query.before))  # they are JSON already
        return Response(b'{"rounds":[%s]}' % rows, media_type="application/json")

    def events(query: EventsQuery) -> Response:
        found = history.events(query.limit, query.before, query.kinds, query.text)
        return answer({"events": [attrs.asdict(event) for event in found]})

    return [
        route("history", HistoryQuery, points),
        route("rounds", RoundsQuery, rounds),
        route("events", EventsQuery, events),
    ]

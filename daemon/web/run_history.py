"""HTTP routes for a run's status, curves, rounds and events, and for a peer's own log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar

import attrs
import msgspec
import trio
from msgspec import Meta, Struct, field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...membership.shared.event_kind import EventKind
from ...protocol.network.interface import Network
from ..curves import EVERYBODY, LINE_COLUMNS, as_columns, member_columns
from ..metrics_store import MetricsStore
from ..process.log_ring import LINES_KEPT_MAX, LogRing, PeerLog
from ..status_records import EVENTS_ANSWER_MAX, ROUNDS_ANSWER_MAX, MasterStatus, PeerStatus
from .app import PrivateRead
from .json_answers import answer

POINTS_MIN, POINTS_MAX, POINTS_DEFAULT = 10, 5_000, 600
LINE_POINTS_DEFAULT = 200
ROUNDS_DEFAULT = 50
EVENTS_DEFAULT = 200
LINES_DEFAULT = 100  # of a peer's own log
EVENT_KINDS = tuple(kind.value for kind in EventKind)
TEXT_CHARS_MAX = 200  # of a search text
READERS_MAX = 4  # queries at once; further ones wait, the run never does
AT_MAX = 1e11  # unix seconds: the year 5138
COUNT_MAX = 2**53  # the largest exact integer in JavaScript


Count = Annotated[int, Meta(ge=1, le=COUNT_MAX)]
UnixTime = Annotated[float, Meta(ge=0, le=AT_MAX)]
PointCount = Annotated[int, Meta(ge=POINTS_MIN, le=POINTS_MAX)]
Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
Q = TypeVar("Q", bound=Struct)


class StatusQuery(Struct, forbid_unknown_fields=True):
    past: Annotated[int, Meta(ge=0, le=1)] = 1


class HistoryQuery(Struct, forbid_unknown_fields=True):
    points: PointCount = POINTS_DEFAULT
    from_at: UnixTime | None = field(name="from", default=None)
    to_at: UnixTime | None = field(name="to", default=None)


class MemberQuery(HistoryQuery, forbid_unknown_fields=True):
    peer: Text = ""


class LinesQuery(HistoryQuery, forbid_unknown_fields=True):
    points: PointCount = LINE_POINTS_DEFAULT
    figure: Text = ""
    column: Text = ""

    @property
    def of(self) -> str:
        """Return the figure or the column; raise QueryError unless there is one of the two."""
        if bool(self.figure) == bool(self.column) or self.column not in ("", *LINE_COLUMNS):
            raise QueryError(f"give figure=NAME, or one column of {', '.join(LINE_COLUMNS)}")
        return self.figure or self.column


class RoundsQuery(Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=ROUNDS_ANSWER_MAX)] = ROUNDS_DEFAULT
    before: Count | None = None


class EventsQuery(Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=EVENTS_ANSWER_MAX)] = EVENTS_DEFAULT
    before: Count | None = None
    kind: str = ""
    text: Text = ""
    peer: Text = ""

    @property
    def kinds(self) -> list[str]:
        """Return the wanted kinds, or nothing for all; raise QueryError for an unknown one."""
        kinds = [word for word in self.kind.split(",") if word]
        for unknown in set(kinds).difference(EVENT_KINDS):
            raise QueryError(f"no such kind: {unknown!r}; there are {', '.join(EVENT_KINDS)}")
        return kinds


class QueryError(HTTPException):
    """An invalid query; the text is shown to people."""

    def __init__(self, text: str) -> None:
        super().__init__(400, text)


def parse_query(given: Mapping[str, str], kind: type[Q]) -> Q:
    """Return the query parameters of a request; raises QueryError if one is invalid."""
    try:
        return msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as error:
        raise QueryError(str(error).replace("`$.", "`")) from error


def status_route(status: Callable[[bool], MasterStatus | PeerStatus]) -> Route:
    """Make ``GET /api/status``; ``status`` is told whether ended rounds and events are wanted."""

    async def handle(request: Request) -> Response:
        return answer(status(bool(parse_query(request.query_params, StatusQuery).past)))

    return Route("/api/status", handle, methods=["GET"])


class _Readers:
    """Routes whose answers are read from the history, in a few threads of their own."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._limiter = trio.CapacityLimiter(READERS_MAX)

    def route(self, name: str, kind: type[Q], ask: Callable[[Q], Response]) -> Route:
        """Make the route ``GET /api/NAME``; ``kind`` are its parameters."""

        async def handle(request: Request) -> Response:
            query = parse_query(request.query_params, kind)
            return await self._network.run_sync(lambda: ask(query), self._limiter)

        return Route(f"/api/{name}", handle, methods=["GET"])


def _member_answer(history: MetricsStore, query: HistoryQuery, found: tuple[str, str]) -> Response:
    peer, name = found
    rows = history.member_points(peer, query.points, query.from_at, query.to_at)
    columns, figures = member_columns(rows)
    return answer({"peer": peer, "name": name, "columns": columns, "figures": figures})


def own_routes(history: MetricsStore, network: Network, me: tuple[str, str]) -> list[Route]:
    """Make a peer's ``GET /api/member``, which answers as its master does about this peer."""

    def member(query: HistoryQuery) -> Response:
        return _member_answer(history, query, me)

    return [_Readers(network).route("member", HistoryQuery, member)]


def past_routes(history: MetricsStore, network: Network) -> list[Route]:
    readers = _Readers(network)

    def points(query: HistoryQuery) -> Response:
        columns = as_columns(history.points(query.points, query.from_at, query.to_at))
        at = columns["at"]
        return answer(
            {
                "columns": columns,
                "from": at[0] if at else None,
                "to": at[-1] if at else None,
                "figures": history.figures(),
            }
        )

    def member(query: MemberQuery) -> Response:
        found = history.member(query.peer)
        if found is None:
            raise HTTPException(404, f"the history has no member {query.peer!r}")
        return _member_answer(history, query, found)

    def lines(query: LinesQuery) -> Response:
        found, left_out = history.lines(
            query.of, query.points, query.from_at, query.to_at, figure=bool(query.figure)
        )
        rows = [attrs.asdict(line) for line in found]
        mean = rows.pop(0) if rows and rows[0]["peer"] == EVERYBODY else None
        return answer({"of": query.of, "mean": mean, "lines": rows, "left_out": left_out})

    def rounds(query: RoundsQuery) -> Response:
        rows = b",".join(history.rounds(query.limit, query.before))  # they are JSON already
        return Response(b'{"rounds":[%s]}' % rows, media_type="application/json")

    def events(query: EventsQuery) -> Response:
        found = history.events(query.limit, query.before, query.kinds, query.text, query.peer)
        return answer({"events": [attrs.asdict(event) for event in found]})

    return [
        readers.route("history", HistoryQuery, points),
        readers.route("rounds", RoundsQuery, rounds),
        readers.route("events", EventsQuery, events),
        readers.route("member", MemberQuery, member),
        readers.route("lines", LinesQuery, lines),
    ]


class LogQuery(Struct, forbid_unknown_fields=True):
    """The parameters of a request: how many lines, and only those ``after`` a time."""

    lines: Annotated[int, Meta(ge=1, le=LINES_KEPT_MAX)] = LINES_DEFAULT
    after: UnixTime = 0.0


def log_reading(name: str, ring: LogRing) -> PrivateRead:
    """Make the answer of ``GET /api/logs``: the newest lines of a peer's own log."""

    async def read(given: Mapping[str, str]) -> Response:
        query = parse_query(given, LogQuery)
        return answer(PeerLog(name, tuple(ring.tail(query.lines, after=query.after))))

    return read

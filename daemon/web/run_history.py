"""HTTP routes for a run's status, curves, rounds and events."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import attrs
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...membership.master.state.master_effects import EventKind
from ...protocol.network.interface import Network
from ..answer_limits import EVENTS_ANSWER_MAX, ROUNDS_ANSWER_MAX
from ..member_curves import EVERYBODY, LINE_COLUMNS, member_columns
from ..metrics_store import MetricsStore, as_columns
from ..status_records import MasterStatus, PeerStatus
from .json_answers import answer

POINTS_MIN, POINTS_MAX, POINTS_DEFAULT = 10, 5_000, 600
LINE_POINTS_DEFAULT = 200
ROUNDS_DEFAULT = 50
EVENTS_DEFAULT = 200
EVENT_KINDS = tuple(kind.value for kind in EventKind)
TEXT_CHARS_MAX = 200  # of a search text
READERS_MAX = 4  # queries at once; further ones wait, the run never does
AT_MAX = 1e11  # unix seconds: the year 5138
COUNT_MAX = 2**53  # the largest exact integer in JavaScript
DIGITS_MAX = 16  # of a number


class QueryError(ValueError):
    """An invalid query; the text is shown to people."""


class Query:
    """The query parameters of a request.

    Raises:
      QueryError: from every method, for an invalid value.
    """

    def __init__(self, given: Mapping[str, str], known: tuple[str, ...]) -> None:
        unknown = [name for name in given if name not in known]
        if unknown:
            raise QueryError(f"no such parameter: {unknown[0]!r}; there are {', '.join(known)}")
        self._given = given

    def count(self, name: str, default: int, lowest: int, highest: int) -> int:
        text = self._given.get(name)
        if text is None:
            return default
        if not text.isdecimal() or len(text) > DIGITS_MAX or not lowest <= int(text) <= highest:
            raise QueryError(f"{name} must be a number from {lowest} to {highest}")
        return int(text)

    def before(self) -> int | None:
        return self.count("before", 0, 1, COUNT_MAX) or None

    def time(self, name: str) -> float | None:
        text = self._given.get(name)
        if text is None:
            return None
        try:
            at = float(text)
        except ValueError:
            at = math.nan
        if not 0.0 <= at <= AT_MAX:
            raise QueryError(f"{name} must be a time in unix seconds")
        return at

    def text(self, name: str) -> str:
        text = self._given.get(name, "")
        if len(text) > TEXT_CHARS_MAX:
            raise QueryError(f"{name} must have at most {TEXT_CHARS_MAX} characters")
        return text

    def words(self, name: str, known: Sequence[str]) -> list[str]:
        """Return the known words of a comma-separated list; an empty list if there is none."""
        words = [word for word in self.text(name).split(",") if word]
        unknown = [word for word in words if word not in known]
        if unknown:
            raise QueryError(f"no such {name}: {unknown[0]!r}; there are {', '.join(known)}")
        return words


def status_route(status: Callable[[bool], MasterStatus | PeerStatus]) -> Route:
    """Make the route ``GET /api/status``.

    Args:
      status: returns the status; called with whether ended rounds and events are wanted.
    """

    async def handle(request: Request) -> Response:
        try:
            past = Query(request.query_params, ("past",)).count("past", 1, 0, 1)
        except QueryError as error:
            return answer({"error": str(error)}, 400)
        return answer(status(bool(past)))

    return Route("/api/status", handle, methods=["GET"])


class _Readers:
    """Routes whose answers are read from the history, in a few threads of their own."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._limiter = trio.CapacityLimiter(READERS_MAX)

    def route(self, name: str, known: tuple[str, ...], ask: Callable[[Query], Response]) -> Route:
        """Make the route ``GET /api/NAME``; ``known`` are its parameters."""

        async def handle(request: Request) -> Response:
            try:
                query = Query(request.query_params, known)
                return await self._network.run_sync(lambda: ask(query), self._limiter)
            except QueryError as error:
                return answer({"error": str(error)}, 400)

        return Route(f"/api/{name}", handle, methods=["GET"])


def _member_answer(history: MetricsStore, query: Query, found: tuple[str, str]) -> Response:
    peer, name = found
    count = query.count("points", POINTS_DEFAULT, POINTS_MIN, POINTS_MAX)
    rows = history.member_points(peer, count, query.time("from"), query.time("to"))
    columns, figures = member_columns(rows)
    return answer({"peer": peer, "name": name, "columns": columns, "figures": figures})


def own_routes(history: MetricsStore, network: Network, me: tuple[str, str]) -> list[Route]:
    """Make a peer's route ``GET /api/member``, whose answer is that of the master about this peer.

    Args:
      me: this peer's id and name.
    """

    def member(query: Query) -> Response:
        return _member_answer(history, query, me)

    return [_Readers(network).route("member", ("points", "from", "to"), member)]


def past_routes(history: MetricsStore, network: Network) -> list[Route]:
    """Make the routes that read the history."""
    route = _Readers(network).route

    def points(query: Query) -> Response:
        count = query.count("points", POINTS_DEFAULT, POINTS_MIN, POINTS_MAX)
        from_at, to_at = query.time("from"), query.time("to")
        columns = as_columns(history.points(count, from_at, to_at))
        at = columns["at"]
        return answer(
            {
                "columns": columns,
                "from": at[0] if at else None,
                "to": at[-1] if at else None,
                "figures": history.figures(),
            }
        )

    def member(query: Query) -> Response:
        wanted = query.text("peer")
        found = history.member(wanted)
        if found is None:
            return answer({"error": f"the history has no member {wanted!r}"}, 404)
        return _member_answer(history, query, found)

    def lines(query: Query) -> Response:
        figure, columns = query.text("figure"), query.words("column", LINE_COLUMNS)
        if bool(figure) == bool(columns) or len(columns) > 1:
            raise QueryError(f"give figure=NAME, or one column of {', '.join(LINE_COLUMNS)}")
        count = query.count("points", LINE_POINTS_DEFAULT, POINTS_MIN, POINTS_MAX)
        of = figure or columns[0]
        found, left_out = history.lines(
            of, count, query.time("from"), query.time("to"), figure=bool(figure)
        )
        rows = [attrs.asdict(line) for line in found]
        mean = rows.pop(0) if rows and rows[0]["peer"] == EVERYBODY else None
        return answer({"of": of, "mean": mean, "lines": rows, "left_out": left_out})

    def rounds(query: Query) -> Response:
        count = query.count("limit", ROUNDS_DEFAULT, 1, ROUNDS_ANSWER_MAX)
        rows = b",".join(history.rounds(count, query.before()))  # they are JSON already
        return Response(b'{"rounds":[%s]}' % rows, media_type="application/json")

    def events(query: Query) -> Response:
        count = query.count("limit", EVENTS_DEFAULT, 1, EVENTS_ANSWER_MAX)
        kinds = query.words("kind", EVENT_KINDS)
        found = history.events(count, query.before(), kinds, query.text("text"), query.text("peer"))
        return answer({"events": [attrs.asdict(event) for event in found]})

    return [
        route("history", ("points", "from", "to"), points),
        route("rounds", ("limit", "before"), rounds),
        route("events", ("limit", "before", "kind", "text", "peer"), events),
        route("member", ("peer", "points", "from", "to"), member),
        route("lines", ("figure", "column", "points", "from", "to"), lines),
    ]

"""The commands' client of the HTTP API of a daemon on this machine.

The current state of a run comes from ``GET /api/status``, its past from the master's history. Rows have
the shape that the commands print with ``--json``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attrs import define, field, frozen

from ...protocol.errors import UserError
from ...protocol.text import escaped
from ..answer_limits import EVENTS_ANSWER_MAX, ROUNDS_ANSWER_MAX
from ..exit_codes import ExitCode
from ..metrics_store import PastEvent
from ..paths import DaemonAddress, find_control
from ..status_records import MasterStatus, PeerStatus, PendingRow, ShownRound, read

if TYPE_CHECKING:
    import httpx

HTTP_S = 10.0  # a local daemon answers at once or not at all
LOOK_S = 1.0  # between two polls
LOOK_HTTP_S = 2.0  # timeout of a poll; a key press waits as long
ROUNDS_SEEN = 20  # most recent rounds that a poller keeps
ROUNDS_PAGE = 5  # rounds per request; the next page follows if all of these are new
EVENTS_SEEN = 100

Json = dict[str, Any]
Status = MasterStatus | PeerStatus
T = TypeVar("T")


def call(
    control: DaemonAddress,
    name: str,
    body: Mapping[str, object] | None,
    *,
    query: Mapping[str, str | int] | None = None,
    timeout_s: float = HTTP_S,
) -> Json:
    """Send a request to a local daemon and return its answer: a GET without ``body``, else a POST.

    Raises:
      UserError: the daemon does not answer, or answers with an error.
    """
    import httpx  # takes a tenth of a second, which only the commands that send requests need

    try:
        if body is None:
            response = _client().get(f"{control.url}/api/{name}", params=query, timeout=timeout_s)
        else:
            response = _client().post(
                f"{control.url}/api/{name}",
                json=dict(body),
                headers={"authorization": f"Bearer {control.token}"},
                timeout=timeout_s,
            )
        answer = _escaped(response.json())
    except (httpx.HTTPError, ValueError) as error:
        raise UserError(
            f"the {control.kind} at {control.url} does not answer: {error}",
            exit_code=ExitCode.UNREACHABLE,
        ) from error
    if response.status_code != 200:
        raise UserError(
            str(answer.get("error", response.text)),
            exit_code=int(answer.get("exit_code", ExitCode.FAILED)),
            hint=str(answer.get("hint", "")),
        )
    result: Json = answer
    return result


@functools.cache
def _client() -> httpx.Client:
    """Return the command's one HTTP client, so that repeated polls share a connection.

    The client ignores proxy variables of the environment: the daemon is on this machine.
    """
    import httpx

    return httpx.Client(trust_env=False)


def _escaped(value: Any) -> Any:
    """Escape all texts of an answer for printing: an older version's journal may hold any characters."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    if isinstance(value, dict):
        return {escaped(key): _escaped(each) for key, each in value.items()}
    return value


class Poller(Generic[T]):
    """Repeated requests to one daemon, which may be restarted in between.

    Args:
      see: the request to make at each poll.

    Attributes:
      control: the daemon found by the last poll.
      away_since: time of the first unanswered poll, by ``time.monotonic``; None while it answers.
    """

    def __init__(
        self, state: Path | None, kind: str | None, see: Callable[[DaemonAddress], T]
    ) -> None:
        self._state = state
        self._see = see
        self.control = find_control(state, kind)
        self.away_since: float | None = None

    def look(self) -> T | None:
        """Poll once; return the snapshot, or None if the daemon does not answer."""
        try:
            self.control = find_control(self._state, self.control.kind)
            seen = self._see(self.control)
        except UserError:
            if self.away_since is None:
                self.away_since = time.monotonic()
            return None
        self.away_since = None
        return seen


def see_json(control: DaemonAddress) -> Json:
    """Return the present status as JSON, for a ``Poller``."""
    return call(control, "status", None, query={"past": 0}, timeout_s=LOOK_HTTP_S)


def read_status(answer: Json) -> Status:
    """Return a status as a record.

    Raises:
      UserError: it is of another version of holdfast.
    """
    if answer.get("kind") == "master":
        return read(answer, MasterStatus)
    return read(answer, PeerStatus)


def status_of_master(control: DaemonAddress) -> MasterStatus:
    """Return the present status of a master."""
    return read(call(control, "status", None, query={"past": 0}), MasterStatus)


@frozen
class Snapshot:
    """A daemon's state at one poll.

    Attributes:
      rounds: recent finished rounds, the newest first; empty for a peer.
      events: recent events, the oldest first; empty for a peer.
    """

    status: Status
    rounds: Sequence[ShownRound] = ()
    events: Sequence[PastEvent] = ()


@define
class RunSnapshot:
    """The request of ``watch``. It keeps the rounds, which are large and constant, between polls."""

    _rounds: list[ShownRound] = field(factory=list)

    def __call__(self, control: DaemonAddress) -> Snapshot:
        status = read_status(see_json(control))
        if control.kind != "master":
            return Snapshot(status)
        self._see_rounds(control)
        events = events_of(control, EVENTS_SEEN, timeout_s=LOOK_HTTP_S)
        return Snapshot(status, self._rounds, events)

    def _see_rounds(self, control: DaemonAddress) -> None:
        known = set(map(key_of, self._rounds))
        fresh: list[ShownRound] = []
        while len(fresh) < ROUNDS_SEEN:
            before = fresh[-1].round if fresh else None
            page = rounds_of(control, ROUNDS_PAGE, before=before, timeout_s=LOOK_HTTP_S)
            new = [row for row in page if key_of(row) not in known]
            fresh += new
            if len(new) < ROUNDS_PAGE:
                break
        self._rounds = [*fresh, *self._rounds][:ROUNDS_SEEN]


Row = TypeVar("Row", ShownRound, PastEvent)


def key_of(row: ShownRound | PastEvent) -> tuple[int, float]:
    """Return a key that no other round or event has, though numbers may begin again."""
    return row.id if isinstance(row, PastEvent) else row.round, row.at


class NewRows:
    """A filter for the rows that the previous poll did not return."""

    def __init__(self) -> None:
        self._known: set[tuple[int, float]] = set()

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Return the new rows, in the order given."""
        new = [row for row in rows if key_of(row) not in self._known]
        self._known = set(map(key_of, rows))
        return new


# ---------------------------------------------------------------- rows


def format_pending(row: PendingRow) -> str:
    """Return a line about a newcomer that waits for approval: what is known of it before what it claims."""
    role = f"{row.role} and founder" if row.founder else row.role
    return (
        f"{row.peer[:8]} at {row.host} asks to join as {role}, for {row.waits_s:.0f} s "
        f"(`holdfast approve {row.peer[:8]}`); it calls itself {row.name!r}"
    )


def rounds_of(
    control: DaemonAddress, limit: int, *, before: int | None = None, timeout_s: float = HTTP_S
) -> list[ShownRound]:
    """Fetch the finished rounds with the names of their contributors, the newest first."""
    rows: list[ShownRound] = []
    while len(rows) < limit:
        query: dict[str, str | int] = {"limit": min(limit - len(rows), ROUNDS_ANSWER_MAX)}
        if before is not None:
            query["before"] = before
        page = call(control, "rounds", None, query=query, timeout_s=timeout_s)["rounds"]
        rows += map(shown_round, page)
        if len(page) < int(query["limit"]):
            break
        before = page[-1]["round"]
    return rows


def shown_round(answer: Json) -> ShownRound:
    """Return a recorded round with names beside the ids."""
    names = {peer: mark["name"] for peer, mark in answer["marks"].items()}
    opened_at = answer["opened_at"]
    more = {
        "at": answer["ended_at"] if opened_at is None else opened_at,
        "names": [names.get(c["peer"], c["peer"][:8]) for c in answer["contributors"]],
        "lost_names": [names.get(peer, peer[:8]) for peer in answer["lost"]],
    }
    return read({**answer, **more}, ShownRound)


def events_of(
    control: DaemonAddress,
    limit: int,
    *,
    kinds: Sequence[str] = (),
    text: str = "",
    peer: str = "",
    timeout_s: float = HTTP_S,
) -> list[PastEvent]:
    """Fetch the latest events that match the filter, the oldest first; ``at`` is Unix time.

    Args:
      peer: the peer's name, or the first digits of its id.
    """
    rows: list[PastEvent] = []
    query: dict[str, str | int] = {"kind": ",".join(kinds), "text": text}
    while len(rows) < limit:
        count = EVENTS_ANSWER_MAX if peer else min(limit - len(rows), EVENTS_ANSWER_MAX)
        query["limit"] = count
        answer = call(control, "events", None, query=query, timeout_s=timeout_s)
        page = read(answer["events"], list[PastEvent])
        rows += [row for row in page if not peer or is_of(row, peer)]
        if len(page) < count:
            break
        query["before"] = page[-1].id
    return rows[:limit][::-1]


def is_of(event: PastEvent, peer: str) -> bool:
    """Return whether an event is about a peer, given by its name or the beginning of its id."""
    return event.name == peer or (event.peer or "").startswith(peer)

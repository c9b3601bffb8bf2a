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
from ..paths import DaemonAddress, find_control

if TYPE_CHECKING:
    import httpx

HTTP_S = 10.0  # a local daemon answers at once or not at all
LOOK_S = 1.0  # between two polls
LOOK_HTTP_S = 2.0  # timeout of a poll; a key press waits as long
ROUNDS_SEEN = 20  # most recent rounds that a poller keeps
ROUNDS_PAGE = 5  # rounds per request; the next page follows if all of these are new
EVENTS_SEEN = 100

Status = dict[str, Any]
T = TypeVar("T")


def call(
    control: DaemonAddress,
    name: str,
    body: Mapping[str, object] | None,
    *,
    query: Mapping[str, str | int] | None = None,
    timeout_s: float = HTTP_S,
) -> dict[str, Any]:
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
    result: dict[str, Any] = answer
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


def see_status(control: DaemonAddress) -> Status:
    """Fetch a daemon's current status, as a request for ``Poller``."""
    return call(control, "status", None, query={"past": 0}, timeout_s=LOOK_HTTP_S)


@frozen
class Snapshot:
    """A daemon's state at one poll.

    Attributes:
      rounds: recent finished rounds, the newest first; empty for a peer.
      events: recent events, the oldest first; empty for a peer.
    """

    status: Status
    rounds: Sequence[Status] = ()
    events: Sequence[Status] = ()


@define
class RunSnapshot:
    """The request of ``watch``. It keeps the rounds, which are large and constant, between polls."""

    _rounds: list[Status] = field(factory=list)

    def __call__(self, control: DaemonAddress) -> Snapshot:
        status = see_status(control)
        if control.kind != "master":
            return Snapshot(status)
        self._see_rounds(control)
        events = events_of(control, EVENTS_SEEN, timeout_s=LOOK_HTTP_S)
        return Snapshot(status, self._rounds, events)

    def _see_rounds(self, control: DaemonAddress) -> None:
        known = set(map(key_of, self._rounds))
        fresh: list[Status] = []
        while len(fresh) < ROUNDS_SEEN:
            before = fresh[-1]["round"] if fresh else None
            page = rounds_of(control, ROUNDS_PAGE, before=before, timeout_s=LOOK_HTTP_S)
            new = [row for row in page if key_of(row) not in known]
            fresh += new
            if len(new) < ROUNDS_PAGE:
                break
        self._rounds = [*fresh, *self._rounds][:ROUNDS_SEEN]


def key_of(row: Status) -> tuple[int, float]:
    """Return the unique key of a round or event row, even if numbering restarted."""
    number: int = row["id"] if "id" in row else row["round"]
    return number, row["at"]


class NewRows:
    """A filter for the rows that the previous poll did not return."""

    def __init__(self) -> None:
        self._known: set[tuple[int, float]] = set()

    def of(self, rows: Sequence[Status]) -> list[Status]:
        """Return the new rows, in the order given."""
        new = [row for row in rows if key_of(row) not in self._known]
        self._known = set(map(key_of, rows))
        return new


# ---------------------------------------------------------------- rows


def member_rows(status: Status, *, gone: bool) -> list[Status]:
    """Return the members by number, or with ``gone`` the departed peers, the latest first."""
    return list(reversed(status["departed"])) if gone else list(status["members"])


def format_pending(row: Status) -> str:
    """Format a peer that waits for approval as one line; its self-chosen name comes last."""
    role = f"{row['role']} and founder" if row["founder"] else row["role"]
    return (
        f"{row['peer'][:8]} at {row['host']} waits for approval as {role}, for {row['waits_s']:.0f} s "
        f"(`holdfast approve {row['peer'][:8]}`); it calls itself {row['name']!r}"
    )


def rounds_of(
    control: DaemonAddress, limit: int, *, before: int | None = None, timeout_s: float = HTTP_S
) -> list[Status]:
    """Fetch the finished rounds with the names of their contributors, the newest first."""
    rows: list[Status] = []
    while len(rows) < limit:
        query: dict[str, str | int] = {"limit": min(limit - len(rows), ROUNDS_ANSWER_MAX)}
        if before is not None:
            query["before"] = before
        page = call(control, "rounds", None, query=query, timeout_s=timeout_s)["rounds"]
        rows += map(round_row, page)
        if len(page) < int(query["limit"]):
            break
        before = page[-1]["round"]
    return rows


def round_row(recorded: Status) -> Status:
    """Return a recorded round with names beside the peer ids."""
    names = {peer: mark["name"] for peer, mark in recorded["marks"].items()}
    return {
        **recorded,
        "at": recorded["ended_at"] if recorded["opened_at"] is None else recorded["opened_at"],
        "names": [names.get(c["peer"], c["peer"][:8]) for c in recorded["contributors"]],
        "lost_names": [names.get(peer, peer[:8]) for peer in recorded["lost"]],
    }


def events_of(
    control: DaemonAddress,
    limit: int,
    *,
    kinds: Sequence[str] = (),
    text: str = "",
    peer: str = "",
    timeout_s: float = HTTP_S,
) -> list[Status]:
    """Fetch the latest events that match the filter, the oldest first; ``at`` is Unix time.

    Args:
      peer: the peer's name, or the first digits of its id.
    """
    rows: list[Status] = []
    query: dict[str, str | int] = {"kind": ",".join(kinds), "text": text}
    while len(rows) < limit:
        count = EVENTS_ANSWER_MAX if peer else min(limit - len(rows), EVENTS_ANSWER_MAX)
        query["limit"] = count
        page = call(control, "events", None, query=query, timeout_s=timeout_s)["events"]
        rows += [row for row in page if not peer or is_of(row, peer)]
        if len(page) < count:
            break
        query["before"] = page[-1]["id"]
    return rows[:limit][::-1]


def is_of(event: Status, peer: str) -> bool:
    """Return whether an event concerns a peer, given by its name or the first digits of its id."""
    return bool(event["name"] == peer or (event["peer"] or "").startswith(peer))

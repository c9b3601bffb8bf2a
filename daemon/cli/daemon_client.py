"""What commands that look ask a daemon on this machine: the one place where it is asked.

How a run is comes out of ``GET /api/status``, what was out of the master's history. Rows are shaped as the
commands print them with ``--json``.
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
LOOK_S = 1.0  # between two looks of a command that goes on looking
LOOK_HTTP_S = 2.0  # for such a look: a key that was pressed meanwhile waits as long
ROUNDS_SEEN = 20  # of the last ones, that are kept by who goes on looking
ROUNDS_PAGE = 5  # at a look; more if all of these are new
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
    """Ask a local daemon. ``body`` None reads, otherwise it acts."""
    import httpx  # a tenth of a second that only the commands which ask need

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
    """One for the whole life of a command: who looks every second keeps one connection for that.

    What the environment says of proxies is about others: a daemon on this machine is asked directly.
    """
    import httpx

    return httpx.Client(trust_env=False)


def _escaped(value: Any) -> Any:
    """An answer whose texts can be printed: a journal of an older version may hold any."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    if isinstance(value, dict):
        return {escaped(key): _escaped(each) for key, each in value.items()}
    return value


class Poller(Generic[T]):
    """Looks at one daemon again and again, also when it is started again meanwhile.

    Args:
      see: what is asked of it at each look.

    Attributes:
      control: the daemon that was found last.
      away_since: when it stopped answering, by ``time.monotonic``; None: it answers.
    """

    def __init__(
        self, state: Path | None, kind: str | None, see: Callable[[DaemonAddress], T]
    ) -> None:
        self._state = state
        self._see = see
        self.control = find_control(state, kind)
        self.away_since: float | None = None

    def look(self) -> T | None:
        """What is seen; None: it does not answer now."""
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
    """A daemon at one look.

    Attributes:
      rounds: the last ones that are over, the newest first; a peer has none.
      events: the last ones, the oldest first; likewise.
    """

    status: Status
    rounds: Sequence[ShownRound] = ()
    events: Sequence[PastEvent] = ()


@define
class RunSnapshot:
    """What ``watch`` looks at. Rounds are large and do not change: each is asked for once or so."""

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
    """Finds the rows that were not there at the last look."""

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
        f"{row.peer[:8]} at {row.host} wants in as {role}, for {row.waits_s:.0f} s "
        f"(`holdfast approve {row.peer[:8]}`); it calls itself {row.name!r}"
    )


def rounds_of(
    control: DaemonAddress, limit: int, *, before: int | None = None, timeout_s: float = HTTP_S
) -> list[ShownRound]:
    """The rounds that are over, the newest first; with the names of who took part."""
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
    """The last events that fit the filter, the oldest first; ``at`` is Unix time.

    Args:
      peer: its name, or how its id begins.
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

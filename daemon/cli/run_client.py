"""What commands ask about a run, as records.

The current state of a run comes from ``GET /api/status``, its past from the master's history. Apart from
``daemon_client``, because records take time to import that only the commands which show a run need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from attrs import define, field, frozen

from ..answer_limits import EVENTS_ANSWER_MAX, ROUNDS_ANSWER_MAX
from ..metrics_store import PastEvent
from ..paths import DaemonAddress
from ..status_records import MasterStatus, PeerStatus, PendingRow, ShownRound, read
from .daemon_client import HTTP_S, LOOK_HTTP_S, Json, call, see_json

ROUNDS_SEEN = 20  # most recent rounds that a poller keeps
ROUNDS_PAGE = 5  # rounds per request; the next page follows if all of these are new
EVENTS_SEEN = 100

Status = MasterStatus | PeerStatus


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
    # A contributor that dies before the reduction is only marked.
    marked = [peer for peer, mark in answer["marks"].items() if mark["state"] == "lost"]
    lost = dict.fromkeys([*answer["lost"], *marked])
    left_out = {peer: why for peer, why in answer["declined"].items() if peer not in lost}
    opened_at = answer["opened_at"]
    more = {
        "at": answer["ended_at"] if opened_at is None else opened_at,
        "names": [names.get(c["peer"], c["peer"][:8]) for c in answer["contributors"]],
        "lost_names": [names.get(peer, peer[:8]) for peer in lost],
        "left_out": [f"{names.get(peer, peer[:8])} ({why})" for peer, why in left_out.items()],
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

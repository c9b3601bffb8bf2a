"""What commands ask about a run, as records.

The current state of a run comes from ``GET /api/status``, its past from the master's history. Apart
from ``daemon_client``, because records take time to import that only the commands which show a run
need.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...membership.shared.run_status import RecordedRound
from ..metrics_store import PastEvent
from ..process.paths import DaemonAddress
from ..status_records import (
    EVENTS_ANSWER_MAX,
    ROUNDS_ANSWER_MAX,
    MasterStatus,
    PeerStatus,
    PendingRow,
    read,
)
from .daemon_client import Json, call

Status = MasterStatus | PeerStatus


def read_status(answer: Json) -> Status:
    """Return a status as a record; raise UserError if another version of holdfast wrote it."""
    if answer.get("kind") == "master":
        return read(answer, MasterStatus)
    return read(answer, PeerStatus)


def status_of_master(control: DaemonAddress) -> MasterStatus:
    return read(call(control, "status", None, query={"past": 0}), MasterStatus)


# ---------------------------------------------------------------- rows


def format_pending(row: PendingRow) -> str:
    """Return a line about a newcomer that waits for approval: what is known before its claims."""
    role = f"{row.role} and founder" if row.founder else row.role
    return (
        f"{row.peer[:8]} at {row.host} asks to join as {role}, for {row.waits_s:.0f} s "
        f"(`holdfast approve {row.peer[:8]}`); it calls itself {row.name!r}"
    )


def rounds_of(control: DaemonAddress, limit: int) -> list[RecordedRound]:
    """Fetch the finished rounds, the newest first."""
    rows: list[RecordedRound] = []
    query: dict[str, str | int] = {}
    while len(rows) < limit:
        query["limit"] = count = min(limit - len(rows), ROUNDS_ANSWER_MAX)
        answer = call(control, "rounds", None, query=query)
        page = read(answer["rounds"], list[RecordedRound])
        rows += page
        if len(page) < count:
            break
        query["before"] = page[-1].round
    return rows


def events_of(
    control: DaemonAddress,
    limit: int,
    *,
    kinds: Sequence[str] = (),
    text: str = "",
    peer: str = "",
) -> list[PastEvent]:
    """Fetch the latest matching events, the oldest first; ``peer`` is a name or part of an id."""
    rows: list[PastEvent] = []
    query: dict[str, str | int] = {"kind": ",".join(kinds), "text": text}
    while len(rows) < limit:
        count = EVENTS_ANSWER_MAX if peer else min(limit - len(rows), EVENTS_ANSWER_MAX)
        query["limit"] = count
        answer = call(control, "events", None, query=query)
        page = read(answer["events"], list[PastEvent])
        rows += [row for row in page if row.name == peer or (row.peer or "").startswith(peer)]
        if len(page) < count:
            break
        query["before"] = page[-1].id
    return rows[:limit][::-1]

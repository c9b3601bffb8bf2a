"""What commands that look ask a daemon on this machine: the one place where it is asked.

Everything comes out of ``GET /api/status``. Rows are shaped as the commands print them with ``--json``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..protocol.errors import UserError
from .exit_codes import ExitCode
from .places import Control, find_control

HTTP_S = 10.0  # a local daemon answers at once or not at all
LOOK_S = 1.0  # between two looks of a command that goes on looking
LOOK_HTTP_S = 2.0  # for such a look: a key that was pressed meanwhile waits as long

Status = dict[str, Any]


def call(
    control: Control,
    name: str,
    body: Mapping[str, object] | None,
    *,
    timeout_s: float = HTTP_S,
) -> dict[str, Any]:
    """Ask a local daemon. ``body`` None reads, otherwise it acts."""
    import httpx  # a tenth of a second that only the commands which ask need

    try:
        if body is None:
            response = httpx.get(f"{control.url}/api/{name}", timeout=timeout_s)
        else:
            response = httpx.post(
                f"{control.url}/api/{name}",
                json=dict(body),
                headers={"authorization": f"Bearer {control.token}"},
                timeout=timeout_s,
            )
        answer = response.json()
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


class Onlooker:
    """Looks at one daemon again and again, also when it is started again meanwhile.

    Attributes:
      control: the daemon that was found last.
      away_since: when it stopped answering, by ``time.monotonic``; None: it answers.
    """

    def __init__(self, state: Path | None, kind: str | None) -> None:
        self._state = state
        self._kind = kind
        self.control = find_control(state, kind)
        self.away_since: float | None = None

    def look(self) -> Status | None:
        """Its status; None: it does not answer now."""
        try:
            self.control = find_control(self._state, self.control.kind)
            status = call(self.control, "status", None, timeout_s=LOOK_HTTP_S)
        except UserError:
            if self.away_since is None:
                self.away_since = time.monotonic()
            return None
        self.away_since = None
        return status


# ---------------------------------------------------------------- rows


def member_rows(status: Status, *, gone: bool) -> list[Status]:
    """Members by number; with ``gone`` those who left instead, the last one first."""
    return list(reversed(status["departed"])) if gone else list(status["members"])


def round_rows(status: Status, limit: int) -> list[Status]:
    """The rounds that are over, the newest first; with the names of who took part."""
    names = names_of(status)
    rows = list(reversed(status["past_rounds"]))[:limit]
    return [
        {
            **row,
            "at": at_of(status, row["opened_s"]),
            "names": [names.get(c["peer"], c["peer"][:8]) for c in row["contributors"]],
            "lost_names": [names.get(peer, peer[:8]) for peer in row["lost"]],
        }
        for row in rows
    ]


def event_rows(
    status: Status,
    *,
    kinds: Collection[str] = (),
    text: str = "",
    peer: str = "",
) -> list[Status]:
    """What happened, the oldest first, as far as it fits the filter; ``at`` is Unix time."""
    names = names_of(status)
    rows = [
        {
            "at": at_of(status, event["at_s"]),
            "kind": event["kind"],
            "peer": event["peer"],
            "name": names.get(event["peer"] or "", ""),
            "text": event["text"],
        }
        for event in status["events"]
    ]
    return [
        row
        for row in rows
        if (not kinds or row["kind"] in kinds)
        and text.lower() in row["text"].lower()
        and (not peer or peer == row["name"] or (row["peer"] or "").startswith(peer))
    ]


class News:
    """What of the events and rounds was not there at the last look."""

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = {}

    def of(self, status: Status, key: str) -> list[Status]:
        """The rows of ``status[key]`` that are new, in order. The term tells masters' clocks apart."""
        rows = {f"{status['term']} {json.dumps(row)}": row for row in status[key]}
        known = self._known.get(key, set())
        self._known[key] = set(rows)
        return [row for text, row in rows.items() if text not in known]


def names_of(status: Status) -> dict[str, str]:
    members = [*status["departed"], *status["members"]]
    return {member["peer"]: member["name"] for member in members}


def at_of(status: Status, at_s: float) -> float:
    """Unix time of a moment on the master's clock; good to the second that asking takes."""
    ago_s: float = status["now_s"] - at_s
    return round(time.time() - ago_s, 1)

"""What commands ask about a run: pages of rounds and events, over one connection."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import attrs
import pytest
import trio
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from holdfast.daemon.cli import daemon_client, run_client
from holdfast.daemon.cli.run_client import events_of, rounds_of
from holdfast.daemon.cli.run_tables import format_contributors, format_round_reason
from holdfast.daemon.metrics_store import MetricsStore, PastEvent
from holdfast.daemon.process.paths import DaemonAddress
from holdfast.daemon.web.connections import Connections
from holdfast.daemon.web.http_server import bind_http
from holdfast.protocol.addresses import Address
from tests.background import SOON_S, background

Json = dict[str, Any]


@pytest.mark.real_time
async def test_polls_share_a_connection() -> None:
    callers = set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        callers.add(scope["client"])
        await JSONResponse({"kind": "peer"})(scope, receive, send)

    listener, url = bind_http(Address("127.0.0.1", 0))
    async with background() as nursery:
        nursery.start_soon(Connections(app).serve, listener)
        control = DaemonAddress("peer", url, "", 0)
        for _ in range(5):
            answer = await trio.to_thread.run_sync(daemon_client.call, control, "status", None)
            assert answer == {"kind": "peer"}
    daemon_client._client().close()
    daemon_client._client.cache_clear()
    assert len(callers) == 1


def test_a_lock_that_ctrl_c_left_taken_lets_a_command_end() -> None:
    taken = "daemon_client._client()._transport._pool._optional_thread_lock.__enter__()"
    code = f"from holdfast.daemon.cli import daemon_client; {taken}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SOON_S)


MASTER = DaemonAddress("master", "http://nowhere", "", 0)


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> MetricsStore:
    """A run's history served in place of a daemon's, a few rows at a time."""
    history = MetricsStore(":memory:")
    monkeypatch.setattr(run_client, "EVENTS_ANSWER_MAX", 2)
    monkeypatch.setattr(run_client, "ROUNDS_ANSWER_MAX", 2)

    def call(_control: DaemonAddress, name: str, _body: None, **more: Any) -> Json:
        query = more["query"]
        count, before = query["limit"], query.get("before")
        if name == "rounds":
            return {"rounds": [json.loads(row) for row in history.rounds(count, before)]}
        kinds = [kind for kind in query["kind"].split(",") if kind]
        rows = history.events(count, before, kinds, query["text"])
        return {"events": [attrs.asdict(row) for row in rows]}

    monkeypatch.setattr(run_client, "call", call)
    return history


MARK = {"ready_s": None, "reduced_s": None, "state": "contributed"}


def a_contribution(peer: str) -> Json:
    return {"peer": peer, "weight": 1, "scale": 1.0, "chunk_share": 1.0, "weight_share": 0.5}


def a_round(number: int, opened_at: float) -> Json:
    """A committed round as the history has it."""
    none = ("repairs", "reruns", "chunk_count", "opened_s", "open_s", "reduce_s", "plan")
    return {
        **dict.fromkeys(none),
        "fragment": 0,
        "version": number,
        "at_step": 0,
        "attempts": 1,
        "round": number,
        "outcome": "committed",
        "why": "",
        "digest": "",
        "manifest": [],
        "contributors": [],
        "lost": {},
        "declined": {},
        "marks": {},
        "opened_at": opened_at,
        "ended_at": opened_at,
    }


def test_events_are_found_by_name_id_kind_and_text(history: MetricsStore) -> None:
    for number, name in enumerate("abcab", 1):
        kind = "leave" if number > 3 else "join"
        peer, text = name + 31 * "0", f"{name} is member {number}"
        history.write(events=[PastEvent(number, 7.0 * number, kind, peer, name, text)])

    def found(limit: int = 40, **which: Any) -> list[int]:
        return [row.id for row in events_of(MASTER, limit, **which)]

    assert found() == [1, 2, 3, 4, 5]
    assert found(3) == [3, 4, 5]
    assert found(0) == []
    assert found(kinds=["join"]) == [1, 2, 3]
    assert found(peer="a") == found(peer="a000") == [1, 4]
    assert found(1, peer="a") == [4]
    assert found(text="MEMBER 3") == [3]
    assert found(kinds=["leave"], peer="c") == []


def test_rounds_name_their_contributors(history: MetricsStore) -> None:
    for number in range(1, 6):
        row = {
            **a_round(number, 9.0 * number),
            "contributors": [a_contribution("a" * 32), a_contribution("b" * 32)],
            "lost": {"b" * 32: "gone"},
            "marks": {"a" * 32: {"name": "alder", **MARK}},
        }
        history.write(rounds=[(number, json.dumps(row).encode())])
    rows = rounds_of(MASTER, 3)
    assert [row.round for row in rows] == [5, 4, 3]
    assert format_contributors(rows[0]) == "alder, bbbbbbbb"
    assert format_round_reason(rows[0]) == "lost bbbbbbbb"
    assert [row.round for row in rounds_of(MASTER, 9)] == [5, 4, 3, 2, 1]


def test_rounds_name_those_that_they_went_on_without(history: MetricsStore) -> None:
    """Birch died before the reduction, which does not name it."""
    row = {
        **a_round(1, 9.0),
        "contributors": [a_contribution("a" * 32)],
        "declined": {"c" * 32: "it was not ready in time"},
        "marks": {
            "a" * 32: {**MARK, "name": "alder"},
            "b" * 32: {**MARK, "name": "birch", "state": "lost"},
            "c" * 32: {**MARK, "name": "cedar", "state": "excluded"},
        },
    }
    history.write(rounds=[(1, json.dumps(row).encode())])
    (shown,) = rounds_of(MASTER, 1)
    assert format_round_reason(shown) == "lost birch; without cedar (it was not ready in time)"

"""``holdfast watch`` fits its screen and shows the essentials, for any run."""

from __future__ import annotations

import io
import json
from typing import Any

import attrs
import msgspec
import pytest
import trio
from rich.console import Console
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from holdfast.daemon.cli import daemon_client, run_client
from holdfast.daemon.cli.daemon_client import see_json
from holdfast.daemon.cli.run_client import NewRows, RunSnapshot, Snapshot, events_of, rounds_of
from holdfast.daemon.cli.watch import ChangeLines, draw, essence
from holdfast.daemon.metrics_store import MetricsStore, PastEvent
from holdfast.daemon.paths import DaemonAddress
from holdfast.daemon.status_records import MasterStatus
from holdfast.daemon.web.http_server import bind_http, serve_http
from holdfast.protocol.addresses import Address
from tests.membership.table import Table
from tests.plain import master_status

Json = dict[str, Any]


def a_run(members: int) -> MasterStatus:
    table = Table()
    for number in range(members):
        table.join("abcdef"[number % 6] + f"{number:031x}")
    return master_status(table.master, table.now_s, "[b]first[/b]")


def seen(status: MasterStatus) -> Snapshot:
    """With the events as the master's history has them."""
    names = {member.peer: member.name for member in status.members}
    events = [
        PastEvent(number, row.at_s, row.kind, row.peer, names.get(row.peer or "", ""), row.text)
        for number, row in enumerate(status.events or ())
    ]
    return Snapshot(status, [], events)


def screen(status: MasterStatus | None, width: int, height: int, away_s: float = 0.0) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, color_system=None)
    snapshot = None if status is None else seen(status)
    console.print(draw("master", snapshot, away_s, width, height))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("members", [0, 1, 5, 26])
@pytest.mark.parametrize("height", [24, 10, 60])
def test_it_fits_and_shows_members_and_events(members: int, height: int) -> None:
    lines = screen(a_run(members), 80, height)
    assert len(lines) <= height
    assert max(len(line) for line in lines) <= 80
    assert lines[0].startswith("[b]first[/b]  waiting for weights  round 0"), "and no markup"
    assert lines[-1].startswith("q: ")
    if members:
        assert lines[4].split()[0] == "a"
        assert any("waiting for the" in line for line in lines[4:])
    if members == 26 and height == 24:
        assert any(line.startswith("... and ") for line in lines)
        assert sum("joined as member" in line for line in lines) >= 3, "the newest events"
        assert any("joined as member 26" in line for line in lines)


def test_an_unreachable_master_is_shown_above_its_last_status() -> None:
    lines = screen(a_run(2), 80, 24, away_s=7)
    assert lines[0].startswith("the master has not answered for 7 s")
    assert lines[4].split()[0] == "a"
    assert screen(None, 80, 24, away_s=3)[0].startswith("the master has not answered")


def test_only_changes_are_printed_as_lines() -> None:
    table = Table()
    lines = ChangeLines()

    def told() -> list[str]:
        status = master_status(table.master, table.now_s, "first")
        return [line.partition("  ")[2] for line in lines.of(seen(status))]

    table.join("a" * 32)
    first = told()
    assert len(first) == 1, "what was before is not told"
    assert first[0].startswith("first  waiting for weights, 1 member: initial weights: waiting")
    assert told() == []
    table.join("b" * 32)
    state, event = told()
    assert state.startswith("first  waiting for weights, 2 members")
    assert event.startswith("join   b (bbbbbbbb) joined as member 2")
    assert told() == []


def test_the_headline_is_the_masters() -> None:
    status = a_run(1)
    told = attrs.evolve(status.headline, loss=1.23456, tokens_per_s=77.0, rounds=3)
    told = attrs.evolve(told, rounds_wanted=9, step=40, sent_bytes=2_000_000)
    status = attrs.evolve(status, headline=told)
    first, second, *_ = screen(status, 80, 24)
    assert first.endswith("round 3/9  step 40  loss 1.235  77 tokens/s")
    assert second.endswith("2.0 MB sent")


def test_news_are_new_once_also_where_numbers_begin_again() -> None:
    news, rows = NewRows(), list(seen(a_run(2)).events)
    assert news.of(rows) == rows
    assert news.of(rows) == []
    later = [attrs.evolve(row, at=row.at + 60) for row in rows]
    assert news.of([*rows, *later]) == later


def test_a_clock_that_moved_is_no_change() -> None:
    status = msgspec.to_builtins(a_run(2))
    assert essence({**status, "now_s": 7.0}) == essence(status)
    assert essence({**status, "step": 7}) != essence(status)


@pytest.mark.real_time
async def test_polls_share_a_connection() -> None:
    callers = set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        callers.add(scope["client"])
        await JSONResponse({"kind": "peer"})(scope, receive, send)

    listener, url = bind_http(Address("127.0.0.1", 0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_http, app, listener)
        control = DaemonAddress("peer", url, "", 0)
        for _ in range(5):
            assert await trio.to_thread.run_sync(see_json, control) == {"kind": "peer"}
        nursery.cancel_scope.cancel()
    daemon_client._client().close()
    daemon_client._client.cache_clear()
    assert len(callers) == 1


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
    assert (rows[0].at, rows[0].names) == (45.0, ("alder", "bbbbbbbb"))
    assert rows[0].lost_names == ("bbbbbbbb",)
    assert [row.round for row in rounds_of(MASTER, 9)] == [5, 4, 3, 2, 1]


def test_a_poller_fetches_each_round_once(history: MetricsStore) -> None:
    asked_for = RunSnapshot()

    def look(*numbers: int) -> list[int]:
        for n in numbers:
            history.write(rounds=[(n, json.dumps(a_round(n, n)).encode())])
        asked_for._see_rounds(MASTER)
        return [row.round for row in asked_for._rounds]

    assert look() == []
    assert look(1, 2) == [2, 1]
    assert look(*range(3, 16)) == list(range(15, 0, -1)), "more than a page was new"
    assert look(*range(16, 60))[:20] == list(range(59, 39, -1))

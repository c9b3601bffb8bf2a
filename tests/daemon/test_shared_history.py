"""The page's history in the masters' database: what one recorded, the next one's page shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.postgres_server import PostgresServer
from holdfast.daemon.master import shared_history
from holdfast.daemon.master.journal_base import JournalAwayError
from holdfast.daemon.master.postgres_journal import MIGRATIONS, Database, schema_of
from holdfast.daemon.master.shared_history import (
    FILL_ROWS,
    MEMBER_POINTS_KEPT_S,
    POINTS_KEPT_S,
    SharedHistory,
)
from holdfast.daemon.member_curves import MemberPoint
from holdfast.daemon.metrics_store import HISTORY_FILE, MetricsStore, PastEvent, Point
from tests import needs

RUN = "history"
PEER = "a" * 32


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    needs.need(needs.postgres())
    with PostgresServer() as server:
        yield server


@pytest.fixture
def history(server: PostgresServer) -> Iterator[SharedHistory]:
    server.query(f"drop schema if exists {schema_of(RUN)} cascade")
    database = Database(server.url, RUN)
    database.migrate()
    made = SharedHistory(database, lambda: 1e6)
    yield made
    made.close()


def a_store(tmp_path: Path, name: str) -> MetricsStore:
    (tmp_path / name).mkdir()
    return MetricsStore(tmp_path / name / HISTORY_FILE)


def point(at: float, loss: float | None = 2.5) -> Point:
    return Point(at=at, step=int(at) % 1_000, rounds=3, loss=loss, members=2, sent_bytes=2**50)


def event(number: int, text: str = "joined") -> PastEvent:
    return PastEvent(number, 1e6 + number, "join", PEER, "alder", text)


def everything(store: MetricsStore) -> tuple[object, ...]:
    rounds = [json.loads(row) for row in store.rounds(10_000, None)]
    points = store.points(10_000, None, None)
    return points, rounds, store.events(10_000, None), store.member_points(PEER, 1_000, None, None)


def test_a_new_leader_has_what_the_last_one_recorded(
    history: SharedHistory, tmp_path: Path
) -> None:
    own, next_ = a_store(tmp_path, "own"), a_store(tmp_path, "next")
    members = [
        MemberPoint(PEER, "alder", 1e6 + at, at, 2.0, 5.5, 0.9, 7, 8, {"grad_norm": 1.25})
        for at in range(4)
    ]
    rows = (
        [point(1e6), point(1e6 + 1, None), Point(1e6 + 2, gap_s=1.0), point(1e6 + 3)],
        [(1, b'{"round":1,"norms":[1.5,null]}'), (2, b'{"round":2}')],
        [event(1), event(2, "a\0b")],
        members,
    )
    own.write(*rows)
    history.write(*rows)
    assert not history.fill(next_)
    assert everything(next_)[1] == everything(own)[1]
    assert everything(next_)[0] == everything(own)[0]
    assert everything(next_)[3] == everything(own)[3]
    assert [each.text for each in next_.events(10, None)] == ["ab", "joined"]
    before = everything(next_)
    assert not history.fill(next_)
    assert everything(next_) == before, "what it has is not copied again"
    history.write([point(1e6 + 9)], [(2, b'{"round":2,"more":1}'), (3, b"{}")], [event(3)], [])
    assert not history.fill(next_)
    assert next_.round_numbers() == {1, 2, 3}
    assert next_.last_event_id() == 3
    own.close()
    next_.close()


def test_a_long_history_comes_in_steps(history: SharedHistory, tmp_path: Path) -> None:
    count = 2 * FILL_ROWS + 5
    history.write(
        [point(1e6 + at) for at in range(count)],
        [(number, b"{}") for number in range(count)],
        [event(number) for number in range(1, count)],
        [],
    )
    store, steps = a_store(tmp_path, "long"), 1
    while history.fill(store):
        steps += 1
    assert steps == 3
    assert len(store.round_numbers()) == count
    assert store.last_event_id() == count - 1
    last = store.last_point()
    assert last is not None
    assert last.at == 1e6 + count - 1
    store.close()


def test_old_rows_are_deleted(
    history: SharedHistory, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_history, "ROUNDS_MAX", 2)
    monkeypatch.setattr(shared_history, "EVENTS_MAX", 2)
    old, kept = 1e6 - POINTS_KEPT_S - 1, 1e6 - POINTS_KEPT_S + 1
    member = MemberPoint(PEER, "alder", 1e6 - MEMBER_POINTS_KEPT_S - 1)
    history.write(
        [point(old), point(kept)],
        [(number, b"{}") for number in range(5)],
        [event(number) for number in range(5)],
        [member],
    )
    schema = schema_of(RUN)
    assert server.query(f"select at from {schema}.points") == [(kept,)]
    assert server.query(f"select number from {schema}.rounds order by 1") == [(3,), (4,)]
    assert server.query(f"select id from {schema}.events order by 1") == [(3,), (4,)]
    assert server.query(f"select count(*) from {schema}.member_points") == [(0,)]


def test_people_can_query_it(history: SharedHistory, server: PostgresServer) -> None:
    history.write([point(1e6)], [(7, b'{"round":7,"seconds":1.5}')], [event(1)], [])
    schema = schema_of(RUN)
    (row,) = server.query(f"select number, (row->>'seconds')::float from {schema}.rounds")
    assert row == (7, 1.5)
    (row,) = server.query(f"select (figures->>'loss')::float from {schema}.points")
    assert row == (2.5,)


def test_a_schema_of_an_earlier_version_gets_the_tables(server: PostgresServer) -> None:
    run = "earlier"
    schema = schema_of(run)
    server.query(f"drop schema if exists {schema} cascade; create schema {schema}")
    server.query(f"set search_path = {schema}; {MIGRATIONS[0]}")
    server.query(f"create table {schema}.version (number integer not null)")
    server.query(f"insert into {schema}.version values (1)")
    server.query(f"insert into {schema}.grants values ('{PEER}', 'spare', 0, 'alder', '')")
    database = Database(server.url, run)
    database.migrate()
    SharedHistory(database).write([point(1e6)], [], [], [])
    assert server.query(f"select number from {schema}.version") == [(2,)]
    assert server.query(f"select name from {schema}.grants") == [("alder",)]
    database.close()


def test_nothing_is_stored_in_part_when_the_database_is_away(tmp_path: Path) -> None:
    history = SharedHistory(Database("postgresql://nobody@127.0.0.1:1/none", RUN))
    store = a_store(tmp_path, "away")
    with pytest.raises(JournalAwayError):
        history.write([point(1e6)], [], [], [])
    with pytest.raises(JournalAwayError):
        history.fill(store)
    store.close()

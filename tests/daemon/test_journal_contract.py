"""What every journal promises, wherever it is kept: an SQLite file, or a real PostgreSQL server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.postgres_server import PostgresServer
from holdfast.daemon.master import standby
from holdfast.daemon.master.journal.journal_base import (
    FencedError,
    GrantRow,
    Journal,
    JournalAwayError,
    TokenError,
)
from holdfast.daemon.master.journal.journal_store import JournalStore
from holdfast.daemon.master.journal.postgres_journal import Database, PostgresJournal, schema_of
from holdfast.daemon.master.journal.shared_journal import SharedOptions
from holdfast.daemon.master.opened_run import MasterOptions
from holdfast.daemon.master.standby import SharedMaster
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.membership.master.state.journal import (
    RoundCommitted,
    RoundNumbered,
    RunFinished,
    TermStarted,
)
from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import UserError
from holdfast.protocol.messages import Commit, Role
from tests import needs
from tests.daemon.test_journal_store import PEER, RECORDS, Clock

LEASE_S = 0.5


Reopen = Callable[[], Journal]  # as the next master does: the earlier one's process is gone


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    needs.need(needs.postgres())
    with PostgresServer() as server:
        yield server


@pytest.fixture
def database(server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Database]:
    name = request.node.name
    server.query(f"drop schema if exists {schema_of(name)} cascade")
    database = Database(server.url, name)
    database.prepare()
    yield database
    database.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgres"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Reopen]:
    opened: list[Journal] = []

    def sqlite() -> Journal:
        opened.append(JournalStore(tmp_path / "journal.sqlite", now=clock))
        return opened[-1]

    def postgres() -> Journal:
        server: PostgresServer = request.getfixturevalue("server")
        own = Database(server.url, request.node.name)
        server.query(f"update {own.schema}.lease set expires = '-infinity'")
        lease = own.take_lease(f"master {len(opened)}", 60.0)
        assert lease is not None
        opened.append(PostgresJournal(own, lease, now=clock))
        return opened[-1]

    if request.param == "postgres":
        request.getfixturevalue("database")
    yield sqlite if request.param == "sqlite" else postgres
    for each in opened:
        each.close()


def test_records_survive_in_order(reopen: Reopen) -> None:
    journal = reopen()
    assert journal.records() == []
    for record in RECORDS[:3]:
        journal.append(record)
    again = reopen()  # the first one is not closed: as if its process was killed
    assert again.records() == RECORDS[:3]
    assert again.cut is None
    for record in RECORDS[3:]:
        again.append(record)
    assert reopen().records() == RECORDS


def test_commits_come_with_the_times_of_their_rounds(reopen: Reopen, clock: Clock) -> None:
    journal = reopen()
    for number in range(1, 8):
        journal.append(RoundNumbered(number))
        clock.now_s += 2.5
        if number != 4:  # that one was aborted
            journal.append(RoundCommitted(Commit(number, 1, 0, 0, 100, (), b"d" * 32)))
        clock.now_s += 1.0
    found = journal.rounds(100, {1, 6})
    assert [each.record.round for each in found] == [2, 3, 4, 5, 7]
    for each in found:
        assert each.opened_at == 1_000_000.0 + 3.5 * (each.record.round - 1)
        aborted = isinstance(each.record, RoundNumbered)
        assert aborted == (each.record.round == 4)
        assert each.committed_at == (None if aborted else each.opened_at + 2.5)
    assert [each.record.round for each in journal.rounds(2, ())] == [6, 7]


def test_a_run_begins_with_its_first_round_and_ends_when_it_is_finished(
    reopen: Reopen, clock: Clock
) -> None:
    journal = reopen()
    began_at = clock.now_s
    assert journal.run_times() == (None, None)
    for number in (1, 2):
        journal.append(RoundNumbered(number))
        clock.now_s += 60.0
    assert journal.run_times() == (began_at, None)
    assert journal.written_at(RoundNumbered) == began_at + 60.0
    journal.append(RunFinished(2))
    assert journal.run_times() == (began_at, began_at + 120.0)


def test_invites_and_grants_survive(reopen: Reopen) -> None:
    journal = reopen()
    token, _ = journal.make_token(Role.CONTRIBUTOR, founder=True, uses=2, hours=1.0)
    other, _ = journal.make_token(Role.SPARE, founder=False, uses=1, hours=1.0, by_hand=True)
    ids = {each["role"]: str(each["id"]) for each in journal.invites()}
    journal.redeem(token, PEER, "alder")
    journal.redeem(token, PEER, "again")  # it keeps its grant, and uses nothing up
    again = reopen()
    assert again.grant(PEER) == GrantRow(Role.CONTRIBUTOR, True, "alder", ids["contributor"])
    again.admit(PEER, GrantRow(Role.SPARE, False, "alder"))
    again = reopen()
    assert again.grant(PEER) == GrantRow(Role.SPARE, False, "alder")
    assert again.valid(other).by_hand
    again.redeem(token, "b" * 32, "birch")
    with pytest.raises(TokenError, match="used up") as raised:
        again.redeem(token, "c" * 32, "cedar")
    assert again.grant("c" * 32) is None
    assert raised.value.exit_code == ExitCode.INVITE
    assert again.withdraw(ids["spare"])
    with pytest.raises(TokenError, match="withdrawn"):
        reopen().redeem(other, "d" * 32, "dogwood")


def test_writers_of_several_threads_get_numbers_of_their_own(reopen: Reopen) -> None:
    journal = reopen()

    def write(first: int) -> None:
        for number in range(first, first + 25):
            journal.append(RoundNumbered(number))

    threads = [threading.Thread(target=write, args=(1 + 100 * each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [record.round for record in reopen().records() if isinstance(record, RoundNumbered)]
    assert sorted(numbers) == sorted(
        first + each for first in (1, 101, 201, 301) for each in range(25)
    )


# ---------------------------------------------------------------- PostgreSQL only


def two_masters(database: Database) -> tuple[PostgresJournal, Database]:
    """Return the journal of a master that holds a lease, and the connection of another one."""
    lease = database.take_lease("a", LEASE_S)
    assert lease is not None
    return PostgresJournal(database, lease), Database(database.url, database.run)


def take(database: Database, holder: str) -> PostgresJournal:
    """Wait until the lease is free, and take it."""
    lease = None
    while lease is None:
        lease = database.take_lease(holder, LEASE_S)
    return PostgresJournal(database, lease)


def test_a_master_whose_lease_was_taken_writes_nothing_any_more(database: Database) -> None:
    old, other = two_masters(database)
    old.append(TermStarted(1))
    assert other.take_lease("b", LEASE_S) is None, "it is held"
    new = take(other, "b")
    assert new.records() == [TermStarted(1)]
    with pytest.raises(FencedError):
        old.append(TermStarted(2))
    with pytest.raises(FencedError):
        old.make_token(Role.SPARE, founder=False, uses=1, hours=1.0)
    with pytest.raises(FencedError):
        old.admit(PEER, GrantRow(Role.SPARE, False, "alder"))
    assert not old.database.renew(old.lease, LEASE_S)
    new.append(TermStarted(3))
    assert take(database, "c").records() == [TermStarted(1), TermStarted(3)]
    assert new.invites() == []
    other.close()


def test_a_lease_that_nobody_took_is_renewed_though_it_is_over(
    server: PostgresServer, database: Database
) -> None:
    journal, other = two_masters(database)
    lease = journal.lease
    server.query(f"update {database.schema}.lease set expires = clock_timestamp() - interval '9 s'")
    journal.append(TermStarted(1))
    assert database.renew(lease, 60.0)
    assert other.take_lease("b", LEASE_S) is None
    database.release(lease)
    assert other.take_lease("b", LEASE_S) is not None
    other.close()


def test_a_record_being_written_comes_before_the_next_master_or_not_at_all(
    server: PostgresServer, database: Database
) -> None:
    """A write holds the row of the lease until it is committed: who takes the lease waits for
    it.
    """
    journal, other = two_masters(database)
    with journal.database.connect() as slow, slow.transaction():
        slow.execute("select 1 from lease for share")  # as a write that is under way
        taken: list[PostgresJournal] = []
        taking = threading.Thread(target=lambda: taken.append(take(other, "b")))
        taking.start()
        taking.join(2 * LEASE_S)
        assert not taken
        journal.append(TermStarted(1))  # beside it: writes do not wait for each other
    taking.join(30)
    assert taken[0].records() == [TermStarted(1)]
    other.close()


def test_a_server_that_is_away_changes_nothing_and_comes_back(
    server: PostgresServer, database: Database
) -> None:
    lease = database.take_lease("a", 60.0)
    assert lease is not None
    journal = PostgresJournal(database, lease)
    journal.append(TermStarted(1))
    server.stop()
    try:
        for _ in range(2):
            with pytest.raises(JournalAwayError):
                journal.append(TermStarted(2))
        with pytest.raises(JournalAwayError):
            journal.make_token(Role.SPARE, founder=False, uses=1, hours=1.0)
    finally:
        server.start()
    journal.append(TermStarted(3))
    assert journal.records() == [TermStarted(1), TermStarted(3)]
    assert journal.invites() == []


def test_a_record_whose_acknowledgement_was_lost_is_written_once(database: Database) -> None:
    lease = database.take_lease("a", 60.0)
    assert lease is not None
    journal = PostgresJournal(database, lease)
    journal.append(TermStarted(1))
    journal._count = 0  # the connection broke before the answer came: it is written again
    journal.append(TermStarted(1))
    journal.append(TermStarted(2))
    assert journal.records() == [TermStarted(1), TermStarted(2)]
    journal._count = 0
    with pytest.raises(FencedError):
        journal.append(TermStarted(9))  # another one's record has that number


def test_a_damaged_record_is_named(server: PostgresServer, database: Database) -> None:
    journal, other = two_masters(database)
    journal.append(TermStarted(1))
    journal.append(TermStarted(2))
    server.query(f"update {database.schema}.records set body = '\\x00' where id = 2")
    with pytest.raises(UserError, match="record 2 is damaged"):
        take(other, "b").records()
    other.close()


def test_a_schema_of_a_newer_version_is_refused(server: PostgresServer, database: Database) -> None:
    database.prepare()  # a second time changes nothing
    server.query(f"update {database.schema}.version set number = 99")
    with pytest.raises(UserError, match="another version of holdfast"):
        database.prepare()


def test_runs_of_one_database_do_not_meet(server: PostgresServer) -> None:
    stores = []
    for name in ("one_run", "One run", "one-run", "another/run"):
        database = Database(server.url, name)
        database.prepare()
        lease = database.take_lease("a", 60.0)
        assert lease is not None
        stores.append(PostgresJournal(database, lease))
    stores[0].append(TermStarted(1))
    assert not any(each.records() for each in stores[1:])
    schemas = [each.database.schema for each in stores]
    assert schemas[0] == "holdfast_one_run"
    assert [name[:-8] for name in schemas[1:]] == [
        *2 * ["holdfast_one_run_"],
        "holdfast_another_run_",
    ]
    for each in stores:
        each.close()


def test_masters_are_listed_while_they_are_there(database: Database) -> None:
    _journal, other = two_masters(database)
    database.register("a", ["a.example:1", "[2001:db8::1]:1"], "http://a")
    other.register("b", ["b.example:2"], "http://b")
    active, waiting = database.masters(60.0)
    assert (active.holder, active.active) == ("a", True)
    assert active.addresses == ("a.example:1", "[2001:db8::1]:1")
    assert 0 < active.left_s <= LEASE_S
    assert (waiting.holder, waiting.active, waiting.page) == ("b", False, "http://b")
    assert database.masters(0.0) == []
    other.close()


def standby_at(state: Path) -> SharedMaster:
    here = Address("127.0.0.1", 1)
    shared = SharedOptions("postgresql://nowhere/runs", "x", None, "", LEASE_S)
    return SharedMaster(MasterOptions(None, state, [here], (), here), shared, lambda _: None)


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="Linux only")
def test_a_lease_goes_by_a_clock_that_no_sleep_of_the_machine_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "clock_gettime", float)  # each clock shows its own number
    monkeypatch.setattr(time, "monotonic", lambda: -1.0)
    assert standby_at(tmp_path)._leadership._clock() == time.CLOCK_BOOTTIME


def test_a_standby_that_starts_before_the_network_tells_its_address_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = standby_at(tmp_path)
    looked = master._watch_leader()
    for host in ("127.0.0.1", "192.0.2.7"):
        monkeypatch.setattr(standby, "dialable", lambda *_, host=host: (host,))
        looked()
        assert master._leadership.addresses == (host,)


def test_a_password_is_shown_nowhere(database: Database) -> None:
    shown = Database("postgresql://me:secret@db.example:5433/runs", "x")
    assert shown.place == "postgresql://db.example:5433/runs, schema holdfast_x"
    several = Database("postgresql://me:a%40b@one:1,two:2/runs?password=secret", "x")
    assert several.place == "postgresql://one:1,two:2/runs, schema holdfast_x"

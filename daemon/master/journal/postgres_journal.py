"""The journal in a PostgreSQL database, which several masters share, one at a time.

Each run has a schema of its own in the database:

    records, tokens, grants   as in the SQLite file (``journal_store``)
    lease                     one row: who holds the journal, until when by the database's clock,
                              and its *fence*
    masters                   the master processes that may hold it, and where they are
    authority                 the certificate of the run's authority, and its key, sealed

*Fencing.* Whoever takes the lease gets the next fence number. Every write of a master locks the
lease's row, shared with its other writes, and writes only if the row still has its fence. Taking
the lease changes the row. So the database orders the two: a write of the earlier holder is there
before the later one reads the journal, or it is refused. No clock decides that. Clocks decide only
*when* a lease may be taken, and it is the database's clock: how long it has left is a difference of
two of its readings.

The connection is opened again by the next call after it failed. A statement whose connection broke
may have been carried out: a record that is already there as it should be written counts as written.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import psycopg
from attrs import evolve
from psycopg import errors, sql

from ....membership.master.state import journal
from ....protocol.errors import UserError
from ...process.exit_codes import ExitCode
from .journal_base import (
    GRANT_COLUMNS,
    GRANTS,
    TABLES,
    TOKEN_COLUMNS,
    TOKENS,
    FencedError,
    Journal,
    JournalAwayError,
    JournalBrokenError,
    RepairedJournal,
    Rows,
    Statement,
    read_row,
)
from .lease import Lease, MasterRow

log = logging.getLogger("holdfast.master")

SCHEMA_VERSION = 3
CONNECT_S = 5  # to reach the database's server
ANSWER_S = 8.0  # for a statement; then the connection is given up
NAME_CHARS_MAX = 40  # of a run's name in its schema's
DIGEST_CHARS = 8  # behind a name that had to be changed for that
CREDENTIALS = re.compile(r"//[^/@]*@")  # the URL may name several hosts, with ports
WORDS = re.compile(r"[^a-z0-9]+")
# The server's side ends a statement before this side gives up, so that a lock is not held by
# nobody.
OPTIONS = f"-c statement_timeout={int(1e3 * ANSWER_S)} -c lock_timeout={int(5e2 * ANSWER_S)}"

SCHEMA = """
create table lease (
    one boolean primary key default true check (one), fence bigint not null, holder text not null,
    expires timestamptz not null);
insert into lease (fence, holder, expires) values (0, '', '-infinity');
create table masters (
    holder text primary key, addresses text not null, page text not null,
    seen timestamptz not null);
create table authority (
    one boolean primary key default true check (one), certificate bytea not null,
    sealed_key bytea not null);
"""
SCHEMA += TABLES.format(number="bigint", blob="bytea", real="double precision")


class Database:
    """One connection, opened when it is needed, and a run's schema; any thread may call."""

    def __init__(self, url: str, run: str) -> None:
        self.url = url
        self.run = run
        self.schema = schema_of(run)
        self._connection: psycopg.Connection[Any] | None = None
        self._using = threading.RLock()

    @property
    def place(self) -> str:
        """The database without user and password."""
        return f"{CREDENTIALS.sub('//', self.url).partition('?')[0]}, schema {self.schema}"

    def connect(self) -> psycopg.Connection[Any]:
        """Open a connection that sees the run's schema; raises ``psycopg.Error``."""
        return psycopg.connect(
            self.url,
            autocommit=True,
            connect_timeout=CONNECT_S,
            application_name="holdfast",
            # A server that is gone without a word is noticed by the kernel.
            tcp_user_timeout=int(1e3 * ANSWER_S),
            keepalives_idle=2,
            keepalives_interval=2,
            keepalives_count=3,
            options=f"{OPTIONS} -c search_path={self.schema} -c synchronous_commit=on",
        )

    @contextlib.contextmanager
    def connected(self) -> Iterator[psycopg.Connection[Any]]:
        """Use the connection.

        Raises:
          JournalAwayError: there is none, or it broke, or the server refuses to write now.
          JournalBrokenError: the server says that the data or the statement is wrong.
        """
        with self._using, own_errors():
            if self._connection is None or self._connection.closed:
                self._connection = self.connect()
            try:
                yield self._connection
            except psycopg.Error:
                if self._connection.broken:
                    self._connection.close()
                raise

    def prepare(self) -> None:
        """Make the schema if it is missing; raise UserError if another version of holdfast did."""
        with self.connected() as connection, connection.transaction():
            connection.execute("select pg_advisory_xact_lock(hashtext(%s))", [self.schema])
            connection.execute(
                sql.SQL("create schema if not exists {}").format(sql.Identifier(self.schema))
            )
            connection.execute("create table if not exists version (number integer not null)")
            rows = connection.execute("select number from version").fetchall()
            if not rows:
                connection.execute(SCHEMA)
                connection.execute("insert into version values (%s)", [SCHEMA_VERSION])
            elif rows[0][0] != SCHEMA_VERSION:
                raise UserError(
                    f"{self.place} was written by another version of holdfast (schema {rows[0][0]},"
                    f" this version reads {SCHEMA_VERSION}): run the same version on all masters,"
                    " or start a new run from an export",
                    exit_code=ExitCode.CONFIG,
                )

    def close(self) -> None:
        with self._using:
            if self._connection is not None:
                self._connection.close()

    # ------------------------------------------------------------ the lease

    def take_lease(self, holder: str, lease_s: float, free_s: float = 0.0) -> Lease | None:
        with self.connected() as connection:
            row = connection.execute(
                "update lease set fence = fence + 1, holder = %s,"
                " expires = clock_timestamp() + make_interval(secs => %s)"
                " where expires < clock_timestamp() - make_interval(secs => %s) returning fence",
                [holder, lease_s, free_s],
            ).fetchone()
        return None if row is None else Lease(holder, row[0])

    def renew(self, lease: Lease, lease_s: float) -> bool:
        with self.connected() as connection:
            return (
                connection.execute(
                    "update lease set expires = clock_timestamp() + make_interval(secs => %s)"
                    " where fence = %s and holder = %s",
                    [lease_s, lease.fence, lease.holder],
                ).rowcount
                == 1
            )

    def release(self, lease: Lease) -> None:
        with self.connected() as connection:
            connection.execute(
                "update lease set expires = clock_timestamp() where fence = %s and holder = %s",
                [lease.fence, lease.holder],
            )

    def register(self, holder: str, addresses: Sequence[str], page: str) -> None:
        with self.connected() as connection:
            connection.execute(
                "insert into masters values (%s, %s, %s, clock_timestamp()) on conflict (holder) do"
                " update set addresses = excluded.addresses, page = excluded.page,"
                " seen = excluded.seen",
                [holder, " ".join(addresses), page],
            )

    def masters(self, seen_s: float) -> list[MasterRow]:
        with self.connected() as connection:
            rows = connection.execute(
                "select m.holder, m.addresses, m.page, l.holder = m.holder,"
                " coalesce("
                "extract(epoch from nullif(l.expires, '-infinity') - clock_timestamp()), -1)"
                " from masters m, lease l"
                " where m.seen > clock_timestamp() - make_interval(secs => %s)"
                " order by 4 desc, m.seen desc",
                [seen_s],
            ).fetchall()
        return [
            MasterRow(holder, tuple(addresses.split()), page, active, float(left_s))
            for holder, addresses, page, active, left_s in rows
        ]

    # ------------------------------------------------------------ the authority

    def authority(self) -> tuple[bytes, bytes] | None:
        """Return the authority's certificate and sealed key; None before the run's first master."""
        with self.connected() as connection:
            row = connection.execute("select certificate, sealed_key from authority").fetchone()
        return None if row is None else (bytes(row[0]), bytes(row[1]))

    def keep_authority(self, lease: Lease, certificate: bytes, sealed_key: bytes) -> None:
        with self.connected() as connection, fenced(connection, lease):
            connection.execute(
                "insert into authority (certificate, sealed_key) values (%s, %s)",
                [certificate, sealed_key],
            )


class PostgresJournal(Journal):
    """The journal in the database, for the holder of the lease."""

    def __init__(
        self, database: Database, lease: Lease, *, now: Callable[[], float] = time.time
    ) -> None:
        super().__init__(now)
        self.database = database
        self.lease = lease
        self._load()

    def _load(self) -> None:
        self._count = self._read("select coalesce(max(id), 0) from records")[0][0]
        self._remember()

    def records(self) -> list[journal.JournalRecord]:
        found = self._read_records()
        if found.fault:
            raise UserError(
                f"the journal in {self.place} is damaged: {found.fault}",
                exit_code=ExitCode.CONFIG,
                hint="put back a backup of the database; see its server's log for the reason",
            )
        return found.records

    @property
    def place(self) -> str:
        return self.database.place

    @property
    def remedy(self) -> str:
        return "see that its database answers and has space"

    def close(self) -> None:
        self.database.close()

    def adopt(self, other: Journal, certificate: bytes, sealed_key: bytes) -> None:
        """Take over another journal and the authority into this empty one, all or nothing."""
        tables = {
            "records (id, kind, body, at_s, chk)": "select id, kind, body, at_s, chk from records",
            f"tokens ({TOKEN_COLUMNS})": TOKENS,
            f"grants ({GRANT_COLUMNS})": GRANTS,
            "authority (certificate, sealed_key)": [(certificate, sealed_key)],
        }
        with self.database.connected() as connection, fenced(connection, self.lease):
            for table, source in tables.items():
                rows = other._read(source) if isinstance(source, str) else source
                marks = ", ".join(["%s"] * (table.count(",") + 1))
                query = f"insert into {table} values ({marks})"
                connection.cursor().executemany(query.encode(), rows)
        self._load()

    def _read(self, query: str, values: Sequence[object] = ()) -> Rows:
        with self.database.connected() as connection:
            return connection.execute(_placed(query), values).fetchall()

    def _write(self, *statements: Statement) -> None:
        with self.database.connected() as connection, fenced(connection, self.lease):
            for query, values in statements:
                connection.execute(_placed(query), values)

    def _append(self, number: int, kind: str, body: bytes, at_s: float, check: bytes) -> None:
        # One statement, so one trip to the server and back.
        query = (
            "with held as (select 1 from lease where fence = %s and holder = %s for share)"
            " insert into records (id, kind, body, at_s, chk)"
            " select %s, %s, %s, %s, %s from held"
        )
        values = [self.lease.fence, self.lease.holder, number, kind, body, at_s, check]
        with self.database.connected() as connection:
            try:
                written = connection.execute(query, values).rowcount
            except errors.UniqueViolation:
                row = connection.execute("select chk from records where id = %s", [number])
                written = int(row.fetchone() == (check,))  # by us, before the connection broke
        if not written:
            raise FencedError(f"another master holds the journal in {self.place}")

    def _read_records(self) -> RepairedJournal:
        found = RepairedJournal([], [], "")
        with self.database.connected() as connection:
            with connection.transaction(), connection.cursor("records") as cursor:
                cursor.execute("select id, kind, body, at_s, chk from records order by id")
                for row in cursor:
                    fault = read_row(found, row)
                    if fault:
                        return evolve(found, fault=fault)
        return found

    @contextlib.contextmanager
    def _newest_rounds(self, count: int) -> Iterator[Iterable[tuple[str, bytes, float]]]:
        with own_errors(), self.database.connect() as connection:  # its own: no writer waits for it
            with connection.transaction(), connection.cursor("rounds") as cursor:
                cursor.execute(
                    "select kind, body, at_s from records where kind in (%s, %s)"
                    " order by id desc limit %s",
                    [journal.RoundCommitted.__name__, journal.RoundNumbered.__name__, 2 * count],
                )
                yield cursor


@contextlib.contextmanager
def fenced(connection: psycopg.Connection[Any], lease: Lease) -> Iterator[None]:
    """Write in a transaction that only the holder of the lease can commit; raises FencedError."""
    with connection.transaction():
        held = connection.execute(
            "select 1 from lease where fence = %s and holder = %s for share",
            [lease.fence, lease.holder],
        ).fetchone()
        if held is None:
            raise FencedError("another master holds the journal")
        yield


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    try:
        yield
    except (
        psycopg.OperationalError,
        psycopg.InterfaceError,
        errors.ReadOnlySqlTransaction,
    ) as error:
        raise JournalAwayError(_said(error)) from error
    except psycopg.Error as error:
        raise JournalBrokenError(_said(error)) from error


def schema_of(run: str) -> str:
    """Return the name of a run's schema: letters, digits and underscores, unique to the run."""
    plain = WORDS.sub("_", run.lower())[:NAME_CHARS_MAX].strip("_")
    digest = "" if plain == run else f"_{hashlib.sha256(run.encode()).hexdigest()[:DIGEST_CHARS]}"
    return f"holdfast_{plain}{digest}"


def _placed(query: str) -> str:
    return query.replace("?", "%s")


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

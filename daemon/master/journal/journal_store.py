"""The master's journal on disk: one SQLite file with a write-ahead log, fsynced at every record.

The file holds the journal's records in order, the invites' tokens (hashed) and the grant of each
admitted identity. The simulator uses ``:memory:``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from ....membership.master.state import journal
from ....protocol.durable_files import keep_private, write_private
from ....protocol.errors import UserError
from ....protocol.messages import Role
from ...process.exit_codes import ExitCode
from ...process.paths import JOURNAL_FILE, PLACE_FILE, make_private
from .journal_base import (
    GRANTS,
    TABLES,
    TOKENS,
    GrantRow,
    Journal,
    JournalAwayError,
    JournalBrokenError,
    JournalCut,
    JournalError,
    RepairedJournal,
    Row,
    Rows,
    Statement,
)
from .journal_repair import (
    finish_replacing,
    keep_aside,
    make_ready,
    read_rows,
    readable,
)

log = logging.getLogger("holdfast.master")

SCHEMA_VERSION = 5

SCHEMA = TABLES.format(number="integer", blob="blob", real="real")


class JournalStore(Journal):
    """The journal in one SQLite file; ``:memory:`` for none."""

    def __init__(self, path: Path | str, *, now: Callable[[], float] = time.time) -> None:
        super().__init__(now)
        self._tip: JournalTip | None = None
        self._path = None if str(path) == ":memory:" else path
        try:
            if str(path) == ":memory:":
                self._db = _open(path)
                records: list[journal.JournalRecord] = []
            else:
                records = self._load(Path(path))
            self._count = len(records)
            self._remember()
        except (sqlite3.DatabaseError, JournalError, OSError, ValueError) as error:
            raise UserError(
                f"the journal {path} cannot be used: {error}", exit_code=ExitCode.CONFIG
            ) from error
        if self.cut is not None:
            self._restore_grants(records)

    def _load(self, path: Path) -> list[journal.JournalRecord]:
        finish_replacing(path)
        self._db = _open(path)
        self._tip = JournalTip(path.with_name(f"{path.name}.tip"))
        found = read_rows(self._db)
        claimed, self.last_term = self._tip.read()
        fault = found.fault
        if not fault and claimed > len(found.rows):
            fault = f"record {len(found.rows) + 1} is missing"
        if not fault:
            return found.records
        kinds = {type(record) for record in found.records}
        if journal.RunCreated not in kinds or journal.RunFounded not in kinds:
            raise UserError(
                f"the journal {path} is damaged so early that the run cannot be rebuilt: {fault}",
                exit_code=ExitCode.CONFIG,
                hint="put back a copy of the state directory (see `holdfast backup`), or start a "
                "new run with another --state DIR",
            )
        behind = 0
        with contextlib.suppress(sqlite3.DatabaseError):
            behind = self._db.execute("select max(id) from records").fetchone()[0] or 0
        count = max(1, claimed - len(found.rows), min(behind, 2**40) - len(found.rows))
        self.cut = JournalCut(count, fault, self._replace(path, found.rows))
        log.warning("%s", self.cut)
        return found.records

    def _replace(self, path: Path, rows: list[Row]) -> Path:
        """Continue with a new journal of the undamaged rows; return the path of the old one."""
        copy = keep_aside(path)
        part = path.with_name(f"{path.name}.part")
        part.unlink(missing_ok=True)
        keep_private(part)
        fresh = sqlite3.connect(part, isolation_level=None)
        fresh.executescript(SCHEMA)
        fresh.execute(f"pragma user_version = {SCHEMA_VERSION}")
        fresh.execute("begin")
        fresh.executemany("insert into records values (?, ?, ?, ?, ?)", rows)
        for query, table, width in ((TOKENS, "tokens", 8), (GRANTS, "grants", 5)):
            marks = ", ".join("?" * width)
            for row in readable(self._db, query):
                with contextlib.suppress(sqlite3.DatabaseError):
                    fresh.execute(f"insert into {table} values ({marks})", row)
        fresh.execute("commit")
        fresh.close()
        self._db.close()
        make_ready(part, path)
        finish_replacing(path)
        self._db = _open(path)
        assert self._tip is not None
        self._tip.write(len(rows), self.last_term)
        return copy

    def _restore_grants(self, records: Iterable[journal.JournalRecord]) -> None:
        """Admit members whose grant was lost with a damaged page as ordinary contributors."""
        for record in records:
            if isinstance(record, journal.PeerAdmitted) and record.peer not in self._grants:
                log.warning("the grant of %s is lost: it is a contributor now", record.name)
                self.admit(record.peer, GrantRow(Role.CONTRIBUTOR, False, record.name))

    def close(self) -> None:
        self._db.close()
        if self._tip is not None:
            self._tip.close()
            self._tip = None

    @property
    def place(self) -> str:
        return str(self._path)

    @property
    def remedy(self) -> str:
        return "free some space on its disk"

    # ------------------------------------------------------------ the database

    def _read(self, query: str, values: Sequence[object] = ()) -> Rows:
        with _own_errors():
            return self._db.execute(query, values).fetchall()

    def _write(self, *statements: Statement) -> None:
        with _own_errors(), self._db:
            if len(statements) > 1:
                self._db.execute("begin")
            for query, values in statements:
                self._db.execute(query, values)

    def _append(self, number: int, kind: str, body: bytes, at_s: float, check: bytes) -> None:
        values = (number, kind, body, at_s, check)
        self._write(
            ("insert into records (id, kind, body, at_s, chk) values (?, ?, ?, ?, ?)", values)
        )

    def append(self, record: journal.JournalRecord) -> None:
        super().append(record)
        if self._tip is not None:
            with self._writing, contextlib.suppress(OSError):
                self._tip.write(self._count, self.last_term)

    def _read_records(self) -> RepairedJournal:
        return read_rows(self._db)

    @contextlib.contextmanager
    def _newest_rounds(self, count: int) -> Iterator[Iterable[tuple[str, bytes, float]]]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_own_errors())
            db = self._db
            if self._path is not None:
                db = stack.enter_context(contextlib.closing(sqlite3.connect(self._path)))
                db.execute("pragma query_only = on")
            yield db.execute(
                "select kind, body, at_s from records where kind in (?, ?) order by id desc"
                " limit ?",
                (journal.RoundCommitted.__name__, journal.RoundNumbered.__name__, 2 * count),
            )


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise JournalAwayError(str(error)) from error
    except sqlite3.DatabaseError as error:
        raise JournalBrokenError(str(error)) from error


def _open(path: Path | str) -> sqlite3.Connection:
    """Open or create the file; raise UserError if another version of holdfast wrote it."""
    if str(path) != ":memory:":
        keep_private(Path(path))  # SQLite gives its log the same mode
    db = sqlite3.connect(str(path), check_same_thread=False, isolation_level=None)
    db.text_factory = bytes.decode
    version = db.execute("pragma user_version").fetchone()[0]
    if version not in (0, SCHEMA_VERSION):
        raise UserError(
            f"{path} was written by another version of holdfast (schema {version}, this version"
            f" reads {SCHEMA_VERSION}): continue with that version, or start a new run from an"
            " export",
            exit_code=ExitCode.CONFIG,
        )
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = full")
    if version == 0:
        db.executescript(SCHEMA)
        db.execute(f"pragma user_version = {SCHEMA_VERSION}")
    return db


def back_up(state: Path, target: Path) -> int:
    """Copy what another master needs to take the run over; return the number of records.

    The journal may be written meanwhile; the copy is of one instant, and replaces an older one
    when it is complete. UserError is raised if there is no run or no room.
    """
    source = state / JOURNAL_FILE
    if (state / PLACE_FILE).exists():
        raise UserError(
            f"the journal of {state} is in {(state / PLACE_FILE).read_text().strip()}",
            exit_code=ExitCode.CONFIG,
            hint="back that database up, for example with pg_dump",
        )
    if not source.exists():
        raise UserError(f"there is no run in {state}", exit_code=ExitCode.CONFIG)
    part = make_private(target) / f"{JOURNAL_FILE}.part"
    try:
        for name in ("authority.key", "authority.pem"):
            content = (state / "authority" / name).read_bytes()
            write_private(make_private(target / "authority") / name, content)
        part.unlink(missing_ok=True)
        write_private(part, b"")
        with contextlib.closing(sqlite3.connect(source)) as live:
            live.execute("pragma query_only = on")
            with contextlib.closing(sqlite3.connect(part)) as copy:
                live.backup(copy)
                copy.execute("pragma journal_mode = delete")
                count = int(copy.execute("select count(*) from records").fetchone()[0])
        for leftover in target.glob(f"{JOURNAL_FILE}.tip"):
            leftover.unlink()  # it describes the older copy, on which a master has run
        make_ready(part, target / JOURNAL_FILE)
        finish_replacing(target / JOURNAL_FILE)
    except (OSError, sqlite3.Error) as error:
        raise UserError(
            f"cannot copy {state} to {target}: {error}",
            exit_code=ExitCode.CONFIG,
            hint="is the disk full? the previous copy is unchanged",
        ) from error
    return count


# ---------------------------------------------------------------- the tip


class JournalTip:
    """The number of the last acknowledged record and the last term, in a small file.

    SQLite silently drops the damaged end of a write-ahead log, which the number then shows. The
    file is written after each record and not fsynced, so it never claims more than what is on disk.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def read(self) -> tuple[int, int]:
        """Return the number and the term; zeros if the file is missing or unreadable."""
        parts = os.pread(self._descriptor, 128, 0).split()
        if len(parts) != 3 or not (parts[0].isdigit() and parts[1].isdigit()):
            return 0, 0
        number, term = int(parts[0]), int(parts[1])
        return (number, term) if parts[2] == _tip_check(number, term) else (0, 0)

    def write(self, number: int, term: int) -> None:
        """Write both; after an OSError the file claims fewer records than there are."""
        check = _tip_check(number, term)
        os.pwrite(self._descriptor, b"%020d %020d %s\n" % (number, term, check), 0)

    def close(self) -> None:
        os.close(self._descriptor)


def _tip_check(number: int, term: int) -> bytes:
    return blake3(b"tip %d %d" % (number, term)).hexdigest()[:16].encode()

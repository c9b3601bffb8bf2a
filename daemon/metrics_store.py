"""The run's history in one SQLite file: its curve, those of its members, its rounds and its events.

The run can continue without it. Therefore its last seconds may be lost, and a damaged file is
replaced by a new one. The journal is a separate file (see ``journal_store``); rounds that the
journal has and the history lacks are copied from it (see ``run_recorder``).

All methods may wait for the disk: call them from a thread. They run one at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
from attrs import frozen

from . import curves
from .curves import COLUMNS, EVERYBODY, MEMBER_COLUMNS, Line, MemberPoint, Point, Row

log = logging.getLogger("holdfast.master")
T = TypeVar("T")

HISTORY_FILE = "history.db"
SCHEMA_VERSION = 4
ROUNDS_MAX = 10_000
ROUNDS_BYTES_MAX = 128 * 2**20  # of compressed rows; fewer than ROUNDS_MAX with 1,000 members
EVENTS_MAX = 20_000
SPARE_COPIES_MAX = 5  # damaged files that are kept; the last one makes way
BUSY_S = 5.0  # for another program that has the file open
ZIP_LEVEL = 3
ANY = 2**62  # above all numbers of rounds and events

SCHEMA = """
create table if not exists rounds (number integer primary key, bytes integer not null, body blob);
create table if not exists events (
    id integer primary key, at real not null, kind text not null, peer text, name text not null,
    text text not null);
"""


@frozen
class PastEvent:
    """One event of the run."""

    id: int
    at: float  # unix seconds
    kind: str
    peer: str | None
    name: str
    text: str


class MetricsStore:
    """The history of one run in a file (``:memory:``: none); ``warn`` is told its faults."""

    def __init__(self, path: Path | str, warn: Callable[[str], None] = log.warning) -> None:
        self._path = path
        self._warn = warn
        self._lock = threading.Lock()
        self._fault = ""
        self._db = self._open()

    # ------------------------------------------------------------ the file

    def _open(self) -> sqlite3.Connection:
        """Open the file; if it is damaged, a new one; if that fails, one in memory."""
        for _ in range(2):
            try:
                return self._begin(_connect(self._path))
            except (sqlite3.OperationalError, OSError) as error:
                self._warn(f"no history is stored: {self._path} cannot be used: {error}")
                break
            except sqlite3.DatabaseError as error:
                if not self._set_aside(error):
                    break
        return self._begin(_connect(":memory:"))

    def _begin(self, db: sqlite3.Connection) -> sqlite3.Connection:
        try:
            with db:
                version = db.execute("pragma user_version").fetchone()[0]
                if version not in (0, SCHEMA_VERSION):
                    raise sqlite3.DatabaseError(f"it has version {version}")
                if db.execute("pragma quick_check(1)").fetchone()[0] != "ok":
                    raise sqlite3.DatabaseError("its pages are damaged")
                db.execute(f"pragma user_version = {SCHEMA_VERSION}")
                db.executescript(SCHEMA + curves.SCHEMA)
            self._rounds = _round_sums(db)
        except BaseException:
            db.close()
            raise
        return db

    def _set_aside(self, error: sqlite3.Error) -> bool:
        """Rename a damaged file; return whether that succeeded."""
        path = Path(self._path)
        for number in range(1, SPARE_COPIES_MAX + 1):
            aside = path.with_name(f"{path.name}.damaged-{number}")
            if not aside.exists():
                break
        try:
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            os.replace(path, aside)
        except OSError as other:
            self._warn(
                f"no history is stored: {path} is damaged ({error}) and not renamed: {other}"
            )
            return False
        self._warn(f"the run's history starts empty: {path} was damaged ({error}), now {aside}")
        return True

    @contextlib.contextmanager
    def _access(self) -> Iterator[None]:
        """Lock the file and turn its errors into warnings, so that the run goes on."""
        with self._lock:
            try:
                yield
                fault = ""
            except sqlite3.OperationalError as error:  # full, locked or removed
                fault = str(error)
                if not self._fault:
                    self._warn(f"the run's history lacks rows: {self._path}: {fault}")
            except sqlite3.DatabaseError as error:
                fault = ""
                self._db.close()
                whole = str(self._path) != ":memory:" and self._set_aside(error)
                self._db = self._open() if whole else self._begin(_connect(":memory:"))
            self._fault = fault

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # ------------------------------------------------------------ writing

    def write(
        self,
        points: Sequence[Point] = (),
        rounds: Sequence[tuple[int, bytes]] = (),
        events: Sequence[PastEvent] = (),
        members: Sequence[MemberPoint] = (),
    ) -> bool:
        """Store all rows (rounds as JSON), or none; return whether they are stored."""
        if not (points or rounds or events or members):
            return True
        packed = [(number, zlib.compress(body, ZIP_LEVEL)) for number, body in rounds]
        with self._access(), self._db:
            self._db.executemany(
                "insert or replace into rounds values (?, ?, ?)",
                [(number, len(body), body) for number, body in packed],
            )
            count, size_bytes = self._rounds
            count, size_bytes = count + len(packed), size_bytes + sum(len(b) for _, b in packed)
            if count > ROUNDS_MAX or size_bytes > ROUNDS_BYTES_MAX:
                count, size_bytes = self._forget_rounds()
            self._db.executemany(
                "insert or replace into events values (?, ?, ?, ?, ?, ?)",
                [attrs.astuple(event) for event in events],
            )
            if events:
                oldest = events[-1].id - EVENTS_MAX
                self._db.execute("delete from events where id <= ?", [oldest])
            curves.write_points(self._db, points, members)
            # Not before: after a failed transaction the old sums hold.
            self._rounds = count, size_bytes
            return True
        return False

    def _forget_rounds(self) -> tuple[int, int]:
        """Delete the oldest rounds, a twentieth more than needed; return the count and bytes."""
        self._db.execute(
            "delete from rounds where number in (select number from (select number, "
            "count(*) over newer as rank, sum(bytes) over newer as total from rounds "
            "window newer as (order by number desc)) where rank > ? or total > ?)",
            [ROUNDS_MAX * 95 // 100, ROUNDS_BYTES_MAX * 95 // 100],
        )
        return _round_sums(self._db)

    # ------------------------------------------------------------ reading

    def ask(self, query: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """Return what a query of ``curves`` finds, or ``otherwise`` if the file has a fault."""
        with self._access():
            return query(self._db)
        return otherwise

    def last_point(self) -> Point | None:
        return self.ask(curves.last_point, None)

    def last_event_id(self) -> int:
        query = "select coalesce(max(id), 0) from events"
        return self.ask(lambda db: int(db.execute(query).fetchone()[0]), 0)

    def points(self, count: int, from_at: float | None, to_at: float | None) -> list[Row]:
        """Return ``count`` rows of ``COLUMNS`` of the run at most, and gaps, oldest first."""
        return self.ask(
            lambda db: curves.rows_of(db, EVERYBODY, COLUMNS, count, from_at, to_at), []
        )

    def rounds(self, count: int, before: int | None) -> list[bytes]:
        """Return ``count`` rows at most as JSON, newest first."""

        def query(db: sqlite3.Connection) -> list[bytes]:
            rows = db.execute(
                "select body from rounds where number < ? order by number desc limit ?",
                [ANY if before is None else before, count],
            ).fetchall()
            try:
                return [zlib.decompress(body) for (body,) in rows]
            except zlib.error as error:
                raise sqlite3.DatabaseError(f"a round's row is damaged: {error}") from error

        return self.ask(query, [])

    def round_numbers(self) -> set[int]:
        query = "select number from rounds"
        return self.ask(lambda db: {number for (number,) in db.execute(query)}, set())

    def losses(self) -> tuple[float | None, float | None]:
        unknown: tuple[float | None, float | None] = None, None
        return self.ask(curves.losses, unknown)

    def figures(self) -> list[str]:
        return self.ask(curves.figure_names, [])

    def member(self, member: str) -> tuple[str, str] | None:
        """Return id and name of a member with points, found by either, or None."""
        return self.ask(lambda db: curves.find_member(db, member), None)

    def member_points(
        self, peer: str, count: int, from_at: float | None, to_at: float | None
    ) -> list[Row]:
        """Return ``count`` rows of ``MEMBER_COLUMNS`` and figures at most, oldest first."""
        columns = (*MEMBER_COLUMNS, "figures")
        return self.ask(lambda db: curves.rows_of(db, peer, columns, count, from_at, to_at), [])

    def lines(
        self, of: str, count: int, from_at: float | None, to_at: float | None, *, figure: bool
    ) -> tuple[list[Line], int]:
        """Return a line per member, and how many members are left out: see ``curves``."""
        none: tuple[list[Line], int] = [], 0
        return self.ask(lambda db: curves.lines(db, of, count, from_at, to_at, figure=figure), none)

    def events(
        self,
        count: int,
        before: int | None,
        kinds: Sequence[str] = (),
        text: str = "",
        peer: str = "",
    ) -> list[PastEvent]:
        """Return ``count`` events at most, newest first; what is empty filters nothing.

        ``text`` is looked for in their text or their peer's name, in any case.
        """
        where = ["id < ?"]
        wanted: list[Any] = [ANY if before is None else before]
        if kinds:
            where.append(f"kind in ({', '.join('?' * len(kinds))})")
            wanted += kinds
        if peer:
            where.append("peer = ?")
            wanted.append(peer)
        if text:
            where.append("(text like ? escape '\\' or name like ? escape '\\')")
            escaped = text.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_")
            wanted += [f"%{escaped}%"] * 2
        query = (
            f"select id, at, kind, peer, name, text from events where {' and '.join(where)} "
            "order by id desc limit ?"
        )
        return self.ask(
            lambda db: [PastEvent(*row) for row in db.execute(query, [*wanted, count])], []
        )


def _connect(path: Path | str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    if str(path) != ":memory:":
        os.chmod(path, 0o600)
    db.create_aggregate("mean_figures", 1, curves.MeanFigures)
    db.execute("pragma journal_mode = wal")
    # Intact after any crash, but without its last seconds.
    db.execute("pragma synchronous = normal")
    return db


def _round_sums(db: sqlite3.Connection) -> tuple[int, int]:
    count, size_bytes = db.execute(
        "select count(*), coalesce(sum(bytes), 0) from rounds"
    ).fetchone()
    return count, size_bytes

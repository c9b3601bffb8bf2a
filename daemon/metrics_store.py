"""The run's history in one SQLite file: its curve, those of its members, its rounds and its events.

The run can continue without it. Therefore its last seconds may be lost, and a damaged file is replaced
by a new one. The journal is a separate file (see ``journal_store``); rounds that the journal has and the
history lacks are copied from it (see ``run_recorder``).

Old points are merged: a point of a *level* stands for ``2 ** level`` points of level 0. When a level is
full, its oldest points are merged in pairs into the next level. A run of any length takes a few times
``LEVEL_POINTS`` rows and is finest at its end. A *gap* is a row without figures that marks the end of a
time without a master.

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
from typing import Any

import attrs
from attrs import frozen

from ..protocol.messages import COUNT_MAX
from . import curves
from .curves import Line, MemberPoint

log = logging.getLogger("holdfast.master")

HISTORY_FILE = "history.db"
SCHEMA_VERSION = 1
LEVEL_POINTS = 4_096
LEVELS = 16  # the oldest points of the last level are deleted
MERGED_POINTS = 256  # at a time
ROUNDS_MAX = 10_000
ROUNDS_BYTES_MAX = 128 * 2**20  # of compressed rows; fewer than ROUNDS_MAX with 1,000 members
EVENTS_MAX = 20_000
SPARE_COPIES_MAX = 5  # damaged files that are kept
BUSY_S = 5.0  # for another program that has the file open
ZIP_LEVEL = 3

SCHEMA = """
create table if not exists points (
    id integer primary key, level integer not null, at real not null, gap_s real, step integer,
    rounds integer, loss real, loss_min real, loss_max real, tokens_per_s real, utilisation real,
    members integer, sent_bytes integer, saved_bytes integer);
create index if not exists points_by_level on points (level, id);
create index if not exists points_by_time on points (at);
create index if not exists gaps on points (at) where gap_s is not null;
create table if not exists rounds (number integer primary key, bytes integer not null, body blob);
create table if not exists events (
    id integer primary key, at real not null, kind text not null, peer text, name text not null,
    text text not null);
"""


@frozen
class Point:
    """A point of the curve: the run at one moment."""

    at: float  # unix seconds
    step: int | None = None
    rounds: int | None = None
    loss: float | None = None
    loss_min: float | None = None
    loss_max: float | None = None
    tokens_per_s: float | None = None
    utilisation: float | None = None
    members: int | None = None
    sent_bytes: int | None = None
    saved_bytes: int | None = None
    gap_s: float | None = None  # set in a gap: nothing is known of this time before it


@frozen
class PastEvent:
    """One event of the run."""

    id: int
    at: float  # unix seconds
    kind: str
    peer: str | None
    name: str
    text: str


COLUMNS = tuple(name for name in attrs.fields_dict(Point) if name != "gap_s")
STORED = ("gap_s", *COLUMNS)
THINNED = (
    "max(at), max(step), max(rounds), avg(loss), min(loss_min), max(loss_max), avg(tokens_per_s), "
    "avg(utilisation), cast(round(avg(members)) as integer), max(sent_bytes), max(saved_bytes)"
)
# The oldest points of a level, merged in pairs: neighbours of which both or none are gaps.
MERGED = f"""
with oldest as (
    select *, row_number() over (order by id) as place from points where level = ? limit ?),
spans as (
    select *, place - row_number() over (partition by gap_s is null order by id) as span
    from oldest),
ranked as (
    select *, row_number() over (partition by gap_s is null, span order by id) - 1 as rank
    from spans)
select max(id), sum(gap_s), {THINNED} from ranked group by gap_s is null, span, rank / 2
order by 1"""
Row = tuple[Any, ...]


class MetricsStore:
    """The history of one run.

    Args:
      path: the file; ``:memory:`` stores nothing on disk.
      warn: called with a sentence about a fault of the file and its consequence.
    """

    def __init__(self, path: Path | str, warn: Callable[[str], None] = log.warning) -> None:
        self._path = path
        self._warn = warn
        self._lock = threading.Lock()
        self._fault = ""
        self._refused: set[str] = set()  # names of figures that are not stored
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
            self._counts = dict(db.execute("select level, count(*) from points group by level"))
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
        """Store all rows, or none; return whether they are stored.

        Args:
          rounds: number, and a row as JSON.
          members: oldest first.
        """
        if not (points or rounds or events or members):
            return True
        packed = [(number, zlib.compress(body, ZIP_LEVEL)) for number, body in rounds]
        with self._access(), self._db:
            counts = dict(self._counts)
            self._db.executemany(
                f"insert into points (level, {', '.join(STORED)}) values (0{', ?' * len(STORED)})",
                [[_storable(getattr(point, name)) for name in STORED] for point in points],
            )
            counts[0] = counts.get(0, 0) + len(points)
            self._merge(counts)
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
            self._warn_refused(curves.write_points(self._db, members))
            # Not before: after a failed transaction the old counts hold.
            self._counts, self._rounds = counts, (count, size_bytes)
            return True
        return False

    def _warn_refused(self, names: Sequence[str]) -> None:
        """Warn once of each figure that is not stored, and of no more than there may be figures."""
        for name in names:
            if name not in self._refused and len(self._refused) < curves.FIGURES_MAX:
                self._refused.add(name)
                self._warn(
                    f"the figure {name[: curves.FIGURE_NAME_CHARS_MAX]!r} of run.log is not stored: "
                    f"a run has at most {curves.FIGURES_MAX}, with names of 1 to "
                    f"{curves.FIGURE_NAME_CHARS_MAX} characters"
                )

    def _merge(self, counts: dict[int, int]) -> None:
        """Merge points of every level that is full."""
        for level in range(LEVELS):
            while counts.get(level, 0) >= LEVEL_POINTS + MERGED_POINTS:
                self._merge_oldest(level, counts)

    def _merge_oldest(self, level: int, counts: dict[int, int]) -> None:
        merged = self._db.execute(MERGED, [level, MERGED_POINTS]).fetchall()
        old = "delete from points where level = ? and id <= ?"
        counts[level] -= self._db.execute(old, [level, merged[-1][0]]).rowcount
        if level + 1 < LEVELS:
            self._db.executemany(
                f"insert into points (level, id, {', '.join(STORED)}) "
                f"values ({level + 1}, ?{', ?' * len(STORED)})",
                merged,
            )
            counts[level + 1] = counts.get(level + 1, 0) + len(merged)

    def _forget_rounds(self) -> tuple[int, int]:
        """Delete the oldest rounds; return the count and bytes left.

        A twentieth more than needed is deleted, so that this does not happen at every round.
        """
        self._db.execute(
            "delete from rounds where number in (select number from (select number, "
            "count(*) over newer as rank, sum(bytes) over newer as total from rounds "
            "window newer as (order by number desc)) where rank > ? or total > ?)",
            [ROUNDS_MAX * 95 // 100, ROUNDS_BYTES_MAX * 95 // 100],
        )
        return _round_sums(self._db)

    # ------------------------------------------------------------ reading

    def last_point(self) -> Point | None:
        """Return the newest point with figures."""
        with self._access():
            row = self._db.execute(
                f"select {', '.join(STORED)} from points where gap_s is null "
                "order by id desc limit 1"
            ).fetchone()
            return None if row is None else Point(**dict(zip(STORED, row, strict=True)))
        return None

    def last_event_id(self) -> int:
        """Return the newest event's id, or 0."""
        with self._access():
            found: int = self._db.execute("select coalesce(max(id), 0) from events").fetchone()[0]
            return found
        return 0

    def points(self, count: int, from_at: float | None, to_at: float | None) -> list[Row]:
        """Return ``count`` rows of ``COLUMNS`` at most, oldest first; a gap is a row of None."""
        with self._access():
            first_at, last_at, found_count = self._db.execute(
                "select min(at), max(at), count(*) from points where at between ? and ?",
                [-1e300 if from_at is None else from_at, 1e300 if to_at is None else to_at],
            ).fetchone()
            if not found_count:
                return []
            span = [first_at, last_at]
            gaps = self._db.execute(
                "select at from points where gap_s is not null and gap_s > ? and at between ? and ? "
                "order by at limit ?",
                [(last_at - first_at) / count, *span, count // 2],
            ).fetchall()
            columns, grouping, arguments = ", ".join(COLUMNS), "", []
            if found_count > count:
                columns, grouping = THINNED, "group by cast((at - ?) / ? as integer)"
                width = (last_at - first_at) / max(1, count - len(gaps) - 1)
                arguments = [first_at, width or 1.0]
            rows = self._db.execute(
                f"select {columns} from points where gap_s is null and at between ? and ? "
                f"{grouping} order by 1",
                [*span, *arguments],
            ).fetchall()
            blank = (None,) * (len(COLUMNS) - 1)
            return sorted([*rows, *((at, *blank) for (at,) in gaps)], key=_by_time)
        return []

    def rounds(self, count: int, before: int | None) -> list[bytes]:
        """Return ``count`` rows at most as JSON, newest first."""
        with self._access():
            rows = self._db.execute(
                "select body from rounds where number < ? order by number desc limit ?",
                [2**62 if before is None else before, count],
            ).fetchall()
            try:
                return [zlib.decompress(body) for (body,) in rows]
            except zlib.error as error:
                raise sqlite3.DatabaseError(f"a round's row is damaged: {error}") from error
        return []

    def round_numbers(self) -> set[int]:
        """Return the numbers of all stored rounds."""
        with self._access():
            return {number for (number,) in self._db.execute("select number from rounds")}
        return set()

    def losses(self) -> tuple[float | None, float | None]:
        """Return the run's first and last loss, of those that are stored."""
        first, last = (
            f"(select loss from points where loss is not null order by at {order} limit 1)"
            for order in ("asc", "desc")
        )
        with self._access():
            found: tuple[float | None, float | None]
            found = self._db.execute(f"select {first}, {last}").fetchone()
            return found
        return None, None

    def figures(self) -> list[str]:
        """Return the names of the figures of ``run.log``."""
        with self._access():
            return curves.figure_names(self._db)
        return []

    def member(self, member: str) -> tuple[str, str] | None:
        """Return id and name of a member with points, found by either, or None."""
        with self._access():
            return curves.find_member(self._db, member)
        return None

    def member_points(
        self, peer: str, count: int, from_at: float | None, to_at: float | None
    ) -> list[Row]:
        """Return ``count`` rows of a member at most, and gaps, oldest first: see ``curves``."""
        with self._access():
            return curves.member_rows(self._db, peer, count, from_at, to_at)
        return []

    def lines(
        self, of: str, count: int, from_at: float | None, to_at: float | None, *, figure: bool
    ) -> tuple[list[Line], int]:
        """Return a line per member, and how many members are left out: see ``curves``."""
        with self._access():
            return curves.lines(self._db, of, count, from_at, to_at, figure=figure)
        return [], 0

    def events(
        self,
        count: int,
        before: int | None,
        kinds: Sequence[str] = (),
        text: str = "",
        peer: str = "",
    ) -> list[PastEvent]:
        """Return ``count`` events at most, newest first.

        Args:
          kinds: only events of these kinds; all if empty.
          text: only events with this in their text or their peer's name, in any case.
          peer: only events about this peer; all if empty.
        """
        where, arguments = ["id < ?"], [2**62 if before is None else before]
        wanted: list[Any] = [*arguments]
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
        with self._access():
            rows = self._db.execute(
                f"select id, at, kind, peer, name, text from events where {' and '.join(where)} "
                "order by id desc limit ?",
                [*wanted, count],
            ).fetchall()
            return [PastEvent(*row) for row in rows]
        return []


def _storable(value: object) -> object:
    """Limit a sum of members' own figures to the range of SQLite's integers."""
    return max(-COUNT_MAX, min(value, COUNT_MAX)) if isinstance(value, int) else value


def _connect(path: Path | str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
    if str(path) != ":memory:":
        os.chmod(path, 0o600)
    db.execute("pragma journal_mode = wal")
    db.execute(
        "pragma synchronous = normal"
    )  # intact after any crash, but without its last seconds
    return db


def _round_sums(db: sqlite3.Connection) -> tuple[int, int]:
    """Return the number of stored rounds and their bytes."""
    row = db.execute("select count(*), coalesce(sum(bytes), 0) from rounds").fetchone()
    count, size_bytes = row
    return count, size_bytes


def _by_time(row: Row) -> float:
    at: float = row[0]
    return at


def as_columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Transpose rows of ``COLUMNS``."""
    return {name: [row[at] for row in rows] for at, name in enumerate(COLUMNS)}

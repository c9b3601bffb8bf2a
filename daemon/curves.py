"""The curves of members and of logged figures: tables of the history's file (see ``metrics_store``).

Each member has a *series* of points. The series of peer ``EVERYBODY`` holds the mean loss and the means of
the figures. Old points are merged as those of the run are: a point of a level stands for ``2 ** level``
points of level 0, and the oldest points of a full level are merged in pairs into the next one. A series
takes ``MEMBER_LEVEL_POINTS`` rows for each doubling of the run's length.

The functions are called inside a transaction of ``MetricsStore``.
"""

from __future__ import annotations

import itertools
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from ..protocol.messages import COUNT_MAX, METRICS_MAX

EVERYBODY = ""  # the peer whose series holds the means
MEMBER_LEVEL_POINTS = 128
MEMBER_MERGED_POINTS = 16  # at a time
MEMBER_LEVELS = 16  # the oldest points of the last level are deleted
SERIES_MAX = 1_025  # members of which points are stored, and the means; the oldest are deleted
FIGURES_MAX = METRICS_MAX  # names that ``run.log`` may use in one run
FIGURE_NAME_CHARS_MAX = 64  # a longer name is not stored
FIGURE_DIGITS = 7  # of a stored value
LINES_MAX = 16  # members in one answer; the mean comes besides
LINES_TRIED_MAX = 64  # members whose points are read for it, not all of which have this figure
GAP_MIN_S = 20.0  # a shorter time without a point is no gap
GAP_FACTOR = 4.0  # a time without a point is a gap if it is so much longer than those beside it

SCHEMA = """
create table if not exists series (
    id integer primary key autoincrement, peer text not null unique, name text not null,
    last_at real not null, has_loss integer not null, has_figures integer not null);
create table if not exists member_points (
    id integer primary key, series integer not null, level integer not null, at real not null,
    step integer, loss real, tokens_per_s real, utilisation real, sent_bytes integer,
    received_bytes integer, figures text);
create index if not exists member_points_by_level on member_points (series, level, id);
create table if not exists figures (id integer primary key autoincrement, name text not null unique);
"""


@frozen
class MemberPoint:
    """A member at one moment; ``figures`` are those of ``run.log``."""

    peer: str
    name: str
    at: float  # unix seconds
    step: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    utilisation: float | None = None
    sent_bytes: int | None = None  # since its daemon started
    received_bytes: int | None = None
    figures: Mapping[str, float] = attrs.Factory(dict)


@frozen
class Line:
    """A figure of one member over time; a value of None is a gap."""

    peer: str
    name: str
    at: list[float]
    step: list[int | None]
    value: list[float | None]


MEMBER_COLUMNS = (
    "at",
    "step",
    "loss",
    "tokens_per_s",
    "utilisation",
    "sent_bytes",
    "received_bytes",
)
LINE_COLUMNS = MEMBER_COLUMNS[2:]
_MEANS = frozenset(("loss", "tokens_per_s", "utilisation"))  # of the others the newest value stays
_STORED = (*MEMBER_COLUMNS, "figures")
Row = tuple[Any, ...]


# ---------------------------------------------------------------- writing


def write_points(db: sqlite3.Connection, points: Sequence[MemberPoint]) -> list[str]:
    """Store points; return the names of figures that are not stored."""
    if not points:
        return []
    ids, refused = _figure_ids(db, points)
    series = dict(db.execute("select peer, id from series"))
    for point in points:
        db.execute(
            "insert into series (peer, name, last_at, has_loss, has_figures) values (?, ?, ?, ?, ?) "
            "on conflict (peer) do update set name = excluded.name, last_at = excluded.last_at, "
            "has_loss = max(has_loss, excluded.has_loss), "
            "has_figures = max(has_figures, excluded.has_figures)",
            [point.peer, point.name, point.at, point.loss is not None, bool(point.figures)],
        )
        if point.peer not in series:
            found = db.execute("select id from series where peer = ?", [point.peer]).fetchone()
            series[point.peer] = found[0]
    db.executemany(
        f"insert into member_points (series, level, {', '.join(_STORED)}) "
        f"values (?, 0{', ?' * len(_STORED)})",
        [
            [
                series[point.peer],
                *(_storable(getattr(point, name)) for name in MEMBER_COLUMNS),
                _packed({ids[name]: v for name, v in point.figures.items() if name in ids}),
            ]
            for point in points
        ],
    )
    for peer in {point.peer for point in points}:
        _merge(db, series[peer])
    if len(series) > SERIES_MAX:
        _forget(db, len(series) - SERIES_MAX)
    return refused


def _figure_ids(
    db: sqlite3.Connection, points: Sequence[MemberPoint]
) -> tuple[dict[str, int], list[str]]:
    """Return the ids of the figures that are stored, and the names of those that are not.

    A new name takes the place of the oldest one that is logged no more.
    """
    ids = dict(db.execute("select name, id from figures order by id"))
    logged = dict.fromkeys(name for point in points for name in point.figures)
    refused = []
    for name in logged:
        if name in ids:
            continue
        unused = next((each for each in ids if each not in logged), None)
        if not 1 <= len(name) <= FIGURE_NAME_CHARS_MAX or (
            len(ids) >= FIGURES_MAX and unused is None
        ):
            refused.append(name)
            continue
        if len(ids) >= FIGURES_MAX and unused is not None:
            db.execute("delete from figures where id = ?", [ids.pop(unused)])
        ids[name] = db.execute("insert into figures (name) values (?)", [name]).lastrowid or 0
    return ids, refused


def _storable(value: object) -> object:
    """Limit a member's own counters to the range of SQLite's integers."""
    return max(0, min(value, COUNT_MAX)) if isinstance(value, int) else value


def _packed(figures: Mapping[Any, float]) -> str | None:
    finite = {k: float(f"{v:.{FIGURE_DIGITS}g}") for k, v in figures.items() if math.isfinite(v)}
    return json.dumps(finite, separators=(",", ":")) if finite else None


def _merge(db: sqlite3.Connection, series: int) -> None:
    """Merge points of every level that is full."""
    level = 0
    while level < MEMBER_LEVELS:
        (count,) = db.execute(
            "select count(*) from member_points where series = ? and level = ?", [series, level]
        ).fetchone()
        if count >= MEMBER_LEVEL_POINTS + MEMBER_MERGED_POINTS:
            _merge_oldest(db, series, level)
        else:
            level += 1


def _merge_oldest(db: sqlite3.Connection, series: int, level: int) -> None:
    rows = db.execute(
        f"select id, {', '.join(_STORED)} from member_points where series = ? and level = ? "
        "order by id limit ?",
        [series, level, MEMBER_MERGED_POINTS],
    ).fetchall()
    db.executemany("delete from member_points where id = ?", [row[:1] for row in rows])
    if level + 1 < MEMBER_LEVELS:
        db.executemany(
            f"insert into member_points (series, level, id, {', '.join(_STORED)}) "
            f"values ({series}, {level + 1}, ?{', ?' * len(_STORED)})",
            [
                (two[-1][0], *merged([_unpacked(row[1:]) for row in two], pack=True))
                for two in (rows[i : i + 2] for i in range(0, len(rows), 2))
            ],
        )


def _unpacked(row: Row) -> Row:
    return (*row[:-1], json.loads(row[-1]) if row[-1] else {})


def merged(rows: Sequence[Row], *, pack: bool = False) -> Row:
    """Merge rows of ``MEMBER_COLUMNS`` and figures into one: means of rates, the newest of counters."""
    values: list[Any] = [
        _mean([row[at] for row in rows]) if name in _MEANS else _newest([row[at] for row in rows])
        for at, name in enumerate(MEMBER_COLUMNS)
    ]
    names = dict.fromkeys(name for row in rows for name in row[-1])
    figures: dict[Any, Any] = {n: _mean([row[-1].get(n) for row in rows]) for n in names}
    return (*values, _packed(figures) if pack else figures)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _newest(values: Sequence[Any]) -> Any:
    return next((value for value in reversed(values) if value is not None), None)


def _forget(db: sqlite3.Connection, count: int) -> None:
    """Delete the series whose members were seen last the longest ago."""
    gone = db.execute(
        "select id from series where peer != ? order by last_at limit ?", [EVERYBODY, count]
    ).fetchall()
    db.executemany("delete from member_points where series = ?", gone)
    db.executemany("delete from series where id = ?", gone)


# ---------------------------------------------------------------- reading


def figure_names(db: sqlite3.Connection) -> list[str]:
    """Return the names of the stored figures, in the order in which they were first logged."""
    return [name for (name,) in db.execute("select name from figures order by id")]


def find_member(db: sqlite3.Connection, member: str) -> tuple[str, str] | None:
    """Return id and name of a member, by its id or its name; of several the one seen last."""
    found: tuple[str, str] | None = db.execute(
        "select peer, name from series where peer != ? and (peer = ? or name = ?) "
        "order by peer = ? desc, last_at desc limit 1",
        [EVERYBODY, member, member, member],
    ).fetchone()
    return found


def member_rows(
    db: sqlite3.Connection, peer: str, count: int, from_at: float | None, to_at: float | None
) -> list[Row]:
    """Return at most ``count`` rows of ``MEMBER_COLUMNS`` and figures by name, oldest first, and gaps.

    A gap is a row of None whose time is right after the last point before it.
    """
    names = dict(db.execute("select id, name from figures"))
    rows = [
        (*row[:-1], {names[int(k)]: v for k, v in json.loads(row[-1]).items() if int(k) in names})
        if row[-1]
        else (*row[:-1], {})
        for row in db.execute(
            f"select {', '.join(_STORED)} from member_points where series = "
            "(select id from series where peer = ?) and at between ? and ? order by at",
            [peer, -1e300 if from_at is None else from_at, 1e300 if to_at is None else to_at],
        )
    ]
    return list(_with_gaps(_thinned(rows, count)))


def _thinned(rows: list[Row], count: int) -> list[Row]:
    if len(rows) <= count:
        return rows
    first, last = rows[0][0], rows[-1][0]
    width = (last - first) / (count - 1) or 1.0
    buckets: dict[int, list[Row]] = {}
    for row in rows:
        buckets.setdefault(int((row[0] - first) / width), []).append(row)
    return [merged(each) for each in buckets.values()]


def _with_gaps(rows: list[Row]) -> Iterator[Row]:
    steps = [later[0] - row[0] for row, later in itertools.pairwise(rows)]
    for index, row in enumerate(rows):
        yield row
        if index >= len(steps):
            continue
        beside = [*steps[max(0, index - 1) : index], *steps[index + 1 : index + 2]]
        if steps[index] > max(GAP_MIN_S, GAP_FACTOR * max(beside, default=math.inf)):
            yield (row[0] + 0.001, *(None,) * (len(MEMBER_COLUMNS) - 1), {})


def lines(
    db: sqlite3.Connection,
    of: str,
    count: int,
    from_at: float | None,
    to_at: float | None,
    *,
    figure: bool,
) -> tuple[list[Line], int]:
    """Return the lines of a column or a figure, and how many members are left out.

    The mean comes first if there is one, then the members that were seen last.

    Args:
      of: one of ``LINE_COLUMNS``, or with ``figure`` the name of a figure.
    """
    known = db.execute(
        f"select peer, name from series where {'has_figures' if figure else 'has_loss or peer = ?'} "
        "order by peer != ?, last_at desc, name",
        [EVERYBODY] if figure else [EVERYBODY, EVERYBODY],
    ).fetchall()
    found: list[Line] = []
    left_out = 0
    column = None if figure else MEMBER_COLUMNS.index(of)
    for tried, (peer, name) in enumerate(known):
        members_count = sum(line.peer != EVERYBODY for line in found)
        if members_count >= LINES_MAX or tried > LINES_TRIED_MAX:
            left_out += 1
            continue
        rows = member_rows(db, peer, count, from_at, to_at)
        value = [row[-1].get(of) if column is None else row[column] for row in rows]
        if any(each is not None for each in value):
            # A row without this figure, such as one from before it was first logged, is no gap.
            kept = [
                (row[0], row[1], each)
                for row, each in zip(rows, value, strict=True)
                if each is not None or row[1] is None
            ]
            at, step, shown = map(list, zip(*kept, strict=True))
            found.append(Line(peer, name, at, step, shown))
    return found, left_out


def member_columns(rows: Sequence[Row]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Transpose rows into columns, and figures by their names."""
    columns = {name: [row[at] for row in rows] for at, name in enumerate(MEMBER_COLUMNS)}
    names = dict.fromkeys(name for row in rows for name in row[-1])
    return columns, {name: [row[-1].get(name) for row in rows] for name in names}

"""The curves of a run, of its members and of logged figures: tables of the history's file (see
``metrics_store``).

Each member has a *series* of points. The series of ``EVERYBODY`` is the run's own: its figures are
the means of those that members log. Old points are merged: a point of a *level* stands for ``2 **
level`` points of level 0, and the oldest points of a full level are merged in pairs into the next
one. So a series of any length takes a few times ``LEVEL_POINTS`` rows (the run's) or
``MEMBER_LEVEL_POINTS``, and is finest at its end. A query merges points in the same way
(``MERGED_BY``) until they are few enough.

The functions are called inside a transaction of ``MetricsStore``.
"""

from __future__ import annotations

import itertools
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from ..protocol.messages import COUNT_MAX, METRICS_MAX

EVERYBODY = ""  # the peer whose series is the run's
LEVEL_POINTS = 4_096
MEMBER_LEVEL_POINTS = 128
MERGED_SHARE = 16  # a level is full with this part more than its points; they are merged at once
LEVELS = 16  # the oldest points of the last level are deleted
SERIES_MAX = 1_025  # members of which points are stored, and the run; the oldest are deleted
FIGURES_MAX = 2 * METRICS_MAX  # in a mean, and names that are known of a series
FIGURE_DIGITS = 7  # of a stored value
LINES_MAX = 16  # members in one answer; the mean comes besides
LINES_TRIED_MAX = 64  # members whose points are read for it, not all of which have this figure
GAP_MIN_S = 20.0  # a shorter time without a point is no gap
GAP_FACTOR = 4.0  # a time without a point is a gap if it is so much longer than those beside it

SCHEMA = """
create table if not exists series (
    id integer primary key autoincrement, peer text not null unique, name text not null,
    last_at real not null, has_loss integer not null, figures text not null);
create table if not exists points (
    id integer primary key, series integer not null, level integer not null, at real not null,
    step integer, rounds integer, loss real, loss_min real, loss_max real, tokens_per_s real,
    utilisation real, members integer, sent_bytes integer, saved_bytes integer,
    received_bytes integer, outer_cosine real, outer_gain real, figures text);
create index if not exists points_by_level on points (series, level, id);
create index if not exists points_by_time on points (series, at);
"""


@frozen
class Point:
    """A point of the run's curve: the run at one moment."""

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
    outer_cosine: float | None = None
    outer_gain: float | None = None
    figures: Mapping[str, float] = attrs.Factory(dict)  # means of those of ``run.log``


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


COLUMNS = tuple(name for name in attrs.fields_dict(Point) if name != "figures")
MEMBER_COLUMNS = tuple(
    name for name in attrs.fields_dict(MemberPoint) if name not in ("peer", "name", "figures")
)
LINE_COLUMNS = MEMBER_COLUMNS[2:]
# How several points become one: the newest of counters, means of rates.
MERGED_BY = {
    "at": "max(at)",
    "step": "max(step)",
    "rounds": "max(rounds)",
    "loss": "avg(loss)",
    "loss_min": "min(loss_min)",
    "loss_max": "max(loss_max)",
    "tokens_per_s": "avg(tokens_per_s)",
    "utilisation": "avg(utilisation)",
    "members": "cast(round(avg(members)) as integer)",
    "sent_bytes": "max(sent_bytes)",
    "saved_bytes": "max(saved_bytes)",
    "received_bytes": "max(received_bytes)",
    "outer_cosine": "avg(outer_cosine)",
    "outer_gain": "avg(outer_gain)",
    "figures": "mean_figures(figures)",
}
STORED = ", ".join(MERGED_BY)
MARKS = ", ".join("?" * len(MERGED_BY))
# The oldest points of a level, merged in pairs.
MERGED = f"""
with oldest as (
    select *, row_number() over (order by id) - 1 as place from points
    where series = ? and level = ? order by id limit ?)
select max(id), {", ".join(MERGED_BY.values())} from oldest group by place / 2 order by 1"""
Row = tuple[Any, ...]


class MeanFigures:
    """SQL's ``mean_figures``: ``mean_figures`` of the column ``figures``."""

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []

    def step(self, packed: Any) -> None:
        self._rows.append(json.loads(packed or "{}"))

    def finalize(self) -> Any:
        return _packed(mean_figures(self._rows))


def mean_figures(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each figure over the rows that have it, without the rarest of many."""
    values: dict[str, list[float]] = {}
    for figures in rows:
        for name, value in figures.items():
            if math.isfinite(value):
                values.setdefault(name, []).append(value)
    kept = sorted(values, key=lambda name: -len(values[name]))[:FIGURES_MAX]
    return {name: sum(values[name]) / len(values[name]) for name in kept}


# ---------------------------------------------------------------- writing


def write_points(
    db: sqlite3.Connection, points: Sequence[Point], members: Sequence[MemberPoint]
) -> None:
    """Store points, oldest first. New names of figures replace the member's own old ones."""
    both: list[Point | MemberPoint] = [*points, *members]
    series = dict(db.execute("select peer, id from series"))
    names = {
        peer: json.loads(each) for peer, each in db.execute("select peer, figures from series")
    }
    rows, touched = [], set()
    for point in both:
        peer, name = (EVERYBODY, "mean") if isinstance(point, Point) else (point.peer, point.name)
        old = (each for each in names.get(peer, ()) if each not in point.figures)
        names[peer] = [*old, *point.figures][-FIGURES_MAX:]
        db.execute(
            "insert into series (peer, name, last_at, has_loss, figures) values (?, ?, ?, ?, ?) "
            "on conflict (peer) do update set name = excluded.name, last_at = excluded.last_at, "
            "has_loss = max(has_loss, excluded.has_loss), "
            "figures = excluded.figures",
            [peer, name, point.at, point.loss is not None, json.dumps(names[peer])],
        )
        if peer not in series:
            found = db.execute("select id from series where peer = ?", [peer]).fetchone()
            series[peer] = found[0]
        touched.add(peer)
        values = [_storable(getattr(point, each, None)) for each in MERGED_BY if each != "figures"]
        rows.append([series[peer], *values, _packed(point.figures)])
    db.executemany(f"insert into points (series, level, {STORED}) values (?, 0, {MARKS})", rows)
    for peer in touched:
        _merge(db, series[peer], LEVEL_POINTS if peer == EVERYBODY else MEMBER_LEVEL_POINTS)
    if len(series) > SERIES_MAX:
        _forget(db, len(series) - SERIES_MAX)


def _storable(value: object) -> object:
    """Limit what members claim, and sums of it, to the range of SQLite's integers."""
    return max(-COUNT_MAX, min(value, COUNT_MAX)) if isinstance(value, int) else value


def _packed(figures: Mapping[str, float]) -> str | None:
    finite = {k: float(f"{v:.{FIGURE_DIGITS}g}") for k, v in figures.items() if math.isfinite(v)}
    return json.dumps(finite, separators=(",", ":")) if finite else None


def _merge(db: sqlite3.Connection, series: int, level_points: int) -> None:
    surplus = level_points // MERGED_SHARE
    for level in range(LEVELS):
        count = _count(db, series, level)
        if count < level_points + surplus:
            return  # no higher level has got more
        while count >= level_points + surplus:
            _merge_oldest(db, series, level, surplus)
            count -= surplus


def _count(db: sqlite3.Connection, series: int, level: int) -> int:
    query = "select count(*) from points where series = ? and level = ?"
    count: int = db.execute(query, [series, level]).fetchone()[0]
    return count


def _merge_oldest(db: sqlite3.Connection, series: int, level: int, count: int) -> None:
    merged = db.execute(MERGED, [series, level, count]).fetchall()
    old = "delete from points where series = ? and level = ? and id <= ?"
    db.execute(old, [series, level, merged[-1][0]])
    if level + 1 < LEVELS:
        db.executemany(
            f"insert into points (series, level, id, {STORED}) "
            f"values ({series}, {level + 1}, ?, {MARKS})",
            merged,
        )


def _forget(db: sqlite3.Connection, count: int) -> None:
    """Delete the series whose members were seen last the longest ago."""
    gone = db.execute(
        "select id from series where peer != ? order by last_at limit ?", [EVERYBODY, count]
    ).fetchall()
    db.executemany("delete from points where series = ?", gone)
    db.executemany("delete from series where id = ?", gone)


# ---------------------------------------------------------------- reading


def last_point(db: sqlite3.Connection) -> Point | None:
    """Return the newest point of the run, without figures."""
    row = db.execute(
        f"select {', '.join(COLUMNS)} from points where series = "
        "(select id from series where peer = ?) order by id desc limit 1",
        [EVERYBODY],
    ).fetchone()
    return None if row is None else Point(*row)


def losses(db: sqlite3.Connection) -> tuple[float | None, float | None]:
    """Return the run's first and last loss, of those that are stored."""
    first, last = (
        "(select loss from points where series = run.id and loss is not null "
        f"order by at {order} limit 1)"
        for order in ("asc", "desc")
    )
    found = db.execute(
        f"select {first}, {last} from series as run where peer = ?", [EVERYBODY]
    ).fetchone()
    return found or (None, None)


def figure_names(db: sqlite3.Connection) -> list[str]:
    """Return the names of the members' figures, those of the most members first."""
    rows = db.execute("select figures from series where peer != ? order by id", [EVERYBODY])
    counts = Counter(name for (names,) in rows for name in json.loads(names))
    return [name for name, _count in counts.most_common()]


def find_member(db: sqlite3.Connection, member: str) -> tuple[str, str] | None:
    """Return id and name of a member, by its id or its name; of several the one seen last."""
    found: tuple[str, str] | None = db.execute(
        "select peer, name from series where peer != ? and (peer = ? or name = ?) "
        "order by peer = ? desc, last_at desc limit 1",
        [EVERYBODY, member, member, member],
    ).fetchone()
    return found


def rows_of(
    db: sqlite3.Connection,
    peer: str,
    columns: Sequence[str],
    count: int,
    from_at: float | None,
    to_at: float | None,
) -> list[Row]:
    """Return at most ``count`` rows of columns, ``at`` first, oldest first.

    A gap is a row of None whose time is right after the last point before it.
    """
    known = db.execute("select id from series where peer = ?", [peer]).fetchone()
    if known is None:
        return []
    span = [known[0], -1e300 if from_at is None else from_at, 1e300 if to_at is None else to_at]
    where = "where series = ? and at between ? and ?"
    first_at, last_at, found_count = db.execute(
        f"select min(at), max(at), count(*) from points {where}", span
    ).fetchone()
    query, values = f"select {', '.join(columns)} from points {where} order by at", span
    if found_count > count:
        width = (last_at - first_at) / (count - 1) or 1.0
        merged = ", ".join(MERGED_BY[name] for name in columns)
        query = (
            f"select {merged} from points {where} group by cast((at - ?) / ? as integer) order by 1"
        )
        values = [*span, first_at, width]
    rows = db.execute(query, values).fetchall()
    if "figures" in columns:
        place = columns.index("figures")
        rows = [(*row[:place], json.loads(row[place] or "{}"), *row[place + 1 :]) for row in rows]
    return list(_with_gaps(rows))


def _with_gaps(rows: list[Row]) -> Iterator[Row]:
    steps = [later[0] - row[0] for row, later in itertools.pairwise(rows)]
    for index, row in enumerate(rows):
        yield row
        if index >= len(steps):
            continue
        beside = [*steps[max(0, index - 1) : index], *steps[index + 1 : index + 2]]
        if steps[index] > max(GAP_MIN_S, GAP_FACTOR * max(beside, default=math.inf)):
            yield (row[0] + 0.001, *(None,) * (len(row) - 1))


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
    """
    where = "figures != '[]'" if figure else "has_loss or peer = ?"
    known = db.execute(
        f"select peer, name from series where {where} order by peer != ?, last_at desc, name",
        [EVERYBODY] if figure else [EVERYBODY, EVERYBODY],
    ).fetchall()
    found: list[Line] = []
    left_out = 0
    column = "figures" if figure else of
    for tried, (peer, name) in enumerate(known):
        members_count = sum(line.peer != EVERYBODY for line in found)
        if members_count >= LINES_MAX or tried > LINES_TRIED_MAX:
            left_out += 1
            continue
        rows = rows_of(db, peer, ("at", "step", column), count, from_at, to_at)
        value = [(row[2] or {}).get(of) if figure else row[2] for row in rows]
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


def as_columns(rows: Sequence[Row], names: Sequence[str] = COLUMNS) -> dict[str, list[Any]]:
    return {name: [row[at] for row in rows] for at, name in enumerate(names)}


def member_columns(rows: Sequence[Row]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Transpose rows of ``MEMBER_COLUMNS`` and figures into columns, and figures by their names."""
    names = dict.fromkeys(name for row in rows for name in row[-1] or ())
    figures = {name: [(row[-1] or {}).get(name) for row in rows] for name in names}
    return as_columns(rows, MEMBER_COLUMNS), figures

"""The page's history of a run with several masters, in the database that they share.

The leader's recorder writes its rows into its own ``history.db``, and every few seconds into the database. A standby
copies from there what its own file lacks, so that a new leader's page goes on with the same curves, rounds and
events; and people can query them:

    rounds          number, row (as in ``GET /api/rounds``)
    events          id, at, kind, peer, name, text
    points          at, figures: the run's curve
    member_points   at, peer, name, figures

The database keeps points as they were taken, for some days; ``history.db`` keeps the whole run, merged. The run can go
on without all this, so no write here is waited for, and none needs the lease's fence: rows of two leaders cannot contradict
each other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from psycopg.types.json import Json

from ..member_curves import MemberPoint
from ..metrics_store import EVENTS_MAX, ROUNDS_MAX, MetricsStore, PastEvent, Point
from .postgres_journal import Database

FILL_ROWS = 2_000  # of each table in one step
POINTS_KEPT_S = 7 * 86_400.0
MEMBER_POINTS_KEPT_S = 6 * 3_600.0
PRUNE_EVERY_S = 600.0


class SharedHistory:
    """One master's access to it. All methods wait for the database: call them from a thread.

    Args:
      database: a connection of its own, so that nothing else waits for it.
      clock: unix seconds.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._pruned_at = 0.0

    def close(self) -> None:
        self._database.close()

    def write(
        self,
        points: Sequence[Point],
        rounds: Sequence[tuple[int, bytes]],
        events: Sequence[PastEvent],
        members: Sequence[MemberPoint],
    ) -> None:
        """Store all rows, or none; as ``MetricsStore.write``.

        Raises:
          JournalError: that is not possible now.
        """
        with self._database.connected() as connection, connection.transaction():
            cursor = connection.cursor()
            cursor.executemany(
                "insert into points (at, figures) values (%s, %s)",
                [(each.at, Json(_figures(each))) for each in points],
            )
            cursor.executemany(
                "insert into rounds values (%s, %s) on conflict (number) do update set row = excluded.row",
                [(number, row.decode()) for number, row in rounds],
            )
            cursor.executemany(
                "insert into events values (%s, %s, %s, %s, %s, %s) on conflict (id) do nothing",
                [tuple(map(_text, attrs.astuple(each))) for each in events],
            )
            cursor.executemany(
                "insert into member_points (at, peer, name, figures) values (%s, %s, %s, %s)",
                [(each.at, each.peer, each.name, Json(_figures(each))) for each in members],
            )
            now = self._clock()
            if now - self._pruned_at >= PRUNE_EVERY_S:
                self._pruned_at = now
                cursor.execute("delete from points where at < %s", [now - POINTS_KEPT_S])
                cursor.execute(
                    "delete from member_points where at < %s", [now - MEMBER_POINTS_KEPT_S]
                )
                for table, column, kept in (
                    ("rounds", "number", ROUNDS_MAX),
                    ("events", "id", EVENTS_MAX),
                ):
                    cursor.execute(
                        f"delete from {table} where {column} <= (select max({column}) from {table}) - %s".encode(),
                        [kept],
                    )

    def fill(self, store: MetricsStore) -> bool:
        """Copy the next rows that a master's own history lacks; return whether there may be more.

        Raises:
          JournalError: the database does not answer.
        """
        last = store.last_point()
        since_at = -1e300 if last is None else last.at
        with self._database.connected() as connection:
            points = connection.execute(
                "select at, figures from points where at > %s order by at limit %s",
                [since_at, FILL_ROWS],
            ).fetchall()
            more = len(points) == FILL_ROWS
            until_at = points[-1][0] if more else 1e300
            members = connection.execute(
                "select peer, name, at, figures from member_points where at > %s and at <= %s"
                " order by at",
                [since_at, until_at],
            ).fetchall()
            known = store.round_numbers()
            numbers = connection.execute("select number from rounds order by number").fetchall()
            missing = [number for (number,) in numbers if number not in known][:FILL_ROWS]
            rounds = connection.execute(
                "select number, row from rounds where number = any(%s) order by number", [missing]
            ).fetchall()
            events = connection.execute(
                "select id, at, kind, peer, name, text from events where id > %s order by id limit %s",
                [store.last_event_id(), FILL_ROWS],
            ).fetchall()
        store.write(
            [Point(at=at, **figures) for at, figures in points],
            [(number, json.dumps(row, separators=(",", ":")).encode()) for number, row in rounds],
            [PastEvent(*row) for row in events],
            [MemberPoint(peer, name, at, **figures) for peer, name, at, figures in members],
        )
        return more or len(missing) == FILL_ROWS or len(events) == FILL_ROWS


def _figures(point: Point | MemberPoint) -> dict[str, Any]:
    """Return what is known at a point, besides where and when."""
    plain = attrs.asdict(point, recurse=False)
    return {
        name: dict(value) if name == "figures" else value
        for name, value in plain.items()
        if name not in ("at", "peer", "name") and value is not None and value != {}
    }


def _text(value: object) -> object:
    """Return a value that PostgreSQL stores: its texts cannot have the character NUL."""
    return value.replace("\0", "") if isinstance(value, str) else value

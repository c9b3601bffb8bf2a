"""A database that several simulated masters share: records, and a lease with a fence, in virtual
time.

It does what ``postgres_journal`` does, in memory. It can be away, be slow, or be cut off from one
master's host.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import trio
from attrs import define, field

from ..daemon.master.journal.journal_base import (
    FencedError,
    GrantRow,
    Journal,
    JournalAwayError,
    RepairedJournal,
    Rows,
    Statement,
)
from ..daemon.master.journal.lease import Lease, MasterRow
from ..membership.master.state.journal import JournalRecord
from .witnessed_services import WitnessedStore

ANSWER_S = 8.0  # for a statement of a host that is cut off; then the connection is given up

T = TypeVar("T")


@define
class SimulatedDatabase:
    """The database's server.

    Attributes:
      store: the records and grants of the run. While its disk is full, no statement is answered;
        while it is slow, all statements are.
      cut_off: hosts that do not reach it.
      trip_s: of a statement, one way.
    """

    store: WitnessedStore
    cut_off: set[str] = field(factory=set)
    trip_s: float = 0.005
    fence: int = 0
    holder: str = ""
    expires_s: float = -math.inf
    rows: dict[str, tuple[tuple[str, ...], str, float]] = field(factory=dict)

    @property
    def way_s(self) -> float:
        """Time of a statement now, one way."""
        return max(self.trip_s, self.store.slow_s)


class DatabaseClient:
    """The database as seen from a host: a ``LeaseTable``, and how to call it."""

    def __init__(self, database: SimulatedDatabase, host: str) -> None:
        self._database = database
        self._host = host

    async def call(self, work: Callable[[], T], /) -> T:
        """Do it as a statement: a trip there, and one back."""
        await trio.sleep(self._database.way_s)
        if self._host in self._database.cut_off:
            await trio.sleep(ANSWER_S)
            raise JournalAwayError("no answer")
        done = work()
        await trio.sleep(self._database.way_s)
        return done

    def check(self) -> None:
        """Raise JournalAwayError if no statement gets there now."""
        if self._database.store.full or self._host in self._database.cut_off:
            raise JournalAwayError("the database does not answer")

    def holds(self, lease: Lease) -> bool:
        database = self._database
        return (database.fence, database.holder) == (lease.fence, lease.holder)

    # ------------------------------------------------------------ LeaseTable

    def take_lease(self, holder: str, lease_s: float, free_s: float) -> Lease | None:
        self.check()
        database = self._database
        if database.expires_s >= trio.current_time() - free_s:
            return None
        database.fence += 1
        database.holder, database.expires_s = holder, trio.current_time() + lease_s
        return Lease(holder, database.fence)

    def renew(self, lease: Lease, lease_s: float) -> bool:
        self.check()
        if not self.holds(lease):
            return False
        self._database.expires_s = trio.current_time() + lease_s
        return True

    def release(self, lease: Lease) -> None:
        self.check()
        if self.holds(lease):
            self._database.expires_s = trio.current_time()

    def register(self, holder: str, addresses: Sequence[str], page: str) -> None:
        self.check()
        self._database.rows[holder] = (tuple(addresses), page, trio.current_time())

    def masters(self, seen_s: float) -> list[MasterRow]:
        self.check()
        database, now_s = self._database, trio.current_time()
        rows = [
            MasterRow(
                holder, addresses, page, holder == database.holder, database.expires_s - now_s
            )
            for holder, (addresses, page, at_s) in database.rows.items()
            if at_s > now_s - seen_s
        ]
        return sorted(rows, key=lambda row: not row.active)


class LeasedJournal(Journal):
    """The database's journal for the holder of a lease."""

    def __init__(self, database: SimulatedDatabase, host: str, lease: Lease) -> None:
        super().__init__()
        self._database = database
        self._client = DatabaseClient(database, host)
        self._lease = lease

    @property
    def slow_s(self) -> float:
        """Duration of writing a record, as of ``WitnessedStore``."""
        return 2 * self._database.way_s

    @property
    def place(self) -> str:
        return "the simulated database"

    @property
    def remedy(self) -> str:
        return "wait for it"

    def close(self) -> None:
        """Nothing to close: there is no connection."""

    def _check(self) -> None:
        self._client.check()
        if not self._client.holds(self._lease):
            raise FencedError("another master holds the journal")

    def append(self, record: JournalRecord) -> None:
        self._check()
        self._database.store.append(record)

    def records(self) -> list[JournalRecord]:
        self._client.check()
        return self._database.store.records()

    def grant(self, peer: str) -> GrantRow | None:
        return self._database.store.grant(peer)

    def granted(self) -> dict[str, GrantRow]:
        return self._database.store.granted()

    def admit(self, peer: str, grant: GrantRow) -> None:
        self._check()
        self._database.store.admit(peer, grant)

    # Nothing below ``append`` is used.

    def _read(self, query: str, values: Sequence[object] = ()) -> Rows:
        raise NotImplementedError

    def _write(self, *statements: Statement) -> None:
        raise NotImplementedError

    def _append(self, number: int, kind: str, body: bytes, at_s: float, check: bytes) -> None:
        raise NotImplementedError

    def _read_records(self) -> RepairedJournal:
        raise NotImplementedError

    def _newest_rounds(
        self, count: int
    ) -> contextlib.AbstractContextManager[Iterable[tuple[str, bytes, float]]]:
        raise NotImplementedError

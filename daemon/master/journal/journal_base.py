"""What the master's journal is, wherever it is kept: records in order, invites, grants.

    Journal          in memory: tokens and grants; in the database: everything
     |- JournalStore      one SQLite file (the default)
     '- PostgresJournal   a PostgreSQL database that several masters share, one at a time

A record is durable when ``append`` returns; the service sends nothing that depends on a record
before that.

Tokens and grants are kept in memory, so reading them never waits for the database. Writes may take
long and may come from any thread; they run one at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
from attrs import define, evolve, frozen
from blake3 import blake3

from ....membership.master.state import journal
from ....protocol import wire
from ....protocol.errors import HoldfastError, RemoteProtocolError, UserError
from ....protocol.messages import Commit, Role
from ....protocol.trust.invite import generate_token
from ...process.exit_codes import ExitCode

COMMITS_BYTES_MAX = 2**26  # of commits that are read at once; with 1,000 members one is 60 kB
# Of every journal, in the words of its database: each has its own names of these types.
TABLES = """
create table if not exists records (
    id {number} primary key, kind text not null, body {blob} not null, at_s {real} not null,
    chk {blob} not null);
create table if not exists tokens (
    hash {blob} primary key, role text not null, founder integer not null,
    uses_left integer not null, expires_s {real} not null, made_s {real} not null,
    withdrawn integer not null default 0, by_hand integer not null default 0);
create table if not exists grants (
    peer text primary key, role text not null, founder integer not null, name text not null,
    invite text not null default '');
"""
TOKEN_COLUMNS = "hash, role, founder, uses_left, expires_s, made_s, withdrawn, by_hand"
TOKENS = f"select {TOKEN_COLUMNS} from tokens"
GRANT_COLUMNS = "peer, role, founder, name, invite"
GRANTS = f"select {GRANT_COLUMNS} from grants"
Rows = Sequence[tuple[Any, ...]]
CHECK_BYTES = 16  # of a record
Row = tuple[int, str, bytes, float, bytes]
Statement = tuple[str, Sequence[object]]  # SQL with ? for values, and those


class JournalError(HoldfastError):
    """The journal cannot be read or written."""


class JournalAwayError(JournalError):
    """A journal that cannot be written now (disk full, database away). Nothing was changed."""


class JournalBrokenError(JournalError):
    """A damaged journal: trying again does not help."""


class FencedError(JournalError):
    """Another master holds the journal now; nothing was changed, and never will be by this one."""


class TokenError(UserError):
    """A token that admits no newcomer; the text is sent to the newcomer."""


@frozen
class GrantRow:
    """The rights of an admitted identity; ``invite`` is its invite's id, empty if not known."""

    role: Role
    founder: bool
    name: str
    invite: str = ""


@define
class Token:
    """An invite's token, as the journal knows it; the journal alone changes it."""

    role: Role
    founder: bool
    uses_left: int
    expires_s: float
    made_s: float
    withdrawn: bool
    by_hand: bool  # the operator approves each newcomer


@frozen
class JournalCut:
    """The repair of a damaged journal: its end was cut off.

    Attributes:
      count: the least number of records that are lost.
      fault: what is wrong with the first of them.
      copy: a copy of the damaged file.
    """

    count: int
    fault: str
    copy: Path

    def __str__(self) -> str:
        return (
            f"the journal was damaged ({self.fault}): at least {self.count} records at its end "
            f"are cut off; the damaged file is kept as {self.copy}"
        )


@frozen
class JournaledRound:
    """A round in the journal: its commit, or that it was opened; times are unix seconds.

    Attributes:
      opened_at: None if it is not known.
      committed_at: None if it was not committed.
    """

    record: Commit | journal.RoundNumbered
    opened_at: float | None
    committed_at: float | None


class Journal(ABC):
    """The part of a run's state that must survive the master's process.

    Attributes:
      cut: the repair when the journal was opened; None if it was whole.
      last_term: the highest term that a master began on this journal, even if its record is cut
        off; 0 if that is not known.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._writing = threading.Lock()
        self._count = 0
        self._grants: dict[str, GrantRow] = {}
        self._tokens: dict[bytes, Token] = {}
        self.last_term = 0
        self.cut: JournalCut | None = None

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it is, for people: a path, or a database without its password."""

    @property
    @abstractmethod
    def remedy(self) -> str:
        """What the operator does when it cannot be written."""

    @abstractmethod
    def close(self) -> None:
        """Close it; what was acknowledged is there."""

    # ------------------------------------------------------------ the database

    @abstractmethod
    def _read(self, query: str, values: Sequence[object] = ()) -> Rows:
        """Return the rows of a query with ``?`` for values; raises JournalError."""

    @abstractmethod
    def _write(self, *statements: Statement) -> None:
        """Write all durably, or raise JournalError and change nothing."""

    @abstractmethod
    def _append(self, number: int, kind: str, body: bytes, at_s: float, check: bytes) -> None:
        """Write a record durably, or raise JournalError and change nothing."""

    @abstractmethod
    def _read_records(self) -> RepairedJournal:
        """Read the records in order up to the first damaged one."""

    @abstractmethod
    def _newest_rounds(
        self, count: int
    ) -> contextlib.AbstractContextManager[Iterable[tuple[str, bytes, float]]]:
        """Read the kind, body and time of the newest records of rounds, the newest first."""

    @property
    def is_empty(self) -> bool:
        return not self._count

    def _remember(self) -> None:
        """Read what is kept in memory."""
        self._grants = {
            peer: GrantRow(Role(role), bool(founder), name, invite)
            for peer, role, founder, name, invite in self._read(GRANTS)
        }
        self._tokens = {
            bytes(row[0]): Token(
                Role(row[1]), bool(row[2]), row[3], row[4], row[5], *map(bool, row[6:])
            )
            for row in self._read(TOKENS)
        }

    # ------------------------------------------------------------ records

    def append(self, record: journal.JournalRecord) -> None:
        """Write one record; on return it is durable.

        Raises:
          JournalAwayError: it cannot be written now (the disk is full). The journal is unchanged.
          JournalBrokenError: the journal is damaged.
          FencedError: another master holds the journal.
        """
        body = msgpack.packb(wire.to_plain(record))
        with self._writing:
            kind, number = type(record).__name__, self._count + 1
            self._append(number, kind, body, self._now(), check_of(number, kind, body))
            self._count = number
            if isinstance(record, journal.TermStarted):
                self.last_term = max(self.last_term, record.term)

    def records(self) -> list[journal.JournalRecord]:
        """Return all records, oldest first."""
        found = self._read_records()
        if found.fault:
            raise UserError(f"the journal is damaged: {found.fault}", exit_code=ExitCode.CONFIG)
        return found.records

    def written_at(self, kind: type[journal.JournalRecord]) -> float | None:
        """Return when the last record of a kind was written (unix seconds); None without any."""
        return self._time_of("max", kind)

    def rounds(self, count: int, known: Container[int]) -> list[JournaledRound]:
        """Return unknown rounds among the newest ``count``, oldest first; no writer waits."""
        found: dict[int, JournaledRound] = {}
        size_bytes = 0
        with self._newest_rounds(count) as rows:
            for kind, body, at_s in rows:
                plain = msgpack.unpackb(body)
                opened = kind == journal.RoundNumbered.__name__
                number = plain["round"] if opened else plain["commit"]["round"]
                if number in known:
                    continue
                if opened and number in found:
                    found[number] = evolve(found[number], opened_at=at_s)
                elif opened:
                    record = wire.from_plain(journal.RoundNumbered, plain)
                    found[number] = JournaledRound(record, at_s, None)
                elif size_bytes >= COMMITS_BYTES_MAX:
                    break
                else:
                    size_bytes += len(body)
                    commit = wire.from_plain(journal.RoundCommitted, plain).commit
                    found[number] = JournaledRound(commit, None, at_s)
        return [found[number] for number in sorted(found)]

    def run_times(self) -> tuple[float | None, float | None]:
        """Return when the first round was opened, and when the run was finished (unix seconds)."""
        return self._time_of("min", journal.RoundNumbered), self._time_of(
            "max", journal.RunFinished
        )

    def _time_of(self, which: str, kind: type[journal.JournalRecord]) -> float | None:
        found = self._read(f"select {which}(at_s) from records where kind = ?", [kind.__name__])
        at_s: float | None = found[0][0]
        return at_s

    # ------------------------------------------------------------ invites

    def make_token(
        self, role: Role, *, founder: bool, uses: int, hours: float, by_hand: bool = False
    ) -> tuple[str, float]:
        """Return a new token and its expiry (unix seconds). Only its hash is stored."""
        token = generate_token()
        made_s = self._now()
        row = Token(role, founder, uses, made_s + 3600.0 * hours, made_s, False, by_hand)
        query = (
            "insert into tokens (hash, role, founder, uses_left, expires_s, made_s, by_hand)"
            " values (?, ?, ?, ?, ?, ?, ?)"
        )
        key, expires_s = _hash(token), row.expires_s
        values = (key, role.value, int(founder), uses, expires_s, made_s, int(by_hand))
        with self._writing:
            self._write((query, values))
            self._tokens[key] = row
        return token, expires_s

    def redeem(self, token: str, peer: str, name: str) -> None:
        """Use a token once and admit a peer with its grant; raises TokenError if it is no good.

        A peer that has a grant already keeps it, and uses nothing up.
        """
        with self._writing:
            if peer in self._grants:
                return
            row = self.valid(token)
            grant = GrantRow(row.role, row.founder, name, _id_of(_hash(token)))
            self._write(
                ("update tokens set uses_left = uses_left - 1 where hash = ?", (_hash(token),)),
                _to_grant(peer, grant),
            )
            self._grants[peer] = grant
            row.uses_left -= 1  # not before the grant is known: its peer may ask meanwhile

    def valid(self, token: str) -> Token:
        """Return a token that admits a machine now; raises TokenError for any other."""
        row = self._tokens.get(_hash(token))
        if row is None:
            raise TokenError("this invite is not known here", exit_code=ExitCode.INVITE)
        if row.withdrawn:
            raise TokenError("this invite was withdrawn", exit_code=ExitCode.INVITE)
        if row.expires_s < self._now():
            raise TokenError("this invite has expired", exit_code=ExitCode.INVITE)
        if row.uses_left < 1:
            raise TokenError("this invite is used up", exit_code=ExitCode.INVITE)
        return row

    def withdraw(self, invite_id: str) -> bool:
        """Make an invite invalid; return whether there is one with this id."""
        found = [key for key in self._tokens if _id_of(key) == invite_id.upper()]
        with self._writing:
            for key in found:
                self._write(("update tokens set withdrawn = 1 where hash = ?", (key,)))
                self._tokens[key].withdrawn = True
            return bool(found)

    def admit(self, peer: str, grant: GrantRow) -> None:
        with self._writing:
            self._write(_to_grant(peer, grant))
            self._grants[peer] = grant

    def grant(self, peer: str) -> GrantRow | None:
        return self._grants.get(peer)

    def granted(self) -> dict[str, GrantRow]:
        return dict(self._grants)

    def invites(self) -> list[dict[str, object]]:
        """Return all invites as JSON, without their tokens."""
        return [
            {
                "id": _id_of(key),
                "role": row.role.value,
                "founder": int(row.founder),
                "uses_left": row.uses_left,
                "expires_s": row.expires_s,
                "withdrawn": int(row.withdrawn),
                "approve": int(row.by_hand),
            }
            for key, row in sorted(self._tokens.items(), key=lambda item: item[1].made_s)
        ]


def invite_id(token: str) -> str:
    """Return the id by which people name the invite with this token."""
    return _id_of(_hash(token))


@contextlib.contextmanager
def storing(what: str) -> Iterator[None]:
    """Turn a failure to write into a UserError that names what cannot be stored."""
    try:
        yield
    except JournalError as error:
        raise UserError(
            f"{what} cannot be stored: {error}",
            hint=(
                "free some space on the disk of the master's state, or see that its database"
                " answers"
            ),
        ) from error


def _id_of(key: bytes) -> str:
    return key[:4].hex().upper()


def _hash(token: str) -> bytes:
    # The token has 192 random bits, so a slow hash would add no security.
    return hashlib.sha256(token.encode()).digest()


def _to_grant(peer: str, grant: GrantRow) -> Statement:
    return (
        "insert into grants (peer, role, founder, name, invite) values (?, ?, ?, ?, ?) on"
        " conflict (peer) do update set role = excluded.role, founder = excluded.founder,"
        " name = excluded.name, invite = excluded.invite",
        (peer, grant.role.value, int(grant.founder), grant.name, grant.invite),
    )


# ---------------------------------------------------------------- rows of records


def check_of(number: int, kind: str, body: bytes) -> bytes:
    """Return a record's checksum, which also covers its number and kind."""
    return blake3(msgpack.packb([number, kind, body])).digest()[:CHECK_BYTES]


@frozen
class RepairedJournal:
    """The valid beginning of a journal.

    Attributes:
      rows, records: the valid records, in order.
      fault: what is wrong with the next record; empty at the journal's end.
    """

    rows: list[Row]
    records: list[journal.JournalRecord]
    fault: str


def read_row(found: RepairedJournal, row: tuple[Any, ...]) -> str:
    """Add the next row to what was found; return what is wrong with it, or an empty string."""
    if fault := _fault(len(found.rows) + 1, row):
        return fault
    number, kind, body, at_s, check = row
    try:
        record = wire.from_plain(journal.RECORDS[kind], msgpack.unpackb(body))
    except (KeyError, TypeError, ValueError, RemoteProtocolError) as error:
        return f"record {number} ({kind}) cannot be read: {error}"
    found.rows.append((number, kind, body, float(at_s), check))
    found.records.append(record)
    return ""


def _fault(expected: int, row: tuple[Any, ...]) -> str:
    number, kind, body, at_s, check = row
    if number != expected:
        return f"record {expected} is missing"
    if not (isinstance(kind, str) and isinstance(body, bytes) and isinstance(at_s, float | int)):
        return f"record {number} is damaged"
    if check != check_of(number, kind, body):
        return f"record {number} is damaged: its checksum does not fit"
    return ""

"""The master's journal on disk: one SQLite file with a write-ahead log, fsynced at every record.

The file holds the journal's records in order, the invites' tokens (hashed) and the grant of each
admitted identity. A record is durable when ``append`` returns; the service sends nothing that depends
on a record before that. The simulator uses ``:memory:``.

Tokens and grants are kept in memory, so reading them never waits for the disk. Writes may take long
and may come from any thread; they run one at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Container, Iterator
from pathlib import Path

import msgpack
from attrs import define, evolve, frozen

from ...membership.master.state import journal
from ...protocol import wire
from ...protocol.durable_files import keep_private, write_private
from ...protocol.errors import UserError
from ...protocol.messages import Commit, Role
from ...protocol.trust.invite import generate_token
from ..exit_codes import ExitCode
from ..paths import make_private
from .journal_repair import (
    JournalTip,
    Row,
    check_of,
    finish_replacing,
    keep_aside,
    make_ready,
    read_rows,
    readable,
)

log = logging.getLogger("holdfast.master")

SCHEMA_VERSION = 5
JOURNAL_FILE = "journal.sqlite"
COMMITS_BYTES_MAX = 2**26  # of commits that are read at once; with 1,000 members one is 60 kB

SCHEMA = """
create table if not exists records (
    id integer primary key, kind text not null, body blob not null, at_s real not null,
    chk blob not null);
create table if not exists tokens (
    hash blob primary key, role text not null, founder integer not null,
    uses_left integer not null, expires_s real not null, made_s real not null,
    withdrawn integer not null default 0, by_hand integer not null default 0);
create table if not exists grants (
    peer text primary key, role text not null, founder integer not null, name text not null,
    invite text not null default '');
"""
TOKENS = "select hash, role, founder, uses_left, expires_s, made_s, withdrawn, by_hand from tokens"
GRANTS = "select peer, role, founder, name, invite from grants"


class TokenError(UserError):
    """A token that admits no newcomer; the text is sent to the newcomer."""


@frozen
class GrantRow:
    """The rights of an admitted identity.

    Attributes:
      invite: the id of the invite that it used; empty if that is not known.
    """

    role: Role
    founder: bool
    name: str
    invite: str = ""


@define
class _Token:
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
class Committed:
    """A round's commit in the journal.

    Attributes:
      opened_at: unix seconds when the round was opened; None if that is not known.
      committed_at: unix seconds when the commit was written.
    """

    commit: Commit
    opened_at: float | None
    committed_at: float


class JournalStore:
    """The part of a run's state that must survive the master's process.

    Attributes:
      cut: the repair when the journal was opened; None if it was whole.
      last_term: the highest term that a master began on this journal, even if its record is cut off;
        0 if that is not known.
    """

    def __init__(self, path: Path | str, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._writing = threading.Lock()
        self._tip: JournalTip | None = None
        self._path = None if str(path) == ":memory:" else path
        self.last_term = 0
        self.cut: JournalCut | None = None
        try:
            if str(path) == ":memory:":
                self._db = _open(path)
                self._records: list[journal.JournalRecord] = []
            else:
                self._load(Path(path))
            self._count = len(self._records)
            self._grants = {
                peer: GrantRow(Role(role), bool(founder), name, invite)
                for peer, role, founder, name, invite in self._db.execute(GRANTS)
            }
            self._tokens = {
                row[0]: _Token(
                    Role(row[1]), bool(row[2]), row[3], row[4], row[5], *map(bool, row[6:])
                )
                for row in self._db.execute(TOKENS)
            }
        except (sqlite3.DatabaseError, OSError, ValueError) as error:
            raise UserError(
                f"the journal {path} cannot be used: {error}", exit_code=ExitCode.CONFIG
            ) from error
        if self.cut is not None:
            self._restore_grants()

    def _load(self, path: Path) -> None:
        finish_replacing(path)
        self._db = _open(path)
        self._tip = JournalTip(path.with_name(f"{path.name}.tip"))
        found = read_rows(self._db)
        claimed, self.last_term = self._tip.read()
        fault = found.fault
        if not fault and claimed > len(found.rows):
            fault = f"record {len(found.rows) + 1} is missing"
        self._records = found.records
        if not fault:
            return
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

    def _restore_grants(self) -> None:
        """Admit members whose grant was lost with a damaged page as ordinary contributors."""
        for record in self._records:
            if isinstance(record, journal.PeerAdmitted) and record.peer not in self._grants:
                log.warning("the grant of %s is lost: it is a contributor now", record.name)
                self.admit(record.peer, GrantRow(Role.CONTRIBUTOR, False, record.name))

    def close(self) -> None:
        self._db.close()
        if self._tip is not None:
            self._tip.close()
            self._tip = None

    # ------------------------------------------------------------ records

    def append(self, record: journal.JournalRecord) -> None:
        """Write one record; on return it is on disk.

        Raises:
          sqlite3.OperationalError: it cannot be written now (the disk is full). The journal is
            unchanged.
        """
        body = msgpack.packb(wire.to_plain(record))
        with self._writing:
            kind, number = type(record).__name__, self._count + 1
            self._db.execute(
                "insert into records (id, kind, body, at_s, chk) values (?, ?, ?, ?, ?)",
                (number, kind, body, self._now(), check_of(number, kind, body)),
            )
            self._count = number
            if isinstance(record, journal.TermStarted):
                self.last_term = max(self.last_term, record.term)
            if self._tip is not None:
                with contextlib.suppress(OSError):
                    self._tip.write(number, self.last_term)

    def records(self) -> list[journal.JournalRecord]:
        """Return all records, oldest first."""
        found = read_rows(self._db)
        if found.fault:
            raise UserError(f"the journal is damaged: {found.fault}", exit_code=ExitCode.CONFIG)
        return found.records

    def commits(self, count: int, known: Container[int]) -> list[Committed]:
        """Return the commits among the newest ``count`` whose rounds are not known, oldest first.

        This blocks no writer.
        """
        found: list[Committed] = []
        opened_at: dict[int, float] = {}
        size_bytes = 0
        with contextlib.ExitStack() as stack:
            db = self._db
            if self._path is not None:
                db = stack.enter_context(contextlib.closing(sqlite3.connect(self._path)))
                db.execute("pragma query_only = on")
            rows = db.execute(
                "select kind, body, at_s from records where kind in (?, ?) order by id desc limit ?",
                (journal.RoundCommitted.__name__, journal.RoundNumbered.__name__, 2 * count),
            )
            for kind, body, at_s in rows:
                plain = msgpack.unpackb(body)
                if kind == journal.RoundNumbered.__name__:
                    opened_at[plain["round"]] = at_s
                elif plain["commit"]["round"] not in known and size_bytes < COMMITS_BYTES_MAX:
                    size_bytes += len(body)
                    record = wire.from_plain(journal.RoundCommitted, plain)
                    found.append(Committed(record.commit, None, at_s))
        return [
            evolve(each, opened_at=opened_at.get(each.commit.round)) for each in reversed(found)
        ]

    def run_times(self) -> tuple[float | None, float | None]:
        """Return when the run's first round was opened, and when the run was finished (unix seconds)."""
        first, last = (
            self._db.execute(
                f"select {which}(at_s) from records where kind = ?", [kind.__name__]
            ).fetchone()[0]
            for which, kind in (("min", journal.RoundNumbered), ("max", journal.RunFinished))
        )
        return first, last

    # ------------------------------------------------------------ invites

    def make_token(
        self, role: Role, *, founder: bool, uses: int, hours: float, by_hand: bool = False
    ) -> tuple[str, float]:
        """Return a new token and its expiry (unix seconds). Only its hash is stored."""
        token = generate_token()
        made_s = self._now()
        row = _Token(role, founder, uses, made_s + 3600.0 * hours, made_s, False, by_hand)
        with self._writing:
            self._db.execute(
                "insert into tokens (hash, role, founder, uses_left, expires_s, made_s, by_hand)"
                " values (?, ?, ?, ?, ?, ?, ?)",
                (_hash(token), role.value, founder, uses, row.expires_s, made_s, by_hand),
            )
            self._tokens[_hash(token)] = row
        return token, row.expires_s

    def redeem(self, token: str) -> GrantRow:
        """Use a token once; return its grant, which has no name yet.

        Raises:
          TokenError: the token is unknown, withdrawn, expired or used up.
        """
        with self._writing:
            row = self._good(token)
            self._db.execute(
                "update tokens set uses_left = uses_left - 1 where hash = ?", (_hash(token),)
            )
            row.uses_left -= 1
            return GrantRow(row.role, row.founder, "", _id_of(_hash(token)))

    def needs_approval(self, token: str) -> bool:
        """Return whether the operator must approve its users; raises TokenError as ``redeem`` does."""
        return self._good(token).by_hand

    def _good(self, token: str) -> _Token:
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

    def offers(self, token: str) -> tuple[GrantRow, int]:
        """Return a token's grant and the uses left; raises TokenError as ``redeem`` does."""
        row = self._good(token)
        return GrantRow(row.role, row.founder, ""), row.uses_left

    def is_good(self, token: str) -> bool:
        """Return whether a token would admit a newcomer now."""
        try:
            self._good(token)
        except TokenError:
            return False
        return True

    def withdraw(self, invite_id: str) -> bool:
        """Make an invite invalid; return whether there is one with this id."""
        found = [key for key in self._tokens if _id_of(key) == invite_id.upper()]
        with self._writing:
            for key in found:
                self._db.execute("update tokens set withdrawn = 1 where hash = ?", (key,))
                self._tokens[key].withdrawn = True
        return bool(found)

    def admit(self, peer: str, grant: GrantRow) -> None:
        """Store an identity's grant."""
        with self._writing:
            self._db.execute(
                "insert or replace into grants (peer, role, founder, name, invite)"
                " values (?, ?, ?, ?, ?)",
                (peer, grant.role.value, grant.founder, grant.name, grant.invite),
            )
            self._grants[peer] = grant

    def grant(self, peer: str) -> GrantRow | None:
        """Return an identity's grant, or None if it was never admitted."""
        return self._grants.get(peer)

    def granted(self) -> dict[str, GrantRow]:
        """Return the grants of all identities that were ever admitted."""
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


def _open(path: Path | str) -> sqlite3.Connection:
    """Open or create the file.

    Raises:
      sqlite3.DatabaseError: it is damaged.
      UserError: another version of holdfast wrote it.
    """
    if str(path) != ":memory:":
        keep_private(Path(path))  # SQLite gives its log the same mode
    db = sqlite3.connect(str(path), check_same_thread=False, isolation_level=None)
    db.text_factory = _strict_text
    version = db.execute("pragma user_version").fetchone()[0]
    if version not in (0, SCHEMA_VERSION):
        raise UserError(
            f"{path} was written by another version of holdfast (schema {version}, this version "
            f"reads {SCHEMA_VERSION}): continue with that version, or start a new run from an export",
            exit_code=ExitCode.CONFIG,
        )
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = full")
    if version == 0:
        db.executescript(SCHEMA)
        db.execute(f"pragma user_version = {SCHEMA_VERSION}")
    return db


def _strict_text(data: bytes) -> str:
    return data.decode("utf-8")


def back_up(state: Path, target: Path) -> int:
    """Copy what another master needs to take the run over; return the number of records.

    The journal may be written meanwhile; the copy is of one instant. An existing copy is replaced
    when the new one is complete.

    Raises:
      UserError: there is no run in ``state``, or the copy cannot be written.
    """
    source = state / JOURNAL_FILE
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


@contextlib.contextmanager
def storing(what: str) -> Iterator[None]:
    """Turn a failure to write into a UserError that names what cannot be stored."""
    try:
        yield
    except sqlite3.Error as error:
        raise UserError(
            f"{what} cannot be stored: {error}",
            hint="free some space on the disk of the master's state",
        ) from error


def _id_of(key: bytes) -> str:
    """Return the id that people use for the invite with this hash."""
    return key[:4].hex().upper()


def _hash(token: str) -> bytes:
    # The token has 192 random bits, so a slow hash would add no security.
    return hashlib.sha256(token.encode()).digest()

"""The master's journal on disk: one SQLite file with a write-ahead log, fsynced at every record.

It holds the journal's records in order, the invites' tokens (hashed) and what each admitted
identity was granted. A record is durable when ``append`` returns; the service sends nothing that
depends on a record before that. ``:memory:`` serves the simulator.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import msgpack
from attrs import frozen

from ..membership import journal
from ..protocol import wire
from ..protocol.errors import RemoteProtocolError, UserError
from ..protocol.messages import Role
from .exit_codes import ExitCode

SCHEMA_VERSION = 1
TOKEN_BYTES = 24

SCHEMA = """
create table if not exists records (
    id integer primary key, kind text not null, body blob not null, at_s real not null);
create table if not exists tokens (
    hash blob primary key, role text not null, founder integer not null,
    uses_left integer not null, expires_s real not null, made_s real not null,
    withdrawn integer not null default 0);
create table if not exists grants (
    peer text primary key, role text not null, founder integer not null, name text not null);
"""


class TokenError(UserError):
    """A token that does not admit; its text goes to the newcomer."""


@frozen
class GrantRow:
    role: Role
    founder: bool
    name: str


class Store:
    """Everything of a run that must survive the master's process."""

    def __init__(self, path: Path | str, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        try:
            # Used from one thread at a time: the service serialises its calls.
            self._db = sqlite3.connect(str(path), check_same_thread=False, isolation_level=None)
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = full")
            version = self._db.execute("pragma user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                raise UserError(
                    f"{path} was written by another holdfast (schema {version})",
                    exit_code=ExitCode.CONFIG,
                )
            self._db.executescript(SCHEMA)
            self._db.execute(f"pragma user_version = {SCHEMA_VERSION}")
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"the journal {path} cannot be used: {error}", exit_code=ExitCode.CONFIG
            ) from error

    def close(self) -> None:
        self._db.close()

    # ------------------------------------------------------------ records

    def append(self, record: journal.JournalRecord) -> None:
        """Write one record; on return it is on disk."""
        body = msgpack.packb(wire.to_plain(record))
        self._db.execute(
            "insert into records (kind, body, at_s) values (?, ?, ?)",
            (type(record).__name__, body, self._now()),
        )

    def records(self) -> list[journal.JournalRecord]:
        """All records, oldest first.

        Raises:
          UserError: a record cannot be read; names its number. Or the file is damaged.
        """
        try:
            rows = self._db.execute("select id, kind, body from records order by id").fetchall()
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"the journal is damaged: {error}",
                exit_code=ExitCode.CONFIG,
                hint="put back a copy of the state directory, or start a new run",
            ) from error
        found = []
        for number, kind, body in rows:
            try:
                found.append(wire.from_plain(journal.RECORDS[kind], msgpack.unpackb(body)))
            except (KeyError, TypeError, ValueError, RemoteProtocolError) as error:
                raise UserError(
                    f"record {number} ({kind}) of the journal cannot be read: {error}",
                    exit_code=ExitCode.CONFIG,
                ) from error
        return found

    # ------------------------------------------------------------ invites

    def make_token(
        self, role: Role, *, founder: bool, uses: int, hours: float
    ) -> tuple[str, float]:
        """A new token and its expiry (Unix seconds); only its hash is kept."""
        token = secrets.token_urlsafe(TOKEN_BYTES)
        expires_s = self._now() + 3600.0 * hours
        self._db.execute(
            "insert into tokens (hash, role, founder, uses_left, expires_s, made_s)"
            " values (?, ?, ?, ?, ?, ?)",
            (_hash(token), role.value, founder, uses, expires_s, self._now()),
        )
        return token, expires_s

    def redeem(self, token: str) -> GrantRow:
        """Use a token once; the grant has no name yet.

        Raises:
          TokenError: unknown, withdrawn, expired or used up; the text says which.
        """
        row = self._db.execute(
            "select role, founder, uses_left, expires_s, withdrawn from tokens where hash = ?",
            (_hash(token),),
        ).fetchone()
        if row is None:
            raise TokenError("this invite is not known here", exit_code=ExitCode.INVITE)
        role, founder, uses_left, expires_s, withdrawn = row
        if withdrawn:
            raise TokenError("this invite was withdrawn", exit_code=ExitCode.INVITE)
        if expires_s < self._now():
            raise TokenError("this invite has expired", exit_code=ExitCode.INVITE)
        if uses_left < 1:
            raise TokenError("this invite is used up", exit_code=ExitCode.INVITE)
        self._db.execute(
            "update tokens set uses_left = uses_left - 1 where hash = ?", (_hash(token),)
        )
        return GrantRow(Role(role), bool(founder), "")

    def withdraw(self, invite_id: str) -> bool:
        """Let an invite admit nobody any more; False: there is none with this id."""
        changed = self._db.execute(
            "update tokens set withdrawn = 1 where hex(substr(hash, 1, 4)) = upper(?)", (invite_id,)
        )
        return changed.rowcount > 0

    def admit(self, peer: str, grant: GrantRow) -> None:
        self._db.execute(
            "insert or replace into grants (peer, role, founder, name) values (?, ?, ?, ?)",
            (peer, grant.role.value, grant.founder, grant.name),
        )

    def grant(self, peer: str) -> GrantRow | None:
        """What this identity was admitted for; None: never."""
        row = self._db.execute(
            "select role, founder, name from grants where peer = ?", (peer,)
        ).fetchone()
        return None if row is None else GrantRow(Role(row[0]), bool(row[1]), row[2])

    def invites(self) -> list[dict[str, object]]:
        """Tokens as the owner may see them: never the token itself."""
        rows = self._db.execute(
            "select hex(substr(hash, 1, 4)), role, founder, uses_left, expires_s, withdrawn"
            " from tokens order by made_s"
        )
        keys = ("id", "role", "founder", "uses_left", "expires_s", "withdrawn")
        return [dict(zip(keys, row, strict=True)) for row in rows]


def _hash(token: str) -> bytes:
    # The token has 192 random bits: a plain hash is enough, a slow one would gain nothing.
    return hashlib.sha256(token.encode()).digest()

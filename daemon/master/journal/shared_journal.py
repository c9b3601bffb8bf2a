"""What a master of a shared journal needs to lead: the database, the journal, and the run's
authority.

The authority's key lies in the database sealed, with a secret that all masters have: a key file or
a passphrase.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from attrs import define, frozen

from ....protocol.durable_files import write_private
from ....protocol.errors import UserError
from ....protocol.trust.authority import SAME_KEY_HINT, Authority, open_key
from ...process.exit_codes import ExitCode
from ...process.paths import PLACE_FILE, make_private
from .journal_base import JournalBrokenError
from .lease import Lease
from .postgres_journal import Database, PostgresJournal

SECRET_BYTES = 32
SECRET_CHARS_MIN = 16  # of a passphrase or a key file


@define
class SharedOptions:
    """What a master needs for a journal in a database; a key file or passphrase seals its key."""

    url: str
    run: str
    key_file: Path | None
    passphrase: str
    lease_s: float


class LeadersDatabase(Database):
    """The database of a master that takes the lease only if it can lead.

    Attributes:
      secret: what has opened the run's key; empty before that, and in a new run.
      unfit: why this master cannot lead; empty while it can.
    """

    def __init__(self, shared: SharedOptions, state: Path) -> None:
        super().__init__(shared.url, shared.run)
        self._shared = shared
        self._state = state
        self.secret = b""
        self.unfit = ""

    def take_lease(self, holder: str, lease_s: float, free_s: float = 0.0) -> Lease | None:
        """Take the lease as ``Database`` does; return None also while this master cannot lead."""
        if not self.secret:
            self._open()
        return None if self.unfit else super().take_lease(holder, lease_s, free_s)

    def _open(self) -> None:
        """Make the schema, and open the run's key if there is one yet."""
        try:
            self.prepare()
        except JournalBrokenError as error:
            raise UserError(
                f"{self.place} cannot be used: {error}",
                exit_code=ExitCode.CONFIG,
                hint="the user needs the right to create a schema",
            ) from error
        write_private(make_private(self._state) / PLACE_FILE, f"{self.place}\n".encode())
        kept = self.authority()
        self.unfit = ""
        if kept is not None:
            try:
                secret = read_secret(self._shared)
                open_key(kept[1], secret)
                self.secret = secret
            except UserError as error:
                self.unfit = f"{error}: {error.hint}"


@frozen
class HeldJournal:
    """The journal, the secret that seals the authority's key, and whether the lease is good."""

    journal: PostgresJournal
    secret: bytes
    is_held: Callable[[], bool]

    def authority(self, run_id: str) -> Authority:
        """Return the run's authority; make and keep it if there is none yet."""
        database = self.journal.database
        kept = database.authority()
        if kept is not None:
            return Authority.unseal(run_id, *kept, self.secret)
        made = Authority.create(run_id)
        database.keep_authority(self.journal.lease, made.certificate_pem, made.sealed(self.secret))
        return made


def read_secret(shared: SharedOptions, *, new_run: bool = False) -> bytes:
    """Return what seals the authority's key: the content of a key file, or a passphrase.

    A new run's key file is made if it is missing. UserError is raised if there is no good secret.
    """
    key_file = shared.key_file
    if key_file is None:
        secret = shared.passphrase.encode()
    else:
        try:
            if new_run and not key_file.exists():
                write_private(key_file, secrets.token_hex(SECRET_BYTES).encode() + b"\n")
            secret = key_file.read_bytes().strip()
        except OSError as error:
            raise UserError(
                f"the key file {key_file} cannot be read or made: {error.strerror}",
                exit_code=ExitCode.CONFIG,
                hint=SAME_KEY_HINT,
            ) from None
    if len(secret) < SECRET_CHARS_MIN:
        raise UserError(
            f"the secret that seals the run's key has {len(secret)} characters, at least "
            f"{SECRET_CHARS_MIN} are needed",
            exit_code=ExitCode.CONFIG,
            hint=SAME_KEY_HINT,
        )
    return secret

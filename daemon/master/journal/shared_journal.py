"""What a master that holds the lease of a shared journal gets: the journal, and the run's authority.

The authority's key lies in the database sealed, with a secret that all masters have: a key file or a passphrase.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from attrs import frozen

from ....protocol.durable_files import write_private
from ....protocol.errors import UserError
from ....protocol.trust.authority import Authority
from ...exit_codes import ExitCode
from .postgres_journal import PostgresJournal

SECRET_BYTES = 32
SECRET_CHARS_MIN = 16  # of a passphrase or a key file


@frozen
class HeldJournal:
    """The journal and what belongs to it, for the master that holds the lease.

    Attributes:
      secret: seals the authority's key.
      is_held: says whether the lease is still good.
    """

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


def read_secret(key_file: Path | None, passphrase: str) -> bytes:
    """Return what seals the authority's key: the content of a key file, or a passphrase.

    A key file that is missing is made. Where the run's key is already sealed with another one, opening it fails.

    Raises:
      UserError: there is neither, or the file cannot be read, or it is too short.
    """
    if key_file is None:
        if not passphrase:
            raise UserError(
                "a journal in a database keeps the run's key sealed: give the masters a key file",
                exit_code=ExitCode.CONFIG,
                hint="--key-file FILE (the first master makes it; copy it to the others), or the "
                "variable HOLDFAST_PASSPHRASE",
            )
        secret = passphrase.encode()
    else:
        try:
            if not key_file.exists():
                write_private(key_file, secrets.token_hex(SECRET_BYTES).encode() + b"\n")
            secret = key_file.read_bytes().strip()
        except OSError as error:
            raise UserError(
                f"the key file {key_file} cannot be read or made: {error.strerror}",
                exit_code=ExitCode.CONFIG,
                hint="copy it from the run's first master",
            ) from None
    if len(secret) < SECRET_CHARS_MIN:
        raise UserError(
            f"the secret that seals the run's key has {len(secret)} characters, at least "
            f"{SECRET_CHARS_MIN} are needed",
            exit_code=ExitCode.CONFIG,
        )
    return secret

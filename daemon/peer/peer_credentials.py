"""A machine's identity and its certificate for the run: stored earlier, or requested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import trio

from ...protocol.enrolment import enrol
from ...protocol.errors import EvictedError, RemoteProtocolError, UserError
from ...protocol.messages import RefusalCode
from ...protocol.trust.authority import fingerprint_of, load_certificate
from ...protocol.trust.credentials import Credentials
from ...protocol.trust.identity import Identity
from ...protocol.trust.invite import Invite
from ..advertised_hosts import doubt_of_loopback
from ..process.exit_codes import ExitCode
from ..process.paths import make_private
from .master_search import BACKOFF_FIRST_S, no_master
from .master_session import BACKOFF_MAX_S

CERTIFICATE_LEFT_MIN_S = 3600.0  # with less left, the invite's token is used again
APPROVAL_S = 5.0  # between two questions whether the run operator has approved this machine


async def obtain_credentials(
    folder: Path, invite: Invite, name: str, patience_s: float | None, tell: Callable[[str], None]
) -> Credentials:
    """Load the credentials in a folder, or request them with the invite's token.

    Args:
      patience_s: give up after this time without a master; None: never.
      tell: takes sentences for the operator.

    Raises:
      UserError: the folder belongs to another run, or there is no admission.
    """
    identity = Identity.load_or_create(make_private(folder) / "identity.key")
    known = stored_credentials(folder, invite)
    if known is not None:
        return known
    tell("asking the master for admission ...")
    certificate, authority = await _enrol(identity, invite, name, patience_s, tell)
    return Credentials(folder, identity, certificate, authority)


def stored_credentials(folder: Path, invite: Invite) -> Credentials | None:
    """Return the credentials of an earlier process, or None if there are none that last for a
    while.

    Raises:
      UserError: they belong to another run, and would be lost.
    """
    try:
        known = Credentials.load(folder)
    except FileNotFoundError:
        return None
    if fingerprint_of(load_certificate(known.authority_pem)) != invite.fingerprint:
        raise UserError(
            f"{folder} belongs to another run ({known.run_id}) than the invite",
            exit_code=ExitCode.CONFIG,
            hint="give this run a folder of its own with --state DIR, or delete that one if the "
            "other run is over",
        )
    return known if known.expires_in_s() > CERTIFICATE_LEFT_MIN_S else None


async def _enrol(
    identity: Identity,
    invite: Invite,
    name: str,
    patience_s: float | None,
    tell: Callable[[str], None],
) -> tuple[bytes, bytes]:
    """Request a certificate; waits for the master to start and for the operator's approval."""
    began_s, backoff_s, waiting = trio.current_time(), BACKOFF_FIRST_S, False
    while True:
        try:
            return await enrol(invite, identity, name)
        except EvictedError as error:
            if error.code != RefusalCode.APPROVAL.value:
                raise as_user_error(error) from error
            if not waiting:
                tell(f"{error.reason}; waiting for that ...")
            waiting, backoff_s, began_s = True, APPROVAL_S, trio.current_time()
        except RemoteProtocolError as error:
            raise UserError(
                str(error),
                exit_code=ExitCode.REFUSED,
                hint=doubt_of_loopback(invite.addresses)
                or "another program or run is at the invite's address: ask for a new invite",
            ) from error
        except OSError as error:
            if patience_s is not None and trio.current_time() - began_s > patience_s:
                raise no_master(invite.addresses, str(error)) from error
            if backoff_s == BACKOFF_FIRST_S:
                tell(f"{error}; trying again ...")
                if doubt := doubt_of_loopback(invite.addresses):
                    tell(doubt)
        await trio.sleep(backoff_s)
        backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)


def as_user_error(error: EvictedError) -> UserError:
    exit_codes = {
        RefusalCode.KICKED.value: ExitCode.EVICTED,
        RefusalCode.TOKEN.value: ExitCode.INVITE,
    }
    hints = {
        RefusalCode.VERSION.value: "install the run's version of holdfast",
        RefusalCode.TOKEN.value: "ask the run's operator for another invite",
        RefusalCode.RUN.value: "this invite is for another run than the master serves",
        RefusalCode.COPY.value: (
            "give this one another folder (--state DIR) and an invite of its own"
        ),
        RefusalCode.LAYOUT.value: "use the same model in the training script as the others",
        RefusalCode.FINISHED.value: (
            "the run's operator can let it go on: `holdfast resume --rounds N` (or --epochs N) at"
            " the master"
        ),
    }
    return UserError(
        error.reason,
        exit_code=exit_codes.get(error.code, ExitCode.REFUSED),
        hint=hints.get(error.code, ""),
    )

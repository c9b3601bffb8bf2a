"""Machines that an authority has admitted."""

from __future__ import annotations

import datetime
from pathlib import Path

from holdfast.protocol.trust.authority import Authority, Party
from holdfast.protocol.trust.credentials import Credentials
from holdfast.protocol.trust.identity import Identity


def admitted(
    authority: Authority,
    folder: Path,
    party: Party = Party.PEER,
    *,
    now: datetime.datetime | None = None,
) -> Credentials:
    """Make an identity and its certificate; they are kept below the folder under the peer's id."""
    identity = Identity.generate()
    certificate = authority.issue(identity.request_pem("node"), "node", party, now=now)
    return Credentials(folder / identity.peer_id, identity, certificate, authority.certificate_pem)

"""Machines that an authority has admitted, and clients that it has not."""

from __future__ import annotations

import datetime
import ssl
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


def anybody() -> ssl.SSLContext:
    """Make the TLS context of a client without a certificate that believes any server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context

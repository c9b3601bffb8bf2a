"""A peer's folder keeps the credentials of one run, whatever invite it is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.daemon.peer.peer_credentials import stored_credentials
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import UserError
from holdfast.protocol.messages import Role
from holdfast.protocol.trust.authority import Authority, Party
from holdfast.protocol.trust.credentials import CERTIFICATE_FILE, Credentials
from holdfast.protocol.trust.identity import Identity
from holdfast.protocol.trust.invite import Invite

RUN_ID = "a" * 32


def an_authority(folder: Path) -> Authority:
    folder.mkdir()
    return Authority.load_or_create(folder, RUN_ID)


def invite_of(authority: Authority) -> Invite:
    return Invite(
        run_id=RUN_ID,
        addresses=(Address("192.0.2.1", 29700),),
        fingerprint=authority.fingerprint,
        token="t" * 32,
        role=Role.CONTRIBUTOR,
        expires_s=2_000_000_000,
    )


def test_another_runs_invite_does_not_replace_what_a_folder_has(tmp_path: Path) -> None:
    ours, other = an_authority(tmp_path / "ours"), an_authority(tmp_path / "other")
    folder, identity = tmp_path / "peer", Identity.generate()
    folder.mkdir(mode=0o700)
    certificate = ours.issue(identity.request_pem("peer"), "peer", Party.PEER)
    Credentials(folder, identity, certificate, ours.certificate_pem)
    kept = stored_credentials(folder, invite_of(ours))
    assert kept is not None
    assert kept.peer_id == identity.peer_id
    with pytest.raises(UserError, match="belongs to another run") as refused:
        stored_credentials(folder, invite_of(other))
    assert refused.value.exit_code == ExitCode.CONFIG
    assert (folder / CERTIFICATE_FILE).read_bytes() == certificate

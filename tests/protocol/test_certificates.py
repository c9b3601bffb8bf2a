"""Identities, the run's authority and credentials: checks, and files on disk."""

from __future__ import annotations

import datetime
import os
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from holdfast.protocol.errors import LocalProtocolError, RemoteProtocolError, UserError
from holdfast.protocol.trust.authority import (
    Authority,
    Party,
    check_issued,
    holder_of,
    load_certificate,
)
from holdfast.protocol.trust.credentials import Credentials
from holdfast.protocol.trust.identity import Identity


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.load_or_create(tmp_path / "authority", "demo")


def test_an_authority_knows_the_terms_that_it_began(tmp_path: Path, authority: Authority) -> None:
    nonce = authority.begin_term(7)
    assert authority.vouches(7, nonce)
    assert nonce != authority.begin_term(7)
    assert not authority.vouches(8, nonce)
    assert not authority.vouches(7, nonce[:-1])
    assert not authority.vouches(7, b"")
    for other in (
        Authority.load_or_create(tmp_path / "other", "demo"),
        Authority.load_or_create(tmp_path / "third", "another-run"),
    ):
        assert not other.vouches(7, nonce)


def leaf_of(authority: Authority) -> x509.Certificate:
    """Issue a certificate of a new peer."""
    return load_certificate(authority.issue(Identity.generate().request_pem(""), "", Party.PEER))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_identity_is_kept_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    identity = Identity.load_or_create(path)
    assert mode(path) == 0o600
    assert mode(path.parent) == 0o700
    assert Identity.load_or_create(path).peer_id == identity.peer_id
    assert len(identity.peer_id) == 32
    assert Identity.generate().peer_id != identity.peer_id
    assert os.listdir(path.parent) == ["identity.key"]


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_key_that_others_may_touch_is_refused(tmp_path: Path, bits: int) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    path.chmod(bits)
    with pytest.raises(UserError, match="others on this machine") as raised:
        Identity.load_or_create(path)
    assert "chmod 600" in raised.value.hint


def test_a_damaged_key_is_not_replaced_by_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    for junk in (b"", b"junk", bytes(100_000)):
        path.write_bytes(junk)
        path.chmod(0o600)
        with pytest.raises(UserError):
            Identity.load_or_create(path)
        assert path.read_bytes() == junk


def test_a_certificate_names_the_holder_of_its_key(authority: Authority) -> None:
    identity = Identity.generate()
    for party in (Party.PEER, Party.MASTER):
        pem = authority.issue(identity.request_pem("my laptop"), "my laptop", party)
        certificate = load_certificate(pem)
        holder = holder_of(certificate)
        assert (holder.run_id, holder.party, holder.peer) == ("demo", party, identity.peer_id)
        check_issued(certificate, load_certificate(authority.certificate_pem))
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        assert abs(certificate.not_valid_after_utc - now - day).total_seconds() < 60
        assert abs(now - certificate.not_valid_before_utc - day).total_seconds() < 60
    with pytest.raises(LocalProtocolError):
        authority.issue(identity.request_pem(""), "", Party.NEWCOMER)


def test_the_authority_survives_a_restart_and_keeps_to_its_run(tmp_path: Path) -> None:
    first = Authority.load_or_create(tmp_path / "a", "demo")
    again = Authority.load_or_create(tmp_path / "a", "demo")
    assert again.fingerprint == first.fingerprint
    assert again.certificate_pem == first.certificate_pem
    assert mode(tmp_path / "a" / "authority.key") == 0o600
    check_issued(leaf_of(again), load_certificate(first.certificate_pem))
    with pytest.raises(UserError, match="another run"):
        Authority.load_or_create(tmp_path / "a", "other")
    (tmp_path / "a" / "authority.key").unlink()
    with pytest.raises(UserError, match="is gone"):
        Authority.load_or_create(tmp_path / "a", "demo")


@pytest.mark.parametrize("run_id", ["", "a/b", "a b", "ä", "x" * 65, ".hidden", "a\n"])
def test_run_ids_that_do_not_fit_a_certificate_are_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(UserError):
        Authority.load_or_create(tmp_path, run_id)


def test_a_member_cannot_sign_certificates(authority: Authority) -> None:
    key = Ed25519PrivateKey.generate()
    member = load_certificate(authority.issue(Identity(key).request_pem(""), "", Party.PEER))
    victim = Ed25519PrivateKey.generate().public_key()
    forged = (
        x509.CertificateBuilder(member.subject, member.subject, victim)
        .serial_number(1)
        .not_valid_before(member.not_valid_before_utc)
        .not_valid_after(member.not_valid_after_utc)
        .sign(key, None)
    )
    with pytest.raises(RemoteProtocolError):
        check_issued(forged, load_certificate(authority.certificate_pem))


def test_a_certificate_with_another_key_than_it_speaks_of_is_refused() -> None:
    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    now = datetime.datetime.now(datetime.UTC)

    def certificate(*uris: str) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder(name, name, key.public_key())
            .serial_number(1)
            .not_valid_before(now)
            .not_valid_after(now + datetime.timedelta(days=1))
        )
        if uris:
            names = [x509.UniformResourceIdentifier(uri) for uri in uris]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        return builder.sign(key, None)

    mine = Identity(key).peer_id
    assert holder_of(certificate(f"holdfast://demo/peer/{mine}")).peer == mine
    for uris in (
        (),
        (f"holdfast://demo/peer/{'0' * 32}",),
        (f"holdfast://demo/newcomer/{mine}",),
        (f"holdfast://demo/peer/{mine}/",),
        (f"https://demo/peer/{mine}",),
        (f"holdfast://demo/peer/{mine}", f"holdfast://demo/master/{mine}"),
    ):
        with pytest.raises(RemoteProtocolError):
            holder_of(certificate(*uris))


def test_requests_that_are_junk_or_of_others_are_refused(authority: Authority) -> None:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    other = ec.generate_private_key(ec.SECP256R1())
    not_ed25519 = x509.CertificateSigningRequestBuilder(name).sign(other, hashes.SHA256())
    good = Identity.generate().request_pem("")
    body = x509.load_pem_x509_csr(good).public_bytes(serialization.Encoding.DER)
    badly_signed = bytearray(body)
    badly_signed[-1] ^= 1
    for junk in (
        b"",
        b"junk",
        bytes(10_000),
        authority.certificate_pem,
        good.replace(b"A", b"B", 3),
        not_ed25519.public_bytes(serialization.Encoding.PEM),
        x509.load_der_x509_csr(bytes(badly_signed)).public_bytes(serialization.Encoding.PEM),
    ):
        with pytest.raises(RemoteProtocolError):
            authority.issue(junk, "x", Party.PEER)


def test_long_and_odd_names_do_not_stop_a_certificate(authority: Authority) -> None:
    for name in ("", "x" * 1_000, "Zoë's Rechner 🚀", "CN=master,O=holdfast", "a\x00b", "\n"):
        identity = Identity.generate()
        pem = authority.issue(identity.request_pem(name), name, Party.PEER)
        assert holder_of(load_certificate(pem)).peer == identity.peer_id


def test_credentials_survive_a_restart(tmp_path: Path, authority: Authority) -> None:
    identity = Identity.generate()
    pem = authority.issue(identity.request_pem(""), "", Party.PEER)
    directory = tmp_path / "peer"
    with pytest.raises(FileNotFoundError):
        Credentials.load(directory)
    made = Credentials(directory, identity, pem, authority.certificate_pem)
    for name in os.listdir(directory):
        assert mode(directory / name) == 0o600
    loaded = Credentials.load(directory)
    assert (loaded.peer_id, loaded.run_id) == (identity.peer_id, "demo")
    assert loaded.holder == made.holder
    assert 86_000 < loaded.expires_in_s() <= 86_400
    (directory / "certificate.pem").write_bytes(b"junk")
    with pytest.raises(UserError, match="damaged"):
        Credentials.load(directory)
    (directory / "identity.key").unlink()
    with pytest.raises(FileNotFoundError):
        Credentials.load(directory)


def test_credentials_of_others_are_refused(tmp_path: Path, authority: Authority) -> None:
    identity, other = Identity.generate(), Identity.generate()
    mine = authority.issue(identity.request_pem(""), "", Party.PEER)
    theirs = authority.issue(other.request_pem(""), "", Party.PEER)
    foreign = Authority.load_or_create(tmp_path / "foreign", "demo")
    with pytest.raises(RemoteProtocolError, match="another key"):
        Credentials(tmp_path / "x", identity, theirs, authority.certificate_pem)
    with pytest.raises(RemoteProtocolError, match="did not sign"):
        Credentials(tmp_path / "x", identity, mine, foreign.certificate_pem)
    assert not (tmp_path / "x").exists()
    credentials = Credentials(tmp_path / "x", identity, mine, authority.certificate_pem)
    context = credentials.ssl_client_context()
    for bad in (theirs, foreign.issue(identity.request_pem(""), "", Party.PEER), b"junk"):
        with pytest.raises(RemoteProtocolError):
            credentials.replace_certificate(bad)
    assert Credentials.load(tmp_path / "x").certificate_pem == mine
    renewed = authority.issue(identity.request_pem(""), "", Party.PEER)
    assert credentials.ssl_client_context() is context
    credentials.replace_certificate(renewed)
    assert credentials.ssl_client_context() is not context
    assert Credentials.load(tmp_path / "x").certificate_pem == renewed

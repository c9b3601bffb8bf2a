"""The run's certificate authority: issuing certificates and checking them.

Every run has an authority of its own, and the master holds its key. A certificate lasts about a
day, so a removed peer is locked out soon even by members that have not heard of the removal. It is
valid from a day back, so that a clock that is a little wrong locks no peer out. A certificate's
content is one URI:

    holdfast://RUN_ID/master/PEER_ID        or        holdfast://RUN_ID/peer/PEER_ID
"""

from __future__ import annotations

import datetime
import enum
import hashlib
import re
import secrets
from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..durable_files import write_private
from ..errors import LocalProtocolError, RemoteProtocolError, UserError
from ..messages import CERTIFICATE_BYTES_MAX, RUN_ID
from .identity import (
    NAME_CHARS_MAX,
    NOT_X509,
    load_private_key,
    peer_id_of_public_key,
    private_key_pem,
)

LEAF_VALIDITY = datetime.timedelta(days=1)
CLOCK_TOLERANCE = datetime.timedelta(days=1)  # lag of another clock that is accepted
AUTHORITY_VALIDITY = datetime.timedelta(days=3_650)  # longer than any run
KEY_FILE = "authority.key"
CERTIFICATE_FILE = "authority.pem"
TERM_RANDOM_BYTES = 16
SAME_KEY_HINT = "all masters of a run need the same key file: copy it from the master that made it"

_URI = re.compile(r"holdfast://([A-Za-z0-9][A-Za-z0-9._-]{0,63})/(master|peer)/([0-9a-f]{32})")


class Party(enum.Enum):
    """The role of a connection's other end, by its certificate."""

    MASTER = "master"
    PEER = "peer"
    NEWCOMER = "newcomer"  # no certificate: may enrol, nothing else


@frozen
class Holder:
    """A certificate's statement about the holder of its key."""

    run_id: str
    party: Party
    peer: str


def fingerprint_of(certificate: x509.Certificate) -> str:
    """Return the SHA-256 of the certificate's DER, 64 hex digits."""
    der = certificate.public_bytes(serialization.Encoding.DER)
    return hashlib.sha256(der).hexdigest()


def load_certificate(pem: bytes) -> x509.Certificate:
    """Parse one certificate in PEM; raises RemoteProtocolError if it is none."""
    if len(pem) > CERTIFICATE_BYTES_MAX:
        raise RemoteProtocolError(f"a certificate of {len(pem)} bytes")
    try:
        return x509.load_pem_x509_certificate(pem)
    except NOT_X509 as error:
        raise RemoteProtocolError(f"not a certificate: {error}") from None


def holder_of(certificate: x509.Certificate) -> Holder:
    """Read a certificate's statement, and check that its peer id is that of its key.

    The signature is not checked here: see ``check_issued``, or ``ssl``.

    Raises:
      RemoteProtocolError: not a certificate of holdfast.
    """
    try:
        key = certificate.public_key()
        names = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value.get_values_for_type(x509.UniformResourceIdentifier)
    except NOT_X509 as error:
        raise RemoteProtocolError(f"not a certificate of holdfast: {error}") from None
    match = _URI.fullmatch(names[0]) if len(names) == 1 else None
    if match is None or not isinstance(key, Ed25519PublicKey):
        raise RemoteProtocolError("not a certificate of holdfast")
    run_id, party, peer = match.groups()
    if peer_id_of_public_key(key) != peer:
        raise RemoteProtocolError(f"a certificate for peer {peer[:8]} with another key")
    return Holder(run_id, Party(party), peer)


def check_issued(certificate: x509.Certificate, authority: x509.Certificate) -> None:
    """Check a certificate's signature; RemoteProtocolError: the authority did not sign it."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise RemoteProtocolError("a certificate that the run's authority did not sign") from None


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


class Authority:
    """Signs the certificates of one run.

    Attributes:
      run_id: the run that it signs for.
      certificate_pem: its own certificate, which every member gets.
      fingerprint: SHA-256 of that certificate; every invite carries it.
    """

    def __init__(self, key: Ed25519PrivateKey, certificate: x509.Certificate, run_id: str) -> None:
        self._key = key
        self._certificate = certificate
        self.run_id = run_id
        self.certificate_pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.fingerprint = fingerprint_of(certificate)

    @classmethod
    def load_or_create(cls, directory: Path, run_id: str) -> Authority:
        """Load the authority from a directory, or create it there.

        Raises:
          UserError: its key can be read by others, is damaged, or belongs to another run.
        """
        if not RUN_ID.fullmatch(run_id):
            raise UserError(
                f"{run_id[:NAME_CHARS_MAX]!r} cannot name a run",
                hint="use letters, digits, '.', '_' and '-', at most 64",
            )
        certificate_path = directory / CERTIFICATE_FILE
        try:
            key = load_private_key(directory / KEY_FILE)
        except FileNotFoundError:
            if certificate_path.exists():
                raise UserError(
                    f"the key of the run's authority is gone from {directory}",
                    hint="restore it from a backup, or start a new run elsewhere",
                ) from None
            return cls._create(directory, run_id)
        try:
            certificate = load_certificate(certificate_path.read_bytes())
        except FileNotFoundError:
            # A crash came between the two files: no peer has seen this authority yet.
            return cls._create(directory, run_id)
        except RemoteProtocolError as error:
            raise UserError(f"{certificate_path} is damaged: {error}") from None
        if certificate.public_key() != key.public_key():
            raise UserError(f"the key and the certificate in {directory} do not belong together")
        if certificate.subject != _authority_name(run_id):
            raise UserError(
                f"{directory} belongs to another run", hint="give every run its own directory"
            )
        return cls(key, certificate, run_id)

    @classmethod
    def _create(cls, directory: Path, run_id: str) -> Authority:
        made = cls.create(run_id)
        write_private(directory / KEY_FILE, private_key_pem(made._key))
        write_private(directory / CERTIFICATE_FILE, made.certificate_pem)
        return made

    @classmethod
    def unseal(
        cls, run_id: str, certificate_pem: bytes, sealed_key: bytes, secret: bytes
    ) -> Authority:
        """Open what ``sealed`` returned.

        Raises:
          UserError: it was sealed with another secret, is damaged, or belongs to another run.
        """
        key, certificate = open_key(sealed_key, secret), load_certificate(certificate_pem)
        fits = isinstance(key, Ed25519PrivateKey) and certificate.public_key() == key.public_key()
        if not fits or certificate.subject != _authority_name(run_id):
            raise UserError("the sealed key is not that of this run's authority")
        assert isinstance(key, Ed25519PrivateKey)
        return cls(key, certificate, run_id)

    def sealed(self, secret: bytes) -> bytes:
        """Return the key in PEM (PKCS 8), encrypted with a key that is derived from the secret."""
        return self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(secret),
        )

    @classmethod
    def create(cls, run_id: str) -> Authority:
        """Make the authority of a new run, in memory only."""
        key = Ed25519PrivateKey.generate()
        name = _authority_name(run_id)
        now = _now()
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_TOLERANCE)
            .not_valid_after(now + AUTHORITY_VALIDITY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .sign(key, None)
        )
        return cls(key, certificate, run_id)

    def begin_term(self, term: int) -> bytes:
        """Make the nonce of a master's term: random bytes and their signature.

        Nothing but this authority can make one, so a master can check a term that a peer reports
        and that it does not know itself: see ``vouches``. The signature is Ed25519 over run, term
        and the random bytes, and follows these.
        """
        drawn = secrets.token_bytes(TERM_RANDOM_BYTES)
        return drawn + self._key.sign(self._term_text(term, drawn))

    def vouches(self, term: int, nonce: bytes) -> bool:
        """Return whether a master of this run really began this term with this nonce."""
        drawn, signature = nonce[:TERM_RANDOM_BYTES], nonce[TERM_RANDOM_BYTES:]
        try:
            self._key.public_key().verify(signature, self._term_text(term, drawn))
        except InvalidSignature:
            return False
        return True

    def _term_text(self, term: int, drawn: bytes) -> bytes:
        return b"holdfast term\0" + self.run_id.encode() + b"\0" + b"%d\0" % term + drawn

    def issue(
        self,
        request_pem: bytes,
        name: str,
        party: Party,
        *,
        now: datetime.datetime | None = None,
    ) -> bytes:
        """Sign a certificate for the key in a request; nothing else of the request is believed.

        Args:
          name: the node's name for people; shown, never trusted.
          now: for tests; the wall clock otherwise.

        Returns:
          The certificate in PEM.

        Raises:
          RemoteProtocolError: the request is invalid, over-long, not Ed25519 or not signed.
        """
        if party is Party.NEWCOMER:
            raise LocalProtocolError("a newcomer has no certificate")
        key = _requested_key(request_pem)
        peer = peer_id_of_public_key(key)
        subject = [x509.NameAttribute(NameOID.COMMON_NAME, peer)]
        if name:
            subject.append(
                x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, name[:NAME_CHARS_MAX])
            )
        now = now or _now()
        uri = x509.UniformResourceIdentifier(f"holdfast://{self.run_id}/{party.value}/{peer}")
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        certificate = (
            x509.CertificateBuilder(self._certificate.subject, x509.Name(subject), key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_TOLERANCE)
            .not_valid_after(now + LEAF_VALIDITY)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, None)
        )
        return certificate.public_bytes(serialization.Encoding.PEM)


def open_key(sealed_key: bytes, secret: bytes) -> PrivateKeyTypes:
    """Open what ``Authority.sealed`` returned; UserError: it was sealed with another secret."""
    try:
        return serialization.load_pem_private_key(sealed_key, secret)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"the sealed key of the run's authority cannot be opened: {error}",
            hint=SAME_KEY_HINT,
        ) from None


def _authority_name(run_id: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "holdfast"),
            x509.NameAttribute(NameOID.COMMON_NAME, run_id),
        ]
    )


def _requested_key(request_pem: bytes) -> Ed25519PublicKey:
    if len(request_pem) > CERTIFICATE_BYTES_MAX:
        raise RemoteProtocolError(f"a certificate request of {len(request_pem)} bytes")
    try:
        request = x509.load_pem_x509_csr(request_pem)
        key = request.public_key()
        valid = request.is_signature_valid
    except NOT_X509 as error:
        raise RemoteProtocolError(f"not a certificate request: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise RemoteProtocolError("a certificate request whose key is not Ed25519")
    if not valid:
        raise RemoteProtocolError("a certificate request that its own key did not sign")
    return key

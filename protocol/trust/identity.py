"""A node's identity: an Ed25519 key, and the peer id, which is that key's fingerprint."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from ..durable_files import write_private
from ..errors import UserError

PEER_ID_BYTES = 16  # of SHA-256: finding a second key with the same 128 bits is infeasible
NAME_CHARS_MAX = 64  # limit of X.509 for one part of a name
KEY_BYTES_MAX = 8_192  # of a key file; an Ed25519 key takes 119
# The errors of x509 for bytes that are not a certificate or request, or lack the part.
NOT_X509 = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


def peer_id_of_public_key(key: Ed25519PublicKey) -> str:
    """Return a key's peer id: 32 hex digits, half of SHA-256 of its SubjectPublicKeyInfo."""
    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).digest()[:PEER_ID_BYTES].hex()


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """Read and parse a key file.

    Raises:
      FileNotFoundError: there is none.
      UserError: other users may read it, or it holds no Ed25519 key.
    """
    with path.open("rb") as file:
        state = os.fstat(file.fileno())
        if stat.S_IMODE(state.st_mode) & 0o077:
            raise UserError(
                f"others on this machine may read the key {path}",
                hint=f"chmod 600 {path}, or delete it if somebody may have copied it",
            )
        if state.st_size > KEY_BYTES_MAX:
            raise UserError(f"{path} is not a key: {state.st_size} bytes")
        data = file.read()
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UserError(
            f"{path} is not a private key", hint="restore it, or delete it to get a new one"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"the key in {path} is not Ed25519")
    return key


def private_key_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


class Identity:
    """A node's key pair. The private key leaves this object only into its own file."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.peer_id = peer_id_of_public_key(key.public_key())

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Load the identity from a file, or create it there.

        Raises:
          UserError: other users may read the file, or it holds no Ed25519 key.
        """
        try:
            return cls(load_private_key(path))
        except FileNotFoundError:
            identity = cls.generate()
            identity.save(path)
            return identity

    def save(self, path: Path) -> None:
        """Write the private key to a file with mode 0600."""
        write_private(path, private_key_pem(self._key))

    def request_pem(self, name: str) -> bytes:
        """Make a certificate request, which proves that this node holds its key."""
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, self.peer_id)]
        if name:
            attributes.append(
                x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, name[:NAME_CHARS_MAX])
            )
        request = x509.CertificateSigningRequestBuilder(x509.Name(attributes)).sign(self._key, None)
        return request.public_bytes(serialization.Encoding.PEM)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

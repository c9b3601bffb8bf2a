"""Signed statements of members, which they cannot deny later.

A *seal* is a public key and its Ed25519 signature of a statement. The key's fingerprint is the peer's id,
so any node that knows the id can check a seal, without certificates. The master can do so after the peer
has left.
"""

from __future__ import annotations

from collections.abc import Callable

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from .identity import Identity, peer_id_of_public_key

KEY_BYTES = 32
SIGNATURE_BYTES = 64
SEAL_BYTES = KEY_BYTES + SIGNATURE_BYTES
KEYS_KEPT_MAX = (
    4_096  # parsed keys in the table; peers can make up any number, so it is emptied then
)

PeerOf = Callable[[Ed25519PublicKey], str]


class Notary:
    """Seals this node's statements about a run and checks other peers'; may be used by many threads.

    Args:
      run_id: part of every statement, so that none is valid in another run.
      identity: this node's; None: this notary only checks seals.
      peer_of: returns the peer id of a key.
    """

    def __init__(
        self,
        run_id: str,
        identity: Identity | None = None,
        peer_of: PeerOf = peer_id_of_public_key,
    ) -> None:
        self._prefix = f"holdfast run {run_id} ".encode()
        self._identity = identity
        self._peer_of = peer_of
        self._keys: dict[bytes, tuple[str, Ed25519PublicKey]] = {}

    def seal(self, statement: bytes) -> bytes:
        """Return this node's seal of a statement."""
        assert self._identity is not None
        return self._identity.public_bytes + self._identity.sign(self._prefix + statement)

    def holds(self, peer: str, statement: bytes, seal: bytes | bytearray | memoryview) -> bool:
        """Return whether this peer sealed this statement."""
        data = bytes(seal)
        if len(data) != SEAL_BYTES:
            return False
        found = self._key(data[:KEY_BYTES])
        if found is None or found[0] != peer:
            return False
        try:
            found[1].verify(data[KEY_BYTES:], self._prefix + statement)
        except InvalidSignature:
            return False
        return True

    def _key(self, raw: bytes) -> tuple[str, Ed25519PublicKey] | None:
        known = self._keys.get(raw)
        if known is None:
            try:
                key = Ed25519PublicKey.from_public_bytes(raw)
            except ValueError:
                return None
            known = (self._peer_of(key), key)
            if len(self._keys) >= KEYS_KEPT_MAX:
                self._keys = {}
            self._keys[raw] = known
        return known

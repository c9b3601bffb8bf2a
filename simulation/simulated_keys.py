"""Keys of simulated peers, whose ids are easier to read than fingerprints."""

from __future__ import annotations

import hashlib

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ..protocol.trust.identity import Identity
from ..protocol.trust.notary import Notary


class SimulatedKeys:
    """The keys of all peers; a peer has the same key in every run."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._peers: dict[bytes, str] = {}  # by public key

    def notary(self, peer: str | None = None) -> Notary:
        """Return the notary of a peer, or one that only verifies if ``peer`` is None."""
        identity = None
        if peer is not None:
            seed = hashlib.sha256(peer.encode()).digest()
            identity = Identity(Ed25519PrivateKey.from_private_bytes(seed))
            self._peers[identity.public_bytes] = peer
        return Notary(self._run_id, identity, self._peer_of)

    def _peer_of(self, key: Ed25519PublicKey) -> str:
        return self._peers.get(key.public_bytes_raw(), "")

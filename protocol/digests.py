"""The digest by which a message is announced."""

from __future__ import annotations

from blake3 import blake3


def body_digest(body: bytes) -> bytes:
    """Return the BLAKE3 hash of a message's encoding, 32 bytes."""
    return blake3(body).digest()

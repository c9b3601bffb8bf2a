"""Sets of the contributors in a chunk, and the manifest: the sets of a result's chunks.

A set of contributors is one bit each, in the order's order, the first one lowest, in as few bytes
as hold them all. A result in which no contributor is missing has no manifest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from ..protocol.messages import ContributorRun
from ..protocol.network.lane import Buffer


def set_bytes(contributor_count: int) -> int:
    """Return the length of a packed set."""
    return (contributor_count + 7) // 8


def pack_set(present: Sequence[bool]) -> bytes:
    """Pack a set of contributors as it follows a chunk's mean on the wire."""
    return np.packbits(np.array(present, np.bool_), bitorder="little").tobytes()


def unpack_bits(data: Buffer, count: int) -> list[bool]:
    """Unpack ``count`` bits, the lowest of each byte first; bits beyond the data are 0."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:count].tolist()
    return [bool(bit) for bit in bits] + [False] * (count - len(bits))


def unpack_set(data: Buffer, contributor_count: int) -> list[bool]:
    """Unpack a set of contributors from the wire.

    Raises:
      ValueError: the set is empty, full (then it is not sent), or has bits beyond the contributors.
    """
    bits = unpack_bits(data, 8 * len(data))
    within = bits[:contributor_count]
    if any(bits[contributor_count:]) or not any(within) or all(within):
        raise ValueError("a set of contributors that cannot be")
    return within


def manifest_of(sets: Sequence[bytes], full: bytes) -> tuple[ContributorRun, ...]:
    """Return the chunks' packed sets as runs; empty if they are all ``full``."""
    if all(packed == full for packed in sets):
        return ()
    return tuple(ContributorRun(packed, len(list(run))) for packed, run in itertools.groupby(sets))


def digest_of(digests: Sequence[bytes], sets: Sequence[bytes]) -> bytes:
    """Return a result's digest: BLAKE3 of all chunks' digests, then of ``sets``.

    Args:
      sets: of all chunks if a contributor is missing in any; else empty.
    """
    return blake3(b"".join([*digests, *sets])).digest()

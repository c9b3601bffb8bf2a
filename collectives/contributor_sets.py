"""Sets of the contributors in a chunk; the manifest of a result has those of all chunks.

A set of contributors is one bit each, in the order's order, the first one lowest, in as few bytes
as hold them all. A result in which no contributor is missing has no manifest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..protocol.network.lane import Buffer


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

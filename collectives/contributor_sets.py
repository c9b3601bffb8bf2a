"""Which contributors are in which chunks of a result: the manifest of a round that lost somebody.

A set of contributors is one bit each, in the order's order, the first one lowest, in as few bytes as
hold them all. Where nobody is missing there is no manifest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from ..protocol.messages import ContributorRun
from ..protocol.network.lane import Buffer


def set_bytes(contributor_count: int) -> int:
    """Length of a packed set."""
    return (contributor_count + 7) // 8


def pack_set(present: Sequence[bool]) -> bytes:
    """A set of contributors as it follows a chunk's mean on the wire."""
    return np.packbits(np.array(present, np.bool_), bitorder="little").tobytes()


def unpack_set(data: Buffer, contributor_count: int) -> list[bool]:
    """The inverse.

    Raises:
      ValueError: nobody is in it, everybody is (then it is not sent), or somebody who does not exist.
    """
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    within = bits[:contributor_count]
    if bits[contributor_count:].any() or not within.any() or within.all():
        raise ValueError("a set of contributors that cannot be")
    return [bool(bit) for bit in within]


def manifest_of(sets: Sequence[bytes], full: bytes) -> tuple[ContributorRun, ...]:
    """The chunks' packed sets as runs; empty if they are all ``full``."""
    if all(packed == full for packed in sets):
        return ()
    return tuple(ContributorRun(packed, len(list(run))) for packed, run in itertools.groupby(sets))


def sets_of(
    manifest: Sequence[ContributorRun], chunk_count: int, contributor_count: int
) -> list[bytes]:
    """The inverse: every chunk's packed set."""
    full = pack_set([True] * contributor_count)
    runs = manifest or (ContributorRun(full, chunk_count),)
    return [run.contributors for run in runs for _chunk in range(run.chunk_count)]


def digest_of(digests: Sequence[bytes], sets: Sequence[bytes]) -> bytes:
    """A result's digest: BLAKE3 of all chunks' digests; if somebody is missing anywhere, of all sets
    after them."""
    return blake3(b"".join([*digests, *sets])).digest()

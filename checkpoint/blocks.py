"""Blocks, digests and roots: how a fragment of the shared state is cut up and named.

A fragment's arrays are cut into blocks that never straddle two arrays, and each block is digested
with BLAKE3 over its little-endian bytes. The root binds the block digests to what they are of:

    values float32 (n,)   | block | block | short |
    momentum float32 (m,) | block | short |              -> digests, in this order
    counters int64 (k,)   | short |

    root = BLAKE3(tag, run id, fragment, version, n, m, k, digests)

so two peers with the same root hold the same bits of the same version of the same run.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

import attrs
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from ..protocol.arena import Counters, Values
from ..protocol.errors import LocalProtocolError
from ..protocol.messages import BLOCKS_MAX, FragmentSize

BLOCK_BYTES = 2**20  # one frame on a lane; small enough to spread over donors, to heal few bytes
ELEMENT_BYTES = (4, 4, 8)  # of values, momentum and counters
VALUES = 0  # the part that lies in the arena and is large
DIGEST_BYTES = 32
DIGEST_THREADS_MAX = 4  # beside a trainer that wants its cores back; memory is not faster than that
DIGEST_RUN_BLOCKS = 8  # that one thread takes at a time: some milliseconds

_ROOT_TAG = b"holdfast fragment root v1\0"
_LINEAGE_TAG = b"holdfast lineage v1\0"

Bytes = NDArray[np.uint8]


class FragmentArrays(NamedTuple):
    """The arrays of one fragment at one version."""

    values: Values
    momentum: Values
    counters: Counters

    def copy(self) -> FragmentArrays:
        return FragmentArrays(self.values.copy(), self.momentum.copy(), self.counters.copy())


@attrs.frozen
class BlockPlace:
    """Which bytes of which array a block is: ``part`` counts as ``FragmentArrays`` does."""

    part: int
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.part]

    def of(self, parts: FragmentArrays) -> Bytes:
        """The block's bytes; a view."""
        view: Bytes = parts[self.part].view(np.uint8)[self.start : self.stop]
        return view


def block_places(size: FragmentSize) -> tuple[BlockPlace, ...]:
    """All blocks of a fragment in order.

    Raises:
      LocalProtocolError: more blocks than an index may have; use more fragments.
    """
    counts = (size.value_count, size.momentum_count, size.counter_count)
    lengths = [count * each for count, each in zip(counts, ELEMENT_BYTES, strict=True)]
    block_count = sum(-(-length // BLOCK_BYTES) for length in lengths)
    if block_count > BLOCKS_MAX:
        raise LocalProtocolError(
            f"a fragment of {block_count} blocks, at most {BLOCKS_MAX}: use more fragments"
        )
    return tuple(
        BlockPlace(part, start, min(start + BLOCK_BYTES, length))
        for part, length in enumerate(lengths)
        for start in range(0, length, BLOCK_BYTES)
    )


def digest_blocks(parts: FragmentArrays, places: Sequence[BlockPlace]) -> bytes:
    """The digests of all blocks, ``DIGEST_BYTES`` each, at BLAKE3's own speed on a few cores.

    Blocks are large enough for all that BLAKE3 does within one core, so a block is a call, and
    threads share out runs of blocks.
    """
    runs = [
        places[start : start + DIGEST_RUN_BLOCKS]
        for start in range(0, len(places), DIGEST_RUN_BLOCKS)
    ]
    if len(runs) <= 1:
        return _digest_run(parts, places)
    return b"".join(_digesters().map(partial(_digest_run, parts), runs))


def _digest_run(parts: FragmentArrays, places: Sequence[BlockPlace]) -> bytes:
    return b"".join(blake3(place.of(parts).data).digest() for place in places)


@cache
def _digesters() -> ThreadPoolExecutor:
    """Threads for nothing but digests; they end with the process."""
    return ThreadPoolExecutor(min(DIGEST_THREADS_MAX, os.cpu_count() or 1), "digest")


@cache
def zeros_digest(size_bytes: int) -> bytes:
    """Of a block that holds nothing but zeros: nobody needs to send it."""
    return blake3(bytes(size_bytes)).digest()


def fragment_root(
    run_id: str, fragment: int, version: int, size: FragmentSize, digests: bytes
) -> bytes:
    """The digest of a whole fragment."""
    name = run_id.encode()
    header = struct.pack(
        "<QQQQQQ",
        len(name),
        fragment,
        version,
        size.value_count,
        size.momentum_count,
        size.counter_count,
    )
    return blake3(_ROOT_TAG + header + name + digests).digest()


def lineage(run_id: str, roots: Sequence[bytes]) -> bytes:
    """What a run's state descends from: the roots of version 0 of all fragments, in order."""
    name = run_id.encode()
    header = struct.pack("<QQ", len(name), len(roots))
    return blake3(_LINEAGE_TAG + header + name + b"".join(roots)).digest()


def differing_blocks(ours: bytes, theirs: bytes) -> tuple[int, ...]:
    """Indices of the blocks whose digests differ; both have the same number of blocks."""
    left = np.frombuffer(ours, np.uint8).reshape(-1, DIGEST_BYTES)
    right = np.frombuffer(theirs, np.uint8).reshape(-1, DIGEST_BYTES)
    return tuple(np.flatnonzero((left != right).any(axis=1)).tolist())

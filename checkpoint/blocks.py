"""Blocks, digests and roots: the parts of a fragment and their names.

A fragment's arrays are cut into blocks that never straddle two arrays, and each block is digested
with BLAKE3 over its little-endian bytes. The root binds the block digests to run, fragment, version
and sizes:

    values float32 (n,)   | block | block | short |
    momentum float32 (m,) | block | short |              -> digests, in this order
    counters int64 (k,)   | short |

    root = BLAKE3(tag, run id, fragment, version, n, m, k, digests)

Two peers with the same root hold the same bits of the same version of the same run.
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

BLOCK_BYTES = 2**20  # one frame on a lane; small, to spread over donors and to repair few bytes
ELEMENT_BYTES = (4, 4, 8)  # of values, momentum and counters
VALUES = 0  # the part that lies in the arena and is large
DIGEST_BYTES = 32
DIGEST_THREADS_MAX = 4  # the trainer needs its cores, and memory is no faster than four threads
DIGEST_RUN_BLOCKS = 8  # that a thread takes at a time: a few milliseconds

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
    """The bytes of a block within an array; ``part`` is the array's index in ``FragmentArrays``."""

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
        """Return the block's bytes; a view."""
        view: Bytes = parts[self.part].view(np.uint8)[self.start : self.stop]
        return view


def block_places(size: FragmentSize) -> tuple[BlockPlace, ...]:
    """Return all blocks of a fragment, in order.

    Raises:
      LocalProtocolError: more blocks than an index may have.
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
    """Return the joined digests of blocks, ``DIGEST_BYTES`` each.

    A block is large enough for BLAKE3's full speed on a core, so each block is one call, and
    threads take runs of blocks.
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
    """Return the pool of threads for digests; they end with the process."""
    return ThreadPoolExecutor(min(DIGEST_THREADS_MAX, os.cpu_count() or 1), "digest")


@cache
def zeros_digest(size_bytes: int) -> bytes:
    """Return the digest of a block of zeros, which is never sent."""
    return blake3(bytes(size_bytes)).digest()


def fragment_root(
    run_id: str, fragment: int, version: int, size: FragmentSize, digests: bytes
) -> bytes:
    """Return the root of a fragment: a digest of its block digests."""
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
    """Return a run's lineage: a digest of the roots of version 0 of all fragments, in order."""
    name = run_id.encode()
    header = struct.pack("<QQ", len(name), len(roots))
    return blake3(_LINEAGE_TAG + header + name + b"".join(roots)).digest()


def differing_blocks(ours: bytes, theirs: bytes) -> tuple[int, ...]:
    """Return the indices of the blocks whose digests differ; both have equally many blocks."""
    left = np.frombuffer(ours, np.uint8).reshape(-1, DIGEST_BYTES)
    right = np.frombuffer(theirs, np.uint8).reshape(-1, DIGEST_BYTES)
    return tuple(np.flatnonzero((left != right).any(axis=1)).tolist())

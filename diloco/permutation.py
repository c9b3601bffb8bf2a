"""The order of a run's samples: a permutation of each epoch that is computed and never stored.

``permuted`` is a Feistel network (Luby and Rackoff 1988) over the smallest square domain that holds
the data set; numbers outside of the data set are enciphered again until they are inside ("cycle
walking", Black and Rogaway 2002), four times on average at most for large sets. Its round function
mixes 64 bit numbers with keys hashed from the run's key and the epoch. It hides nothing.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

# Of the network; four make a permutation that looks random, mixing is weaker than a cipher.
ROUND_COUNT = 8
HALF_BITS_MIN = 4  # a domain of fewer numbers is shuffled badly

_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))  # MurmurHash3's finalizer
_SHIFT = np.uint64(33)

Numbers = NDArray[np.uint64]


def permuted(key: bytes, length: int, start: int, stop: int) -> NDArray[np.int64]:
    """Return the samples at the run's positions from ``start`` up to ``stop``.

    Args:
      key: of the run's order.
      length: samples of the data set, at least 1.

    Returns:
      Sample numbers from 0 to ``length - 1``, shape ``(stop - start,)``. Each whole epoch, which
      begins at a multiple of ``length``, has each number once.
    """
    parts = []
    while start < stop:
        epoch, place = divmod(start, length)
        count = min(stop - start, length - place)
        places = np.arange(place, place + count, dtype=np.uint64)
        parts.append(_walk(places, length, _round_keys(key, epoch)))
        start += count
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _round_keys(key: bytes, epoch: int) -> Numbers:
    """Return the keys of all rounds in an epoch."""
    digest = hashlib.blake2b(
        epoch.to_bytes(8, "little"), key=key, digest_size=8 * ROUND_COUNT
    ).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def _walk(numbers: Numbers, length: int, keys: Numbers) -> Numbers:
    half_bits = max(HALF_BITS_MIN, -(-(length - 1).bit_length() // 2))
    numbers = _encipher(numbers, half_bits, keys)
    outside = np.flatnonzero(numbers >= length)
    while outside.size:
        numbers[outside] = _encipher(numbers[outside], half_bits, keys)
        outside = outside[numbers[outside] >= length]
    return numbers


def _encipher(numbers: Numbers, half_bits: int, keys: Numbers) -> Numbers:
    """Return a permutation of the numbers below ``4 ** half_bits``."""
    bits, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = numbers >> bits, numbers & mask
    for key in keys:
        mixed = right + key  # modulo 2**64
        for factor in _MIX:
            mixed ^= mixed >> _SHIFT
            mixed *= factor
        mixed ^= mixed >> _SHIFT
        left, right = right, left ^ (mixed & mask)
    return (left << bits) | right

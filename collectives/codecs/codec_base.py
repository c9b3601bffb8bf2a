"""The interface of codecs, and what they share: checks, blocks and their scales.

``codecs`` lists the codecs and finds one by name.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Bytes = memoryview | bytearray | bytes

FP16_INFINITY_BITS = 0x7C00  # bit patterns from here on are infinite, not a number, or negative
# Values worked on at a time where an encoder takes many steps, so that all of its scratch memory
# stays in a core's second cache; a multiple of every block.
TILE = 1 << 15
MAGNITUDE_BITS = np.uint32(0x7FFF_FFFF)  # of a float32: all but the sign


class Codec(Protocol):
    """A codec. All methods are thread-safe; none blocks on anything but the CPU."""

    @property
    def name(self) -> str: ...

    @property
    def lossy(self) -> bool:
        """Decoding may give other values than were encoded."""
        ...

    @property
    def verbatim(self) -> bool:
        """The encoding of values equals their memory, so that nothing needs to be copied."""
        ...

    @property
    def variable(self) -> bool:
        """Encodings of equally many values may have unequal lengths."""
        ...

    def encoded_bytes(self, count: int) -> int:
        """Return the largest length of ``count`` encoded values; 0 for 0 values.

        It is the exact length unless the codec is ``variable``.
        """
        ...

    def encode(self, values: Values, out: memoryview) -> int:
        """Encode ``values``, shape ``(n,)``, into ``out`` of ``encoded_bytes(n)`` bytes.

        Returns:
          The length of the encoding; the rest of ``out`` has no meaning.

        Raises:
          ValueError: the values cannot be represented; ``out`` may be partly written.
        """
        ...

    def decode(self, data: Bytes, out: Values) -> None:
        """Decode ``data``, one whole encoding and no more, into ``out``, shape ``(n,)``.

        Any bytes give values or a ValueError, in memory of the order of ``out``. The values are
        finite if the codec is lossy.

        Raises:
          ValueError: wrong length, or bytes that no encoder writes; ``out`` may be partly written.
        """
        ...


class FixedLength:
    """Base of codecs whose encoding has a length that depends on the count alone."""

    verbatim = False
    variable = False


def check_length(codec: Codec, data: Bytes, count: int) -> None:
    """Check that ``data`` has the codec's (largest) length for ``count``.

    Raises:
      ValueError: it has not.
    """
    wanted_bytes = codec.encoded_bytes(count)
    if len(data) != wanted_bytes:
        raise ValueError(
            f"{codec.name}: {len(data)} bytes for {count} values, {wanted_bytes} wanted"
        )


def by_block(operation: np.ufunc, values: Values, factors: Values, block: int, out: Values) -> None:
    """Write ``operation(value, factor of its block)`` to ``out``; the last block may be short."""
    whole = values.size - values.size % block
    blocks = whole // block
    operation(
        values[:whole].reshape(blocks, block),
        factors[:blocks, np.newaxis],
        out=out[:whole].reshape(blocks, block),
    )
    if whole < values.size:
        operation(values[whole:], factors[blocks], out=out[whole:])


def make_scales(name: str, values: Values, block: int, level_max: int) -> NDArray[np.float16]:
    """Return for each block the smallest fp16 number that is at least ``max |x| / level_max``.

    Raises:
      ValueError: a block, which is named, holds a value that is not finite or too large.
    """
    largest = _largest_magnitudes(values, block).astype(np.float64)
    if not np.isfinite(largest).all():
        bad = int(np.flatnonzero(~np.isfinite(largest))[0])
        raise ValueError(f"{name}: block {bad} holds a value that is not finite")
    limit = float(np.finfo(np.float16).max) * level_max
    if largest.max() > limit:
        bad = int(largest.argmax())
        raise ValueError(
            f"{name}: block {bad} holds {largest[bad]:.6g}, beyond the {limit:.6g} "
            "that its scale can express"
        )
    scales = (largest / level_max).astype("<f2")
    # A product of 11 and 7 bits is exact in float64, so this comparison has no rounding. The bits
    # of positive fp16 numbers count upwards: one more is the next number.
    scales.view("<u2")[scales.astype(np.float64) * level_max < largest] += 1
    return scales


def _largest_magnitudes(values: Values, block: int) -> Values:
    """Return the largest magnitude of each block; not finite if a value of the block is not.

    Without their sign, bits of float32 are ordered as the numbers are, and bits of infinities and
    NaNs come last. numpy finds the largest of integers in a third of the time that it takes for
    floats.
    """
    starts = np.arange(0, values.size, block)
    largest = np.empty(starts.size, np.uint32)
    bits = np.empty(min(TILE, values.size), np.uint32)
    for start in range(0, values.size, TILE):
        part = values[start : start + TILE].view(np.uint32)
        magnitudes = np.bitwise_and(part, MAGNITUDE_BITS, out=bits[: part.size])
        first, count = start // block, -(-part.size // block)
        np.maximum.reduceat(magnitudes, starts[:count], out=largest[first : first + count])
    return largest.view(np.float32)


def make_divisors(scales: NDArray[np.float16]) -> Values:
    """Return the scales as float32 divisors.

    A zero scale divides only zeros. It becomes one, so that numpy does not warn.
    """
    divisors = scales.astype(np.float32)
    divisors[divisors == 0] = 1
    return divisors


def read_scales(name: str, data: Bytes, block_count: int) -> Values:
    """Return the scales that an encoding begins with.

    Raises:
      ValueError: a scale that no encoder writes.
    """
    scales = np.frombuffer(data, "<f2", count=block_count)
    if scales.view("<u2").max() >= FP16_INFINITY_BITS:
        raise ValueError(f"{name}: a scale that is negative or not finite")
    return scales.astype(np.float32)

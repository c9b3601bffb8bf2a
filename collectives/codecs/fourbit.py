"""NF4: four bits a value, in blocks of 64 with one fp16 scale each.

All scales of the chunk come first, then the codes, two a byte: the earlier value in the lower four
bits. The last block may be short; after an odd number of values the last upper four bits are 0.
With ``m`` the largest magnitude of a block,

    scale = the smallest fp16 number that is at least m
    ratio = x / scale, rounded to float32; between -1 and 1
    code  = that of the level nearest to ratio; of two equally near, the one closer to 0

and decoding multiplies level and scale in float32. Levels, as multiples of the scale, are the 16
quantiles of a normal distribution of QLoRA (arXiv 2305.14314, appendix E), in ascending order; code
7 is 0.

The error of a value is at most half the widest gap between levels times the scale: 0.152. Scales
below 6.1e-5 are fp16 subnormals, so blocks of smaller values have coarser scales. Magnitudes above
65504 and values that are not finite are refused.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from .codec_base import (
    TILE,
    Bytes,
    FixedLength,
    Values,
    by_block,
    check_length,
    make_divisors,
    make_scales,
    read_scales,
)

FOUR_BIT_BLOCK = 64  # values that share one scale; 2 bytes of scale are a sixteenth of the codes

NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class Nf4Codec(FixedLength):
    """See the top of this file.

    Attributes:
      table: shape ``(16,)``: the level of each code.
    """

    name: Final = "nf4"
    lossy: Final = True

    def __init__(self) -> None:
        self.table: Final = np.array(NF4_LEVELS, np.float32)
        self._bounds = _upper_bounds(self.table)
        # Both levels of every byte, as one item of 8 bytes.
        pairs = np.empty((256, 2), np.float32)
        pairs[:, 0] = np.tile(self.table, 16)
        pairs[:, 1] = np.repeat(self.table, 16)
        self._pairs = pairs.view(np.complex64).reshape(256)

    def encoded_bytes(self, count: int) -> int:
        return 2 * -(-count // FOUR_BIT_BLOCK) + (count + 1) // 2

    def encode(self, values: Values, out: memoryview) -> int:
        count = values.size
        check_length(self, out, count)
        if count == 0:
            return 0
        block_count = -(-count // FOUR_BIT_BLOCK)
        scales = make_scales(self.name, values, FOUR_BIT_BLOCK, 1)
        np.frombuffer(out, "<f2", count=block_count)[:] = scales
        divisors = make_divisors(scales)
        packed = np.frombuffer(out, np.uint8, offset=2 * block_count)
        size = min(TILE, count + count % 2)
        ratios = np.empty(size, np.float32)
        above = np.empty((self._bounds.size, size), np.bool_)
        codes = np.empty(size, np.uint8)
        for start in range(0, count, TILE):
            part = values[start : start + TILE]
            block_at = start // FOUR_BIT_BLOCK
            n = part.size
            by_block(np.divide, part, divisors[block_at:], FOUR_BIT_BLOCK, ratios[:n])
            self._find_codes(ratios[:n], above[:, :n], codes[:n])
            codes[n : n + n % 2] = 0
            two = codes[: n + n % 2].view("<u2")
            # low | high << 8 becomes low | high << 4; casting keeps the lower byte.
            packed[start // 2 : (start + n + 1) // 2] = two | (two >> 4)
        return len(out)

    def _find_codes(
        self, ratios: Values, above: NDArray[np.bool_], codes: NDArray[np.uint8]
    ) -> None:
        """Count for each ratio the bounds below it: its code.

        To compare a cached tile with all bounds is faster than a search.

        Args:
          ratios: shape ``(n,)``.
          above: shape ``(bounds, n)``; scratch.
          codes: shape ``(n,)``; become the codes.
        """
        np.greater(ratios, self._bounds[:, np.newaxis], out=above)
        np.add.reduce(above.view(np.uint8), axis=0, dtype=np.uint8, out=codes)

    def decode(self, data: Bytes, out: Values) -> None:
        count = out.size
        check_length(self, data, count)
        if count == 0:
            return
        block_count = -(-count // FOUR_BIT_BLOCK)
        scales = read_scales(self.name, data, block_count)
        packed = np.frombuffer(data, np.uint8, offset=2 * block_count)
        even = count - count % 2
        # Indices are bytes and the table has 256 entries: "clip" only spares a check and a copy.
        np.take(self._pairs, packed[: even // 2], out=out[:even].view(np.complex64), mode="clip")
        if even < count:
            if packed[-1] >> 4:
                raise ValueError(f"{self.name}: padding that is not zero")
            out[even] = self.table[packed[-1]]
        by_block(np.multiply, out, scales, FOUR_BIT_BLOCK, out)


def _upper_bounds(levels: Values) -> Values:
    """Return for each level but the last the largest float32 that is still rounded to it.

    That is the midpoint to the next level, or the float32 before it: a midpoint above 0 belongs to
    the lower level, a midpoint below 0 to the upper one.
    """
    # Sums of two float32 that are this close in size are exact in float64, so halves are, too.
    exact = (levels[:-1].astype(np.float64) + levels[1:].astype(np.float64)) / 2
    bounds = exact.astype(np.float32)
    beyond = np.where(exact > 0, bounds > exact, bounds >= exact)
    return np.where(beyond, np.nextafter(bounds, np.float32(-np.inf)), bounds)

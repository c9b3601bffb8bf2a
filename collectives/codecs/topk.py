"""The top-k codecs: a chunk's largest 64th of values, as position, sign and one of two levels.

Of ``n`` values the ``k = ceil(n / 64)`` of largest magnitude survive (among equals the earlier
ones; zeros never); of ``topk16``, ``topk8`` and ``topk4`` the 16th, 8th and 4th part. Their
magnitudes are split in two groups with the least squared error; the two levels are the groups'
means (sparsification with 2-bit values and error feedback is SparseLoCo's, arXiv 2508.15706). The
rest decodes to 0.

    length     u32  bytes of this whole encoding
    count      u32  survivors, at most k
    levels     2 x f32, lower and upper, as they are decoded
    parameter  u8   p, of the Rice code
    bits       first bits of a byte first; the last byte is filled up with zeros:
               2 a survivor   1 for negative, 1 for the upper level
               p a survivor   its gap's lower p bits, most significant first
               then           its gap >> p in unary: that number of zeros, then a one

A *gap* counts the dropped values since the survivor before. p is the parameter that gives the
fewest bits, the smallest of several. With independent values gaps are geometric, and a survivor
costs about 2 + 7.5 bits, 0.15 bits a value (0.47, 0.8 and 1.3 where more survive). It never costs
more than 10, 4 more than the logarithm of the share, because with p = 6 it does not. Numbers are
little-endian. No values are encoded as no bytes.

Coding works on whole arrays of bits, one byte each before they are packed: 10 bytes a survivor.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .codec_base import MAGNITUDE_BITS, Bytes, Values, check_length

TOPK_SHARE_BITS = {"topk": 6, "topk16": 4, "topk8": 3, "topk4": 2}  # one of 2**bits survives
RICE_PARAMETER_MAX = 30  # gaps are below 2**31, whatever a chunk's length
VALUE_BITS = 2
INFINITY_BITS = np.uint32(0x7F80_0000)

_HEADER = struct.Struct("<IIffB")
Positions = NDArray[np.int64]
Bits = NDArray[np.uint8]


class TopKCodec:
    """A top-k codec. Encoding what it decoded gives the same bytes again.

    Magnitudes are those of float32, so no finite value is too large or too small.
    """

    lossy: Final = True
    verbatim: Final = False
    variable: Final = True

    def __init__(self, name: str = "topk") -> None:
        self.name: Final = name
        self._share_bits = TOPK_SHARE_BITS[name]

    def _survivors_max(self, count: int) -> int:
        return -(-count >> self._share_bits)

    def encoded_bytes(self, count: int) -> int:
        if count == 0:
            return 0
        # With the share's logarithm as parameter, a gap costs 2 bits more than that parameter.
        survivor_bits = VALUE_BITS + self._share_bits + 2
        return _HEADER.size + -(-self._survivors_max(count) * survivor_bits // 8)

    def encode(self, values: Values, out: memoryview) -> int:
        check_length(self, out, values.size)
        if values.size == 0:
            return 0
        where = _survivors(self.name, values, self._survivors_max(values.size))
        kept = values[where]
        low, high, is_high = _two_levels(np.abs(kept))
        parameter, gap_bits = _rice_encode(np.diff(where, prepend=-1) - 1)
        value_bits = np.stack((np.signbit(kept), is_high), axis=1).view(np.uint8).reshape(-1)
        packed = np.packbits(np.concatenate((value_bits, gap_bits)))
        length = _HEADER.size + packed.size
        out[: _HEADER.size] = _HEADER.pack(length, where.size, low, high, parameter)
        np.frombuffer(out, np.uint8, count=packed.size, offset=_HEADER.size)[:] = packed
        return length

    def decode(self, data: Bytes, out: Values) -> None:
        if out.size == 0:
            check_length(self, data, 0)
            return
        self._check_encoding(data, out.size)
        _length, count, low, high, parameter = _HEADER.unpack_from(data)
        if count > self._survivors_max(out.size) or parameter > RICE_PARAMETER_MAX:
            raise ValueError(f"{self.name}: {count} survivors of {out.size}, parameter {parameter}")
        if not 0 <= low <= high < float("inf"):
            raise ValueError(f"{self.name}: levels {low:g} and {high:g}")
        bits = np.unpackbits(np.frombuffer(data, np.uint8, offset=_HEADER.size))
        gaps = _rice_decode(bits[VALUE_BITS * count :], count, parameter)
        where = np.cumsum(gaps + 1) - 1
        if count and where[-1] >= out.size:
            raise ValueError("topk: a survivor beyond the end")
        levels = np.array((low, high, -low, -high), np.float32)
        out[:] = 0
        out[where] = levels[2 * bits[: 2 * count : 2] + bits[1 : 2 * count : 2]]

    def _check_encoding(self, data: Bytes, count: int) -> None:
        if len(data) < _HEADER.size:
            raise ValueError(f"{self.name}: {len(data)} bytes, {_HEADER.size} wanted at least")
        length = int(_HEADER.unpack_from(data)[0])
        if length != len(data) or length > self.encoded_bytes(count):
            raise ValueError(
                f"{self.name}: {len(data)} bytes for {count} values, {length} wanted by the first"
                f" of them and {self.encoded_bytes(count)} at most"
            )


def _survivors(name: str, values: Values, wanted: int) -> Positions:
    """Return the ascending positions of the largest values, at most ``wanted``.

    Raises:
      ValueError: a value, which is named, is not finite.
    """
    magnitudes = values.view(np.uint32) & MAGNITUDE_BITS  # ordered as their bits are
    ordered = np.partition(magnitudes, values.size - wanted)[-wanted:]
    if ordered.max() >= INFINITY_BITS:
        bad = int(np.flatnonzero(magnitudes >= INFINITY_BITS)[0])
        raise ValueError(f"{name}: value {bad} is not finite")
    smallest = ordered[0]
    where = np.flatnonzero(magnitudes >= max(smallest, np.uint32(1)))
    surplus = where.size - wanted
    if surplus > 0:
        equal = np.flatnonzero(magnitudes[where] == smallest)
        where = np.delete(where, equal[-surplus:])
    return where


def _two_levels(magnitudes: Values) -> tuple[np.float32, np.float32, NDArray[np.bool_]]:
    """Return the best two levels for these magnitudes, and which of these have the upper one.

    Every split of the sorted magnitudes is tried. Sums are cumulative, one addition after the
    other in ascending order, so they are the same bits on every machine. The smallest magnitude is
    subtracted first, in float64, so that magnitudes close together keep their digits.
    """
    count = magnitudes.size
    if count == 0:
        return np.float32(0), np.float32(0), np.empty(0, np.bool_)
    ordered = np.sort(magnitudes)
    smallest = np.float64(ordered[0])
    sums = np.cumsum(ordered.astype(np.float64) - smallest)
    if count == 1 or sums[-1] == 0:
        return ordered[0], ordered[0], np.zeros(count, np.bool_)
    below = np.arange(1, count)
    # The squared error is a constant minus this gain; of equal gains the first is taken.
    gain = sums[:-1] ** 2 / below + (sums[-1] - sums[:-1]) ** 2 / (count - below)
    split = int(gain.argmax()) + 1
    low = np.float32(smallest + sums[split - 1] / split)
    high = np.float32(smallest + (sums[-1] - sums[split - 1]) / (count - split))
    return low, high, magnitudes > ordered[split - 1]


def _rice_encode(gaps: Positions) -> tuple[int, Bits]:
    """Return the best parameter, and the gaps' bits under it."""
    count = gaps.size
    total = int(gaps.sum())
    if count == 0:
        return 0, np.empty(0, np.uint8)
    # A parameter above log2 of the sum adds a bit a gap and saves none.
    costs = [
        parameter * count + int((gaps >> parameter).sum())
        for parameter in range(total.bit_length() + 1)
    ]
    parameter = int(np.argmin(costs))
    ends = np.cumsum((gaps >> parameter) + 1)
    bits = np.zeros(parameter * count + int(ends[-1]), np.uint8)
    lower = bits[: parameter * count].reshape(count, parameter)
    for place in range(parameter):
        lower[:, place] = (gaps >> (parameter - 1 - place)) & 1
    bits[parameter * count + ends - 1] = 1
    return parameter, bits


def _rice_decode(bits: Bits, count: int, parameter: int) -> Positions:
    """Decode ``count`` gaps.

    Raises:
      ValueError: there are fewer or more, or more than a byte's padding after them.
    """
    if bits.size < (parameter + 1) * count:
        raise ValueError("topk: gaps are missing")
    lower = bits[: parameter * count].reshape(count, parameter)
    unary = bits[parameter * count :]
    ends = np.flatnonzero(unary)
    behind = unary.size - (int(ends[-1]) + 1 if ends.size else 0)
    if ends.size != count or behind >= 8:
        raise ValueError(f"topk: {ends.size} gaps and {behind} bits, {count} gaps wanted")
    # Upper parts add up to fewer than the bits there are: no sum comes near 2**63.
    gaps = np.diff(ends, prepend=-1) - 1
    for place in range(parameter):
        gaps <<= 1
        gaps |= lower[:, place]
    return gaps

"""Codecs between the float32 values of one chunk and bytes on the wire.

A codec is a pure function of its input: encoding the same values gives the same bytes, decoding the
same bytes gives the same bits, on every machine. Decoding is elementwise float32 (conversions that
are exact, then at most one multiply), so x86 and Arm agree. Codecs hold no state; error feedback is
in ``error_feedback``, compression of encodings at the end.

    name   bits a value   what is encoded
    fp32   32             everything, bit for bit (little-endian)
    bf16   16             8 significant bits, float32's range
    int8   8 + 16/256     127 levels each way of a scale per block of 256 values
    nf4    4 + 16/64      16 levels of a scale per block of 64, close where normal values are dense
    topk   about 0.15     the largest 64th part of the values; sign and one of two levels
    topk16, topk8, topk4  the same with the 16th part (0.47), the 8th (0.8), the 4th (1.3)

Signal-to-noise in dB on independent values (normal; Laplace; Student's t with 3 degrees of
freedom): int8 43.1, 40.0, 35; nf4 20.7, 19.7, 18. topk leaves out much of the signal, so it needs
error feedback, which only contributions have.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from .codec_base import (
    TILE,
    Bytes,
    Codec,
    FixedLength,
    Values,
    by_block,
    check_length,
    make_divisors,
    make_scales,
    read_scales,
)
from .fourbit import Nf4Codec
from .topk import TOPK_SHARE_BITS, TopKCodec

__all__ = ["CODECS", "INT8_BLOCK", "Codec", "Values", "get_codec"]

INT8_BLOCK = 256  # values that share one scale; 2 bytes of scale cost 0.8 % at this length
INT8_LEVEL_MAX = 127  # -128 is never written, so that the levels are symmetric

FP32_EXPONENT = np.uint32(0x7F80_0000)  # all ones: infinite or not a number
BF16_EXPONENT = np.uint16(0x7F80)


class Fp32Codec(FixedLength):
    """Verbatim little-endian float32; NaN and negative zero come back bit for bit."""

    name: Final = "fp32"
    lossy: Final = False
    verbatim = sys.byteorder == "little"

    def encoded_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Values, out: memoryview) -> int:
        check_length(self, out, values.size)
        np.frombuffer(out, "<f4")[:] = values
        return len(out)

    def decode(self, data: Bytes, out: Values) -> None:
        check_length(self, data, out.size)
        out[:] = np.frombuffer(data, "<f4")


class Bf16Codec(FixedLength):
    """The upper half of a float32, little-endian, rounded to nearest, ties to even.

    No float32 underflows: subnormals are rounded like the rest. Values that are not finite, or
    would be rounded to infinity (3.3961775e38 and above), are refused.
    """

    name: Final = "bf16"
    lossy: Final = True

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Values, out: memoryview) -> int:
        check_length(self, out, values.size)
        halves = np.frombuffer(out, "<u2")
        for start in range(0, values.size, TILE):
            tile = slice(start, start + TILE)
            bits = values[tile].view(np.uint32)
            if ((bits & FP32_EXPONENT) == FP32_EXPONENT).any():
                bad = int(np.flatnonzero(~np.isfinite(values[tile]))[0]) + start
                raise ValueError(f"bf16: value {bad} is not finite")
            rounded = bits >> np.uint32(16)
            rounded &= np.uint32(1)  # a tie is rounded up from an odd half only
            rounded += np.uint32(0x7FFF)
            rounded += bits
            rounded >>= np.uint32(16)
            halves[tile] = rounded
            if _any_infinite(halves[tile]):
                bad = int(np.abs(values[tile]).argmax()) + start
                raise ValueError(f"bf16: value {bad} is {values[bad]:.9g}, beyond what bf16 holds")
        return len(out)

    def decode(self, data: Bytes, out: Values) -> None:
        check_length(self, data, out.size)
        halves = np.frombuffer(data, "<u2")
        for start in range(0, out.size, TILE):
            tile = slice(start, start + TILE)
            if _any_infinite(halves[tile]):
                raise ValueError("bf16: a value that is not finite")
            np.left_shift(halves[tile], 16, out=out[tile].view(np.uint32), dtype=np.uint32)


def _any_infinite(halves: NDArray[np.uint16]) -> bool:
    return bool(((halves & BF16_EXPONENT) == BF16_EXPONENT).any())


class Int8Codec(FixedLength):
    """Blocks of 256 values: one fp16 scale each, then one signed byte a value.

    All scales of the chunk come first, then all bytes; the last block may be short. With ``m`` the
    largest magnitude of a block,

        scale = the smallest fp16 number that is at least m / 127
        byte  = x / scale, rounded to the nearest integer, ties to even

    Rounding the scale up keeps every byte within -127..127. The error of a value is at most half a
    scale: ``m / 254`` or little more, as long as ``m / 127`` is a normal fp16 number. Scales below
    6.1e-5 (``m`` below 0.0078) are fp16 subnormals, spaced 6.0e-8 apart; values below 3.0e-8
    vanish. A block of zeros has scale 0. Decoding multiplies byte and scale in float32.
    """

    name: Final = "int8"
    lossy: Final = True

    def encoded_bytes(self, count: int) -> int:
        return 2 * -(-count // INT8_BLOCK) + count

    def encode(self, values: Values, out: memoryview) -> int:
        count = values.size
        check_length(self, out, count)
        if count == 0:
            return 0
        block_count = -(-count // INT8_BLOCK)
        scales = make_scales(self.name, values, INT8_BLOCK, INT8_LEVEL_MAX)
        np.frombuffer(out, "<f2", count=block_count)[:] = scales
        divisors = make_divisors(scales)
        encoded = np.frombuffer(out, np.int8, offset=2 * block_count)
        room = np.empty(min(TILE, count), np.float32)
        for start in range(0, count, TILE):
            part = values[start : start + TILE]
            levels = room[: part.size]
            by_block(np.divide, part, divisors[start // INT8_BLOCK :], INT8_BLOCK, levels)
            np.rint(levels, out=levels)
            np.copyto(encoded[start : start + part.size], levels, casting="unsafe")
        return len(out)

    def decode(self, data: Bytes, out: Values) -> None:
        count = out.size
        check_length(self, data, count)
        if count == 0:
            return
        block_count = -(-count // INT8_BLOCK)
        scales = read_scales(self.name, data, block_count)
        out[:] = np.frombuffer(data, np.int8, offset=2 * block_count)
        by_block(np.multiply, out, scales, INT8_BLOCK, out)


_ALL: tuple[Codec, ...] = (
    Fp32Codec(),
    Bf16Codec(),
    Int8Codec(),
    Nf4Codec(),
    *map(TopKCodec, TOPK_SHARE_BITS),
)
CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in _ALL})


def get_codec(name: str) -> Codec:
    """Return the codec of that name.

    Raises:
      ValueError: there is none; the text lists the names.
    """
    try:
        return CODECS[name]
    except KeyError:
        raise ValueError(f"no codec {name!r}; there are {', '.join(CODECS)}") from None


# ---------------------------------------------------------------- zstd

# A codec's name in a plan may end in ``+zstd``. Then a frame that is shorter than its chunk's
# encoding is that encoding, compressed; a frame of the full length is the encoding itself. So only
# codecs of fixed length can have it. Only frames are compressed: results are stored and hashed as
# they are encoded.

ZSTD_SUFFIX = "+zstd"
ZSTD_LEVEL = 1  # higher levels save hardly more of an encoding, at a fraction of the speed
SAVING_MIN = 0.04  # share of a chunk's bytes; less is not worth the time at both ends
SAMPLE_BYTES_MIN = 4_096  # shorter chunks do not predict how the others compress


def parse_codec(name: str) -> tuple[Codec, bool]:
    """Return the codec that a plan names, and whether its frames may be compressed.

    Raises:
      ValueError: there is no such codec, or its encodings are compressed already.
    """
    plain = name.removesuffix(ZSTD_SUFFIX)
    codec = get_codec(plain)
    if codec.variable and plain != name:
        raise ValueError(f"{plain} is compressed already, so {name!r} is no codec")
    return codec, plain != name


class FrameCompressor:
    """Compressor of one node's frames of one direction of one round. Thread-safe.

    The first chunk of at least ``SAMPLE_BYTES_MIN`` is the sample: if compressing it saves less
    than ``SAVING_MIN``, the rest of the round is not compressed.

    Attributes:
      pays: whether it is worth calling ``compress``.
    """

    def __init__(self, wanted: bool) -> None:
        self.pays = wanted
        self._sampled = False

    def compress(self, payload: memoryview) -> Bytes:
        """Return the payload compressed, or the payload itself if that is not longer."""
        if not self.pays:
            return payload
        compressed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(payload)
        if not self._sampled and len(payload) >= SAMPLE_BYTES_MIN:
            self._sampled = True
            self.pays = len(compressed) <= (1 - SAVING_MIN) * len(payload)
        return compressed if len(compressed) < len(payload) else payload


def expand(data: Bytes, wanted_bytes: int) -> bytes:
    """Undo ``compress``. No more than the known length is ever allocated.

    Raises:
      ValueError: not a compressed chunk of that length.
    """
    try:
        parameters = zstandard.get_frame_parameters(data)
        if parameters.content_size != wanted_bytes or parameters.dict_id:
            raise ValueError(f"zstd: not a frame of {wanted_bytes} bytes")
        expanded = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=wanted_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd: {error}") from error
    if len(expanded) != wanted_bytes:
        raise ValueError(f"zstd: {len(expanded)} bytes, {wanted_bytes} wanted")
    return expanded

"""Codecs: how the float32 values of one chunk become bytes on the wire, and back.

A codec is a pure function of its input: encoding the same values gives the same bytes, decoding the
same bytes gives the same bits, on every machine. Decoding is elementwise float32 (conversions that
are exact, then at most one multiply), so x86 and Arm agree. Codecs hold no state; error feedback
and the choice of a codec live elsewhere.

    name   bytes a value   what is kept
    fp32   4               everything, bit for bit (little-endian)
    int8   1 + 2/256       127 levels each way of a scale per block of 256 values
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Bytes = memoryview | bytearray | bytes

INT8_BLOCK = 256  # values that share one scale; 2 bytes of scale cost 0.8 % at this length
INT8_LEVEL_MAX = 127  # -128 is never made, so that the levels are symmetric
FP16_INFINITY_BITS = 0x7C00  # bit patterns from here on are infinite, not a number, or negative


class Codec(Protocol):
    """What every codec does. All methods are thread-safe; none blocks on anything but the CPU."""

    @property
    def name(self) -> str: ...

    @property
    def verbatim(self) -> bool:
        """Whether the encoding of values is their very memory: then nothing needs to be copied."""
        ...

    def encoded_bytes(self, count: int) -> int:
        """Exact length of ``count`` encoded values; 0 for 0 values."""
        ...

    def encode(self, values: Values, out: memoryview) -> None:
        """Encode ``values``, shape ``(n,)``, into ``out`` of ``encoded_bytes(n)`` bytes.

        Raises:
          ValueError: the values cannot be represented; ``out`` may be partly written.
        """
        ...

    def decode(self, data: Bytes, out: Values) -> None:
        """Decode ``data`` of ``encoded_bytes(n)`` bytes into ``out``, shape ``(n,)``.

        Raises:
          ValueError: wrong length, or bytes that no encoder makes; ``out`` may be partly written.
        """
        ...


def _check_length(codec: Codec, data: Bytes, count: int) -> None:
    wanted_bytes = codec.encoded_bytes(count)
    if len(data) != wanted_bytes:
        raise ValueError(
            f"{codec.name}: {len(data)} bytes for {count} values, {wanted_bytes} wanted"
        )


class Fp32Codec:
    """Verbatim little-endian float32; not-a-number and negative zero come back bit for bit."""

    name: Final = "fp32"
    verbatim: Final = sys.byteorder == "little"

    def encoded_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Values, out: memoryview) -> None:
        _check_length(self, out, values.size)
        np.frombuffer(out, "<f4")[:] = values

    def decode(self, data: Bytes, out: Values) -> None:
        _check_length(self, data, out.size)
        out[:] = np.frombuffer(data, "<f4")


class Int8Codec:
    """Blocks of 256 values: one fp16 scale each, then one signed byte a value.

    All scales of the chunk come first, then all bytes; the last block may be short. With ``m`` the
    largest magnitude of a block,

        scale = the smallest fp16 number that is at least m / 127
        byte  = x / scale, rounded to the nearest integer, ties to even

    Rounding the scale up keeps every byte within -127..127. The error of a value is at most half a
    scale: ``m / 254`` or little more, as long as ``m / 127`` is a normal fp16 number. Scales below
    6.1e-5 (``m`` below 0.0078) are fp16 subnormals, spaced 6.0e-8 apart; values below 3.0e-8 vanish.
    A block of zeros has scale 0. Decoding multiplies byte and scale in float32.
    """

    name: Final = "int8"
    verbatim: Final = False

    def encoded_bytes(self, count: int) -> int:
        return 2 * -(-count // INT8_BLOCK) + count

    def encode(self, values: Values, out: memoryview) -> None:
        count = values.size
        _check_length(self, out, count)
        if count == 0:
            return
        block_count = -(-count // INT8_BLOCK)
        scales = _int8_scales(values)
        np.frombuffer(out, "<f2", count=block_count)[:] = scales
        # Zero scales only divide zeros; dividing those by one instead raises no warning.
        divisors = scales.astype(np.float32)
        divisors[divisors == 0] = 1
        levels = np.empty(count, np.float32)
        _by_block(np.divide, values, divisors, levels)
        np.rint(levels, out=levels)
        np.copyto(np.frombuffer(out, np.int8, offset=2 * block_count), levels, casting="unsafe")

    def decode(self, data: Bytes, out: Values) -> None:
        count = out.size
        _check_length(self, data, count)
        if count == 0:
            return
        block_count = -(-count // INT8_BLOCK)
        scales = np.frombuffer(data, "<f2", count=block_count)
        if scales.view("<u2").max() >= FP16_INFINITY_BITS:
            raise ValueError("int8: a scale that is negative or not finite")
        out[:] = np.frombuffer(data, np.int8, offset=2 * block_count)
        _by_block(np.multiply, out, scales.astype(np.float32), out)


def _by_block(operation: np.ufunc, values: Values, factors: Values, out: Values) -> None:
    """``out = operation(values, factor of the value's block)``; the last block may be short."""
    whole = values.size - values.size % INT8_BLOCK
    blocks = whole // INT8_BLOCK
    operation(
        values[:whole].reshape(blocks, INT8_BLOCK),
        factors[:blocks, np.newaxis],
        out=out[:whole].reshape(blocks, INT8_BLOCK),
    )
    if whole < values.size:
        operation(values[whole:], factors[blocks], out=out[whole:])


def _int8_scales(values: Values) -> NDArray[np.float16]:
    """Per block the smallest fp16 number that is at least ``max |x| / 127``."""
    starts = np.arange(0, values.size, INT8_BLOCK)
    # Both keep a not-a-number that is anywhere in the block; abs turns -0.0 into 0.0.
    largest = np.abs(
        np.maximum(np.maximum.reduceat(values, starts), -np.minimum.reduceat(values, starts))
    ).astype(np.float64)
    if not np.isfinite(largest).all():
        block = int(np.flatnonzero(~np.isfinite(largest))[0])
        raise ValueError(f"int8: block {block} holds a value that is not finite")
    limit = float(np.finfo(np.float16).max) * INT8_LEVEL_MAX
    if largest.max() > limit:
        block = int(largest.argmax())
        raise ValueError(
            f"int8: block {block} holds {largest[block]:.6g}, beyond the {limit:.6g} "
            "that its scale can express"
        )
    scales = (largest / INT8_LEVEL_MAX).astype("<f2")
    # A product of 11 and 7 bits is exact in float64, so this comparison has no rounding. The bits
    # of positive fp16 numbers count upwards: one more is the next number.
    scales.view("<u2")[scales.astype(np.float64) * INT8_LEVEL_MAX < largest] += 1
    return scales


CODECS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (Fp32Codec(), Int8Codec())}
)


def get_codec(name: str) -> Codec:
    """The codec of that name.

    Raises:
      ValueError: there is none; the text lists those there are.
    """
    try:
        return CODECS[name]
    except KeyError:
        raise ValueError(f"no codec {name!r}; there are {', '.join(CODECS)}") from None

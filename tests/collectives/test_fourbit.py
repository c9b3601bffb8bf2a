"""NF4: nearest levels by exact arithmetic, ties, nibbles, scales."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from holdfast.collectives.codecs.fourbit import FOUR_BIT_BLOCK, Nf4Codec

Values = NDArray[np.float32]

patient = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
counts = st.one_of(st.integers(1, 4), st.integers(62, 66), st.integers(1, 300))
values_of_any_size = hnp.arrays(np.float32, counts, elements=st.floats(-65504, 65504, width=32))
LARGEST_GAP = 1 - 0.6961928
CODEC = Nf4Codec()


def encode(values: Values) -> bytes:
    out = bytearray(CODEC.encoded_bytes(values.size))
    assert CODEC.encode(values, memoryview(out)) == len(out)
    return bytes(out)


def decode(data: bytes, count: int) -> Values:
    out = np.full(count, 7, np.float32)
    CODEC.decode(data, out)
    return out


def codes_of(data: bytes, count: int) -> list[int]:
    packed = data[2 * -(-count // FOUR_BIT_BLOCK) :]
    return [packed[i // 2] >> 4 * (i % 2) & 15 for i in range(count)]


def one_by_one(values: Values) -> bytes:
    """The format's definition, written as slowly as possible."""
    grid = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    usable = [code for code in range(16) if code != 8 or CODEC.name == "nf4"]
    scales, codes = b"", []
    for start in range(0, values.size, FOUR_BIT_BLOCK):
        block = values[start : start + FOUR_BIT_BLOCK]
        scale = float(grid[np.searchsorted(grid, float(np.abs(block).max()), side="left")])
        scales += np.float16(scale).tobytes()
        for value in block:
            ratio = Fraction(float(value / np.float32(scale))) if scale else Fraction(0)
            levels = {code: Fraction(float(CODEC.table[code])) for code in usable}
            codes.append(min(usable, key=lambda c: (abs(levels[c] - ratio), abs(levels[c]))))
    codes += [0] * (len(codes) % 2)
    return scales + bytes(
        low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)
    )


@patient
@given(values=values_of_any_size)
def test_the_bytes_are_what_the_definition_says(values: Values) -> None:
    assert encode(values) == one_by_one(values)


@patient
@given(st.data())
def test_values_near_midpoints_find_the_nearest_level(data: st.DataObject) -> None:
    ascending = np.unique(CODEC.table)
    midpoints = (ascending[1:].astype(np.float64) + ascending[:-1]) / 2
    values = midpoints.astype(np.float32)
    for _ in range(data.draw(st.integers(0, 2))):
        values = np.nextafter(values, np.float32(data.draw(st.sampled_from([-2, 2]))))
    values = np.append(values, np.float32(1))
    assert encode(values) == one_by_one(values)


@patient
@given(values=values_of_any_size)
def test_no_value_errs_by_more_than_half_the_widest_gap(values: Values) -> None:
    data = encode(values)
    scales = np.frombuffer(data, "<f2", count=-(-values.size // FOUR_BIT_BLOCK)).astype(np.float64)
    bound = np.repeat(scales, FOUR_BIT_BLOCK)[: values.size] * LARGEST_GAP / 2
    decoded = decode(data, values.size).astype(np.float64)
    assert (np.abs(decoded - values) <= bound * (1 + 1e-5)).all()


@patient
@given(values=values_of_any_size)
def test_decoding_is_one_float32_multiply(values: Values) -> None:
    data = encode(values)
    scales = np.frombuffer(data, "<f2", count=-(-values.size // FOUR_BIT_BLOCK))
    expected = [
        CODEC.table[code] * np.float32(scales[i // FOUR_BIT_BLOCK])
        for i, code in enumerate(codes_of(data, values.size))
    ]
    assert decode(data, values.size).tobytes() == np.array(expected, np.float32).tobytes()


def test_nf4_has_the_levels_of_its_paper() -> None:
    assert CODEC.table[[0, 7, 8, 15]].tolist() == [-1, 0, np.float32(0.07958029955625534), 1]
    assert (np.diff(CODEC.table) > 0).all()


def test_the_earlier_value_has_the_lower_nibble() -> None:
    zero = int(np.flatnonzero(CODEC.table == 0)[0])
    top = int(np.flatnonzero(CODEC.table == 1)[0])
    data = encode(np.array([1, 0, 0, 1, 1], np.float32))
    assert data[:2] == np.float16(1).tobytes()
    assert list(data[2:]) == [top | zero << 4, zero | top << 4, top]


def test_padding_must_be_zero() -> None:
    data = bytearray(encode(np.array([1, 0, 1], np.float32)))
    data[-1] |= 0x10
    with pytest.raises(ValueError, match="padding"):
        decode(bytes(data), 3)


def test_a_block_of_zeros_stays_one() -> None:
    values = np.zeros(FOUR_BIT_BLOCK + 3, np.float32)
    values[0] = -0.0
    data = encode(values)
    assert data[:4] == bytes(4)
    assert not decode(data, values.size).any()


def test_magnitudes_beyond_the_scale_are_refused() -> None:
    values = np.full(70, 65504, np.float32)
    assert decode(encode(values), 70).tolist() == values.tolist()
    values[68] = np.nextafter(np.float32(65504), np.float32(np.inf))
    with pytest.raises(ValueError, match=r"block 1 .*beyond"):
        encode(values)


@pytest.mark.parametrize("bits", [0x7C00, 0x8000, 0xFFFF])
def test_scales_that_no_encoder_makes_are_refused(bits: int) -> None:
    data = bytearray(encode(np.ones(70, np.float32)))
    data[2:4] = bits.to_bytes(2, "little")
    with pytest.raises(ValueError, match="scale"):
        decode(bytes(data), 70)

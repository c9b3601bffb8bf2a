"""NF4: nearest levels by exact arithmetic, ties, nibbles; ``test_codecs`` has its scales."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.collectives.codecs.fourbit import FOUR_BIT_BLOCK, Nf4Codec
from tests.collectives.coding import Values, decode, encode

patient = settings(max_examples=40)
counts = st.one_of(st.integers(1, 4), st.integers(62, 66), st.integers(1, 300))
values_of_any_size = hnp.arrays(np.float32, counts, elements=st.floats(-65504, 65504, width=32))
CODEC = Nf4Codec()


def one_by_one(values: Values) -> bytes:
    """The format's definition, written as slowly as possible."""
    grid = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    scales, codes = b"", []
    for start in range(0, values.size, FOUR_BIT_BLOCK):
        block = values[start : start + FOUR_BIT_BLOCK]
        scale = float(grid[np.searchsorted(grid, float(np.abs(block).max()), side="left")])
        scales += np.float16(scale).tobytes()
        for value in block:
            ratio = Fraction(float(value / np.float32(scale))) if scale else Fraction(0)
            levels = [Fraction(float(level)) for level in CODEC.table]
            codes.append(min(range(16), key=lambda c: (abs(levels[c] - ratio), abs(levels[c]))))
    codes += [0] * (len(codes) % 2)
    return scales + bytes(
        low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)
    )


@patient
@given(values=values_of_any_size)
def test_the_bytes_are_what_the_definition_says(values: Values) -> None:
    assert encode(CODEC, values) == one_by_one(values)


@patient
@given(st.data())
def test_values_near_midpoints_find_the_nearest_level(data: st.DataObject) -> None:
    ascending = np.unique(CODEC.table)
    midpoints = (ascending[1:].astype(np.float64) + ascending[:-1]) / 2
    values = midpoints.astype(np.float32)
    for _ in range(data.draw(st.integers(0, 2))):
        values = np.nextafter(values, np.float32(data.draw(st.sampled_from([-2, 2]))))
    values = np.append(values, np.float32(1))
    assert encode(CODEC, values) == one_by_one(values)


def test_nf4_has_the_levels_of_its_paper() -> None:
    assert CODEC.table[[0, 7, 8, 15]].tolist() == [-1, 0, np.float32(0.07958029955625534), 1]
    assert (np.diff(CODEC.table) > 0).all()


def test_the_earlier_value_has_the_lower_nibble() -> None:
    zero = int(np.flatnonzero(CODEC.table == 0)[0])
    top = int(np.flatnonzero(CODEC.table == 1)[0])
    data = encode(CODEC, np.array([1, 0, 0, 1, 1], np.float32))
    assert data[:2] == np.float16(1).tobytes()
    assert list(data[2:]) == [top | zero << 4, zero | top << 4, top]


def test_padding_must_be_zero() -> None:
    data = bytearray(encode(CODEC, np.array([1, 0, 1], np.float32)))
    data[-1] |= 0x10
    with pytest.raises(ValueError, match="padding"):
        decode(CODEC, bytes(data), 3)

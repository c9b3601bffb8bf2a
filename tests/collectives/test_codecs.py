"""Codecs: lengths, error bounds, bit-exact decoding, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from holdfast.collectives.codecs import CODECS, INT8_BLOCK, Codec, get_codec

Values = NDArray[np.float32]

LARGEST_INT8 = float(np.finfo(np.float16).max) * 127

counts = st.one_of(st.integers(0, 4), st.integers(250, 262), st.integers(0, 1500))
small_values = hnp.arrays(
    np.float32,
    counts,
    elements=st.floats(-LARGEST_INT8, LARGEST_INT8, width=32, allow_nan=False),
)
any_values = hnp.arrays(np.float32, counts, elements=st.floats(width=32))


# Other work on the machine must not fail a test.
patient = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def encode(codec: Codec, values: Values) -> bytes:
    out = bytearray(codec.encoded_bytes(values.size))
    codec.encode(values, memoryview(out))
    return bytes(out)


def decode(codec: Codec, data: bytes, count: int) -> Values:
    out = np.full(count, 7, np.float32)
    codec.decode(data, out)
    return out


def int8_one_by_one(values: Values) -> bytes:
    """The format's definition, written as slowly as possible."""
    grid = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    scales, levels = b"", b""
    for start in range(0, values.size, INT8_BLOCK):
        block = values[start : start + INT8_BLOCK]
        largest = float(np.abs(block).max())
        scale = float(grid[np.searchsorted(grid * 127, largest, side="left")])
        scales += np.float16(scale).tobytes()
        for value in block:
            ratio = np.float32(value) / np.float32(scale) if scale else np.float32(0)
            levels += round(float(ratio)).to_bytes(1, "little", signed=True)
    return scales + levels


@patient
@given(any_values)
def test_fp32_is_verbatim(values: Values) -> None:
    codec = get_codec("fp32")
    data = encode(codec, values)
    assert data == values.astype("<f4").tobytes()
    assert decode(codec, data, values.size).tobytes() == values.tobytes()


@patient
@given(small_values)
def test_int8_is_what_its_definition_says(values: Values) -> None:
    assert encode(get_codec("int8"), values) == int8_one_by_one(values)


@patient
@given(small_values)
def test_int8_errs_by_half_a_scale_at_most(values: Values) -> None:
    codec = get_codec("int8")
    data = encode(codec, values)
    blocks = -(-values.size // INT8_BLOCK)
    assert len(data) == 2 * blocks + values.size
    decoded = decode(codec, data, values.size)
    scales = np.frombuffer(data, "<f2", count=blocks).astype(np.float64)
    bound = np.repeat(scales, INT8_BLOCK)[: values.size] * 0.5
    # One float32 division is in between: allow its rounding.
    assert (np.abs(decoded.astype(np.float64) - values) <= bound * (1 + 1e-5)).all()


@patient
@given(small_values)
def test_int8_decodes_bit_for_bit_as_one_float32_multiply(values: Values) -> None:
    codec = get_codec("int8")
    data = encode(codec, values)
    blocks = -(-values.size // INT8_BLOCK)
    scales = np.frombuffer(data, "<f2", count=blocks)
    levels = np.frombuffer(data, np.int8, offset=2 * blocks)
    expected = [
        np.float32(level) * np.float32(scales[i // INT8_BLOCK]) for i, level in enumerate(levels)
    ]
    assert decode(codec, data, values.size).tobytes() == np.array(expected, np.float32).tobytes()


@patient
@given(small_values)
def test_int8_encodes_its_own_decoding_to_the_same_values(values: Values) -> None:
    codec = get_codec("int8")
    once = decode(codec, encode(codec, values), values.size)
    twice = decode(codec, encode(codec, once), values.size)
    assert np.abs(twice - once).max(initial=0) <= np.abs(once).max(initial=0) / 127


def test_int8_rounds_ties_to_even() -> None:
    values = np.zeros(INT8_BLOCK, np.float32)
    values[:6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]  # scale 1
    data = encode(get_codec("int8"), values)
    assert np.frombuffer(data, np.int8, offset=2)[:6].tolist() == [127, 0, 2, 2, 0, -2]


def test_int8_rounds_the_scale_up_so_that_nothing_overflows() -> None:
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(200 * INT8_BLOCK) * 10.0 ** rng.uniform(-9, 6)).astype(np.float32)
    data = encode(get_codec("int8"), values)
    levels = np.frombuffer(data, np.int8, offset=2 * 200)
    scales = np.frombuffer(data, "<f2", count=200).astype(np.float64)
    assert levels.min() >= -127
    assert (scales * 127 >= np.abs(values.reshape(200, -1)).max(axis=1)).all()


@pytest.mark.parametrize("tiny", [1e-45, 1e-38, 1e-12, 2.9e-8, 3.1e-8, 1e-6, 5e-3])
def test_int8_handles_tiny_scales(tiny: float) -> None:
    values = np.full(300, tiny, np.float32)
    data = encode(get_codec("int8"), values)
    assert data == int8_one_by_one(values)
    scale = float(np.frombuffer(data, "<f2", count=1)[0])
    assert scale > 0
    decoded = decode(get_codec("int8"), data, 300)
    assert np.abs(decoded.astype(np.float64) - values).max() <= scale / 2


def test_int8_all_zero_block_has_scale_zero() -> None:
    values = np.zeros(INT8_BLOCK + 3, np.float32)
    values[0] = -0.0
    data = encode(get_codec("int8"), values)
    assert data == bytes(len(data))
    assert decode(get_codec("int8"), data, values.size).tobytes() == bytes(4 * values.size)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int8_refuses_what_is_not_finite(bad: float) -> None:
    for at in (0, 255, 256, 299):
        values = np.ones(300, np.float32)
        values[at] = bad
        with pytest.raises(ValueError, match=f"block {at // 256} .*not finite"):
            encode(get_codec("int8"), values)


def test_int8_reaches_the_largest_scale_and_refuses_beyond() -> None:
    values = np.full(5, LARGEST_INT8, np.float32)
    data = encode(get_codec("int8"), values)
    assert decode(get_codec("int8"), data, 5).tolist() == values.tolist()
    values[3] = np.nextafter(np.float32(LARGEST_INT8), np.float32(np.inf))
    with pytest.raises(ValueError, match="beyond"):
        encode(get_codec("int8"), values)


@pytest.mark.parametrize("bits", [0x7C00, 0x7E00, 0x8000, 0xBC00, 0xFC00])
def test_int8_refuses_scales_that_no_encoder_makes(bits: int) -> None:
    data = bytearray(encode(get_codec("int8"), np.ones(300, np.float32)))
    data[2:4] = bits.to_bytes(2, "little")
    with pytest.raises(ValueError, match="scale"):
        decode(get_codec("int8"), bytes(data), 300)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_wrong_lengths_are_refused(name: str) -> None:
    codec = get_codec(name)
    values = np.ones(10, np.float32)
    with pytest.raises(ValueError, match="wanted"):
        codec.encode(values, memoryview(bytearray(codec.encoded_bytes(10) + 1)))
    with pytest.raises(ValueError, match="wanted"):
        codec.decode(bytes(codec.encoded_bytes(10) - 1), values)


def test_an_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'zip'.*fp32, int8"):
        get_codec("zip")

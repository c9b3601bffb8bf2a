"""Codecs: lengths, error bounds, bit-exact decoding, and what they refuse.

What holds for every codec, and fp32, bf16 and int8; the others have files of their own.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.collectives.codecs.codec_base import TILE
from holdfast.collectives.codecs.codecs import CODECS, INT8_BLOCK, ZSTD_SUFFIX, parse_codec
from holdfast.collectives.codecs.fourbit import FOUR_BIT_BLOCK, Nf4Codec
from holdfast.membership.spec.spec import CODECS as SPEC_CODECS
from tests.collectives.coding import Values, decode, encode

LARGEST_INT8 = float(np.finfo(np.float16).max) * 127

counts = st.one_of(st.integers(0, 4), st.integers(250, 262), st.integers(0, 1500))
small_values = hnp.arrays(
    np.float32,
    counts,
    elements=st.floats(-LARGEST_INT8, LARGEST_INT8, width=32, allow_nan=False),
)
any_values = hnp.arrays(np.float32, counts, elements=st.floats(width=32))


patient = settings(max_examples=60)
INT8, BF16 = CODECS["int8"], CODECS["bf16"]


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
    codec = CODECS["fp32"]
    data = encode(codec, values)
    assert data == values.astype("<f4").tobytes()
    assert decode(codec, data, values.size).tobytes() == values.tobytes()


@patient
@given(small_values)
@example(np.full(300, 1e-45, np.float32))  # scales that are subnormal numbers of fp16, or the least
@example(np.full(300, 2.9e-8, np.float32))
@example(np.full(300, 1e-6, np.float32))
@example(np.full(300, 5e-3, np.float32))
def test_int8_is_what_its_definition_says(values: Values) -> None:
    assert encode(INT8, values) == int8_one_by_one(values)


def test_int8_rounds_ties_to_even() -> None:
    values = np.zeros(INT8_BLOCK, np.float32)
    values[:6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]  # scale 1
    data = encode(INT8, values)
    assert np.frombuffer(data, np.int8, offset=2)[:6].tolist() == [127, 0, 2, 2, 0, -2]


# ---------------------------------------------------------------- one scale for each block

# Values of a block, the largest level, and half of the widest gap between levels.
SCALED = {"int8": (INT8_BLOCK, 127, 0.5), "nf4": (FOUR_BIT_BLOCK, 1, (1 - 0.6961928) / 2)}
every_scaled = pytest.mark.parametrize("name", SCALED)


def parts(name: str, data: bytes, count: int) -> tuple[Values, Values]:
    """Return the scale and the level of each value of an encoding."""
    block = SCALED[name][0]
    blocks = -(-count // block)
    scales = np.frombuffer(data, "<f2", count=blocks).astype(np.float32)
    codes = np.frombuffer(data, np.int8, offset=2 * blocks)
    levels = codes.astype(np.float32)
    if name == "nf4":
        levels = Nf4Codec().table[np.stack((codes & 15, codes >> 4 & 15), axis=1).reshape(-1)]
    return np.repeat(scales, block)[:count], levels[:count]


@every_scaled
@patient
@given(values=small_values)
def test_a_value_is_one_float32_multiply_and_errs_by_half_a_gap_at_most(
    name: str, values: Values
) -> None:
    codec, (_block, level_max, half_gap) = CODECS[name], SCALED[name]
    values = (values / 127 * level_max).astype(np.float32)
    data = encode(codec, values)
    decoded = decode(codec, data, values.size)
    scales, levels = parts(name, data, values.size)
    assert decoded.tobytes() == (levels * scales).tobytes()
    # One float32 division is in between: allow its rounding.
    bound = scales.astype(np.float64) * half_gap * (1 + 1e-5)
    assert (np.abs(decoded.astype(np.float64) - values) <= bound).all()


@every_scaled
def test_a_block_of_zeros_has_scale_zero(name: str) -> None:
    values = np.zeros(INT8_BLOCK + 3, np.float32)
    values[0] = -0.0
    data = encode(CODECS[name], values)
    assert not any(parts(name, data, values.size)[0])
    assert decode(CODECS[name], data, values.size).tobytes() == bytes(4 * values.size)


@every_scaled
def test_the_largest_scale_is_reached_and_what_is_beyond_is_refused(name: str) -> None:
    largest = np.float32(np.finfo(np.float16).max) * np.float32(SCALED[name][1])
    values = np.full(300, largest, np.float32)
    assert decode(CODECS[name], encode(CODECS[name], values), 300).tolist() == values.tolist()
    values[298] = np.nextafter(largest, np.float32(np.inf))
    with pytest.raises(ValueError, match=rf"block {298 // SCALED[name][0]} .*beyond"):
        encode(CODECS[name], values)


@every_scaled
@pytest.mark.parametrize("bits", [0x7C00, 0x7E00, 0x8000, 0xBC00, 0xFC00, 0xFFFF])
def test_scales_that_no_encoder_makes_are_refused(name: str, bits: int) -> None:
    data = bytearray(encode(CODECS[name], np.ones(300, np.float32)))
    data[2:4] = bits.to_bytes(2, "little")
    with pytest.raises(ValueError, match="scale"):
        decode(CODECS[name], bytes(data), 300)


# ---------------------------------------------------------------- bf16


def bf16_one_by_one(values: Values) -> bytes:
    """The nearest number with 8 significant bits, by exact arithmetic on each value."""
    data = b""
    for value in values:
        bits = int(np.float32(value).view(np.uint32))
        below = bits >> 16
        rest = bits & 0xFFFF
        up = rest > 0x8000 or (rest == 0x8000 and below % 2 == 1)
        data += (below + up).to_bytes(2, "little")
    return data


@patient
@given(hnp.arrays(np.float32, counts, elements=st.floats(-(2.0**127), 2.0**127, width=32)))
def test_bf16_is_what_its_definition_says(values: Values) -> None:
    codec = BF16
    data = encode(codec, values)
    assert data == bf16_one_by_one(values)
    decoded = decode(codec, data, values.size)
    # Half a unit in the last of 8 places; subnormals have fewer places.
    bound = np.maximum(np.abs(values.astype(np.float64)) * 2.0**-8, 2.0**-134)
    assert (np.abs(decoded.astype(np.float64) - values) <= bound).all()
    assert encode(codec, decoded) == data


def test_bf16_rounds_ties_to_even() -> None:
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2**-133 * 0.5], np.float32)
    assert decode(BF16, encode(BF16, values), 4).tolist() == [
        1,
        1 + 2**-6,
        -1,
        0,
    ]


def test_bf16_refuses_what_would_become_infinite() -> None:
    largest = np.uint32(0x7F7F_7FFF).view(np.float32)
    values = np.zeros(TILE + 9, np.float32)
    values[TILE + 3] = largest
    assert decode(BF16, encode(BF16, values), values.size)[TILE + 3] > 3e38
    values[TILE + 3] = -np.nextafter(largest, np.float32(np.inf))
    with pytest.raises(ValueError, match=f"value {TILE + 3} .*beyond"):
        encode(BF16, values)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_bf16_refuses_bytes_that_are_not_finite(bits: int) -> None:
    data = bytearray(2 * TILE + 20)
    data[2 * TILE + 8 : 2 * TILE + 10] = bits.to_bytes(2, "little")
    with pytest.raises(ValueError, match="not finite"):
        decode(BF16, bytes(data), TILE + 10)


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", sorted(CODECS))
def test_wrong_lengths_are_refused(name: str) -> None:
    codec = CODECS[name]
    values = np.ones(10, np.float32)
    with pytest.raises(ValueError, match="wanted"):
        codec.encode(values, memoryview(bytearray(codec.encoded_bytes(10) + 1)))
    with pytest.raises(ValueError, match="wanted"):
        codec.decode(bytes(codec.encoded_bytes(10) - 1), values)


every_lossy = pytest.mark.parametrize("name", sorted(set(CODECS) - {"fp32"}))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_no_values_are_no_bytes(name: str) -> None:
    codec = CODECS[name]
    assert codec.encoded_bytes(0) == 0
    assert encode(codec, np.empty(0, np.float32)) == b""
    assert decode(codec, b"", 0).size == 0


HALF_SPACING_MIN = 2.0**-24  # between fp16 numbers


@pytest.mark.parametrize("name", sorted(CODECS))
@patient
@given(values=small_values.map(lambda values: values / 300))
def test_encoding_is_a_pure_function_and_settles_at_once(name: str, values: Values) -> None:
    codec = CODECS[name]
    before = values.tobytes()
    data = encode(codec, values)
    assert data == encode(codec, values.copy())
    assert values.tobytes() == before
    decoded = decode(codec, data, values.size)
    again = decode(codec, encode(codec, decoded), values.size)
    step = np.abs(decoded).max(initial=0) / 127 if name == "int8" else 0
    # The fp16 scales of very small blocks are rounded coarsely, each time.
    coarse = HALF_SPACING_MIN if name in SCALED else 0
    assert (np.abs(again - decoded) <= step + coarse).all()


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_chunk_is_coded_alike_wherever_it_lies(name: str) -> None:
    codec = CODECS[name]
    values = np.random.default_rng(1).standard_normal(2 * TILE + 101).astype(np.float32)
    for start in (1, 7):
        part = values[start:]
        data = encode(codec, part)
        room = np.zeros(len(data) + 3, np.uint8)
        room[3:] = np.frombuffer(data, np.uint8)
        out = np.zeros(values.size, np.float32)
        codec.decode(room[3:].data, out[start:])
        assert out[start:].tobytes() == decode(codec, data, part.size).tobytes()


def spread_values(count: int) -> Values:
    """Return values of both signs in blocks of every size from subnormal numbers to 2**15."""
    places = np.arange(count, dtype=np.uint32)
    mixed = (places.astype(np.uint64) + 1) * np.uint64(0x9E37_79B9_7F4A_7C15)
    sign_and_mantissa = (mixed >> np.uint64(32)).astype(np.uint32) & np.uint32(0x807F_FFFF)
    return (sign_and_mantissa | (places // 64 * 5 % 142) << np.uint32(23)).view(np.float32)


# BLAKE3 of the encoding of ``spread_values`` and of what it decodes to. They never change: peers of
# different releases share a run, and journals hold digests of encodings.
GOLDEN = {
    "fp32": "b48075ac38b7b567657a45150f330f57",
    "bf16": "e0e8dc52baf328facd1f9862ce68900e",
    "int8": "7e7938ff945c4cbe30ec2a642983c0ad",
    "nf4": "b7dbc55a7d14fee3a9dfd7727051188d",
    "topk": "f0baa197aecc37f1e5ac59d74f2a36c3",
    "topk16": "7273405a48524d5d33f01c33c4441dda",
    "topk8": "6bc1fc78b06444e3c7eb88f280b16f00",
    "topk4": "28a62ba5183f1ba65d6991f96bbfe600",
}


@pytest.mark.parametrize("name", sorted(CODECS))
def test_bytes_and_decoded_values_are_those_of_all_releases(name: str) -> None:
    values = spread_values(3 * TILE + 77)
    data = encode(CODECS[name], values)
    decoded = decode(CODECS[name], data, values.size)
    assert blake3(data + decoded.tobytes()).hexdigest(length=16) == GOLDEN[name]


@every_lossy
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_with_its_place(name: str, bad: float) -> None:
    for count, at in ((1, 0), (300, 256), (TILE + 300, TILE + 299)):
        values = np.ones(count, np.float32)
        values[at] = bad
        with pytest.raises(
            ValueError, match=f"{name}: (block|value) [0-9]+ .*not finite"
        ) as caught:
            encode(CODECS[name], values)
        place = int(re.findall("[0-9]+", str(caught.value).split(":")[1])[0])
        block = {"int8": 256, "nf4": 64}.get(name, 1)
        assert place == at // block


@every_lossy
@patient
@given(st.data())
def test_any_bytes_decode_to_finite_values_or_are_refused(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    count = data.draw(st.integers(1, 700))
    if data.draw(st.booleans(), label="from a real one"):
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        junk = bytearray(encode(codec, rng.standard_normal(count).astype(np.float32)))
        for _ in range(data.draw(st.integers(1, 4))):
            junk[data.draw(st.integers(0, min(len(junk), 40) - 1))] = data.draw(st.integers(0, 255))
    else:
        length = codec.encoded_bytes(count)
        junk = bytearray(data.draw(st.binary(min_size=0, max_size=length)))
        if not codec.variable:
            junk = junk.ljust(length, data.draw(st.sampled_from([b"\0", b"\x11", b"\xff"])))
    try:
        with np.errstate(over="ignore"):
            decoded = decode(codec, bytes(junk), count)
    except ValueError:
        event("refused")
    else:
        event("decoded")
        assert np.isfinite(decoded).all()


WANTED_DB = {
    "int8": (43.1, 39.9, 35.4),
    "nf4": (20.7, 19.7, 18.1),
}


@pytest.mark.parametrize("at", range(3), ids=["normal", "laplace", "student with 3 degrees"])
def test_signal_to_noise(at: int) -> None:
    rng = np.random.default_rng(1)
    count = 1 << 21
    drawn = (
        rng.standard_normal(count) if at == 0
        else rng.laplace(size=count) if at == 1
        else rng.standard_t(3, count)
    )  # fmt: skip
    values = drawn.astype(np.float32)
    for name, wanted in WANTED_DB.items():
        decoded = decode(CODECS[name], encode(CODECS[name], values), count)
        noise = np.square(decoded.astype(np.float64) - values).sum()
        decibels = 10 * np.log10(np.square(values.astype(np.float64)).sum() / noise)
        assert abs(decibels - wanted[at]) <= 0.5, (name, decibels)


def test_the_spec_knows_every_codec() -> None:
    squeezed = [name + ZSTD_SUFFIX for name, codec in CODECS.items() if not codec.variable]
    assert sorted(SPEC_CODECS) == sorted([*CODECS, *squeezed])


def test_an_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'zip'.*fp32, bf16, int8"):
        parse_codec("zip")

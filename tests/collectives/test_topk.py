"""The top-k codec against a slow one: survivors, levels, bits, and junk."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from holdfast.collectives.codecs.topk import TopKCodec
from tests.collectives.coding import Values, decode, encode

CODEC = TopKCodec()
HEADER_BYTES = 17

patient = settings(max_examples=80)
counts = st.one_of(st.integers(1, 4), st.integers(62, 130), st.integers(1, 2_000))
few_magnitudes = st.sampled_from([0.0, -0.0, 0.0, 0.0, 1.0, -1.0, 2.0, -3.0])
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
arrays = st.one_of(
    hnp.arrays(np.float32, counts, elements=finite),
    hnp.arrays(np.float32, counts, elements=few_magnitudes),
    st.builds(
        lambda seed, count: np.random.default_rng(seed).standard_t(2, (count,)).astype(np.float32),
        st.integers(0, 99),
        st.integers(1, 6_000),
    ),
)  # fmt: skip


def survivors(values: Values) -> list[int]:
    wanted = math.ceil(values.size / 64)
    order = sorted(range(values.size), key=lambda i: (-abs(float(values[i])), i))
    return sorted(i for i in order[:wanted] if values[i] != 0)


def write_slowly(values: Values, low: float, high: float) -> bytes:
    """The format's definition for given levels."""
    where = survivors(values)
    middle = (low + high) / 2
    bits = ""
    for i in where:
        bits += "1" if np.signbit(values[i]) else "0"
        bits += "1" if abs(float(values[i])) > middle else "0"
    before = [-1, *where]
    gaps = [b - a - 1 for a, b in zip(before, where, strict=False)]
    costs = [sum(p + (gap >> p) + 1 for gap in gaps) for p in range(31)]
    p = costs.index(min(costs)) if gaps else 0
    bits += "".join(format(gap % 2**p, f"0{p}b") if p else "" for gap in gaps)
    bits += "".join("0" * (gap >> p) + "1" for gap in gaps)
    body = bytes(int(bits[i : i + 8].ljust(8, "0"), 2) for i in range(0, len(bits), 8))
    return struct.pack("<IIffB", HEADER_BYTES + len(body), len(where), low, high, p) + body


@patient
@given(arrays)
@example(np.zeros(300, np.float32))
@example(np.ones(300, np.float32))
@example(np.array([1e-45], np.float32))
def test_the_bytes_are_what_the_definition_says(values: Values) -> None:
    data = encode(CODEC, values)
    assert len(data) <= CODEC.encoded_bytes(values.size)
    low, high = struct.unpack_from("<ff", data, 8)
    if low == high:
        high = low + 1  # no magnitude counts as an upper one
        slow = bytearray(write_slowly(values, low, math.inf))
        slow[12:16] = data[12:16]
        assert data == bytes(slow)
    elif np.ptp(np.log2(np.abs(values[survivors(values)]))) < 20:
        # The best two levels put each magnitude with the nearer one; ties are too rare to be met.
        assert data == write_slowly(values, low, high)


@patient
@given(arrays)
def test_survivors_are_the_largest_and_keep_their_signs(values: Values) -> None:
    decoded = decode(CODEC, encode(CODEC, values), values.size)
    where = survivors(values)
    assert np.flatnonzero(decoded).tolist() == where
    assert (np.signbit(decoded[where]) == np.signbit(values[where])).all()
    assert not np.signbit(np.delete(decoded, where)).any()


@patient
@given(
    hnp.arrays(
        np.float32, st.integers(2, 1_200), elements=st.integers(-500, 500).map(lambda n: n / 16)
    )
)
def test_no_other_split_has_better_levels(values: Values) -> None:
    where = survivors(values)
    magnitudes = np.sort(np.abs(values[where].astype(np.float64)))
    decoded = np.abs(decode(CODEC, encode(CODEC, values), values.size)[where].astype(np.float64))
    error = np.square(np.abs(values[where]) - decoded).sum()
    splits = [
        sum(np.square(part - part.mean()).sum() for part in (magnitudes[:at], magnitudes[at:]))
        for at in range(1, magnitudes.size)
    ]
    assert error <= min(splits, default=0) * (1 + 1e-5) + 1e-9


def test_it_takes_about_015_bits_a_value() -> None:
    values = np.random.default_rng(1).standard_normal(1 << 18).astype(np.float32)
    bits = 8 * len(encode(CODEC, values)) / values.size
    assert 0.145 < bits < 0.152
    assert 8 * CODEC.encoded_bytes(values.size) / values.size < 0.157


@pytest.mark.parametrize(
    ("name", "share", "bits"), [("topk16", 16, 0.48), ("topk8", 8, 0.80), ("topk4", 4, 1.32)]
)
def test_more_may_survive(name: str, share: int, bits: float) -> None:
    codec = TopKCodec(name)
    for count in (1, share, share + 1, 1 << 16):
        values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
        data = encode(codec, values)
        decoded = decode(codec, data, count)
        where = np.flatnonzero(decoded)
        assert where.size == math.ceil(count / share)
        assert np.abs(values[where]).min() >= np.abs(np.delete(values, where)).max(initial=0.0)
    assert 8 * len(data) / count == pytest.approx(bits, rel=0.03)
    with pytest.raises(ValueError, match="at most"):
        decode(CODEC, data, count)


def test_clustered_survivors_cost_less() -> None:
    values = np.random.default_rng(1).standard_normal(1 << 18).astype(np.float32) * 0.01
    values[1_000:6_000] *= 1_000  # a layer that moves more than the others
    assert 8 * len(encode(CODEC, values)) / values.size < 0.08


def test_the_longest_gap_fits() -> None:
    values = np.zeros(1 << 20, np.float32)
    values[-1] = -5
    data = encode(CODEC, values)
    assert len(data) < 24
    assert np.flatnonzero(decode(CODEC, data, values.size)).tolist() == [values.size - 1]
    values[:16_383] = 1
    values[16_000:16_383] = 0
    assert np.count_nonzero(decode(CODEC, encode(CODEC, values), values.size)) == 16_001


def good() -> bytearray:
    return bytearray(
        encode(CODEC, np.random.default_rng(1).standard_normal(640).astype(np.float32))
    )


def spoiled(at: int, data: bytes) -> bytes:
    junk = good()
    junk[at : at + len(data)] = data
    return bytes(junk)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (bytes(good()[:-1]), "wanted"),
        (bytes(good()) + b"\0", "wanted by the first"),
        (bytes(HEADER_BYTES - 1), "wanted at least"),
        (spoiled(0, struct.pack("<I", 2**32 - 1)), "wanted by the first"),
        (spoiled(4, struct.pack("<I", 11)), "survivors of 640"),
        (spoiled(4, struct.pack("<I", 9)), "9 gaps wanted"),
        (spoiled(4, struct.pack("<I", 2**32 - 1)), "survivors of 640"),
        (spoiled(8, struct.pack("<f", math.nan)), "levels"),
        (spoiled(12, struct.pack("<f", math.inf)), "levels"),
        (spoiled(8, struct.pack("<ff", 2, 1)), "levels"),
        (spoiled(8, struct.pack("<ff", -1, 1)), "levels"),
        (spoiled(16, b"\x1f"), "parameter 31"),
        (spoiled(16, b"\x1e"), "missing"),
        (struct.pack("<IIffBB", 18, 0, 0, 0, 0, 0), "0 gaps and 8 bits"),
        (struct.pack("<IIffB", 20, 1, 1, 1, 9) + b"\x3f\xff\xff", "beyond the end|gaps"),
        (struct.pack("<IIffB", 20, 1, 1, 1, 12) + b"\x3f\xff\x00", "gaps"),
        (struct.pack("<IIffB", 20, 1, 1, 1, 19) + b"\x3f\xff\xfc", "beyond the end"),
    ],
)
def test_junk_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decode(CODEC, data, 640)


def test_a_survivor_may_be_the_last_value_and_none_comes_after() -> None:
    def one(gap: int) -> bytes:
        bits = "00" + format(gap, "012b") + "1"
        body = int(bits.ljust(16, "0"), 2).to_bytes(2, "big")
        return struct.pack("<IIffB", HEADER_BYTES + 2, 1, 1, 1, 12) + body

    assert np.flatnonzero(decode(CODEC, one(639), 640)).tolist() == [639]
    with pytest.raises(ValueError, match="beyond the end"):
        decode(CODEC, one(640), 640)

"""zstd over frames: only where it pays, and never with more memory than expected."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.collectives.codecs.codecs import (
    SAMPLE_BYTES_MIN,
    SAVING_MIN,
    FrameCompressor,
    expand,
    parse_codec,
)

NOISE = memoryview(np.random.default_rng(1).bytes(20_000))
ZEROS = memoryview(bytes(20_000))


def partly_noise(share: float) -> memoryview:
    noise = round(len(NOISE) * share)
    return memoryview(bytes(NOISE[:noise]) + bytes(len(NOISE) - noise))


@given(st.binary(max_size=3_000), st.integers(0, 3_000))
def test_what_was_compressed_comes_back(data: bytes, zeros: int) -> None:
    payload = memoryview(data + bytes(zeros))
    compressed = FrameCompressor(True).compress(payload)
    assert compressed is payload or len(compressed) < len(payload)
    if compressed is not payload:
        assert expand(compressed, len(payload)) == payload


def test_it_stops_after_a_sample_that_saves_too_little() -> None:
    for share, pays in ((1 - SAVING_MIN - 0.01, True), (1 - SAVING_MIN + 0.01, False)):
        compressor = FrameCompressor(True)
        compressor.compress(partly_noise(share))
        assert compressor.pays is pays
        after = compressor.compress(ZEROS)
        assert (after is ZEROS) is not pays


def test_a_short_chunk_is_no_sample() -> None:
    compressor = FrameCompressor(True)
    assert compressor.compress(NOISE[: SAMPLE_BYTES_MIN - 1]) is not None
    assert compressor.pays
    compressor.compress(ZEROS)  # the sample
    assert compressor.compress(NOISE) is NOISE
    assert compressor.pays


def test_unwanted_it_does_nothing() -> None:
    compressor = FrameCompressor(False)
    assert not compressor.pays
    assert compressor.compress(ZEROS) is ZEROS


@given(st.binary(max_size=200), st.integers(0, 2**23))
def test_any_bytes_expand_to_that_length_or_are_refused(data: bytes, wanted_bytes: int) -> None:
    with pytest.raises(ValueError, match="zstd"):
        expand(data, wanted_bytes)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_damaged_frame_gives_that_length_or_is_refused(changes: list[tuple[int, int]]) -> None:
    junk = bytearray(FrameCompressor(True).compress(partly_noise(0.5)))
    for at, value in changes:
        junk[at] = value
    try:
        expanded = expand(bytes(junk), len(NOISE))
    except ValueError:
        return
    assert len(expanded) == len(NOISE)


def test_a_bomb_is_refused_by_its_header() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    assert len(bomb) < 10_000
    with pytest.raises(ValueError, match="not a frame of 20000 bytes"):
        expand(bomb, 20_000)


def test_frames_without_a_length_or_with_more_behind_them_are_refused() -> None:
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    with pytest.raises(ValueError, match="not a frame of 100 bytes"):
        expand(silent, 100)
    told = zstandard.ZstdCompressor().compress(bytes(100))
    with pytest.raises(ValueError, match="zstd"):
        expand(told + b"x", 100)
    with pytest.raises(ValueError, match="zstd"):
        expand(told[:-1], 100)


def test_names() -> None:
    codec, zstd = parse_codec("int8+zstd")
    assert (codec.name, zstd) == ("int8", True)
    assert parse_codec("topk")[1] is False
    for wrong in ("topk+zstd", "int8+zstd+zstd", "+zstd", "int8+gzip"):
        with pytest.raises(ValueError, match=r"codec|compressed already"):
            parse_codec(wrong)

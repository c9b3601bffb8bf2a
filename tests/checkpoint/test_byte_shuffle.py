"""Compressed blocks: the same bytes again, or an error that says which block; and what it is worth."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from functools import cache
from unittest import mock

import numpy as np
import pytest
import zstandard
from hypothesis import event, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.checkpoint import blocks
from holdfast.checkpoint.byte_shuffle import squeeze, unsqueeze
from holdfast.checkpoint.shared_state import SharedState
from holdfast.protocol.arena import Arena, arena_bytes
from holdfast.protocol.errors import StateMismatchError
from holdfast.protocol.messages import FragmentSize

BLOCK_BYTES = 4_096
SIZE = FragmentSize(value_count=1_500, momentum_count=10, counter_count=300)
MIB = 2**20


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with mock.patch.object(blocks, "BLOCK_BYTES", BLOCK_BYTES):
        yield


def normal(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(count, dtype=np.float32)


def as_bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The values that bfloat16 has of these, as float32."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


# ---------------------------------------------------------------- the same again

some_arrays = st.builds(
    lambda kind, count, seed: np.random.default_rng(seed).integers(0, 1_000, count).astype(kind),
    st.sampled_from(["<f4", "<f8", "<f2", "<i8", "<i4", "?", "u1"]),
    st.integers(0, 3_000),
    st.integers(0, 9),
)
some_bytes = st.one_of(st.binary(max_size=400), some_arrays.map(lambda array: array.tobytes()))


@given(data=some_bytes, element_bytes=st.integers(1, 9))
def test_any_bytes_come_back_whatever_they_are_taken_for(data: bytes, element_bytes: int) -> None:
    short = squeeze(data, element_bytes)
    event("shorter" if len(short) < len(data) else "not shorter")
    assert bytes(unsqueeze(short, len(data), element_bytes)) == data


# ---------------------------------------------------------------- what others send


@cache
def source() -> SharedState:
    state = SharedState([SIZE], Arena(bytearray(arena_bytes([SIZE])), [SIZE]), "run")
    state.load_initial(0, normal(SIZE.value_count), np.arange(SIZE.counter_count))
    return state


def compressed(block: int) -> bytes:
    place = source().places(0)[block]
    data = squeeze(source().block(0, 0, block), place.element_bytes)
    assert len(data) < place.size_bytes
    return data


def refusal_of(block: int, payload: bytes) -> StateMismatchError | None:
    """Give an empty peer a block's payload as it came over the line; it has the right bytes or none."""
    target = SharedState([SIZE], Arena(bytearray(arena_bytes([SIZE])), [SIZE]), "run")
    (head,) = source().heads()
    incoming = target.begin(head, source().index(0, 0))
    refusal = None
    try:
        assert incoming.accept(block, incoming.plain(block, memoryview(payload)))
    except StateMismatchError as error:
        refusal = error
    right = source().block(0, 0, block)
    assert bytes(incoming.place(block).of(target.parts(0))) == (
        right if refusal is None else bytes(len(right))
    )
    incoming.abandon()
    return refusal


def counters_block() -> int:
    return next(n for n, place in enumerate(source().places(0)) if place.part == 2)


damages = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 10**6), st.integers(0, 7)),
    st.tuples(st.just("cut"), st.integers(0, 10**6), st.just(0)),
    st.tuples(st.just("append"), st.integers(1, 200), st.integers(0, 255)),
    st.tuples(st.just("insert"), st.integers(0, 10**6), st.integers(0, 255)),
)


@pytest.mark.fault("a donor's compressed block is damaged, too short, or a bomb")
@given(of_counters=st.booleans(), harm=st.lists(damages, min_size=1, max_size=3), junk=st.binary())
def test_a_damaged_block_is_named_and_never_another_ones_bytes(
    of_counters: bool, harm: list[tuple[str, int, int]], junk: bytes
) -> None:
    block = counters_block() if of_counters else 0
    data = bytearray(compressed(block))
    for how, at, what in harm:
        at %= len(data) or 1
        match how:
            case "flip" if data:
                data[at] ^= 1 << what
            case "cut":
                del data[at:]
            case "append":
                data += bytes([what]) * at
            case _:
                data.insert(at, what)
    for payload in (bytes(data), junk):
        refusal = refusal_of(block, payload)
        event("the same bytes after all" if refusal is None else "refused")
        if refusal is not None:
            assert refusal.blocks == (block,)
            assert str(refusal).startswith(f"block {block} of fragment 0")


def _header(content_size: int) -> bytes:
    # Single segment, 8 bytes of content size; then one last block: a run of 128 KiB of zeros.
    return (
        b"\xe0"
        + struct.pack("<Q", content_size)
        + struct.pack("<I", 1 | 1 << 1 | 2**17 << 3)[:3]
        + b"\0"
    )


@pytest.mark.fault(
    "a donor's compressed block is damaged, too short, or a bomb",
    "zstd's frame, the block's length, its digest",
    "at most a block's length is made of it; refused, the donor is dropped and named",
)
@pytest.mark.parametrize(
    "payload",
    [
        zstandard.ZstdCompressor(level=1).compress(bytes(64 * MIB)),
        zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(64 * MIB)),
        zstandard.ZstdCompressor(level=1).compress(bytes(BLOCK_BYTES - 4)),
        zstandard.ZstdCompressor(level=1).compress(bytes(BLOCK_BYTES)) * 2,
        b"\x28\xb5\x2f\xfd" + _header(BLOCK_BYTES),  # says a block's length, and holds 128 KiB
        b"\x28\xb5\x2f\xfd" + _header(2**62),
        b"\x50\x2a\x4d\x18" + struct.pack("<I", 8) + bytes(8),  # a frame to be skipped
        b"",
    ],
    ids=["long", "length untold", "short", "twice", "lying", "huge", "skippable", "empty"],
)
def test_a_bomb_makes_no_more_than_a_block(payload: bytes) -> None:
    if len(payload) >= BLOCK_BYTES:
        payload = payload[: BLOCK_BYTES - 1]
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="zstd"):
            unsqueeze(payload, BLOCK_BYTES, 4)
        assert tracemalloc.get_traced_memory()[1] < 16 * BLOCK_BYTES
    finally:
        tracemalloc.stop()
    assert str(refusal_of(0, payload)).startswith("block 0 of fragment 0: zstd")


# ---------------------------------------------------------------- what it is worth


@pytest.mark.parametrize(
    ("data", "saved_min", "saved_max"),
    [
        (normal(MIB // 4), 0.15, 0.18),
        (normal(MIB // 4) * np.float32(1e-3), 0.15, 0.18),
        (as_bfloat16(normal(MIB // 4)), 0.64, 0.68),
        (np.zeros(MIB // 4, np.float32), 0.99, 1.0),
        (np.random.default_rng(0).integers(0, 256, MIB, np.uint8), -0.001, 0.0),
    ],
    ids=["float32", "small ones", "bfloat16's", "zeros", "noise"],
)
def test_what_compression_saves(
    data: NDArray[np.generic], saved_min: float, saved_max: float
) -> None:
    saved = 1 - len(squeeze(data.tobytes(), 4)) / data.nbytes
    assert saved_min <= saved <= saved_max

"""Arenas: bytes that are written by system calls are the bytes that both sides see."""

import gc
import os

import numpy as np
import pytest

from holdfast.protocol.arena import Arena, arena_bytes, create_arena_file, map_arena
from holdfast.protocol.messages import FragmentSize

SIZES = (FragmentSize(5_000, 0, 3), FragmentSize(1, 0, 0), FragmentSize(3_000, 0, 1))


@pytest.mark.parametrize("mapped", [True, False])
def test_bytes_go_where_the_values_are(mapped: bool) -> None:
    if mapped:
        file = create_arena_file(SIZES)
        arena, other = map_arena(file, SIZES), map_arena(file, SIZES)
        os.close(file)
    else:
        memory = bytearray(arena_bytes(SIZES))
        arena, other = Arena(memory, SIZES), Arena(memory, SIZES)
    expected = [np.zeros(size.value_count, np.float32) for size in SIZES]
    rng = np.random.default_rng(0)
    for number, start, count in ((0, 4_096, 9_000), (0, 0, 4), (1, 0, 4), (2, 8_000, 4_000)):
        data = rng.integers(0, 256, count, np.uint8)
        arena.write_values(number, start, data)
        expected[number].view(np.uint8)[start : start + count] = data
    for each in (arena, other):
        for number, values in enumerate(expected):
            assert each.values(number).tobytes() == values.tobytes()
            assert not each.counters(number).any()


def test_an_arena_that_nobody_needs_holds_no_file() -> None:
    file = create_arena_file(SIZES)
    before = set(os.listdir("/proc/self/fd"))
    arena = map_arena(file, SIZES)
    assert set(os.listdir("/proc/self/fd")) > before
    del arena
    gc.collect()
    os.close(file)
    assert len(set(os.listdir("/proc/self/fd"))) < len(before)

"""Arenas: both sides see the same bytes; no reader takes a torn copy or waits for a dead writer."""

import gc
import os

import numpy as np
import pytest

from holdfast.protocol.arena import (
    NOTHING_WHOLE,
    Arena,
    NotWholeError,
    arena_bytes,
    create_arena_file,
    map_arena,
)
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


def test_an_unused_arena_holds_no_file() -> None:
    file = create_arena_file(SIZES)
    before = set(os.listdir("/proc/self/fd"))
    arena = map_arena(file, SIZES)
    assert set(os.listdir("/proc/self/fd")) > before
    del arena
    gc.collect()
    os.close(file)
    assert len(set(os.listdir("/proc/self/fd"))) < len(before)


# ---------------------------------------------------------------- a reader and its writer


def memory_arena() -> Arena:
    return Arena(bytearray(arena_bytes(SIZES)), SIZES)


def never() -> None:
    pytest.fail("there is nothing to copy and nobody to wait for")


def test_memory_never_written_holds_nothing_whole() -> None:
    arena = memory_arena()
    assert arena.version(0) == NOTHING_WHOLE
    with pytest.raises(NotWholeError):
        arena.read(0, never, never)


def test_a_reader_waits_for_its_writer_however_long_that_writes() -> None:
    arena, looks_left = memory_arena(), 3_000  # of a fiftieth of a second each
    with arena.writing(0, 6):
        arena.values(0)[:] = 1.0
    writing = arena.writing(0, 7)
    writing.__enter__()

    def wait() -> None:
        """Let a moment pass; the writer is done after a minute."""
        nonlocal looks_left
        looks_left -= 1
        if not looks_left:
            arena.values(0)[:] = 2.0
            writing.__exit__(None, None, None)

    seen = np.zeros(SIZES[0].value_count, np.float32)
    assert arena.read(0, lambda: np.copyto(seen, arena.values(0)), wait) == 7
    assert looks_left == 0
    assert (seen == 2.0).all()


def test_what_changes_while_it_is_copied_is_copied_again() -> None:
    arena = memory_arena()
    with arena.writing(0, 0):
        pass
    versions = [1, 2]

    def copy() -> None:
        if versions:
            with arena.writing(0, versions.pop(0)):
                pass

    assert arena.read(0, copy, never) == 2


def test_a_writer_that_fails_leaves_nothing_to_read_and_no_reader_waiting() -> None:
    arena = memory_arena()
    with arena.writing(0, 3):
        pass
    with pytest.raises(ZeroDivisionError), arena.writing(0, 4):
        raise ZeroDivisionError
    with pytest.raises(NotWholeError):
        arena.read(0, never, never)
    with arena.writing(0, 5):
        pass
    assert arena.read(0, lambda: None, never) == 5


def test_a_reader_of_a_dead_writer_raises_the_error_of_its_wait() -> None:
    arena = memory_arena()
    writing = arena.writing(0, 3)  # kept: it would end with its last reference
    writing.__enter__()

    def dead() -> None:
        raise EOFError

    with pytest.raises(EOFError):
        arena.read(0, never, dead)


def test_released_memory_is_the_fragments_own() -> None:
    """Its pages go back to the system, its neighbours' values stay, and it can be written again."""
    sizes = [FragmentSize(3_000, 0, 2), FragmentSize(50_000, 0, 0), FragmentSize(3_000, 0, 0)]
    file = create_arena_file(sizes)
    arena, other = map_arena(file, sizes), map_arena(file, sizes)
    for fragment in range(3):
        arena.values(fragment)[:] = fragment + 1
    before = os.fstat(file).st_blocks
    arena.release(1)
    assert os.fstat(file).st_blocks <= before - 40 * 4_096 // 512
    assert set(other.values(0)) == {1.0}
    assert set(other.values(2)) == {3.0}
    arena.release(0)  # smaller than two pages: nothing to give back, or a part
    other.values(1)[:] = 7
    assert set(arena.values(1)) == {7.0}
    os.close(file)

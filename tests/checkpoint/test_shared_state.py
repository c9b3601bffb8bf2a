"""The shared state: roots, old versions kept for readers, transfers installed whole or not at
all.
"""

from __future__ import annotations

import os
import threading
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import fragment_state
from holdfast.checkpoint.blocks import (
    BLOCK_BYTES,
    block_places,
    digest_blocks,
    fragment_root,
    lineage,
)
from holdfast.checkpoint.fragment_state import NotHeldError
from holdfast.checkpoint.shared_state import SharedState, Step
from holdfast.protocol import unnamed_file
from holdfast.protocol.arena import Arena, NotWholeError, Values, arena_bytes
from holdfast.protocol.errors import LocalProtocolError, StateMismatchError
from holdfast.protocol.messages import BLOCKS_MAX, FragmentHead, FragmentSize
from tests.checkpoint.pins import copied, copied_to_files, pinned

BLOCK_ELEMENTS = BLOCK_BYTES // 4
# Two and a half blocks of values, one and a bit of momentum, a short block of counters.
SIZE = FragmentSize(
    value_count=2 * BLOCK_ELEMENTS + BLOCK_ELEMENTS // 2,
    momentum_count=BLOCK_ELEMENTS + 3,
    counter_count=5,
)
SMALL = FragmentSize(value_count=7, momentum_count=4, counter_count=2)


def make_state(
    *sizes: FragmentSize, run_id: str = "run", folder: Path | None = None
) -> SharedState:
    return SharedState(sizes, Arena(bytearray(arena_bytes(sizes)), sizes), run_id, folder)


def founded(
    *sizes: FragmentSize, seed: int = 0, run_id: str = "run", folder: Path | None = None
) -> SharedState:
    state = make_state(*sizes, run_id=run_id, folder=folder)
    rng = np.random.default_rng(seed)
    for number, size in enumerate(sizes):
        state.load_initial(
            number,
            rng.standard_normal(size.value_count, dtype=np.float32),
            rng.integers(0, 9, size.counter_count),
        )
    return state


def step(mean: Values) -> Step:
    def work(values: Values, momentum: Values) -> None:
        momentum += mean[: len(momentum)]
        values -= mean

    return work


def advance(state: SharedState, fragment: int = 0) -> FragmentHead:
    head = state.head(fragment)
    assert head is not None
    size = state.sizes[fragment]
    rng = np.random.default_rng(1000 + head.version)
    return state.apply(
        fragment,
        head.version + 1,
        np.full(size.counter_count, 10 + head.version, np.int64),
        step(rng.standard_normal(size.value_count, dtype=np.float32)),
    )


def content(state: SharedState, fragment: int = 0) -> bytes:
    return b"".join(part.tobytes() for part in state.fragments[fragment].parts)


def served(state: SharedState, version: int) -> bytes:
    one = state.fragments[0]
    return b"".join(one.block(version, index) for index in range(len(one.places)))


# ---------------------------------------------------------------- blocks and roots


def test_blocks_cover_all_bytes_and_straddle_no_array() -> None:
    places = block_places(SIZE)
    assert [place.size_bytes for place in places] == [
        BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES // 2,
        BLOCK_BYTES, 12,
        40,
    ]  # fmt: skip
    assert [place.part for place in places] == [0, 0, 0, 1, 1, 2]
    assert block_places(FragmentSize(0, 0, 0)) == ()


def test_a_fragment_with_too_many_blocks_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="more fragments"):
        block_places(FragmentSize(BLOCKS_MAX * BLOCK_ELEMENTS, 1, 0))


def test_the_root_is_that_of_the_written_bytes() -> None:
    state = founded(SIZE)
    advance(state)
    head = advance(state)
    places = block_places(SIZE)
    fresh = state.fragments[0].parts.copy()
    assert state.fragments[0].index(2) == digest_blocks(fresh, places)
    assert head.root == fragment_root("run", 0, 2, SIZE, digest_blocks(fresh, places))
    assert state.arena.version(0) == 2


@given(st.integers(0, 7 * 4 + 4 * 4 + 2 * 8 - 1), st.integers(0, 7))
def test_any_bit_changes_the_root(byte: int, bit: int) -> None:
    state = founded(SMALL)
    advance(state)
    fragment = state.fragments[0]
    parts = fragment.parts.copy()
    before = digest_blocks(parts, fragment.places)
    for part in parts:
        view = part.view(np.uint8)
        if byte < len(view):
            view[byte] ^= 1 << bit
            break
        byte -= len(view)
    assert digest_blocks(parts, fragment.places) != before
    root = fragment_root("run", 0, 1, SMALL, before)
    assert fragment_root("run", 0, 1, SMALL, digest_blocks(parts, fragment.places)) != root


def test_the_root_says_whose_which_and_how_large() -> None:
    digests = bytes(64)
    roots = {
        fragment_root(run, fragment, version, FragmentSize(*counts), digests)
        for run, fragment, version, counts in [
            ("a", 0, 0, (1, 1, 0)),
            ("b", 0, 0, (1, 1, 0)),
            ("a", 1, 0, (1, 1, 0)),
            ("a", 0, 1, (1, 1, 0)),
            ("a", 0, 0, (2, 1, 0)),
            ("a", 0, 0, (1, 0, 1)),
        ]
    }
    assert len(roots) == 6


def test_a_lineage_is_made_of_the_first_versions() -> None:
    state = founded(SMALL, SMALL)
    roots = [head.root for head in state.heads()]
    assert roots[0] != roots[1]
    assert state.lineage() == lineage("run", roots)
    assert len({state.lineage(), lineage("run", roots[::-1]), lineage("other", roots)}) == 3
    advance(state)
    with pytest.raises(LocalProtocolError, match="version 0"):
        state.lineage()
    with pytest.raises(LocalProtocolError, match="version 0"):
        make_state(SMALL).lineage()


# ---------------------------------------------------------------- rounds


def test_a_round_moves_only_its_fragment() -> None:
    state = founded(SMALL, SMALL)
    other = state.head(1)
    mean = np.arange(7, dtype=np.float32)
    values = state.fragments[0].parts.values - mean
    head = state.apply(0, 1, np.array([4, 5]), step(mean))
    assert (head.fragment, head.version) == (0, 1)
    assert state.heads() == (head, other)
    assert state.fragments[0].parts.values.tolist() == values.tolist()
    assert state.fragments[0].parts.momentum.tolist() == [0, 1, 2, 3]
    assert state.fragments[0].parts.counters.tolist() == [4, 5]


@pytest.mark.parametrize("version", [0, 1, 3])
def test_a_round_follows_the_version_before_it(version: int) -> None:
    state = founded(SMALL)
    advance(state)
    before = content(state), state.heads()
    with pytest.raises(LocalProtocolError, match="cannot follow"):
        state.apply(0, version, np.zeros(2, np.int64), step(np.zeros(7, np.float32)))
    assert (content(state), state.heads()) == before


def test_counters_that_do_not_fit_are_refused() -> None:
    state = founded(SMALL)
    nothing = step(np.zeros(7, np.float32))
    with pytest.raises(LocalProtocolError, match="7"):
        state.apply(0, 1, np.zeros(1, np.int64), nothing)
    with pytest.raises(LocalProtocolError, match="float64"):
        state.apply(0, 1, np.zeros(2), nothing)  # type: ignore[arg-type]
    assert state.heads()[0].version == 0


def test_a_step_that_fails_leaves_no_head() -> None:
    state = founded(SMALL)

    def broken(values: Values, _momentum: Values) -> None:
        values[:3] = 0
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        state.apply(0, 1, np.zeros(2, np.int64), broken)
    assert state.heads() == ()
    with pytest.raises(NotHeldError):
        state.fragments[0].index(0)


# ---------------------------------------------------------------- pins


@pytest.fixture(params=["memory", "file", "disk full", "no folder"])
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder for versions, and a limit beyond which they go there."""
    if request.param != "memory":
        monkeypatch.setattr(fragment_state, "IN_MEMORY_BYTES_MAX", 0)
    if request.param == "disk full":
        monkeypatch.setattr(unnamed_file, "TemporaryFile", lambda **_: FileIO("/dev/full", "wb"))
    return tmp_path / "none" if request.param == "no folder" else tmp_path


def test_a_pinned_version_keeps_its_bytes_while_rounds_go_on(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    state = founded(SIZE, folder=folder)
    head, before, index = state.head(0), content(state), state.fragments[0].index(0)
    assert head is not None
    assert state.fragments[0].pin(0, "a")
    assert copied(state, 0) == ()  # nothing is copied before it must be
    for _ in range(3):
        advance(state)
        assert served(state, 0) == before
        assert state.fragments[0].index(0) == index
    assert copied(state, 0) == (0,)
    assert copied_to_files(state, 0) == ((0,) if "file" in request.node.name else ())
    assert served(state, 3) == content(state) != before
    with pytest.raises(NotHeldError):
        state.fragments[0].block(1, 0)
    if folder.exists():
        assert not list(folder.iterdir()), "nothing is left after a crash"


def test_a_copy_that_cannot_be_read_is_not_held(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(fragment_state, "IN_MEMORY_BYTES_MAX", 0)
    state = founded(SIZE, folder=tmp_path)
    state.fragments[0].pin(0, "a")
    advance(state)
    monkeypatch.setattr(os, "pread", lambda *_: b"short")
    with pytest.raises(NotHeldError, match="5 of 1048576 bytes"):
        state.fragments[0].block(0, 0)


def test_the_last_release_closes_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(fragment_state, "IN_MEMORY_BYTES_MAX", 0)
    state = founded(SIZE, folder=tmp_path)
    state.fragments[0].pin(0, "a")
    before = len(os.listdir("/proc/self/fd"))
    advance(state)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    state.release_receiver("a")
    assert len(os.listdir("/proc/self/fd")) == before


def test_blocks_that_were_handed_out_do_not_change(folder: Path) -> None:
    state = founded(SIZE, folder=folder)
    state.fragments[0].pin(0, "a")
    blocks = [state.fragments[0].block(0, index) for index in range(len(state.fragments[0].places))]
    before = b"".join(blocks)
    advance(state)
    later = [state.fragments[0].block(0, index) for index in range(len(state.fragments[0].places))]
    state.fragments[0].release("a", 0)
    advance(state)
    assert b"".join(blocks) == b"".join(later) == before


def test_readers_never_see_a_torn_block_while_a_thread_applies() -> None:
    state = founded(SIZE)
    state.fragments[0].pin(0, "a")
    before = content(state)
    applying = threading.Thread(target=lambda: [advance(state) for _ in range(3)])
    applying.start()
    reads = 0
    while applying.is_alive() or not reads:
        assert served(state, 0) == before
        reads += 1
    applying.join()
    assert state.heads()[0].version == 3


# ---------------------------------------------------------------- transfers


def read(state: SharedState) -> int:
    """The version that a trainer would take now; it may not have to wait for it."""

    def wait() -> None:
        pytest.fail("the trainer is kept waiting")

    return state.arena.read(0, lambda: None, wait)


def receive(target: SharedState, source: SharedState, fragment: int = 0) -> list[int]:
    head = source.head(fragment)
    assert head is not None
    incoming = target.begin(head, source.fragments[fragment].index(head.version))
    came = sorted(incoming.missing)
    for index in came:
        incoming.accept(index, source.fragments[fragment].block(head.version, index))
    assert incoming.finish() == head
    return came


def test_an_empty_peer_gets_the_whole_state() -> None:
    source, target = founded(SIZE), make_state(SIZE)
    advance(source)
    assert receive(target, source) == list(range(6))
    assert target.heads() == source.heads()
    assert content(target) == content(source)
    assert read(target) == 1
    assert advance(target) == advance(source)


def test_while_a_fragment_comes_its_trainer_is_told_that_it_is_not_whole() -> None:
    """The transfer may take minutes, and a trainer that waited for its end would get no message."""
    source, target = founded(SIZE), make_state(SIZE)
    head = source.heads()[0]
    incoming = target.begin(head, source.fragments[0].index(0))
    assert incoming.in_place
    for index in sorted(incoming.missing):
        with pytest.raises(NotWholeError):
            read(target)
        incoming.accept(index, source.fragments[0].block(0, index))
    incoming.finish()
    assert read(target) == head.version


def test_a_transfer_over_a_valid_fragment_leaves_it_to_the_trainer_until_its_end() -> None:
    source, target = founded(SIZE), founded(SIZE, seed=1)
    advance(source)
    incoming = target.begin(source.heads()[0], source.fragments[0].index(1))
    for index in sorted(incoming.missing):
        assert read(target) == 0
        incoming.accept(index, source.fragments[0].block(1, index))
    incoming.finish()
    assert read(target) == 1


def test_a_transfer_that_was_given_up_half_way_leaves_nothing_to_the_trainer() -> None:
    source, target = founded(SIZE), make_state(SIZE)
    incoming = target.begin(source.heads()[0], source.fragments[0].index(0))
    incoming.accept(0, source.fragments[0].block(0, 0))
    incoming.abandon()
    with pytest.raises(NotWholeError):
        read(target)


def test_while_it_is_received_a_fragment_has_no_head() -> None:
    source, target = founded(SMALL, SMALL), founded(SMALL, SMALL, seed=1)
    old, before = target.heads(), content(target)
    head = source.heads()[0]
    incoming = target.begin(head, source.fragments[0].index(0))
    assert target.heads() == old[1:]
    assert target.head(0) is None
    incoming.accept(0, source.fragments[0].block(0, 0))
    assert content(target) == before  # a valid fragment is not touched before the end
    incoming.abandon()
    assert target.heads() == old
    assert content(target) == before
    assert not incoming.accept(0, source.fragments[0].block(0, 0))
    assert content(target) == before
    with pytest.raises(LocalProtocolError, match="given up"):
        incoming.finish()


def test_a_transfer_that_was_given_up_is_taken_up_where_it_stopped() -> None:
    source, target = founded(SIZE), make_state(SIZE)
    advance(source)
    head = source.heads()[0]
    first = target.begin(head, source.fragments[0].index(1))
    first.accept(2, source.fragments[0].block(1, 2))
    first.accept(0, source.fragments[0].block(1, 0))
    assert target.heads() == ()
    second = target.begin(head, source.fragments[0].index(1))  # gives the first one up
    assert not first.open
    assert sorted(second.missing) == [1, 3, 4, 5]
    with pytest.raises(LocalProtocolError, match="4 blocks are still missing"):
        second.finish()
    for index in sorted(second.missing):
        second.accept(index, source.fragments[0].block(1, index))
    second.finish()
    assert content(target) == content(source)
    assert read(target) == 1


@pytest.mark.parametrize("valid", [False, True])
def test_a_block_with_other_bytes_is_refused(valid: bool) -> None:
    source = founded(SIZE)
    target = founded(SIZE, seed=1) if valid else make_state(SIZE)
    incoming = target.begin(source.heads()[0], source.fragments[0].index(0))
    before = content(target)
    bad = bytearray(source.fragments[0].block(0, 2))
    bad[17] ^= 1
    for data in (bad, source.fragments[0].block(0, 1), source.fragments[0].block(0, 2)[:-1], b""):
        with pytest.raises(StateMismatchError) as caught:
            incoming.accept(2, data)
        assert caught.value.blocks == (2,)
    assert 2 in incoming.missing
    assert content(target) == before


def test_an_index_that_does_not_fit_the_root_is_refused() -> None:
    source, target = founded(SMALL), make_state(SMALL)
    head, index = source.heads()[0], bytearray(source.fragments[0].index(0))
    index[0] ^= 1
    for bad in (bytes(index), bytes(index[:-1]), bytes(index[:-32]), b""):
        assert not target.check_index(head, bad)
        with pytest.raises(StateMismatchError):
            target.begin(head, bad)
    assert not make_state(SMALL, run_id="other").check_index(head, source.fragments[0].index(0))


def test_a_change_behind_our_back_is_found_at_the_end() -> None:
    source, target = founded(SIZE), founded(SIZE, seed=1)
    incoming = target.begin(source.heads()[0], source.fragments[0].index(0))
    for index in sorted(incoming.missing):
        incoming.accept(index, source.fragments[0].block(0, index))
    # Momentum is zero on both sides, so its blocks were kept; damage one after that.
    target.fragments[0].parts.momentum[5] = 1
    with pytest.raises(StateMismatchError) as caught:
        incoming.finish()
    assert caught.value.blocks == (3,)
    assert target.heads() == ()
    assert receive(target, source) == []  # zeros need not travel


def test_a_round_that_comes_after_the_transfer_began_is_found_at_its_end() -> None:
    source, target = founded(SIZE), founded(SIZE)
    incoming = target.begin(source.heads()[0], source.fragments[0].index(0))
    assert incoming.missing == set()
    ones = np.ones(SIZE.value_count, np.float32)
    assert target.apply(0, 1, np.zeros(5, np.int64), step(ones)).version == 1
    with pytest.raises(StateMismatchError):
        incoming.finish()
    assert target.heads() == ()
    with pytest.raises(NotWholeError):
        read(target)
    assert receive(target, source) == [0, 1, 2, 5]  # momentum is zero there: it need not travel


def test_founding_ends_a_transfer() -> None:
    source, target = founded(SMALL), make_state(SMALL)
    incoming = target.begin(source.heads()[0], source.fragments[0].index(0))
    head = target.load_initial(0, np.ones(7, np.float32), np.zeros(2, np.int64))
    assert target.heads() == (head,)
    assert not incoming.accept(0, source.fragments[0].block(0, 0))
    assert target.fragments[0].parts.values.tolist() == [1.0] * 7


def test_changes_wait_for_each_other() -> None:
    state = founded(SMALL)
    order: list[str] = []
    stepping, go_on = threading.Event(), threading.Event()

    def slow(values: Values, _momentum: Values) -> None:
        stepping.set()
        assert go_on.wait(120)
        values -= 1
        order.append("stepped")

    zeros = np.zeros(2, np.int64)
    one = threading.Thread(target=lambda: state.apply(0, 1, zeros, slow))
    one.start()
    assert stepping.wait(120)
    other = threading.Thread(
        target=lambda: order.append(
            str(state.load_initial(0, np.ones(7, np.float32), zeros).version)
        )
    )
    other.start()
    assert state.heads()[0].version == 0  # the last whole version is told meanwhile
    with pytest.raises(NotHeldError):
        state.fragments[0].index(0)  # but nobody is served from arrays that change
    assert not state.fragments[0].pin(0, "late")
    assert state.fragments[0].pin(1, "early")
    go_on.set()
    one.join()
    other.join()
    assert order == ["stepped", "0"]


def test_a_pinned_version_survives_a_transfer_over_it() -> None:
    source, target = founded(SIZE), founded(SIZE, seed=1)
    advance(source)
    before = content(target)
    target.fragments[0].pin(0, "a")
    receive(target, source)
    assert served(target, 0) == before
    assert content(target) == content(source)


def test_an_arena_of_other_sizes_is_refused() -> None:
    arena = Arena(bytearray(arena_bytes([SIZE])), [SIZE])
    with pytest.raises(LocalProtocolError, match="other sizes"):
        SharedState([SMALL], arena, "run")


operations = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), st.just(0), st.just("")),
        st.tuples(st.just("pin"), st.integers(-2, 2), st.sampled_from("abc")),
        st.tuples(st.just("release"), st.integers(-3, 0), st.sampled_from("abc")),
        st.tuples(st.just("leave"), st.just(0), st.sampled_from("abc")),
    ),
    max_size=40,
)


@given(operations)
def test_what_is_pinned_is_served_and_what_is_not_is_freed(
    script: list[tuple[str, int, str]],
) -> None:
    assert not make_state(SMALL).fragments[0].pin(0, "a"), "there is nothing yet"
    state = founded(SMALL)
    history = [content(state)]
    pins: set[tuple[int, str]] = set()
    for what, offset, who in script:
        version = len(history) - 1 + offset
        if what == "apply":
            advance(state)
            history.append(content(state))
        elif what == "pin" and version >= 0:
            expected = version >= len(history) - 1 or any(v == version for v, _ in pins)
            assert state.fragments[0].pin(version, who) == expected
            pins |= {(version, who)} if expected else set()
        elif what == "release" and version >= 0:
            state.fragments[0].release(who, version)
            pins.discard((version, who))
        elif what == "leave":
            state.release_receiver(who)
            pins = {(v, other) for v, other in pins if other != who}
        needed = {v for v, _ in pins}
        assert pinned(state, 0) == tuple(sorted(needed))
        assert copied(state, 0) == tuple(sorted(v for v in needed if v < len(history) - 1))
        for version in {len(history) - 1, *needed}:
            if version < len(history):
                assert served(state, version) == history[version]

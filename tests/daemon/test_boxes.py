"""Boxes of a fragment between two hosts' arenas: nothing but the boxes moves, bit for bit."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from holdfast.daemon.peer.hosts import boxes
from holdfast.daemon.peer.hosts.boxes import BoxSink, BoxSource, pieces_of
from holdfast.protocol.arena import Arena, arena_bytes
from holdfast.protocol.messages import FragmentSize, ModelLayout, TensorBox, TensorSpec

SPECS = (
    TensorSpec("wide", (70, 33), "float32", "parameter"),
    TensorSpec("deep", (3, 5, 7, 11), "float32", "parameter"),
    TensorSpec("scale", (), "float32", "buffer"),
    TensorSpec("seen", (9,), "int64", "counter"),
    TensorSpec("none", (0, 4), "float32", "parameter"),
)
LAYOUT = ModelLayout(SPECS)
ORDER = (0, 1, 4, 2, 3)  # of the fragment: parameters, buffers, counters
VALUES = sum(math.prod(each.shape) for each in SPECS if each.kind != "counter")
SIZES = (FragmentSize(VALUES, VALUES - 1, 9),)


def arena(fill: int) -> Arena:
    made = Arena(bytearray(arena_bytes(SIZES)), SIZES)
    made.values(0)[:] = fill
    made.counters(0)[:] = fill
    return made


def halves(random_: random.Random) -> tuple[dict[int, list[TensorBox]], dict[int, list[TensorBox]]]:
    """Return the boxes of two hosts, each tensor cut along one of its dimensions."""
    ours: dict[int, list[TensorBox]] = {}
    theirs: dict[int, list[TensorBox]] = {}
    for index, spec in enumerate(SPECS):
        if not spec.shape:
            ours[index] = [TensorBox((), ())]
            continue
        axis = random_.randrange(len(spec.shape))
        at = random_.randint(0, spec.shape[axis])
        for held, start, stop in ((ours, 0, at), (theirs, at, spec.shape[axis])):
            shape, begin = list(spec.shape), [0] * len(spec.shape)
            shape[axis], begin[axis] = stop - start, start
            held[index] = [TensorBox(tuple(begin), tuple(shape))]
    return ours, theirs


def move(source: BoxSource, sink: BoxSink, order: random.Random) -> None:
    """Hand a source's frames to a sink, in any order."""
    loads = []
    while (load := source.next_frame()) is not None:
        loads.append(load)
    order.shuffle(loads)
    for load in loads:
        frame = load()
        if frame is not None:
            header, payload = frame
            place = sink.place("a", header)
            assert place is not None
            place[:] = payload
            sink.deliver("a", header, place)


@pytest.mark.parametrize("piece_bytes", [16, 100, 2**20])
def test_two_hosts_boxes_make_the_fragment_whole(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boxes, "PIECE_BYTES", piece_bytes)
    for seed in range(20):
        random_ = random.Random(seed)
        there, here = arena(0), arena(-1)
        there.values(0)[:] = np.arange(VALUES)
        there.counters(0)[:] = np.arange(9) * 2**40
        moved = 0
        for held in halves(random_):
            pieces = pieces_of(LAYOUT, ORDER, held)
            assert all(each.size_bytes <= max(piece_bytes, 8) for each in pieces)
            moved += sum(each.size_bytes for each in pieces)
            sink = BoxSink("a", here, 0, pieces)
            assert sink.whole.is_set() is not bool(pieces)
            move(BoxSource(there, 0, pieces, 1, None), sink, random_)
            assert sink.whole.is_set()
        assert moved == 4 * VALUES + 8 * 9, "each value moves once"
        assert np.array_equal(here.values(0), there.values(0))
        assert np.array_equal(here.counters(0), there.counters(0))


def test_a_box_that_two_ranks_hold_moves_once() -> None:
    box = TensorBox((0, 0), (70, 33))
    assert sum(each.size_bytes for each in pieces_of(LAYOUT, ORDER, {0: [box, box]})) == 4 * 70 * 33


def test_a_fragment_that_has_another_version_meanwhile_is_given_up() -> None:
    there = arena(0)
    with there.writing(0, 5):
        pass
    pieces = pieces_of(LAYOUT, ORDER, {0: [TensorBox((0, 0), (70, 33))]})
    assert BoxSource(there, 0, pieces, 1, 5)._frame(0) is not None
    late = BoxSource(there, 0, pieces, 1, 4)
    assert late._frame(0) is None
    assert late.stale
    assert late.next_frame() is None


def test_a_frame_of_another_length_is_dropped() -> None:
    pieces = pieces_of(LAYOUT, ORDER, {0: [TensorBox((0, 0), (70, 33))]})
    frame = BoxSource(arena(0), 0, pieces, 1, None)._frame(0)
    assert frame is not None
    others = pieces_of(LAYOUT, ORDER, {0: [TensorBox((0, 0), (69, 33))]})
    assert BoxSink("a", arena(0), 0, others).place("a", frame[0]) is None
    assert BoxSink("a", arena(0), 0, ()).place("a", frame[0]) is None
    assert BoxSink("b", arena(0), 0, pieces).place("a", frame[0]) is None, "another one's"

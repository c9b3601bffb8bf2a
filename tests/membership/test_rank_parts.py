"""Parts of a model that ranks declare: exactly the whole is taken, and each value has one
writer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.membership.peer.rank_parts import RankPartsError, box_of, writers
from holdfast.protocol import messages as m


def layout(*shapes: tuple[int, ...]) -> m.ModelLayout:
    specs = (m.TensorSpec(f"t{n}", shape, "float32", "parameter") for n, shape in enumerate(shapes))
    return m.ModelLayout(tuple(specs))


def parts(*boxes: Sequence[m.TensorBox]) -> list[m.RankPart]:
    count = len(boxes)
    return [m.RankPart(rank, count, rank, tuple(each)) for rank, each in enumerate(boxes)]


def rows(start: int, count: int, columns: int = 2) -> m.TensorBox:
    return m.TensorBox((start, 0), (count, columns))


def refusal(model: m.ModelLayout, held: Sequence[m.RankPart]) -> str:
    with pytest.raises(RankPartsError) as error:
        writers(model, held)
    return str(error.value)


def test_replicas_are_written_once_and_the_load_is_balanced() -> None:
    model = layout((4, 2), (4, 2), (4, 2), ())
    assert writers(model, parts((), ())) == [[0, 2], [1, 3]]


def test_a_missing_part_is_named() -> None:
    text = refusal(layout((4, 2)), parts([rows(0, 2)], [rows(2, 1)]))
    assert text == (
        "2 of the 8 values of tensor 't0' (4, 2) are held by no rank: "
        "rank 0 [0:2, 0:2], rank 1 [2:3, 0:2]"
    )


def test_overlapping_parts_are_refused() -> None:
    text = refusal(layout((4, 2)), parts([rows(0, 3)], [rows(2, 2)]))
    assert "ranks 0 and 1 hold parts of tensor 't0' that overlap: [0:3, 0:2] and [2:4, 0:2]" in text


def test_a_whole_beside_a_part_is_an_overlap() -> None:
    assert "overlap" in refusal(layout((4, 2)), parts([], [rows(0, 2)]))


@pytest.mark.parametrize(
    "box", [rows(3, 2), rows(0, 4, 3), m.TensorBox((0,), (8,)), m.TensorBox((0, 0), (4,))]
)
def test_a_part_outside_of_its_tensor_is_refused(box: m.TensorBox) -> None:
    assert "rank 1 holds" in refusal(layout((4, 2)), parts([rows(0, 4)], [box]))


def test_another_number_of_boxes_than_tensors_is_refused() -> None:
    text = refusal(layout((4, 2), (4, 2)), parts([rows(0, 4)], []))
    assert text == "rank 0 declares parts of 1 tensors and the model has 2"


def test_empty_parts_write_nothing() -> None:
    assert writers(layout((1, 2)), parts([rows(0, 1)], [rows(1, 0)])) == [[0], []]


def test_an_empty_part_fits_every_tensor() -> None:
    nothing = m.TensorBox((0,), (0,))
    held = parts([m.TensorBox((), ()), nothing], [nothing, rows(0, 1)])
    assert writers(layout((), (1, 2)), held) == [[0], [1]]


def test_a_tensor_that_is_in_no_stage_is_named() -> None:
    nothing = m.TensorBox((0,), (0,))
    text = refusal(layout((1, 2), (1, 2)), parts([rows(0, 1), nothing], [nothing, nothing]))
    assert text.startswith("tensor 't1' is in no rank: the stages of a pipeline must together")


def test_a_tensor_of_no_dimension_and_one_without_values() -> None:
    model = layout((), (0, 3))
    held = [m.TensorBox((), ()), m.TensorBox((0, 0), (0, 3))]
    assert writers(model, parts(held, held)) == [[0], []]


def cuts(length: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ranges that make up a length, some of them empty."""
    points = st.lists(st.integers(0, length), max_size=3).map(sorted)
    return points.map(lambda inner: list(itertools.pairwise([0, *inner, length])))


@st.composite
def grids(draw: st.DrawFn) -> tuple[m.ModelLayout, list[m.RankPart]]:
    """Tensors of which each is divided by a grid of its own; some parts are held by several
    ranks.
    """
    shapes = draw(
        st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=3)
    )
    divided = []
    for shape in shapes:
        ranges = itertools.product(*(draw(cuts(length)) for length in shape))
        divided.append(
            [
                m.TensorBox(tuple(a for a, _ in each), tuple(b - a for a, b in each))
                for each in ranges
            ]
        )
    most = max(map(len, divided))
    assume(most + 3 <= m.RANKS_MAX)
    count = draw(st.integers(most, most + 3))
    held = [[boxes[rank % len(boxes)] for boxes in divided] for rank in range(count)]
    order = draw(st.permutations(range(count)))
    return layout(*shapes), parts(*(held[rank] for rank in order))


@given(grids())
def test_any_grid_is_taken_and_each_value_written_once(
    case: tuple[m.ModelLayout, list[m.RankPart]],
) -> None:
    model, held = case
    written = writers(model, held)
    for index, spec in enumerate(model.tensors):
        times = np.zeros(spec.shape, int)
        for part, tensors in zip(held, written, strict=True):
            if index in tensors:
                box = box_of(part, model, index)
                pairs = zip(box.start, box.shape, strict=True)
                here: tuple[slice, ...] = tuple(slice(a, a + n) for a, n in pairs)
                times[here] += 1
        assert (times == 1).all()


@given(st.data(), st.integers(2, 9), st.integers(2, 9))
def test_a_grid_without_one_part_or_with_one_shifted_is_refused(
    data: st.DataObject, height: int, width: int
) -> None:
    lines = st.lists(st.integers(1, height - 1), unique=True, min_size=1, max_size=4).map(sorted)
    ranges = list(itertools.pairwise([0, *data.draw(lines), height]))
    held = parts(*([m.TensorBox((a, 0), (b - a, width))] for a, b in ranges))
    model = layout((height, width))
    writers(model, held)
    victim = data.draw(st.integers(0, len(held) - 1))
    box = held[victim].boxes[0]
    others = [part for rank, part in enumerate(held) if rank != victim]
    refusal(model, others)
    for moved in (box.start[0] - 1, box.start[0] + 1):
        if moved >= 0:
            shifted = evolve(held[victim], boxes=(evolve(box, start=(moved, 0)),))
            refusal(model, [*others, shifted])

"""Merging: no step taken meanwhile is lost, and none is counted twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from holdfast.diloco.merge import Values, lerp, merged, parse_merge

finite = st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100)
vectors = arrays(np.float32, 16, elements=finite)


@given(vectors, vectors)
def test_an_idle_trainer_gets_the_shared_bits(shared: Values, local: Values) -> None:
    assert merged(shared, local, local.copy()).tobytes() == shared.tobytes()


@given(vectors, vectors, vectors)
def test_delta_is_the_formula_and_changes_no_argument(
    shared: Values, local: Values, anchor: Values
) -> None:
    kept = [array.tobytes() for array in (shared, local, anchor)]
    result = merged(shared, local, anchor)
    assert result.dtype == np.float32
    assert np.array_equal(result, shared + (local - anchor))
    assert [array.tobytes() for array in (shared, local, anchor)] == kept


def test_minus_zero_survives() -> None:
    shared = np.array([-0.0, -0.0, 0.0], np.float32)
    local = np.array([1.5, -0.0, -0.0], np.float32)
    assert merged(shared, local, local).tobytes() == shared.tobytes()


@given(vectors, vectors, st.floats(0, 1))
def test_lerp_is_the_formula(shared: Values, local: Values, keep: float) -> None:
    result = parse_merge(f"lerp:{keep!r}")(shared, local, local)
    expected = np.float32(keep) * local + np.float32(1 - keep) * shared
    assert result.dtype == np.float32
    assert result.tobytes() == expected.tobytes()
    assert np.array_equal(lerp(shared, local, 0.0), shared)
    assert np.array_equal(lerp(shared, local, 1.0), local)


def test_delta_by_name() -> None:
    assert parse_merge("delta") is merged


@pytest.mark.parametrize("text", ["", "lerp", "lerp:", "lerp:x", "lerp:1.5", "lerp:-1", "lerp:nan"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="merge must be"):
        parse_merge(text)

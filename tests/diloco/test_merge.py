"""Merging: no step taken meanwhile is lost, and none is counted twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from holdfast.diloco.outer import Values, merged

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

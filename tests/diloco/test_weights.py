"""Contributors' weights as float32 coefficients."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.diloco.weights import coefficients


def test_equal_weights_are_one() -> None:
    assert coefficients([7, 7, 7]).tolist() == [1.0, 1.0, 1.0]


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20).filter(any))
def test_they_are_the_quotients_rounded(weights: list[int]) -> None:
    result = coefficients(weights)
    assert result.dtype == np.float32
    assert result.max() == 1.0
    for weight, coefficient in zip(weights, result, strict=True):
        exact = Fraction(weight, max(weights))
        # Two roundings, to double and to float32: hardly more than half a unit in the last place.
        assert abs(Fraction(float(coefficient)) - exact) <= exact * Fraction(501, 1000) / 2**23
        assert (coefficient == 0) == (weight == 0)


@pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2]])
def test_weights_without_meaning_are_refused(weights: list[int]) -> None:
    with pytest.raises(ValueError, match="not all zero"):
        coefficients(weights)

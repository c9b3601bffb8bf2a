"""Contributors' weights as the float32 scalars of a mean."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.collectives.arithmetic import MeanFactors
from holdfast.protocol.messages import Contributor


def factors_of(weights: list[int]) -> MeanFactors:
    return MeanFactors.of(
        [Contributor(f"{n:032x}", weight, 1.0) for n, weight in enumerate(weights)]
    )


def test_equal_weights_are_one() -> None:
    assert factors_of([7, 7, 7]) == MeanFactors((np.float32(1),) * 3, np.float32(3))


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20).filter(any))
def test_they_are_the_quotients_rounded(weights: list[int]) -> None:
    factors = factors_of(weights).factors
    assert max(factors) == 1.0
    for weight, factor in zip(weights, factors, strict=True):
        exact = Fraction(weight, max(weights))
        # Two roundings, to double and to float32: hardly more than half a unit in the last place.
        assert abs(Fraction(float(factor)) - exact) <= exact * Fraction(501, 1000) / 2**23
        assert (factor == 0) == (weight == 0)

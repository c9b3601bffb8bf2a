"""Contributors' weights as the float32 scalars of a mean."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.collectives.arithmetic import MeanFactors, SumTerm, reduce_values
from holdfast.collectives.codecs.codecs import CODECS
from holdfast.protocol.errors import BadContributionError
from holdfast.protocol.messages import Contributor


def factors_of(weights: list[int]) -> MeanFactors:
    return MeanFactors.of(
        [Contributor(f"{n:032x}", weight, 1.0) for n, weight in enumerate(weights)]
    )


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20).filter(any))
def test_they_are_the_quotients_rounded(weights: list[int]) -> None:
    factors = factors_of(weights).factors
    assert max(factors) == 1.0
    for weight, factor in zip(weights, factors, strict=True):
        exact = Fraction(weight, max(weights))
        # Two roundings, to double and to float32: hardly more than half a unit in the last place.
        assert abs(Fraction(float(factor)) - exact) <= exact * Fraction(501, 1000) / 2**23
        assert (factor == 0) == (weight == 0)


@given(
    st.floats(2.0**-149, 2.0**60, width=32) | st.integers(-149, 127).map(lambda k: 2.0**k),
    st.lists(st.floats(width=32), min_size=1, max_size=20),
)
def test_a_mean_is_divided_to_the_bit(divisor: float, values: list[float]) -> None:
    """Whether by a division, or by a multiplication that rounds the same number."""
    given_values = np.array(values, np.float32)
    given_values = given_values[np.isfinite(given_values)]
    if not given_values.size:
        return
    out = np.empty_like(given_values)
    with np.errstate(over="ignore", under="ignore"):
        wanted = given_values / np.float32(divisor)
    term = SumTerm("a" * 32, given_values.data.cast("B"), np.float32(1), CODECS["fp32"])
    room = out.data.cast("B")
    if np.isfinite(wanted).all():
        reduce_values([term], np.float32(divisor), CODECS["fp32"], out, room)
        assert out.tobytes() == wanted.tobytes()
    else:
        with pytest.raises(BadContributionError):
            reduce_values([term], np.float32(divisor), CODECS["fp32"], out, room)

"""Values in 8 bits: how far off they may be, for whatever floats there are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from holdfast.client.eight_bits import BLOCK, SLICE_VALUES, Coded, decode, encode

LEAST = 2.0**-149

# Some of them denormal; zeros in all blocks.
sizes = st.floats(0.0, 3.4028234663852886e38, width=32) | st.floats(0.0, 1.0, width=32) | st.just(0)
counts = st.integers(0, 2 * BLOCK + 3)


def back(values: torch.Tensor, *, signed: bool) -> torch.Tensor:
    return decode(encode(values, signed=signed), values.numel(), signed=signed)


@given(counts.flatmap(lambda count: arrays(np.float32, count, elements=sizes)))
def test_second_moments_keep_their_order_of_size_and_only_zero_is_zero(
    values: np.ndarray,
) -> None:
    found = back(torch.from_numpy(values), signed=False).numpy().astype(np.float64)
    assert np.array_equal(found == 0, values == 0)
    for start in range(0, len(values), BLOCK):
        block, its = values[start : start + BLOCK].astype(np.float64), found[start : start + BLOCK]
        kept = block > 0
        if not kept.any():
            continue
        bound = (np.log2(block[kept].max()) - np.log2(block[kept].min())) / 508 + 2e-5
        # A denormal number has few digits itself: half of the least one is what it can be off.
        near = np.abs(its[kept] - block[kept]) <= LEAST
        off = np.abs(np.log2(its[kept]) - np.log2(block[kept])) <= bound
        assert (near | off).all()


@given(
    counts.flatmap(
        lambda count: arrays(
            np.float32, count, elements=st.floats(allow_nan=False, allow_infinity=False, width=32)
        )
    )
)
def test_first_moments_are_off_by_a_share_of_the_largest_and_less_if_they_are_small(
    values: np.ndarray,
) -> None:
    found = back(torch.from_numpy(values), signed=True).numpy().astype(np.float64)
    for start in range(0, len(values), BLOCK):
        block, its = values[start : start + BLOCK].astype(np.float64), found[start : start + BLOCK]
        most = np.abs(block).max()
        # Of the roots of the shares of the largest, half a step.
        bound = (np.sqrt(np.abs(block) * most) + most / 254) / 127 * 1.01 + 4 * LEAST
        assert (np.abs(its - block) <= bound).all()
        assert (its * block >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("signed", [True, False])
def test_every_type_comes_back_to_within_two_percent(dtype: torch.dtype, signed: bool) -> None:
    torch.manual_seed(1)
    values = torch.randn(1_000).to(dtype)
    values = values if signed else values.square() * 1e-4
    error = (back(values, signed=signed) - values.float()).norm() / values.float().norm()
    assert error < 0.02


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("signed", [True, False])
def test_what_is_not_finite_shows_in_its_scale(bad: float, signed: bool) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 7] = bad
    coded = encode(values, signed=signed)
    assert coded.scales.isfinite().reshape(3, -1).all(1).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="scale"):
        decode(coded, 3 * BLOCK, signed=signed)


def test_a_second_moment_below_zero_is_none() -> None:
    assert encode(torch.tensor([1.0, -1e-20]), signed=False).scales.isnan().all()


def test_a_second_moment_too_small_for_float32_is_not_zero() -> None:
    found = back(torch.tensor([1.0, 1e-60, 0.0], dtype=torch.float64), signed=False)
    assert found[1] > 0
    assert found[2] == 0


def test_no_values_and_more_than_are_worked_on_at_a_time() -> None:
    for signed in (True, False):
        assert back(torch.empty(0), signed=signed).shape == (0,)
    values = torch.arange(SLICE_VALUES + 5).float()
    assert torch.allclose(back(values, signed=False), values, rtol=0.03)


@pytest.mark.parametrize(
    ("codes", "scales", "signed"),
    [
        (torch.zeros(5, dtype=torch.uint8), torch.zeros(1), True),
        (torch.zeros(4, dtype=torch.int8), torch.zeros(1), True),
        (torch.zeros(5, dtype=torch.int8), torch.zeros(2), True),
        (torch.zeros(5, dtype=torch.int8), torch.full((1,), -1.0), True),
        (torch.full((5,), -128, dtype=torch.int8), torch.ones(1), True),
        (torch.zeros(5, dtype=torch.uint8), torch.zeros(1), False),
        (torch.zeros(5, dtype=torch.uint8), torch.full((1, 2), 200.0), False),
    ],
)
def test_what_is_no_such_code_is_refused(
    codes: torch.Tensor, scales: torch.Tensor, signed: bool
) -> None:
    with pytest.raises(ValueError, match=r"code|scale"):
        decode(Coded(codes, scales), 5, signed=signed)

"""The order of samples: a permutation of each epoch, without storing one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diloco.permutation import permuted

KEY = bytes(range(16))
LARGE = 10**9
FIRST_TEN = [7, 0, 6, 4, 1, 5, 3, 9, 2, 8]


@given(st.integers(1, 3_000), st.integers(0, 2**20), st.binary(min_size=1, max_size=16))
def test_every_epoch_has_every_sample_once(length: int, epoch: int, key: bytes) -> None:
    samples = permuted(key, length, epoch * length, (epoch + 1) * length)
    assert sorted(samples.tolist()) == list(range(length))


@settings(max_examples=30)
@given(st.integers(50, 500), st.integers(0, 1_500), st.integers(0, 200), st.integers(0, 200))
def test_a_range_is_the_ranges_that_make_it(length: int, start: int, one: int, two: int) -> None:
    whole = permuted(KEY, length, start, start + one + two)
    parts = (
        permuted(KEY, length, start, start + one),
        permuted(KEY, length, start + one, start + one + two),
    )
    assert whole.tolist() == np.concatenate(parts).tolist()


def test_epochs_and_keys_differ() -> None:
    first, second = permuted(KEY, 1_000, 0, 1_000), permuted(KEY, 1_000, 1_000, 2_000)
    other = permuted(b"another", 1_000, 0, 1_000)
    assert (first == second).mean() < 0.01
    assert (first == other).mean() < 0.01


def test_the_order_is_the_same_on_every_machine() -> None:
    assert permuted(KEY, 10, 0, 10).tolist() == FIRST_TEN


@pytest.mark.parametrize("length", [LARGE, 2**40])
def test_a_large_set_costs_no_more(length: int) -> None:
    samples = permuted(KEY, length, 5 * length - 256, 5 * length + 256)
    assert samples.min() >= 0
    assert samples.max() < length
    assert abs(samples.mean() / length - 0.5) < 0.1

"""The outer step, bit for bit against its formula and within roundings of torch's SGD."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from holdfast.diloco.outer import BLOCK_ELEMENTS, Values, merged, outer_step


def drawn(rng: np.random.Generator, count: int) -> Values:
    return rng.standard_normal(count).astype(np.float32)


def formula(
    theta: Values, b: Values, d: Values, lr: float, mu: float, nesterov: bool
) -> tuple[Values, Values]:
    """The documented formula, one rounding per operation, without blocks or scratch."""
    rate, decay = np.float32(lr), np.float32(mu)
    if mu == 0:
        return theta - rate * d, b.copy()
    b = decay * b + d
    return theta - rate * (d + decay * b if nesterov else b), b


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1, 7, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 3]),
    st.integers(0, 5),
    st.floats(0, 2),
    st.sampled_from([0.0, 0.7, 0.9]),
    st.booleans(),
)
def test_every_bit_is_the_formulas(
    seed: int, parameter_count: int, buffer_count: int, lr: float, mu: float, nesterov: bool
) -> None:
    rng = np.random.default_rng(seed)
    values = drawn(rng, parameter_count + buffer_count)
    momentum = np.zeros(parameter_count, np.float32)
    for _ in range(3):
        mean = drawn(rng, len(values))
        kept_mean = mean.copy()
        theta, b = formula(
            values[:parameter_count], momentum, mean[:parameter_count], lr, mu, nesterov
        )
        buffers = values[parameter_count:] - mean[parameter_count:]
        outer_step(values, momentum, mean, lr, mu, nesterov)
        assert values.tobytes() == theta.tobytes() + buffers.tobytes()
        assert momentum.tobytes() == b.tobytes()
        assert mean.tobytes() == kept_mean.tobytes()


@pytest.mark.parametrize(("mu", "nesterov"), [(0.9, True), (0.7, True), (0.9, False), (0.0, False)])
def test_it_is_torchs_sgd_but_for_roundings(mu: float, nesterov: bool) -> None:
    rng = np.random.default_rng(7)
    values = drawn(rng, 10_000)
    momentum = np.zeros_like(values)
    parameter = torch.nn.Parameter(torch.from_numpy(values.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.4, momentum=mu, nesterov=nesterov)
    spacing = np.zeros_like(values)  # how far the values could have drifted by roundings alone
    for _ in range(50):
        mean = drawn(rng, len(values))
        parameter.grad = torch.from_numpy(mean.copy())
        optimizer.step()
        outer_step(values, momentum, mean, 0.4, mu, nesterov)
        if mu:  # torch does not fuse here: the same bits
            assert torch.equal(
                optimizer.state[parameter]["momentum_buffer"], torch.from_numpy(momentum)
            )
        largest = np.maximum(np.abs(values), np.abs(mean) + np.abs(momentum))
        spacing += np.spacing(largest)
    assert np.all(np.abs(parameter.detach().numpy() - values) <= spacing)


@pytest.mark.parametrize(
    ("values", "momentum", "mean"),
    [
        (np.zeros(2, np.float32), np.zeros(3, np.float32), np.zeros(2, np.float32)),
        (np.zeros(2, np.float32), np.zeros(2, np.float32), np.zeros(1, np.float32)),
        (np.zeros(2, np.float64), np.zeros(2, np.float32), np.zeros(2, np.float32)),
        (np.zeros((1, 2), np.float32), np.zeros(1, np.float32), np.zeros((1, 2), np.float32)),
    ],
)
def test_what_does_not_fit_is_refused(values: Values, momentum: Values, mean: Values) -> None:
    with pytest.raises(ValueError, match=r"do not fit|float32 vector"):
        outer_step(values, momentum, mean, 0.7, 0.9, True)


def test_no_full_size_temporary_is_made() -> None:
    count = 4_000_000
    values, momentum, mean = (np.zeros(count, np.float32) for _ in range(3))
    tracemalloc.start()
    started_s = time.process_time()  # whoever else is busy here
    outer_step(values, momentum, mean, 0.7, 0.9, True)
    taken_s = time.process_time() - started_s
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2 * 4 * BLOCK_ELEMENTS
    assert taken_s < 1.0  # about 5 ms; a loop over elements would take seconds


# ---------------------------------------------------------------- merging


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

"""Posting, loading and merging one fragment, without a socket: what happens to every bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from holdfast.protocol.arena import Arena, NotWholeError
from tests.client.replica_bench import ReplicaBench

pytestmark = pytest.mark.usefixtures("without_gradients")

Values = NDArray[np.float32]


class Bench(ReplicaBench):
    def post(self) -> Values:
        self.replica.post()
        return self.posted.values(0).copy()

    def commit(self, values: object, counters: object = None, *, contributed: bool = True) -> None:
        self.share(values, counters)
        self.replica.merge(contributed=contributed)


def vector(values: list[float], dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.tensor(values, dtype=dtype))
    return model


def set_to(model: nn.Module, values: list[float]) -> None:
    weight = model.weight
    assert isinstance(weight, torch.Tensor)
    weight.copy_(torch.tensor(values, dtype=weight.dtype))


def now(model: nn.Module) -> list[float]:
    weight = model.weight
    assert isinstance(weight, torch.Tensor)
    values: list[float] = weight.tolist()
    return values


# ---------------------------------------------------------------- float32


@pytest.mark.parametrize("contributed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_version_that_comes_amid_a_merge_is_merged_everywhere(
    dtype: torch.dtype, contributed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may commit another version before a merge has read the shared values."""
    model = vector([1.0, 2.0, 3.0, 4.0, 5.0], dtype)
    model.register_buffer("seen", torch.tensor(3))
    model.register_buffer("mask", torch.tensor([-math.inf, 0.5]))
    bench = Bench(model, overlap=True)
    set_to(model, [1.5, 2.5, 3.5, 4.5, 5.5])
    bench.post()
    set_to(model, [1.75, 2.75, 3.75, 4.75, 5.75])
    read_once, left = Arena.read_once, [2]

    def read_late(arena: Arena, *arguments: Any) -> int | None:
        left[0] -= 1
        if left[0] == 0:
            bench.share([32.0] * 5 + [-math.inf, 8.0], [9])
        return read_once(arena, *arguments)

    monkeypatch.setattr(Arena, "read_once", read_late)
    bench.commit([16.0] * 5 + [-math.inf, 0.75], [5], contributed=contributed)
    assert bench.replica.version == 2
    gained = 0.25 if contributed else 0.75
    assert now(model) == [32.0 + gained] * 5
    assert model.get_buffer("seen").item() == 9
    assert model.get_buffer("mask").tolist() == [-math.inf, 8.0]
    assert bench.post().tolist() == [-gained] * 5 + [0.0, 0.0]


def test_a_fragment_that_is_fetched_amid_a_merge_is_refused_and_loaded_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = vector([1.0, 2.0])
    bench = Bench(model)
    set_to(model, [1.5, 2.5])
    bench.post()
    read_once, left = Arena.read_once, [2]

    def read_late(arena: Arena, *arguments: Any) -> int | None:
        left[0] -= 1
        if left[0] == 0:
            raise NotWholeError
        return read_once(arena, *arguments)

    monkeypatch.setattr(Arena, "read_once", read_late)
    with pytest.raises(NotWholeError):
        bench.commit([8.0, 16.0], contributed=False)
    assert (bench.replica.version, bench.replica.lost) == (0, False)
    bench.replica.load()
    assert now(model) == [8.0, 16.0]


def test_an_aborted_round_leaves_its_delta_for_the_next_snapshot() -> None:
    model = vector([1.0])
    bench = Bench(model, overlap=True)
    set_to(model, [1.5])
    bench.post()  # aborted: nothing is called
    set_to(model, [1.75])
    assert bench.post().tolist() == [-0.75]
    set_to(model, [2.0])
    bench.commit([8.0])
    assert now(model) == [8.25]


def test_a_tensor_that_has_not_moved_gets_the_shared_bits_even_with_overlap() -> None:
    odd = [-0.0, 1e-45, -3.0e38, 0.1]
    model = vector([0.3, 0.2, 0.1, 0.7])
    bench = Bench(model, overlap=True)
    bench.post()
    bench.commit(odd)
    expected = np.array(odd, np.float32)
    assert np.array(now(model), np.float32).tobytes() == expected.tobytes()
    bench.commit(odd, contributed=False)
    assert np.array(now(model), np.float32).tobytes() == expected.tobytes()


def test_deltas_survive_many_commits_of_others_to_rounding() -> None:
    chance = np.random.default_rng(5)
    model = vector(chance.standard_normal(100).tolist())
    bench = Bench(model)
    start = np.array(now(model), np.float32)
    delta = (chance.standard_normal(100) * 1e-3).astype(np.float32)
    set_to(model, (start + delta).tolist())
    theta = start
    for _ in range(50):
        theta = theta + (chance.standard_normal(100) * 1e-2).astype(np.float32)
        bench.commit(theta, contributed=False)
    np.testing.assert_allclose(bench.post(), -delta, atol=50 * 2e-7)


# ---------------------------------------------------------------- other precisions


def test_rounding_to_bfloat16_does_not_pass_for_training() -> None:
    model = vector([1.0, 2.0], torch.bfloat16)
    bench = Bench(model)
    bench.post()
    bench.commit([1.001, 2.003])  # not representable: 1.0 and 2.0 are
    assert now(model) == [1.0, 2.0]
    assert bench.post().tolist() == [0.0, 0.0]
    bench.share([1.0035, -1.0])
    bench.replica.load()
    assert bench.post().tolist() == [0.0, 0.0]
    assert now(model) == [1.0, -1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("contributed", [False, True])
def test_low_precision_keeps_its_pending_delta(dtype: torch.dtype, contributed: bool) -> None:
    model = vector([1.0], dtype)
    bench = Bench(model, overlap=True)
    if contributed:
        set_to(model, [1.25])
        bench.post()
        set_to(model, [1.75])
    else:
        set_to(model, [1.5])
    bench.commit([3.0001], contributed=contributed)
    assert now(model) == [3.5]
    assert bench.post().tolist() == pytest.approx([-0.5], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_shared_state_gets_what_was_trained_in_16_bits_and_no_rounding_of_it(
    dtype: torch.dtype, overlap: bool
) -> None:
    """All values are multiples of ``grid`` below 64: float32 holds their sums exactly, 16 bits do
    not. So the books are kept to the bit over many rounds, in some of which we are not."""
    grid, count = 2.0**-12, 32
    chance = np.random.default_rng(11)

    def some(size: float) -> NDArray[np.float64]:
        steps: NDArray[np.float64] = np.rint(chance.uniform(-size, size, count) / grid) * grid
        return steps

    model = vector([0.0] * count, dtype)
    bench = Bench(model, overlap)
    weight = model.weight
    assert isinstance(weight, torch.Tensor)

    def train() -> NDArray[np.float64]:
        before = weight.double().numpy().copy()
        weight.add_(torch.from_numpy(some(0.05)).to(dtype))
        weight.copy_((weight.double() / grid).round().mul(grid).to(dtype))
        moved: NDArray[np.float64] = weight.double().numpy() - before
        return moved

    theta = some(4.0)
    bench.share(theta)
    bench.replica.load()
    expected, rounded_count = theta.copy(), 0
    for _ in range(200):
        pending = train()
        delta = bench.post().astype(np.float64)
        if overlap:
            pending += train()
        others = some(0.5) - np.rint(theta / grid / 8) * grid  # and back towards zero
        contributed = bool(chance.random() < 0.7)
        theta = theta + others - (delta if contributed else 0.0)
        expected += pending + others
        if not contributed:
            bench.replica.withdraw()
        bench.commit(theta, contributed=contributed)
        rounded_count += int(np.count_nonzero(weight.double().numpy() != theta))
    delta = bench.post().astype(np.float64)
    assert np.array_equal(theta - delta, expected)
    assert np.abs(theta).max() < 64
    assert rounded_count > 100 * count, "the tensors hardly ever hold what the run does"


def test_float64_parameters_keep_their_own_precision() -> None:
    tiny = 1e-12
    model = vector([1.0], torch.float64)
    bench = Bench(model, overlap=True)
    set_to(model, [1.5])
    assert bench.post().tolist() == [-0.5]
    set_to(model, [1.5 + tiny])
    bench.commit([2.0])
    assert now(model) == [pytest.approx(2.0 + tiny, abs=1e-15)]
    bench.commit([3.0], contributed=False)
    assert now(model) == [pytest.approx(3.0 + tiny, abs=1e-15)]


# ---------------------------------------------------------------- buffers, counters, odd shapes


def test_batch_norms_statistics_are_averaged_and_its_count_follows_the_largest() -> None:
    model = nn.BatchNorm1d(1)
    bench = Bench(model, overlap=True)
    model.train()
    model(torch.tensor([[1.0], [3.0]]))
    mean, variance = model.running_mean, model.running_var
    assert mean is not None
    assert variance is not None
    posted = bench.post()
    assert posted[2:].tolist() == [-mean.item(), pytest.approx(1.0 - variance.item())]
    assert bench.posted.counters(0).tolist() == [1]
    model(torch.tensor([[1.0], [3.0]]))
    model(torch.tensor([[1.0], [3.0]]))
    bench.commit([1, 0, 0.5, 0.75], [2])
    assert model.num_batches_tracked is not None
    assert model.num_batches_tracked.item() == 3  # ours, counted on meanwhile, is larger
    bench.commit([1, 0, 0.5, 0.75], [9], contributed=False)
    assert model.num_batches_tracked.item() == 9
    bench.share([1, 0, 0.5, 0.75], [4])
    bench.replica.load()
    assert model.num_batches_tracked.item() == 4
    assert mean.item() == 0.5


@pytest.mark.parametrize("overlap", [False, True])
def test_a_mask_of_infinities_posts_zero_and_stays(overlap: bool) -> None:
    model = vector([1.0])
    mask = torch.tensor([0.0, -math.inf, math.inf])
    model.register_buffer("mask", mask)
    bench = Bench(model, overlap)
    set_to(model, [2.0])
    assert bench.post().tolist() == [-1.0, 0.0, 0.0, 0.0]
    for contributed in (True, False):
        bench.commit([3.0, 0.0, -math.inf, math.inf], contributed=contributed)
        assert mask.tolist() == [0.0, -math.inf, math.inf]


def test_bools_scalars_and_empty_tensors() -> None:
    model = nn.Module()
    scale = nn.Parameter(torch.tensor(2.0))
    seen, count = torch.tensor([True, False]), torch.tensor(3, dtype=torch.uint8)
    model.scale = scale
    model.nothing = nn.Parameter(torch.zeros(0, 4))
    model.register_buffer("seen", seen)
    model.register_buffer("count", count)
    bench = Bench(model, overlap=True)
    scale.add_(1.0)
    assert bench.post().tolist() == [-1.0]
    assert bench.posted.counters(0).tolist() == [1, 0, 3]
    bench.commit([5.0], [0, 1, 200])
    assert scale.item() == 5.0
    assert seen.tolist() == [True, True]
    assert count.item() == 200


def test_parameters_come_before_buffers_whatever_the_order_of_the_layout() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1, bias=False))
    layer = model[1]
    assert isinstance(layer, nn.Linear)
    layer.weight.fill_(7.0)
    bench = Bench(model)
    assert bench.shared.values(0).tolist() == [1.0, 0.0, 7.0, 0.0, 1.0]


def test_a_weight_that_is_not_contiguous_is_merged_in_its_own_order() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    bench = Bench(model, overlap=True)
    assert bench.shared.values(0).tolist() == [0, 3, 1, 4, 2, 5]
    bench.post()
    model.weight[0, 1] += 1.0  # the second one
    bench.commit(np.array([10, 20, 30, 40, 50, 60]))
    assert model.weight.tolist() == [[10, 21], [30, 40], [50, 60]]

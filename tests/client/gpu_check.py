"""Tests of the hook that need a GPU: `make gpu`. CI has none, so pytest does not collect this file.

The last one runs two ranks on the one GPU; ``test_sharded`` does the same on CPUs.

The rules of posts and merges are tested in ``test_fragment_replica`` and ``test_deferred``.
Here it is about CUDA's part: streams, events and pinned memory, and that nothing stalls.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.client.replica_bench import ReplicaBench
from tests.processes.harness import Fleet
from tests.processes.test_sharded import train_on_one_device

LARGE = 4_096  # a square of it is 64 MiB, whose copy takes milliseconds


@pytest.fixture(autouse=True)
def _on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.fail("torch sees no CUDA device here: run this on a machine that has one")
    torch.set_grad_enabled(False)


class Bench(ReplicaBench):
    def __init__(self, device: str, dtype: torch.dtype, side: int = 64) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(side, side), nn.BatchNorm1d(side)).to(dtype)
        self.model.to(device)
        super().__init__(self.model, overlap=True)

    def train(self, seed: int) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            noise = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(100 * seed + number)
            )
            parameter.add_((noise * 0.01).to(parameter))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_gets_the_bits_of_the_processor(dtype: torch.dtype) -> None:
    benches = [Bench("cuda", dtype), Bench("cpu", dtype)]
    chance = torch.Generator().manual_seed(7)
    for version in range(1, 21):
        contributed = version % 3 != 0
        change = torch.randn(benches[0].shared.values(0).shape, generator=chance) * 0.01
        posts = []
        for bench in benches:
            bench.train(2 * version)
            bench.replica.post()
            bench.train(2 * version + 1)
            bench.replica.finish()
            posts.append(bench.posted.values(0).tobytes())
            if not contributed:
                bench.replica.withdraw()
            bench.share(torch.from_numpy(bench.shared.values(0)) - change)
            bench.replica.merge(contributed=contributed)
            bench.replica.finish()
        assert posts[0] == posts[1], f"version {version}"
    for on_gpu, here in zip(*(bench.model.state_dict().values() for bench in benches), strict=True):
        assert torch.equal(on_gpu.cpu(), here)


def test_a_post_returns_before_what_is_queued_is_computed_and_takes_the_values_after_it() -> None:
    bench = Bench("cuda", torch.float32, LARGE)
    weight = bench.model[0].weight
    assert isinstance(weight, torch.Tensor)
    before = weight.cpu()
    bench.replica.post()
    bench.replica.finish()  # the first use of pinned memory takes its time
    square = torch.randn(LARGE, LARGE, device="cuda")
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(200):
        square = (square @ square).clamp(-1, 1)
    weight += 1
    bench.replica.post()
    weight += 1  # must not get into the post
    queued_s = time.perf_counter() - started_s
    still_under_way = bench.replica.under_way
    bench.replica.finish()
    took_s = time.perf_counter() - started_s
    assert still_under_way, "the copy was waited for"
    assert queued_s < took_s / 2, f"queued in {queued_s:.3f} s of {took_s:.3f} s"
    count = before.numel()
    expected = before.reshape(-1) - (before + 1).reshape(-1)
    assert torch.equal(torch.from_numpy(bench.posted.values(0)[:count]), expected)


def test_steps_go_on_while_a_merge_is_on_its_way_up() -> None:
    bench = Bench("cuda", torch.float32, LARGE)
    weight = bench.model[0].weight
    assert isinstance(weight, torch.Tensor)
    bench.replica.post()
    bench.replica.finish()
    expected = weight + 8 + 3
    bench.share(bench.shared.values(0) + 8)
    weight += 1
    bench.replica.merge(contributed=True)
    for _ in range(2):
        weight += 1
        bench.replica.advance()
    bench.replica.finish()
    torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize("kind", ["rows", "ddp"])
def test_two_ranks_on_one_gpu_train_beside_a_process_without_one(kind: str, tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        train_on_one_device(fleet, kind, "cuda")

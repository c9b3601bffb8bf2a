"""What fits inside a peer, against the peak of bytes that torch allocates for small models."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from holdfast.membership.planning.inside import (
    CONTEXT_BYTES,
    Fit,
    GpuHost,
    Transformer,
    deal_layers,
    gpu_bytes_needed,
    judge,
    simplest,
)

HEAD_WIDTH = 64
AGREEMENT = 0.15
GB = 1e9


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of storages that were alive after any operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, DTensor):
                tensor = tensor._local_tensor  # the whole one is not there
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._seen[storage._cdata] = weakref.ref(storage)
        alive = {key: kept for key, kept in self._seen.items() if kept() is not None}
        self._seen = alive
        storages = (kept() for kept in alive.values())
        now = sum(storage.nbytes() for storage in storages if storage is not None)
        self.peak_bytes = max(self.peak_bytes, now)
        return out


class Block(nn.Module):
    def __init__(self, width: int, *, recomputed: bool) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recomputed:
            again: torch.Tensor = checkpoint(self.whole, x, use_reentrant=False)
            return again
        return self.whole(x)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) to the same."""
        batch, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, -1, HEAD_WIDTH)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return out


class Model(nn.Module):
    def __init__(self, layers: int, width: int, words: int, *, recomputed: bool = False) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, recomputed=recomputed) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting the tokens themselves."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def values_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def predicted(model: Transformer, layers: int, **choices: Any) -> float:
    """On the CPU there is no context."""
    return gpu_bytes_needed(model, layers, **choices) - CONTEXT_BYTES


def second_micro_batch(
    model: nn.Module, shape: tuple[int, int], words: int, peak: PeakMemory, *, autocast: bool
) -> None:
    """Run a micro-batch while gradients and moments are there, after a first one and a step."""
    # Without temporary copies, as fused; fake tensors cannot fuse.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for last in (False, True):
        peak.peak_bytes = 0
        tokens = torch.randint(words, shape)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens)
        loss.backward()
        if not last:
            optimizer.step()


SHAPES = [
    pytest.param((4, 256, 1_000), (8, 256), id="small"),
    pytest.param((2, 768, 50_257), (2, 1_024), id="many words", marks=pytest.mark.nightly),
    pytest.param((3, 2_048, 32_000), (1, 2_048), id="wide", marks=pytest.mark.nightly),
]


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(("size", "batch"), SHAPES)
def test_a_whole_model_takes_what_is_predicted(
    size: tuple[int, int, int], batch: tuple[int, int], recomputed: bool
) -> None:
    layers, width, words = size
    with FakeTensorMode(), PeakMemory() as peak:
        model = Model(*size, recomputed=recomputed)
        second_micro_batch(model, batch, words, peak, autocast=True)
    shape = Transformer(values_of(model), layers, width, words, batch[0] * batch[1])
    found = predicted(shape, layers, recomputed=recomputed)
    assert found == pytest.approx(peak.peak_bytes, rel=AGREEMENT)


def test_fake_tensors_take_what_real_ones_do() -> None:
    peaks = []
    for mode in (FakeTensorMode(), nullcontext()):
        with mode, PeakMemory() as peak:
            second_micro_batch(Model(2, 128, 500), (1, 64), 500, peak, autocast=True)
        peaks.append(peak.peak_bytes)
    assert peaks[0] == peaks[1] > 0


@contextmanager
def ranks_that_answer_nothing(count: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("size", "batch"), [pytest.param((4, 512, 1_000), (1, 64), id="gathered"), SHAPES[2]]
)
def test_a_shard_takes_what_is_predicted(
    size: tuple[int, int, int], batch: tuple[int, int], recomputed: bool
) -> None:
    layers, width, words = size
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with ranks_that_answer_nothing(4) as mesh, FakeTensorMode(), PeakMemory() as peak:
        model = Model(*size, recomputed=recomputed)
        count = values_of(model)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        second_micro_batch(model, batch, words, peak, autocast=False)
    shape = Transformer(count, layers, width, words, batch[0] * batch[1])
    found = predicted(shape, layers, shards=4, recomputed=recomputed)
    assert found == pytest.approx(peak.peak_bytes, rel=AGREEMENT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "in_flight",
    [pytest.param(1, marks=pytest.mark.nightly), 2, pytest.param(4, marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_stage_takes_what_is_predicted(in_flight: int, recomputed: bool) -> None:
    """The first stages of a pipeline: layers only, as many micro-batches as it has in flight."""
    layers, width, tokens = 4, 512, 512
    with FakeTensorMode(), PeakMemory() as peak:
        stage = nn.Sequential(*(Block(width, recomputed=recomputed) for _ in range(layers)))
        optimizer = torch.optim.AdamW(stage.parameters(), foreach=False)
        for last in (False, True):
            peak.peak_bytes = 0
            with torch.autocast("cpu", torch.bfloat16):
                received = [
                    torch.randn(1, tokens, width, requires_grad=True) for _ in range(in_flight)
                ]
                sent = [stage(each) for each in received]
                for each in sent:
                    each.backward(torch.ones_like(each))
            del received, sent, each
            if not last:
                optimizer.step()
    # Of a model twice as deep, half.
    whole = Transformer(2 * values_of(stage), 2 * layers, width, 32_000, tokens)
    found = predicted(whole, layers, in_flight=in_flight, is_last=False, recomputed=recomputed)
    assert found == pytest.approx(peak.peak_bytes, rel=AGREEMENT)


# ---------------------------------------------------------------- layouts


def fits_by_name(model: Transformer, *hosts: GpuHost) -> dict[tuple[str, bool], Fit]:
    return {(fit.layout, fit.recomputed): fit for fit in judge(model, hosts)}


def usual(value_count: float, tokens: int = 2_048) -> Transformer:
    return Transformer.usual(value_count, 32_000, tokens)


def test_the_usual_shape_is_that_of_published_models() -> None:
    """Llama 7B has 32 layers of width 4,096, GPT-3 175B 96 of 12,288."""
    for count, layers, width in ((6.6e9, 32, 4_096), (175e9, 96, 12_288)):
        model = usual(count)
        assert model.layers == pytest.approx(layers, rel=0.05)
        assert model.width == pytest.approx(width, rel=0.05)
        assert 12 * model.layers * model.width**2 == pytest.approx(count)


def test_sixteen_bytes_a_parameter_and_a_copy_in_16_bits() -> None:
    """The published 16 bytes of AdamW in mixed precision: 112 GB for 7 billion parameters."""
    model = usual(7e9, tokens=1)
    assert predicted(model, model.layers) == pytest.approx(112e9 + 14e9, rel=0.01)
    gathered = 4 * (2 * 7e9 / model.layers + 32_000 * model.width)
    sharded = predicted(model, model.layers, shards=7)
    assert sharded == pytest.approx(16e9 + gathered, rel=0.01)


def test_layers_go_where_there_is_room() -> None:
    def needed(stage: int, layers: int) -> float:
        return layers + (2 if stage == 0 else 0)

    assert deal_layers(13, [24.0, 24.0, 12.0], needed) == [4, 6, 3]
    assert deal_layers(3, [24.0, 1.0, 1.0], needed) == [1, 1, 1]


def test_the_simplest_that_fits_is_chosen() -> None:
    for count, hosts, layout, recomputed in (
        (1e9, [GpuHost(1, 24e9)], "plain", False),
        (1.2e9, [GpuHost(1, 24e9)], "plain", True),
        (4e9, [GpuHost(8, 24e9)], "FSDP2", False),
        (2.5e9, [GpuHost(2, 24e9), GpuHost(1, 12e9)], "pipeline", True),
        (20e9, [GpuHost(4, 80e9), GpuHost(4, 24e9)], "pipeline of hosts, FSDP2 in each", True),
    ):
        fit = simplest(judge(usual(count), hosts))
        assert (fit.layout, fit.recomputed) == (layout, recomputed)
        assert fit.left_bytes >= 0
        left = [has - needs for has, needs in zip(fit.gpu_bytes, fit.needed_bytes, strict=True)]
        assert fit.left_bytes == min(left) == left[fit.tightest]


def test_layouts_that_make_no_difference_are_left_out() -> None:
    assert {name for name, _ in fits_by_name(usual(1e9), GpuHost(1, 24e9))} == {"plain"}
    two = fits_by_name(usual(1e9), GpuHost(1, 24e9), GpuHost(1, 24e9))
    assert {name for name, _ in two} == {"plain", "FSDP2", "pipeline"}
    flat = Transformer(1e9, 2, 6_454, 32_000, 2_048)
    assert {name for name, _ in fits_by_name(flat, GpuHost(4, 24e9))} == {"plain", "FSDP2"}


def test_only_the_last_stage_has_logits() -> None:
    words = 1_000_000
    model = Transformer.usual(1e9, words, 2_048)
    first, last = fits_by_name(model, GpuHost(2, 80e9))["pipeline", False].needed_bytes
    logits_bytes = 12 * words * 2_048
    assert first < logits_bytes < last


def test_what_crosses_the_network_between_hosts() -> None:
    model = usual(7e9)
    hidden = model.width * model.tokens
    middle = fits_by_name(model, GpuHost(1, 80e9), GpuHost(2, 80e9), GpuHost(1, 80e9))
    assert middle["plain", False].moved_bytes == (2 * 3 / 4 * 4 * 7e9,) * 3
    assert middle["FSDP2", False].moved_bytes == (3 * 3 / 4 * 2 * 7e9,) * 3
    assert middle["pipeline", True].moved_bytes == (4 * hidden, 8 * hidden, 4 * hidden)
    assert middle["plain", False].host_shares == (1, 1, 1)
    assert middle["FSDP2", False].host_shares == (1 / 4, 1 / 2, 1 / 4)
    assert sum(middle["pipeline", False].host_shares) == pytest.approx(1)
    nested = fits_by_name(model, GpuHost(4, 80e9), GpuHost(4, 80e9))
    moved = nested["pipeline of hosts, FSDP2 in each", False].moved_bytes
    assert moved == (4 * 2 * hidden,) * 2, "each GPU has a micro-batch of its own"

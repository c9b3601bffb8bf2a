"""Tensors of every type, 0-dim and empty ones too: from one hook to another, over a real copy."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.shared_state import SharedState
from holdfast.client.state.fragment_replica import FragmentReplica
from holdfast.client.state.tensors import find_shared
from holdfast.protocol.arena import Arena
from holdfast.protocol.messages import SyncFragment
from holdfast.simulation.memory_network import MemoryWorld
from tests.background import background
from tests.checkpoint.test_transfer_links import start
from tests.client.replica_bench import arenas_of
from tests.collectives.net import peer_id

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3, 0, 2), (7,), (2, 3))


def make_model(seed: int) -> nn.Module:
    """Make a model with a parameter (where possible) and a buffer of every type, in every shape."""
    rng = torch.Generator().manual_seed(seed)
    model = nn.Module()
    for dtype in (*FLOATS, *INTEGERS):
        for number, shape in enumerate(SHAPES):
            name = f"{str(dtype).removeprefix('torch.')}_{number}"
            if dtype in FLOATS:
                # Values that all of them can hold; the run's own are float32.
                values = torch.randint(-512, 512, shape, generator=rng).to(torch.float32) / 256
                values = values.to(torch.bfloat16).to(dtype)
                model.register_parameter(name, nn.Parameter(values, requires_grad=False))
                model.register_buffer(f"{name}_mean", -values)
            else:
                low = 0 if dtype in (torch.bool, torch.uint8) else -100
                high = 2 if dtype == torch.bool else 100
                model.register_buffer(
                    name, torch.randint(low, high, shape, generator=rng).to(dtype)
                )
    return model


def mirrored(model: nn.Module) -> tuple[FragmentReplica, SharedState, Arena]:
    """Make the model one fragment, with a daemon's state behind it."""
    tensors = find_shared(model)
    shared, posted = arenas_of(tensors)
    state = SharedState(shared.sizes, shared, "run")
    return FragmentReplica(0, tensors, shared, posted, False), state, posted


async def test_all_of_them_come_over_bit_by_bit() -> None:
    here, there = make_model(seed=0), make_model(seed=1)
    with torch.no_grad():
        replica, founded, posted = mirrored(here)
        replica.post_present()
        head = founded.load_initial(0, posted.values(0), posted.counters(0))
        copier, copied, _posted = mirrored(there)
        async with background() as nursery:
            world = MemoryWorld(random.Random(1), delay_s=0.02)
            nodes = await start(nursery, world, [copied, founded])
            report = await nodes[0].joiner.fetch(SyncFragment(head, (peer_id(1),)))
        assert report.received_bytes > 0
        copier.load()
    ours, theirs = here.state_dict(), there.state_dict()
    assert list(ours) == list(theirs)
    assert len(ours) == len(SHAPES) * (2 * len(FLOATS) + len(INTEGERS))
    for name, tensor in ours.items():
        assert theirs[name].dtype == tensor.dtype
        assert theirs[name].shape == tensor.shape
        assert torch.equal(theirs[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_half_precision_number_survives_the_way_through_float32(dtype: torch.dtype) -> None:
    patterns = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.int16)).view(dtype)
    finite = patterns[torch.isfinite(patterns)]
    there = nn.Module()
    there.register_parameter("weight", nn.Parameter(finite.clone(), requires_grad=False))
    replica, state, posted = mirrored(there)
    with torch.no_grad():
        replica.post_present()
        state.load_initial(0, posted.values(0), posted.counters(0))
        there.get_parameter("weight").zero_()
        replica.load()
    came = there.get_parameter("weight").detach()
    assert torch.equal(came.view(torch.int16), finite.view(torch.int16))

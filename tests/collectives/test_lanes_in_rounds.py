"""Lanes that break in the middle of a reduction cost no attempt and no bit."""

from __future__ import annotations

import random

import pytest
import trio

from holdfast.protocol.messages import FragmentSize
from holdfast.simulation.memory_network import MemoryWorld
from holdfast.simulation.memory_streams import MemoryStream
from tests.background import background
from tests.collectives.swarm import a_swarm, check_same_bits, give_input


@pytest.mark.parametrize("seed", range(3))
async def test_lanes_that_break_in_a_reduction_change_nothing(seed: int) -> None:
    size = FragmentSize(40_000, 0, 3)
    rng = random.Random(seed)
    world = MemoryWorld(random.Random(seed), bytes_per_s=1e5, buffer_bytes=4_096)
    async with a_swarm(3, world) as swarm:
        await swarm.settle()
        await trio.sleep(1)
        give_input(swarm.nodes, size, 5)
        order = swarm.order(size)
        links = [link for node in swarm.nodes for link in node.hub.links.values()]
        broken = 0

        async def break_lanes() -> None:
            nonlocal broken
            while True:
                await trio.sleep(rng.uniform(0.1, 0.5))
                lanes = rng.choice(links).lanes.working
                if len(lanes) > 1:
                    stream = rng.choice(lanes).stream
                    assert isinstance(stream, MemoryStream)
                    stream.cut()
                    broken += 1

        async with background() as nursery:
            nursery.start_soon(break_lanes)
            await swarm.reduce(order, size, swarm.nodes)
        check_same_bits(order, size, swarm.nodes)
        assert broken > 3
        assert not any(link.lost.is_set() for link in links)

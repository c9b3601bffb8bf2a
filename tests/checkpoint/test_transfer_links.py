"""State transfer over the links and lanes that the peers really use, and blocks of the real
size.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio
from attrs import define

from holdfast.checkpoint.blocks import BLOCK_BYTES
from holdfast.checkpoint.donor import Donor
from holdfast.checkpoint.joiner import Joiner
from holdfast.checkpoint.shared_state import SharedState
from holdfast.checkpoint.state_transfer import FetchFailedError
from holdfast.collectives.links.hub import LinkHub
from holdfast.protocol import messages as m
from holdfast.protocol.addresses import Address
from holdfast.simulation.memory_network import MemoryNetwork, MemoryWorld
from tests.background import background
from tests.checkpoint.test_shared_state import founded, make_state
from tests.collectives.net import member, peer_id, real_nodes, start_hub

BLOCK_ELEMENTS = BLOCK_BYTES // 4
SIZE = m.FragmentSize(value_count=12 * BLOCK_ELEMENTS + 5, momentum_count=100, counter_count=3)
PLAIN_BYTES = 4 * SIZE.value_count + 8 * SIZE.counter_count  # momentum is zero and does not travel
OVERHEAD = 0.01  # of headers, tags, messages


@define(eq=False)
class Node:
    """A peer as far as state transfer goes."""

    network: MemoryNetwork
    hub: LinkHub
    state: SharedState
    donor: Donor
    joiner: Joiner

    @classmethod
    def make(cls, world: MemoryWorld, number: int, state: SharedState) -> Node:
        network = world.host(f"host{number}", peer_id(number))
        hub = LinkHub(network, peer_id(number))
        node = cls(network, hub, state, Donor(state, hub, network), Joiner(state, hub, network))
        hub.on_message = node.hear
        return node

    async def hear(self, peer: str, message: m.Message) -> None:
        if isinstance(message, m.IndexRequest | m.BlocksRequest):
            self.donor.receive(peer, message)
        else:
            assert isinstance(message, m.Index | m.BlocksRefused)
            self.joiner.receive(peer, message)


async def start(nursery: trio.Nursery, world: MemoryWorld, states: list[SharedState]) -> list[Node]:
    nodes = [Node.make(world, number, state) for number, state in enumerate(states)]
    for number, node in enumerate(nodes):
        await start_hub(nursery, node.hub, node.network, Address(f"host{number}", 7000))
        await nursery.start(node.donor.run)
    members = [member(number, f"host{number}:7000") for number in range(len(nodes))]
    for node in nodes:
        node.hub.set_members(members)
    return nodes


async def test_a_joiner_fetches_over_real_links_from_fast_and_slow_donors() -> None:
    world = MemoryWorld(random.Random(1), delay_s=0.02, bytes_per_s=4e6)
    world.link("host0", "host2", bytes_per_s=1e6)
    source = founded(SIZE)
    async with background() as nursery:
        states = [make_state(SIZE), source, founded(SIZE)]
        nodes = await start(nursery, world, states)
        order = m.SyncFragment(source.heads()[0], (peer_id(1), peer_id(2)))
        started_s = trio.current_time()
        report = await nodes[0].joiner.fetch(order)
        taken_s = trio.current_time() - started_s
    assert states[0].heads() == source.heads()
    assert (
        states[0].fragments[0].parts.values.tobytes() == source.fragments[0].parts.values.tobytes()
    )
    assert report.received_bytes == PLAIN_BYTES
    assert report.donors == (peer_id(1), peer_id(2))
    assert world.sent_bytes["host2", "host0"] > BLOCK_BYTES
    assert taken_s < 5.0  # the fast donor alone needs 3.2 s, the slow one 12.6


@pytest.mark.parametrize("fault", ["freeze", "corrupt"])
async def test_when_the_only_donor_fails_the_next_fetch_takes_up_what_came(fault: str) -> None:
    world = MemoryWorld(random.Random(1), delay_s=0.02, bytes_per_s=2e6)
    source = founded(SIZE)
    async with background() as nursery:
        states = [make_state(SIZE), source]
        nodes = await start(nursery, world, states)
        order = m.SyncFragment(source.heads()[0], (peer_id(1),))

        async def fail() -> None:
            await trio.sleep(2)  # while the donor has blocks left to send
            if fault == "freeze":
                world.freeze("host1")
            else:  # somebody on the way changes a frame: the link is lost, the donor is not blamed
                world.corrupt_next_lane_frame("host1", "host0")

        nursery.start_soon(fail)
        with pytest.raises(FetchFailedError) as caught:
            await nodes[0].joiner.fetch(order)
        assert caught.value.bad_donors == ()
        assert states[0].heads() == ()
        if fault == "freeze":
            world.thaw("host1")
        report = await nodes[0].joiner.fetch(order)
    assert states[0].heads() == source.heads()
    assert BLOCK_BYTES < report.received_bytes < 4 * SIZE.value_count - BLOCK_BYTES


@pytest.mark.real_time
async def test_lanes_threads_carry_a_copy(tmp_path: Path) -> None:
    source = founded(SIZE)
    target = make_state(SIZE)
    async with (
        real_nodes(tmp_path) as (giver, taker),
        trio.open_nursery() as nursery,
    ):
        here = MemoryWorld(random.Random(0)).host("here", giver.hub.me)  # only to work in place
        donor = Donor(source, giver.hub, here)
        joiner = Joiner(target, taker.hub, here)

        async def asked(peer: str, message: m.Message) -> None:
            assert isinstance(message, m.IndexRequest | m.BlocksRequest)
            donor.receive(peer, message)

        async def answered(peer: str, message: m.Message) -> None:
            assert isinstance(message, m.Index | m.BlocksRefused)
            joiner.receive(peer, message)

        giver.hub.on_message, taker.hub.on_message = asked, answered
        await nursery.start(donor.run)
        order = m.SyncFragment(source.heads()[0], (giver.hub.me,))
        report = await joiner.fetch(order)
        carried_bytes = taker.hub.received_bytes
        nursery.cancel_scope.cancel()
    assert target.heads() == source.heads()
    assert target.fragments[0].parts.values.tobytes() == source.fragments[0].parts.values.tobytes()
    assert (report.received_bytes, report.bad_donors) == (PLAIN_BYTES, ())
    assert carried_bytes == pytest.approx(PLAIN_BYTES, rel=OVERHEAD)

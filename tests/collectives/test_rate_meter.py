"""Meters: bytes and busy time, of a link and of the node."""

from __future__ import annotations

import random

import pytest
import trio

from holdfast.collectives.links.hub import LinkHub
from holdfast.collectives.links.rates.rate_meter import Meter, Reading
from holdfast.simulation.memory_network import MemoryWorld
from tests.collectives.net import KEY, Net, Sink, a_net, frame, peer_id, send_frame, view


async def test_several_transfers_that_end_together_are_as_many() -> None:
    node = Meter()
    meter = Meter(node)
    for _ in range(3):
        meter.begin()
    await trio.sleep(2)
    meter.end(100, count=2)
    await trio.sleep(3)
    meter.end(50)
    await trio.sleep(10)
    assert meter.take() == Reading(150, 5.0)
    assert node.take() == Reading(150, 5.0)


async def test_the_time_of_a_transfer_under_way_is_split_between_readings() -> None:
    meter = Meter()
    meter.begin()
    await trio.sleep(2)
    assert meter.take() == Reading(0, 2.0)
    await trio.sleep(3)
    meter.end(100)
    assert meter.take() == Reading(100, 3.0)


async def test_the_node_is_busy_while_any_link_is() -> None:
    node = Meter()
    one, two = Meter(node), Meter(node)
    one.begin()
    await trio.sleep(2)
    two.begin()
    await trio.sleep(2)
    one.end(10)
    await trio.sleep(2)
    two.end(20)
    assert (one.take(), two.take()) == (Reading(10, 4.0), Reading(20, 4.0))
    assert node.take() == Reading(30, 6.0)


FRAME_BYTES = 400_000


async def hub_of(net: Net, number: int) -> LinkHub:
    return (await net.node(number, view(0, 1, 2))).hub


async def send(hub: LinkHub, to: int, count: int) -> None:
    link, payload = await hub.link(peer_id(to)), bytes(FRAME_BYTES)
    for index in range(count):
        await send_frame(link, frame(index, payload), payload)


async def test_a_hub_measures_what_its_lines_carry() -> None:
    """Two links of 1 MB/s each send at once; then nothing moves for a while."""
    world = MemoryWorld(random.Random(0), delay_s=0.01, bytes_per_s=1e6)
    async with a_net(world) as net:
        sender, one, two = [await hub_of(net, number) for number in range(3)]
        sinks = [Sink(), Sink()]
        with one.register(KEY, sinks[0]), two.register(KEY, sinks[1]):
            await trio.sleep(1)  # until all lanes are open
            for hub in (sender, one, two):
                await hub.link(peer_id(0 if hub is not sender else 1))
                hub.take_measurements()
            async with trio.open_nursery() as sending:
                sending.start_soon(send, sender, 1, 10)
                sending.start_soon(send, sender, 2, 5)
            await trio.sleep(60)
            assert [len(sink.frames) for sink in sinks] == [10, 5]
        seen, heard = sender.take_measurements(), one.take_measurements()
    to_one = seen.sent_to[peer_id(1)]
    assert to_one.carried_bytes == pytest.approx(10 * FRAME_BYTES, rel=0.001)
    assert to_one.carried_bytes / to_one.busy_s == pytest.approx(1e6, rel=0.1)
    assert seen.sent.carried_bytes == pytest.approx(15 * FRAME_BYTES, rel=0.001)
    # As long as the longer of the two took, not their sum.
    assert seen.sent.busy_s == pytest.approx(to_one.busy_s, rel=0.1)
    assert heard.received.carried_bytes == 10 * FRAME_BYTES
    # What comes in the same piece as a header comes before the meter starts: a sixth of a frame
    # here.
    assert heard.received.carried_bytes / heard.received.busy_s == pytest.approx(1.2e6, rel=0.1)
    assert heard.sent_to == {}


async def test_a_link_that_breaks_in_the_middle_of_a_frame_leaves_no_meter_busy() -> None:
    world = MemoryWorld(random.Random(0), delay_s=0.01, bytes_per_s=1e5)
    async with a_net(world) as net:
        sender, receiver = [await hub_of(net, number) for number in range(2)]
        with receiver.register(KEY, Sink()):
            await sender.link(peer_id(1))
            link = await receiver.link(peer_id(0))
            with trio.move_on_after(1):
                await send(sender, 1, 1)
            link.close("the test cuts it")
            await trio.sleep(1)
            sender.take_measurements()
            receiver.take_measurements()
            await trio.sleep(50)
        assert sender.take_measurements().sent.busy_s < 5, "a new link's first words, at most"
        assert receiver.take_measurements().received.busy_s < 5

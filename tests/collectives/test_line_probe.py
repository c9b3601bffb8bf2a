"""Probes over links in virtual time: rates as configured, bounds kept, nothing left behind."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from holdfast.collectives.links.hub import LinkHub
from holdfast.collectives.links.line_probe import Prober
from holdfast.collectives.links.rate_limiter import RateLimiter
from holdfast.daemon.simulation.memory_network import MemoryWorld
from holdfast.protocol.addresses import Address
from holdfast.protocol.messages import MemberInfo, Message, Probe, Probed, ProbeRequest, Role
from holdfast.protocol.network.lane import FrameHeader, FrameKind
from tests.collectives.net import Sink, send_frame

PORT = 7_700
BYTES = 4 * 2**20
SECONDS = 2.0


def peer_id(number: int) -> str:
    return f"{number:032x}"


def order(count: int = BYTES, seconds: float = SECONDS) -> Probe:
    """Return the order for node 0 to probe node 1."""
    return Probe(7, peer_id(1), count, seconds)


class Node:
    """A hub with a prober, wired as a daemon does it."""

    def __init__(self, world: MemoryWorld, number: int, limiter: RateLimiter | None) -> None:
        self.network = world.host(f"n{number}", peer_id(number))
        self.hub = LinkHub(
            self.network, peer_id(number), on_message=self.on_message, upload=limiter
        )
        self.prober = Prober(self.hub)
        self.nursery: trio.Nursery | None = None

    async def on_message(self, peer: str, message: Message) -> None:
        assert isinstance(message, ProbeRequest)
        assert self.nursery is not None
        self.nursery.start_soon(self.prober.serve, peer, message)

    async def start(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.hub.set_members(
            [
                MemberInfo(peer_id(i), f"n{i}", i, (f"n{i}:{PORT}",), Role.CONTRIBUTOR, True)
                for i in range(2)
            ]
        )
        bind = [Address("::", PORT)]
        await nursery.start(self.network.serve, bind, self.hub.handle_channel, self.hub.handle_lane)
        await nursery.start(self.hub.run)


@asynccontextmanager
async def a_pair(
    bytes_per_s: float, *, limiter: RateLimiter | None = None
) -> AsyncIterator[tuple[Node, Node]]:
    """A receiver and a sender; ``limiter`` is the sender's."""
    world = MemoryWorld(random.Random(0), delay_s=0.05, bytes_per_s=bytes_per_s)
    async with trio.open_nursery() as nursery:
        receiver, sender = Node(world, 0, None), Node(world, 1, limiter)
        for node in (receiver, sender):
            await node.start(nursery)
        await receiver.hub.link(peer_id(1))
        yield receiver, sender
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("bytes_per_s", [2e5, 2e6, 2e7])
async def test_the_measured_rate_is_the_rate_of_the_line(bytes_per_s: float) -> None:
    async with a_pair(bytes_per_s) as (receiver, sender):
        began_s = trio.current_time()
        report = await receiver.prober.measure(order())
        took_s = trio.current_time() - began_s
        sent_bytes = sender.hub.sent_bytes

    assert (report.number, report.sender) == (7, peer_id(1))
    assert report.carried_bytes / report.seconds == pytest.approx(bytes_per_s, rel=0.15)
    assert took_s < 3 * SECONDS + 1
    assert sent_bytes < 1.02 * BYTES + 2**16
    # A slow line carries for the probe's seconds, and what was then on its way.
    assert sent_bytes < bytes_per_s * 2 * SECONDS + 32 * 2**16


async def test_the_senders_own_cap_is_what_is_measured() -> None:
    async with a_pair(1e8, limiter=RateLimiter(5e5)) as (receiver, _sender):
        report = await receiver.prober.measure(order())

    assert report.carried_bytes / report.seconds == pytest.approx(5e5, rel=0.1)


async def test_a_round_ends_a_probe_at_both_ends() -> None:
    async with a_pair(1e6) as (receiver, sender):
        reports: list[Probed] = []

        async def measure() -> None:
            reports.append(await receiver.prober.measure(order()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(measure)
            await trio.sleep(0.5)
            sender.prober.stop()
            receiver.prober.stop()
        sent_bytes = sender.hub.sent_bytes
        await trio.sleep(60)
        assert sender.hub.sent_bytes <= sent_bytes + 32 * 2**16, "only what was handed over"
        # The lanes are free for what comes next, whatever was on its way.
        frame = FrameHeader(FrameKind.CONTRIBUTION, 1, 1, 0, 0, 4)
        with receiver.hub.register((FrameKind.CONTRIBUTION, 1, 1), sink := Sink()):
            link = await sender.hub.link(peer_id(0))
            await send_frame(link, frame, b"data")
            await trio.sleep(1)

    assert reports == [Probed(7, peer_id(1), 0, 0.0)], "a rate of a shared line would mislead"
    assert [payload for _peer, _index, payload in sink.frames] == [b"data"]


async def test_a_second_request_ends_the_first() -> None:
    async with a_pair(1e8) as (receiver, sender):
        link = await receiver.hub.link(peer_id(1))
        for transfer in range(50):
            await link.send(ProbeRequest(transfer, BYTES, SECONDS))
        await trio.sleep(60)
        sent_bytes = sender.hub.sent_bytes

    assert sent_bytes < 2 * BYTES, "they do not add up"


async def test_a_lost_sender_is_reported_as_nothing() -> None:
    async with a_pair(1e6) as (receiver, sender):
        reports: list[Probed] = []

        async def measure() -> None:
            reports.append(await receiver.prober.measure(order()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(measure)
            await trio.sleep(0.1)
            sender.hub.set_members([])
            receiver.hub.set_members([])
    assert reports[0].carried_bytes == 0


async def test_frames_that_were_not_requested_are_dropped() -> None:
    async with a_pair(1e6) as (receiver, sender):
        link = await sender.hub.link(peer_id(0))
        header = FrameHeader(FrameKind.BLOCK, 0, 0, 0, 99, 4)
        await send_frame(link, header, b"junk")
        await trio.sleep(60)
        assert receiver.hub.router.dropped_frames == 1
        assert not link.lost.is_set()

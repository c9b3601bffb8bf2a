"""Lanes of a link: they break, stall, retire and are replaced, and no frame is lost or doubled."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import trio

from holdfast.collectives.links.lane_pool import UsedLaneNumbers
from holdfast.collectives.links.link import LONG_PATH_ACKNOWLEDGE_S, Link
from holdfast.collectives.links.link_parts import LaneRules
from holdfast.collectives.links.rates.line_watch import LineWatch
from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import PeerLostError, RemoteProtocolError
from holdfast.protocol.messages import LANES_OPEN_MAX, LaneReceived, LanesReceived
from holdfast.protocol.network.interface import LaneFacts
from holdfast.simulation.memory_network import MemoryNetwork, MemoryWorld
from holdfast.simulation.memory_streams import MemoryStream, Pipe
from tests.collectives.net import (
    KEY,
    Node,
    Sink,
    a_net,
    a_pair,
    frame,
    note,
    peer_id,
    send_frame,
    view,
)

CHUNK = 150_000  # three segments of the virtual network


# A chunk takes half a second, and not even one fits into a pipe.
SLOW = {"bytes_per_s": 3e5, "buffer_bytes": 1_000}


def stream_of(link: Link, position: int) -> MemoryStream:
    stream = link.lanes.working[position].stream
    assert isinstance(stream, MemoryStream)
    return stream


def stall(link: Link, position: int) -> None:
    """Let nothing arrive that is sent on a lane from now on, without an error."""
    hold(stream_of(link, position)._outward)


def hold(pipe: Pipe) -> None:
    """Let nothing arrive any more that is in a pipe."""

    async def receive(_max_bytes: int) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    pipe.receive = receive  # type: ignore[method-assign, assignment]


async def send_all(link: Link, count: int, rng: random.Random) -> dict[int, bytes]:
    """Send frames over all lanes, and return their payloads."""
    payloads = {index: rng.randbytes(CHUNK) for index in range(count)}
    async with trio.open_nursery() as senders:
        for index, payload in payloads.items():
            senders.start_soon(send_frame, link, frame(index, payload), payload)
    return payloads


def arrived_once(sink: Sink, payloads: dict[int, bytes], sender: Node) -> bool:
    return sorted(sink.frames) == [(sender.hub.me, i, p) for i, p in sorted(payloads.items())]


@pytest.mark.fault(
    "a lane breaks", "its stream's end", "its frames go over others, a new one is dialled"
)
@pytest.mark.parametrize("breaker", ["sender", "receiver", "network"])
async def test_a_broken_lane_gives_its_frames_to_the_others_and_is_replaced(breaker: str) -> None:
    async with a_pair(LaneRules(2, 2), **SLOW) as (a, b, at_a, at_b):
        await trio.sleep(1)
        sink = Sink()
        rng = random.Random(1)
        sent: list[dict[int, bytes]] = []

        async def send() -> None:
            sent.append(await send_all(at_b, 40, rng))

        with a.hub.register(KEY, sink):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                for _ in range(6):
                    await trio.sleep(rng.uniform(0.5, 2))
                    link = at_a if breaker == "receiver" else at_b
                    if link.lanes.working:
                        stream = stream_of(link, rng.randrange(len(link.lanes.working)))
                        stream.cut() if breaker == "network" else await stream.aclose()
            await trio.sleep(5)
        assert arrived_once(sink, sent[0], b)
        assert not at_a.lost.is_set()
        assert not at_b.lost.is_set()
        assert [lane.number for lane in at_a.lanes.working] == [
            lane.number for lane in at_b.lanes.working
        ]
        assert len(at_b.lanes.working) == 2
        assert at_b.lanes.working[-1].number >= 5
        assert len(at_b.lanes._lanes) == len(at_a.lanes._lanes) == 2


async def test_a_frame_that_broke_half_way_is_abandoned_at_the_receiver() -> None:
    async with a_pair(**SLOW) as (a, b, _, at_b):
        await trio.sleep(1)
        sink = Sink()
        with a.hub.register(KEY, sink):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_all, at_b, 2, random.Random(2))
                await trio.sleep(0.8)
                stream_of(at_b, 0).cut()
            await trio.sleep(3)
        assert len(sink.abandoned) == 1
        assert sorted(index for _, index, _ in sink.frames) == [0, 1]
        assert b.hub.links[a.hub.me] is at_b


@pytest.mark.fault("a lane stalls, others move", "nothing of it is acknowledged", "the same")
async def test_a_lane_that_stalls_while_others_move_is_given_up() -> None:
    async with a_pair(**SLOW) as (a, b, at_a, at_b):
        await trio.sleep(1)
        sink = Sink()
        stalled = at_b.lanes.working[1].number
        stall(at_b, 1)
        started_s = trio.current_time()
        with a.hub.register(KEY, sink):
            payloads = await send_all(at_b, 20, random.Random(3))
            await trio.sleep(5)
        assert arrived_once(sink, payloads, b)
        assert trio.current_time() - started_s < 30
        assert stalled not in {lane.number for lane in at_b.lanes.working}
        assert not at_a.lost.is_set()


async def test_a_frame_that_was_sent_but_lost_on_the_way_is_sent_again() -> None:
    # The pipes take everything at once: only the other side's acknowledgement says what came.
    async with a_pair() as (a, b, _, at_b):
        await trio.sleep(1)
        sink = Sink()
        with a.hub.register(KEY, sink):
            stall(at_b, 0)
            payloads = await send_all(at_b, 20, random.Random(4))
            await trio.sleep(0.5)
            assert 0 < len(sink.frames) < 20
            await trio.sleep(25)
        assert arrived_once(sink, payloads, b)


async def test_slow_lanes_are_not_stalled_lanes() -> None:
    async with a_pair(bytes_per_s=20_000) as (a, _, _, at_b):
        await trio.sleep(1)
        numbers = [lane.number for lane in at_b.lanes.working]
        sink = Sink()
        payload = bytes(2**20)
        with a.hub.register(KEY, sink):
            await send_frame(at_b, frame(0, payload), payload)  # the pipe takes it at once
            await trio.sleep(120)
        assert len(sink.frames) == 1
        assert [lane.number for lane in at_b.lanes.working] == numbers


@pytest.mark.fault("no lane can be had", "none works for a while", "the link is lost")
async def test_a_link_without_any_working_lane_is_lost_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusing, dial_lane = trio.Event(), MemoryNetwork.dial_lane

    async def dial_or_refuse(network: MemoryNetwork, address: Address) -> trio.abc.Stream:
        if refusing.is_set():
            raise OSError("no more connections")
        return await dial_lane(network, address)

    monkeypatch.setattr(MemoryNetwork, "dial_lane", dial_or_refuse)
    async with a_pair() as (_, _, at_a, at_b):
        await trio.sleep(1)
        refusing.set()
        for _ in range(2):
            stream_of(at_b, 0).cut()
            await trio.sleep(0.1)
        with pytest.raises(PeerLostError):
            await send_frame(at_b, frame(0, b"x"), b"x")
        await at_a.lost.wait()
        first_reason = "no lane has worked for 5 s (the connection broke"
        assert any(link.reason.startswith(first_reason) for link in (at_a, at_b))


async def test_lanes_retire_without_sending_anything_twice() -> None:
    async with a_pair(LaneRules(4, 4), **SLOW) as (a, _, at_a, at_b):
        await trio.sleep(1)
        sink = Sink()
        with a.hub.register(KEY, sink):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_all, at_b, 20, random.Random(5))
                await trio.sleep(1.2)
                at_b.lanes._count.wanted = 1
                at_b.lanes._changed.notify_all()
                await trio.sleep(5)
                assert len(at_a.lanes.working) == len(at_b.lanes.working) == 1
            await trio.sleep(5)
        assert sorted(index for _, index, _ in sink.frames) == list(range(20))
        assert sink.abandoned == []
        assert at_b.lanes.sent_bytes == at_a.lanes.received_bytes
        assert not at_b.lost.is_set()


@pytest.mark.parametrize("dialer_sends", [True, False])
async def test_an_idle_link_keeps_no_sent_frame(dialer_sends: bool) -> None:
    async with a_pair() as (a, b, at_a, at_b):
        receiver, link = (a, at_b) if dialer_sends else (b, at_a)
        values = np.zeros(1_000, np.uint8)
        gone = weakref.ref(values)
        with receiver.hub.register(KEY, Sink()):
            for index in range(4):
                await send_frame(link, frame(index, bytes(1_000)), values.data)
            del values
            await trio.sleep(LONG_PATH_ACKNOWLEDGE_S + 0.2)  # and a trip
            gc.collect()
            assert gone() is None


async def test_a_peer_that_acknowledges_an_unsent_frame_loses_the_link() -> None:
    async with a_pair() as (_, _, at_a, at_b):
        await at_a.send(LanesReceived((LaneReceived(0, 1, 100),)))
        await at_b.lost.wait()
        assert "lane 0" in at_b.reason
        await at_a.lost.wait()


async def test_junk_on_a_lane_loses_the_whole_link() -> None:
    async with a_pair() as (_, _, at_a, at_b):
        await trio.sleep(1)
        await stream_of(at_b, 0).send_all(bytes(64))
        await at_a.lost.wait()
        await at_b.lost.wait()


async def test_messages_pass_while_lanes_come_and_go() -> None:
    async with a_pair(**SLOW) as (a, _, _, at_b):
        for sequence in range(10):
            if at_b.lanes.working:
                stream_of(at_b, 0).cut()
            await at_b.send(note(sequence))
            await trio.sleep(0.2)
        assert a.heard == [(peer_id(1), note(sequence)) for sequence in range(10)]


@pytest.mark.parametrize("dialer_sends", [True, False])
async def test_lanes_are_added_while_the_line_has_room(
    monkeypatch: pytest.MonkeyPatch, dialer_sends: bool
) -> None:
    """What a kernel says of its connections is made up here; lanes in memory have none."""
    monkeypatch.setattr(
        MemoryNetwork, "prepare_lane", lambda _, __, ___: LaneFacts("cubic", round_trip_s=0.006)
    )
    monkeypatch.setattr(LineWatch, "has_room", lambda _, lanes, __: len(list(lanes)) < 8)
    world = MemoryWorld(random.Random(0), delay_s=0.003, bytes_per_s=20e6)
    world.link("n0", "n1", window_bytes=16_384)  # 2.6 MB/s a lane
    async with a_net(world) as net:
        a, b, at_a, at_b = await net.pair()
        receiver, link = (a, at_b) if dialer_sends else (b, at_a)
        sink = Sink()
        payload = bytes(2**20)
        with receiver.hub.register(KEY, sink):
            async with trio.open_nursery() as senders:
                for index in range(260):
                    senders.start_soon(send_frame, link, frame(index, payload), payload)
                await trio.sleep(0.5)
                assert len(link.lanes.working) == 6  # what a path of this length begins with
                await trio.sleep(10)
                assert len(link.lanes.working) == 9
            await trio.sleep(2)
        assert sorted(index for _, index, _ in sink.frames) == list(range(260))


async def test_a_lane_that_only_its_acceptor_takes_for_open_is_given_up_by_both() -> None:
    async with a_net(rules=LaneRules(2, 2)) as net:
        a, b = await net.node(0, view(0, 1)), await net.node(1, [])
        dial_lane = b.network.dial_lane
        dialled = 0

        async def dial(address: Address) -> trio.abc.Stream:
            nonlocal dialled
            stream = await dial_lane(address)
            assert isinstance(stream, MemoryStream)
            dialled += 1
            if dialled == 2:
                hold(stream._inward)
            return stream

        b.network.dial_lane = dial  # type: ignore[method-assign]
        b.hub.set_members(view(0, 1))
        at_a = await a.hub.link(peer_id(1))
        await trio.sleep(1)
        assert [lane.number for lane in at_a.lanes.working] == [0, 1]
        sink = Sink()
        with b.hub.register(KEY, sink):
            payloads = await send_all(at_a, 20, random.Random(6))
            await trio.sleep(30)
        assert arrived_once(sink, payloads, a)
        assert [lane.number for lane in at_a.lanes.working] == [0, 2]


async def test_a_lane_that_was_given_up_must_not_come_late() -> None:
    async with a_pair() as (_, _, at_a, at_b):
        await at_b.send(LanesReceived((LaneReceived(7, 0, 0, closed=True),)))
        await trio.sleep(1)
        late = at_a.lanes.make_lane(7, at_a.lanes.working[0].stream, b"s" * 32, b"r" * 32)
        with pytest.raises(RemoteProtocolError, match="lane 7 is not wanted"):
            at_a.lanes.claim_lane(late)


def test_a_number_is_good_for_one_lane() -> None:
    numbers = UsedLaneNumbers()
    assert numbers.use(1)
    assert numbers.use(0)
    assert not numbers.use(1)
    for number in range(2, 10_000):
        assert numbers.use(number)
        assert not numbers.use(number - 1)
    assert not numbers.use(9_999 - LANES_OPEN_MAX)
    assert len(numbers._used) <= LANES_OPEN_MAX

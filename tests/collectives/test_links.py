"""Links: dialling, refusals, ends and replacements, and the way of frames to their sinks."""

from __future__ import annotations

import random

import pytest
import trio
from attrs import evolve

from holdfast.collectives.links.frame_routing import EARLY_WAIT_S
from holdfast.collectives.links.link_parts import LANE_STALL_S
from holdfast.protocol import messages as m
from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import LocalProtocolError, PeerLostError, RemoteProtocolError
from holdfast.protocol.network.lane import (
    FrameHeader,
    FrameKind,
    Lane,
    derive_lane_keys,
    send_preamble,
)
from holdfast.protocol.network.stream import MessageStream
from holdfast.protocol.trust.authority import Party
from holdfast.simulation.memory_network import MemoryNetwork, MemoryWorld
from tests.collectives.net import (
    KEY,
    PORT,
    Net,
    Sink,
    a_net,
    a_pair,
    frame,
    member,
    note,
    peer_id,
    send_frame,
    view,
)

# ---------------------------------------------------------------- coming up


async def test_the_later_joiner_dials_and_one_link_joins_each_pair() -> None:
    async with a_net() as net:
        nodes = [await net.node(number, view(0, 1, 2)) for number in range(3)]
        for a in nodes:
            for b in nodes:
                if a is not b:
                    assert (await a.hub.link(b.hub.me)).peer == b.hub.me
        await trio.sleep(30)
        assert [len(node.dialled) for node in nodes] == [2, 1, 0]
        assert [len(node.hub.links) for node in nodes] == [2, 2, 2]


async def test_a_dialler_that_the_view_does_not_name_yet_waits_for_it() -> None:
    async with a_net() as net:
        a = await net.node(0, view(0))
        b = await net.node(1, view(0, 1))
        await trio.sleep(3)
        a.hub.set_members(view(0, 1))
        await b.hub.link(peer_id(0), deadline_s=1)
        assert len(a.dialled) == 1


async def test_a_peer_that_leaves_the_view_before_it_was_dialled_is_not_dialled() -> None:
    async with a_net() as net:
        b = await net.node(1, view(1))
        b.hub.set_members(view(0, 1))
        b.hub.set_members(view(1))  # the dialler has not run yet
        await trio.sleep(1)
        assert not b.dialled


async def test_an_unexpected_peer_is_refused_and_a_later_view_lets_it_in() -> None:
    async with a_net() as net:
        a = await net.node(0, view(0))
        b = await net.node(1, view(0, 1))
        with pytest.raises(PeerLostError, match="you are not in my view"):
            await b.hub.link(peer_id(0), deadline_s=8)
        a.hub.set_members(view(0, 1))
        await b.hub.link(peer_id(0), deadline_s=6)


async def greeted(
    net: Net, number: int, to: int, hello: m.LinkHello
) -> tuple[MemoryNetwork, MessageStream]:
    """A bare node that has dialled another one, and said hello."""
    bare = net.world.host(f"n{number}", peer_id(number))
    channel = await bare.dial(Address(f"n{to}", PORT), party=Party.PEER)
    stream = MessageStream(channel.stream)
    await stream.send(hello)
    return bare, stream


HELLO = m.LinkHello(m.VERSION_MIN, m.VERSION_MAX, b"L" * 16, b"s" * 32)


async def test_the_earlier_joiner_is_not_accepted_as_dialler() -> None:
    async with a_net() as net:
        await net.node(1, view(0, 1))
        _early, stream = await greeted(net, 0, 1, HELLO)
        refused = await stream.receive_expected(m.Refused)
        assert "I dial this link" in refused.reason


async def test_a_version_that_is_not_spoken_here_is_refused() -> None:
    async with a_net() as net:
        await net.node(0, view(0, 1))
        later = evolve(HELLO, version_min=m.VERSION_MAX + 1, version_max=m.VERSION_MAX + 3)
        _other, stream = await greeted(net, 1, 0, later)
        wanted = f"versions {m.VERSION_MAX + 1} to {m.VERSION_MAX + 3}"
        assert wanted in (await stream.receive_expected(m.Refused)).reason


async def test_addresses_are_tried_in_order_until_one_answers() -> None:
    async with a_net() as net:
        await net.node(0, view(0, 1))
        await net.node(2, [member(2)])  # another peer answers there
        addresses = ("nowhere:1", "not an address", f"n2:{PORT}", "n0:1", f"n0:{PORT}")
        b = await net.node(1, [member(0, *addresses), member(1)])
        await b.hub.link(peer_id(0), deadline_s=1)


async def test_a_caller_that_waits_for_a_link_is_told_why_it_does_not_come() -> None:
    async with a_net() as net:
        a = await net.node(0, view(0, 1))
        b = await net.node(1, [member(0, "nowhere:1"), member(1)])
        with pytest.raises(PeerLostError, match="no route to nowhere:1"):
            await b.hub.link(peer_id(0), deadline_s=3)
        with pytest.raises(PeerLostError, match="it did not dial this node"):
            await a.hub.link(peer_id(1), deadline_s=3)
        with pytest.raises(PeerLostError, match="not in the view"):
            await a.hub.link(peer_id(5))


async def test_dials_back_off() -> None:
    async with a_net() as net:
        dials = 0
        b = await net.node(1, [member(1)])
        dial = b.network.dial

        async def counted(*args: object, **kwargs: object) -> object:
            nonlocal dials
            dials += 1
            return await dial(*args, **kwargs)  # type: ignore[arg-type]

        b.network.dial = counted  # type: ignore[method-assign, assignment]
        b.hub.set_members([member(0, "nowhere:1"), member(1)])
        await trio.sleep(60)
        assert 10 < dials < 20


# ---------------------------------------------------------------- ending and coming back


async def test_a_cut_link_wakes_its_senders_and_is_dialled_again() -> None:
    async with a_net() as net:
        a, b, at_a, at_b = await net.pair()
        net.world.cut("n0", "n1")
        await at_a.lost.wait()
        await at_b.lost.wait()
        with pytest.raises(PeerLostError):
            await at_a.send(note(1))
        with pytest.raises(PeerLostError):
            await send_frame(at_a, frame(0, b""), b"")
        await at_a.finished.wait()
        assert (await a.hub.link(peer_id(1))) is not at_a
        assert (await b.hub.link(peer_id(0))) is not at_b


async def test_a_link_that_broke_before_a_sessions_first_view_is_told_of_when_it_is_back() -> None:
    """The new session's master has heard that the link broke, and must be told that it is back."""
    async with a_net() as net:
        _a, b, _at_a, at_b = await net.pair()
        told: list[m.Message] = []
        b.hub.tell_master = told.append
        net.world.cut("n0", "n1")
        await at_b.finished.wait()
        assert told == [m.LinkBroken(peer_id(0))]
        b.hub.set_members(view(0, 1), new_master=True)
        await b.hub.link(peer_id(0))
        assert told == [m.LinkBroken(peer_id(0)), m.RouteWorks(peer_id(0), 0)]


async def test_a_new_masters_view_ends_only_links_over_arranged_routes() -> None:
    async with a_pair() as (a, b, at_a, at_b):
        for node in (a, b):
            node.hub.set_members(view(0, 1), new_master=True)
        await trio.sleep(60)
        assert (await a.hub.link(peer_id(1)), await b.hub.link(peer_id(0))) == (at_a, at_b)
        for end, other in ((a, 1), (b, 0)):
            dials = end is a
            end.hub.set_route(m.Route(peer_id(other), 1, m.RouteKind.DIRECT, dials, "", (), b"", 0))
        await trio.sleep(60)
        arranged = await a.hub.link(peer_id(1))
        b.hub.set_members(view(0, 1), new_master=True)
        await arranged.lost.wait()
        a.hub.set_members(view(0, 1), new_master=True)
        assert (await a.hub.link(peer_id(1))) is not arranged


async def test_a_peer_that_comes_back_makes_all_links_again() -> None:
    async with a_pair() as (a, b, at_a, at_b):
        b.hub.set_members(view(0, 1), back=True)
        assert at_b.lost.is_set()
        await at_a.lost.wait()
        assert (await a.hub.link(peer_id(1))) is not at_a


async def test_a_peer_that_leaves_the_view_is_cut_off_at_once_and_not_dialled_again() -> None:
    async with a_pair() as (a, b, at_a, at_b):
        b.hub.set_members(view(1))
        assert at_b.lost.is_set()
        assert at_b.reason == "it left the view"
        await at_a.lost.wait()
        with pytest.raises(PeerLostError, match="not in the view"):
            await b.hub.link(peer_id(0))
        await trio.sleep(60)
        assert a.hub.links == {}
        assert len(a.dialled) == 1


async def test_a_caller_that_waits_for_a_link_learns_that_the_peer_left_the_view() -> None:
    async with a_net() as net:
        b = await net.node(1, [member(0, "nowhere:1"), member(1)])

        async def leave() -> None:
            await trio.sleep(1)
            b.hub.set_members(view(1))

        net.nursery.start_soon(leave)
        with pytest.raises(PeerLostError, match="not in the view"):
            await b.hub.link(peer_id(0))
        assert trio.current_time() < 2


async def test_an_evicted_node_keeps_no_links() -> None:
    async with a_pair() as (_, b, at_a, _):
        b.hub.set_members(view(0))
        assert b.hub.links == {}
        await at_a.lost.wait()


async def test_a_member_that_joined_again_gets_a_new_link() -> None:
    async with a_pair() as (a, b, at_a, _):
        for node in (a, b):
            node.hub.set_members([member(0, joined=5), member(1)])
        assert at_a.lost.is_set()
        await a.hub.link(peer_id(1))
        assert b.dialled == [peer_id(0)]  # which is the later joiner now


async def test_a_link_that_broke_unnoticed_at_one_end_is_replaced() -> None:
    async with a_net() as net:
        a, b, at_a, at_b = await net.pair()
        net.world.filter = lambda sent: b""  # what closing would say gets lost
        net.world.partition("n0", "n1")
        at_b.close("a router between us forgot the connection")
        await trio.sleep(1)
        assert not at_a.lost.is_set()
        # The old streams' end never arrives: keep it from the acceptor for good.
        net.world.filter = None
        for stream in (at_a._stream, *(lane.stream for lane in at_a.lanes.working)):
            stream._inward._end_s = float("inf")  # type: ignore[attr-defined]
        net.world.heal("n0", "n1")
        new = await b.hub.link(peer_id(0))
        await at_a.lost.wait()
        assert at_a.reason == "replaced by a newer link"
        assert (await a.hub.link(peer_id(1))) is not at_a
        assert not new.lost.is_set()


async def test_a_node_that_stops_closes_its_links() -> None:
    async with a_pair() as (a, b, at_a, at_b):
        a.scope.cancel()
        await at_a.finished.wait()
        await at_b.lost.wait()
        assert at_b.reason == "the other side closed the link"
        with pytest.raises(LocalProtocolError):
            a.hub.trailing.start(peer_id(1), 1, trio.sleep_forever)
        assert b.hub.links == {}


async def test_a_restarted_node_is_linked_again() -> None:
    async with a_net() as net:
        a, b, _, at_b = await net.pair()
        a.scope.cancel()
        net.world.crash("n0")
        await at_b.lost.wait()
        await trio.sleep(30)
        await net.node(0, view(0, 1))
        await b.hub.link(peer_id(0), deadline_s=6)


async def test_a_frozen_member_is_lost_once_a_write_is_stuck() -> None:
    async with a_net(MemoryWorld(random.Random(0), buffer_bytes=1_000)) as net:
        _, _, _, at_b = await net.pair()
        net.world.freeze("n0")
        payload = bytes(100_000)
        started_s = trio.current_time()

        async def send_on() -> None:
            for index in range(5):
                await send_frame(at_b, frame(index, payload), payload)

        with pytest.raises(PeerLostError, match="no lane has worked for 5 s"):
            await send_on()
        assert 19 < trio.current_time() - started_s < 45


async def test_slow_is_not_stuck() -> None:
    async with a_pair(bytes_per_s=50_000, buffer_bytes=1_000) as (a, _, _, at_b):
        sink = Sink()
        payload = bytes(4 * 2**20)  # 84 s
        with a.hub.register(KEY, sink):
            await send_frame(at_b, frame(0, payload), payload)
            await trio.sleep(10)
        assert len(sink.frames) == 1


async def test_a_message_that_breaks_the_protocol_ends_the_link() -> None:
    async with a_pair() as (a, _, at_a, at_b):

        async def refuse(_peer: str, _message: m.Message) -> None:
            raise RemoteProtocolError("no such transfer")

        a.hub.on_message = refuse
        await at_b.send(m.BlocksRefused(0, 1, 2, "for no request"))
        await at_a.lost.wait()
        assert at_a.reason == "no such transfer"
        await at_b.lost.wait()


# ---------------------------------------------------------------- lanes


async def test_a_lane_of_no_link_or_without_the_keys_is_closed_and_harms_no_link() -> None:
    async with a_net() as net:
        await net.node(0, view(0, 1))
        other, stream = await greeted(net, 1, 0, HELLO)
        await stream.receive_expected(m.LinkHello)
        await stream.receive_expected(m.LinkReady)
        for link_id, number in ((b"M" * 16, 0), (b"L" * 16, 0), (b"L" * 16, 63)):
            lane = await other.dial_lane(Address("n0", PORT))
            await send_preamble(lane, link_id, number)
            await lane.send_all(bytes(48))  # what an OPEN without the key looks like
            assert await lane.receive_some() == b""
        await trio.sleep(16)  # the handshake is given up after its time
        with pytest.raises(trio.EndOfChannel):
            await stream.receive()


async def test_a_lane_that_is_replayed_gets_no_answer_under_the_same_keys() -> None:
    async with a_net() as net:
        await net.node(0, view(0, 1))
        other, stream = await greeted(net, 1, 0, HELLO)
        hello = await stream.receive_expected(m.LinkHello)
        await stream.receive_expected(m.LinkReady)
        keys = derive_lane_keys(b"s" * 32, hello.secret, b"L" * 16, 0)
        for first in (True, False):
            bare = await other.dial_lane(Address("n0", PORT))
            await send_preamble(bare, b"L" * 16, 0)
            lane = Lane(bare, *keys)
            await lane.open()
            if first:
                await lane.wait_open()
            else:
                assert await bare.receive_some() == b""


async def test_idle_lanes_take_the_next_frame() -> None:
    async with a_pair() as (a, _, at_a, at_b):
        await trio.sleep(1)
        sink = Sink()
        sent = {index: bytes([index]) * (1 + 37 * index) for index in range(200)}
        with a.hub.register(KEY, sink):
            async with trio.open_nursery() as senders:
                for index, payload in sent.items():
                    senders.start_soon(send_frame, at_b, frame(index, payload), payload)
            await trio.sleep(1)
        assert sorted(sink.frames) == [(peer_id(1), i, p) for i, p in sent.items()]
        assert len(at_b.lanes.working) == 2
        assert min(lane.sent_bytes for lane in at_b.lanes.working) > 100_000
        assert a.hub.received_bytes == at_a.lanes.received_bytes == at_b.lanes.sent_bytes


async def test_a_cancelled_sender_tears_nothing() -> None:
    async with a_pair(bytes_per_s=1e5, buffer_bytes=1_000) as (a, _, _, at_b):
        sink = Sink()
        rng = random.Random(3)
        payload = rng.randbytes(30_000)

        async def send_a_while(index: int, seconds: float) -> None:
            with trio.move_on_after(seconds):
                await send_frame(at_b, frame(index, payload), payload)

        with a.hub.register(KEY, sink):
            async with trio.open_nursery() as senders:
                for index in range(40):
                    senders.start_soon(send_a_while, index, rng.uniform(0, 10))
            await send_frame(at_b, frame(99, payload), payload)
            await trio.sleep(5)
        assert all(content == payload for _, _, content in sink.frames)
        indices = [index for _, index, _ in sink.frames]
        assert 3 < len(indices) < 40
        assert 99 in indices
        assert not at_b.lost.is_set()


async def test_an_early_frame_waits_for_its_sink_and_delays_no_other_link() -> None:
    async with a_net(MemoryWorld(random.Random(0), buffer_bytes=1_000)) as net:
        nodes = [await net.node(number, view(0, 1, 2)) for number in range(3)]
        early = await nodes[1].hub.link(peer_id(0))
        other = await nodes[2].hub.link(peer_id(0))
        sink, other_sink = Sink(), Sink()
        payload = bytes(20_000)
        async with trio.open_nursery() as senders:
            for index in range(4):  # more than the lanes hold
                senders.start_soon(send_frame, early, frame(index, payload), payload)
            await trio.sleep(1)
            with nodes[0].hub.register((FrameKind.CONTRIBUTION, 2, 1), other_sink):
                started_s = trio.current_time()
                await send_frame(other, frame(0, payload, round_=2), payload)
                await early.send(note(1))  # control traffic is not behind the frames
                await trio.sleep(0.1)
                assert len(other_sink.frames) == 1
                assert nodes[0].heard == [(peer_id(1), note(1))]
                assert trio.current_time() - started_s < 0.5
            await trio.sleep(5)
            with nodes[0].hub.register(KEY, sink):
                await trio.sleep(0.5)
                assert sorted(index for _, index, _ in sink.frames) == [0, 1, 2, 3]


async def test_a_frame_without_a_sink_in_time_is_dropped_and_the_lane_goes_on() -> None:
    async with a_pair() as (a, _, _, at_b):
        for index in range(50):
            await send_frame(at_b, frame(index, b"early"), b"early")
        await trio.sleep(9.5)
        assert a.hub.router.dropped_frames == 0
        await trio.sleep(1)  # one wait for all of them
        assert a.hub.router.dropped_frames == 50
        sink = Sink()
        with a.hub.register(KEY, sink):
            await send_frame(at_b, frame(2, b"in time"), b"in time")
            await trio.sleep(1)
        assert sink.frames == [(peer_id(1), 2, b"in time")]


async def test_frames_of_a_finished_attempt_or_transfer_are_dropped_at_once() -> None:
    async with a_pair() as (a, _, _, at_b):
        a.hub.router.forget_through(7, 2)
        with a.hub.register((FrameKind.BLOCK, 4), Sink()):
            pass
        over = [
            frame(0, b"", round_=7, attempt=1),
            frame(0, b"", round_=7, attempt=2),
            FrameHeader(FrameKind.BLOCK, 0, 0, 0, 4, 0),
        ]
        sink = Sink()
        started_s = trio.current_time()
        with a.hub.register((FrameKind.CONTRIBUTION, 7, 3), sink):
            for header in over:
                await send_frame(at_b, header, b"")
            await send_frame(at_b, frame(5, b"", round_=7, attempt=3), b"")
            await trio.sleep(0.1)
        assert sink.frames == [(peer_id(1), 5, b"")]
        assert a.hub.router.dropped_frames == 3
        assert trio.current_time() - started_s < 0.5
        with pytest.raises(RemoteProtocolError, match="attempt 3 of round 7 is over"):
            a.hub.register((FrameKind.CONTRIBUTION, 7, 3), sink).__enter__()
        with pytest.raises(LocalProtocolError, match="transfer 4 is over"):
            a.hub.register((FrameKind.BLOCK, 4), sink).__enter__()


def test_waiting_for_early_frames_must_not_look_like_a_stall() -> None:
    assert EARLY_WAIT_S < LANE_STALL_S

"""The virtual network: streams like real ones, and the faults that tests ask for."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trio
import trio.testing

from holdfast.protocol.addresses import Address
from holdfast.protocol.network.interface import Channel
from holdfast.protocol.network.stream import receive_exactly
from holdfast.protocol.trust.authority import Party
from holdfast.simulation.memory_network import MemoryWorld
from holdfast.simulation.memory_streams import SEGMENT_BYTES
from tests.background import background

PEER_A, PEER_B = "a" * 32, "b" * 32
PORT = 7_700


async def nothing_comes(attempt: Callable[[], Awaitable[object]], seconds: float = 60) -> None:
    with trio.move_on_after(seconds) as scope:
        await attempt()
    assert scope.cancelled_caught


class Pair:
    """Two hosts with one stream between them: ``near`` dialled ``far``."""

    def __init__(self, nursery: trio.Nursery, world: MemoryWorld | None = None) -> None:
        self.nursery = nursery
        self.world = world or MemoryWorld(random.Random(0))
        self.a = self.world.host("a", PEER_A)
        self.b = self.world.host("b", PEER_B)
        self._send, self._receive = trio.open_memory_channel[trio.abc.Stream](100)

    async def connect(self, *, lane: bool = False) -> tuple[trio.abc.Stream, trio.abc.Stream]:
        if not any(self.b._host.listeners):
            await self.nursery.start(self.serve)
        near: trio.abc.Stream
        if lane:
            near = await self.a.dial_lane(Address("b", PORT))
        else:
            near = (await self.a.dial(Address("b", PORT), party=Party.PEER, peer=PEER_B)).stream
        return near, await self._receive.receive()

    async def serve(self, task_status: trio.TaskStatus[object]) -> None:
        async def on_lane(stream: trio.abc.Stream) -> None:
            await self._send.send(stream)
            await trio.sleep_forever()

        async def on_channel(channel: Channel) -> None:
            await on_lane(channel.stream)

        await self.b.serve([Address("::", PORT)], on_channel, on_lane, task_status=task_status)


@contextlib.asynccontextmanager
async def a_pair(world: MemoryWorld | None = None) -> AsyncIterator[Pair]:
    async with background() as nursery:
        yield Pair(nursery, world)


async def test_a_stream_is_what_trio_calls_a_stream() -> None:
    async with background() as nursery:
        world = MemoryWorld(random.Random(0), delay_s=0.0, buffer_bytes=2**16)
        pair = Pair(nursery, world)

        async def make() -> tuple[trio.abc.Stream, trio.abc.Stream]:
            return await pair.connect()

        async def make_clogged() -> tuple[trio.abc.Stream, trio.abc.Stream]:
            near, far = await pair.connect()
            for stream in (near, far):
                await stream.send_all(bytes(2**16))
            return near, far

        await trio.testing.check_two_way_stream(make, make_clogged)


async def test_bytes_take_the_delay_and_the_rate_of_the_link() -> None:
    async with a_pair() as pair:
        near, far = await pair.connect()
        pair.world.link("a", "b", delay_s=0.5, bytes_per_s=1e6)
        start_s = trio.current_time()
        pair.nursery.start_soon(near.send_all, bytes(2_000_000))
        await receive_exactly(far, 2_000_000)
        assert trio.current_time() - start_s == pytest.approx(2.5)


async def test_hosts_behind_one_line_share_it_to_others_only() -> None:
    async with a_pair(MemoryWorld(random.Random(0), delay_s=0.0)) as pair:
        pair.world.share_line("b", up=1e6, down=2e6)
        streams = [await pair.connect() for _ in range(2)]
        start_s = trio.current_time()
        async with trio.open_nursery() as transfers:
            for near, far in streams:
                transfers.start_soon(near.send_all, bytes(10**6))
                transfers.start_soon(receive_exactly, far, 10**6)
        assert trio.current_time() - start_s == pytest.approx(1.0, rel=0.1)
        pair.world.share_line("ab", up=1.0, down=1.0)  # both are behind it
        start_s = trio.current_time()
        near, far = streams[0]
        await far.send_all(bytes(10**6))
        await receive_exactly(near, 10**6)
        assert trio.current_time() - start_s == pytest.approx(1.0, rel=0.1)


async def test_streams_of_one_pair_share_its_rate() -> None:
    async with a_pair(MemoryWorld(random.Random(0), delay_s=0.0, bytes_per_s=1e6)) as pair:
        ends = [await pair.connect(lane=True) for _ in range(2)]
        start_s = trio.current_time()
        for near, _ in ends:
            pair.nursery.start_soon(near.send_all, bytes(1_000_000))
        for _, far in ends:
            await receive_exactly(far, 1_000_000)
        assert trio.current_time() - start_s == pytest.approx(2.0)


async def test_jitter_changes_when_bytes_arrive_but_not_their_order() -> None:
    async with a_pair(MemoryWorld(random.Random(0), jitter_s=1.0)) as pair:
        near, far = await pair.connect()
        sent = bytes(range(200))
        for byte in sent:
            await near.send_all(bytes([byte]))
        await near.aclose()
        start_s = trio.current_time()
        assert await receive_exactly(far, 200) == sent
        assert 0.9 < trio.current_time() - start_s <= 1.01
        assert await far.receive_some() == b""


async def test_a_small_message_overtakes_the_bulk_of_another_stream() -> None:
    async with a_pair(MemoryWorld(random.Random(0), delay_s=0.01, bytes_per_s=1e6)) as pair:
        bulk, _ = await pair.connect(lane=True)
        near, far = await pair.connect()
        pair.nursery.start_soon(bulk.send_all, bytes(3_000_000))
        await trio.sleep(0.5)
        start_s = trio.current_time()
        await near.send_all(b"beat")
        assert await receive_exactly(far, 4) == b"beat"
        assert trio.current_time() - start_s < 0.2


async def test_a_sender_waits_for_a_reader_that_does_not_read() -> None:
    async with a_pair(MemoryWorld(random.Random(0), buffer_bytes=100_000)) as pair:
        near, far = await pair.connect()
        await nothing_comes(lambda: near.send_all(bytes(1_000_000)))
        with trio.move_on_after(10):
            received = 0
            while True:
                received += len(await far.receive_some())
        assert 100_000 <= received <= 200_000


async def test_a_sender_that_waits_learns_that_its_reader_closed() -> None:
    async with a_pair(MemoryWorld(random.Random(0), delay_s=0.5, buffer_bytes=1_000)) as pair:
        near, far = await pair.connect()

        async def close_later() -> None:
            await trio.sleep(10)
            await far.aclose()

        pair.nursery.start_soon(close_later)
        start_s = trio.current_time()
        with pytest.raises(trio.BrokenResourceError):
            await near.send_all(bytes(1_000_000))
        assert trio.current_time() - start_s == pytest.approx(10.5)


async def test_a_dial_takes_a_round_trip() -> None:
    async with a_pair(MemoryWorld(random.Random(0), delay_s=0.5)) as pair:
        await pair.connect()
        assert trio.current_time() == pytest.approx(1.0)


async def test_healing_wakes_a_task_that_waits_already() -> None:
    async with a_pair() as pair:
        near, far = await pair.connect()
        pair.world.partition("a", "b")
        await near.send_all(b"held")

        async def heal_later() -> None:
            await trio.sleep(100)
            pair.world.heal("a", "b")

        pair.nursery.start_soon(heal_later)
        assert await far.receive_some() == b"held"
        assert 100 <= trio.current_time() < 101
        pair.world.partition("a", "b")
        pair.nursery.start_soon(heal_later)
        await pair.connect()
        assert 200 <= trio.current_time() < 202


async def test_a_partition_may_hold_one_direction_only() -> None:
    async with a_pair() as pair:
        near, far = await pair.connect()
        pair.world.partition("a", "b", one_way=True)
        await near.send_all(b"held")
        await far.send_all(b"back")
        assert await near.receive_some() == b"back"
        for attempt in (  # a dial needs an answer, whoever dials
            lambda: far.receive_some(),
            lambda: pair.connect(lane=True),
            lambda: pair.b.dial_lane(Address("a", PORT)),
        ):
            await nothing_comes(attempt)
        pair.world.heal("b", "a")
        assert await far.receive_some() == b"held"


async def test_a_missing_reader_is_learned_over_the_way_back() -> None:
    async with a_pair() as pair:
        near, far = await pair.connect()
        pair.world.partition("b", "a", one_way=True)
        await far.aclose()
        await trio.sleep(100)
        await near.send_all(b"into the void")
        pair.world.heal("a", "b")
        with pytest.raises(trio.BrokenResourceError):
            await near.send_all(b"more")


async def test_a_corrupted_control_message_breaks_its_stream_and_no_lane() -> None:
    async with a_pair() as pair:
        near, far = await pair.connect()
        lane, other_end = await pair.connect(lane=True)
        pair.world.corrupt_next_control_message("a", "b")
        await lane.send_all(b"lane")
        assert await receive_exactly(other_end, 4) == b"lane"
        await far.send_all(b"back")  # the other direction is as it was
        assert await near.receive_some() == b"back"
        with pytest.raises(trio.BrokenResourceError):
            await near.send_all(b"changed")
        with pytest.raises(trio.BrokenResourceError):
            await far.receive_some()
        near, far = await pair.connect()
        await near.send_all(b"a new one")
        assert await far.receive_some() == b"a new one"


async def test_a_new_rate_is_that_of_live_streams_too() -> None:
    async with a_pair(MemoryWorld(random.Random(0), delay_s=0.0, bytes_per_s=1e6)) as pair:
        near, far = await pair.connect()
        pair.nursery.start_soon(near.send_all, bytes(2_000_000))
        await trio.sleep(1.0)
        pair.world.link("a", "b", bytes_per_s=1e5)
        start_s = trio.current_time()
        await receive_exactly(far, 2_000_000)
        assert trio.current_time() - start_s == pytest.approx(10.0, rel=0.1)


async def test_a_frozen_host_neither_speaks_nor_hears_and_nothing_breaks() -> None:
    async with a_pair() as pair:
        near, far = await pair.connect()
        pair.world.freeze("b")
        await near.send_all(b"to b")
        await far.send_all(b"to a")
        for stream in (near, far):
            await nothing_comes(stream.receive_some, 1_000)
        pair.world.thaw("b")
        assert await near.receive_some() == b"to a"
        assert await far.receive_some() == b"to b"


async def test_a_crash_breaks_the_streams_at_the_others_and_refuses_dials() -> None:
    async with a_pair() as pair:
        near, far = await pair.connect()
        start_s = trio.current_time()
        pair.world.crash("b")
        with pytest.raises(trio.BrokenResourceError):
            await near.receive_some()
        assert trio.current_time() - start_s == pytest.approx(0.01)
        with pytest.raises(trio.BrokenResourceError):
            await near.send_all(b"x")
        with pytest.raises(trio.BrokenResourceError):
            await far.receive_some()
        with pytest.raises(OSError, match="no route"):
            await pair.a.dial_lane(Address("b", PORT))
        with pytest.raises(OSError, match="crashed"):
            await pair.b.dial_lane(Address("a", PORT))
        pair.b = pair.world.host("b", PEER_B)
        with pytest.raises(OSError, match="refused"):
            await pair.a.dial_lane(Address("b", PORT))
        near, far = await pair.connect()
        await near.send_all(b"again")
        assert await far.receive_some() == b"again"


async def test_a_crash_behind_a_partition_looks_like_silence() -> None:
    async with a_pair() as pair:
        near, _ = await pair.connect()
        pair.world.partition("a", "b")
        pair.world.crash("b")
        await nothing_comes(near.receive_some, 1_000)
        pair.world.heal("a", "b")
        with pytest.raises(trio.BrokenResourceError):
            await near.receive_some()


async def test_a_crash_loses_a_part_of_the_last_bytes_and_the_seed_says_which() -> None:
    async def crash_report(seed: int) -> int:
        async with a_pair(MemoryWorld(random.Random(seed))) as pair:
            near, far = await pair.connect()
            await far.send_all(bytes(1_000_000))
            pair.world.crash("b")
            received = 0
            try:
                while True:
                    received += len(await near.receive_some())
            except trio.BrokenResourceError:
                pass
        return received

    first = [await crash_report(seed) for seed in range(5)]
    assert first == [await crash_report(seed) for seed in range(5)]
    assert len(set(first)) > 1
    assert all(0 <= count <= 1_000_000 for count in first)


async def test_cutting_breaks_both_ends_and_both_may_dial_again() -> None:
    async with a_pair() as pair:
        near, far = await pair.connect()
        await near.send_all(b"under way")
        pair.world.cut("a", "b")
        assert await far.receive_some() == b"under way"
        for stream in (near, far):
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
            with pytest.raises(trio.BrokenResourceError):
                await stream.send_all(b"x")
        near, far = await pair.connect()
        await near.send_all(b"again")
        assert await far.receive_some() == b"again"


async def test_an_unreachable_host_can_dial_but_not_be_dialled() -> None:
    async with a_pair() as pair:
        pair.world.unreachable.add("a")
        await pair.connect()

        async def on_channel(_: Channel) -> None:
            raise AssertionError("nobody can get here")

        await pair.nursery.start(pair.a.serve, [Address("::", PORT)], on_channel, None)
        with pytest.raises(OSError, match="no route"):
            await pair.b.dial(Address("a", PORT), party=Party.PEER)


async def test_a_filter_drops_and_changes_what_is_sent() -> None:
    async with a_pair() as pair:
        near, far = await pair.connect()
        pair.world.filter = lambda sent: (
            b"" if sent.data == b"lost" else sent.data.replace(b"1", b"2")
        )
        for data in (b"lost", b"a1"):
            await near.send_all(data)
        assert await far.receive_some() == b"a2"
        assert pair.world.sent_bytes["a", "b"] == 6


async def test_connections_not_accepted_are_reset_when_the_server_stops() -> None:
    async with a_pair() as pair:
        streams: list[trio.abc.Stream] = []

        async def dial(server: trio.CancelScope) -> None:
            streams.append(await pair.a.dial_lane(Address("b", PORT)))
            if len(streams) == 3:
                server.cancel()  # before the server had its turn

        async with trio.open_nursery() as nursery:
            await nursery.start(pair.serve)
            async with trio.open_nursery() as dials:
                for _ in range(3):
                    dials.start_soon(dial, nursery.cancel_scope)
        with pytest.raises(OSError, match="refused"):
            await pair.a.dial_lane(Address("b", PORT))
        assert len(streams) == 3
        for stream in streams:
            with trio.move_on_after(1) as scope:
                with contextlib.suppress(trio.BrokenResourceError):
                    assert await stream.receive_some() == b""
            assert not scope.cancelled_caught


@pytest.mark.parametrize("stream_count", [1, 4])
async def test_a_window_lets_several_streams_carry_more_than_one(stream_count: int) -> None:
    """A stream has 64 KiB under way for 100 ms: 0.66 MB/s of the link's 10."""
    world = MemoryWorld(random.Random(0), delay_s=0.1, bytes_per_s=10e6)
    world.link("a", "b", window_bytes=SEGMENT_BYTES)
    async with a_pair(world) as pair:
        got = 0

        async def receive(stream: trio.abc.Stream) -> None:
            nonlocal got
            while data := await stream.receive_some():
                got += len(data)

        ends = [await pair.connect(lane=True) for _ in range(stream_count)]
        for near, far in ends:
            pair.nursery.start_soon(near.send_all, bytes(10**8))
            pair.nursery.start_soon(receive, far)
        await trio.sleep(10)
        assert got == pytest.approx(stream_count * 10 * SEGMENT_BYTES / 0.1, rel=0.15)


async def test_one_side_may_finish_while_the_other_goes_on() -> None:
    async with a_pair() as pair:
        near, far = await pair.connect(lane=True)
        assert isinstance(near, trio.abc.HalfCloseableStream)
        await near.send_all(b"question")
        await near.send_eof()
        assert await far.receive_some() == b"question"
        assert await far.receive_some() == b""
        await far.send_all(b"answer")
        assert await near.receive_some() == b"answer"
        with pytest.raises(trio.ClosedResourceError):
            await near.send_all(b"more")

"""The contract of ``Network``, run against real sockets and against the virtual network."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import RemoteProtocolError, UserError
from holdfast.protocol.messages import Heartbeat, Notice, RefusalCode, Refused
from holdfast.protocol.network.interface import Channel, Network
from holdfast.protocol.network.lane import receive_preamble, send_preamble
from holdfast.protocol.network.sockets import SocketNetwork
from holdfast.protocol.network.stream import MessageStream
from holdfast.protocol.trust.authority import Authority, Party
from holdfast.simulation.memory_network import MemoryWorld
from tests.background import background
from tests.trust import admitted

Maker = Callable[[Party], tuple[Network, str]]


class Nodes:
    """Makes nodes of one run, on either network."""

    def __init__(self, make: Maker, host: Callable[[Network], str]) -> None:
        self.make = make
        self._host = host

    def pair(self, party: Party = Party.PEER) -> tuple[Network, Network]:
        """Make a server of this party, and a peer that dials."""
        return self.make(party)[0], self.make(Party.PEER)[0]

    def bind(self, network: Network) -> Address:
        return Address(self._host(network), 0)


def memory_nodes() -> Nodes:
    world = MemoryWorld(random.Random(1))
    names: dict[int, str] = {}

    def make(party: Party) -> tuple[Network, str]:
        peer = f"{len(names):032x}"
        network = world.host(f"host-{len(names)}", peer, party)
        names[id(network)] = network.name
        return network, peer

    return Nodes(make, lambda network: names[id(network)])


def socket_nodes(directory: Path) -> Nodes:
    authority = Authority.load_or_create(directory / "authority", "demo")

    def make(party: Party) -> tuple[Network, str]:
        credentials = admitted(authority, directory, party)
        return SocketNetwork(credentials), credentials.peer_id

    return Nodes(make, lambda _: "127.0.0.1")


@pytest.fixture(
    params=["memory", pytest.param("sockets", marks=pytest.mark.real_time)],
)
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Nodes:
    return memory_nodes() if request.param == "memory" else socket_nodes(tmp_path)


async def refuse_lane(_: trio.abc.Stream) -> None:
    raise AssertionError("no lane was dialled")


async def echo(channel: Channel) -> None:
    messages = MessageStream(channel.stream)
    while True:
        await messages.send(await messages.receive())


@asynccontextmanager
async def serving(
    nodes: Nodes,
    network: Network,
    on_channel: Callable[[Channel], Awaitable[None]],
    on_lane: Callable[[trio.abc.Stream], Awaitable[None]] | None = refuse_lane,
) -> AsyncIterator[Address]:
    async with background() as nursery:
        (address,) = await nursery.start(network.serve, [nodes.bind(network)], on_channel, on_lane)
        assert address.port
        yield address


async def test_both_ends_know_the_other_one(nodes: Nodes) -> None:
    master, master_id = nodes.make(Party.MASTER)
    peer, peer_id = nodes.make(Party.PEER)
    met: list[tuple[Party, str]] = []

    async def on_channel(channel: Channel) -> None:
        met.append((channel.party, channel.peer))
        assert channel.remote_address
        await echo(channel)

    async with serving(nodes, master, on_channel) as address:
        channel = await peer.dial(address, party=Party.MASTER, peer=master_id)
        assert (channel.party, channel.peer) == (Party.MASTER, master_id)
        messages = MessageStream(channel.stream)
        await messages.send(Heartbeat(1))
        assert await messages.receive() == Heartbeat(1)
        assert met == [(Party.PEER, peer_id)]
        await messages.aclose()


async def test_who_is_not_looked_for_is_refused(nodes: Nodes) -> None:
    server, _ = nodes.make(Party.PEER)
    dialer, dialer_id = nodes.make(Party.PEER)
    async with serving(nodes, server, echo) as address:
        with pytest.raises(RemoteProtocolError):
            await dialer.dial(address, party=Party.MASTER)
        with pytest.raises(RemoteProtocolError):
            await dialer.dial(address, party=Party.PEER, peer=dialer_id)
        await (await dialer.dial(address, party=Party.PEER)).stream.aclose()


async def test_lanes_and_control_streams_share_a_port(nodes: Nodes) -> None:
    server, server_id = nodes.make(Party.PEER)
    dialer, _ = nodes.make(Party.PEER)

    async def on_lane(stream: trio.abc.Stream) -> None:
        preamble = await receive_preamble(stream)
        await stream.send_all(preamble.link_id)

    async with serving(nodes, server, echo, on_lane) as address:
        channel = await dialer.dial(address, party=Party.PEER, peer=server_id)
        lane = await dialer.dial_lane(address)
        await send_preamble(lane, b"0123456789abcdef", 0)
        assert await lane.receive_some() == b"0123456789abcdef"
        assert await lane.receive_some() == b""  # the handler returned
        messages = MessageStream(channel.stream)
        await messages.send(Heartbeat(2))
        assert await messages.receive() == Heartbeat(2)
        await lane.aclose()
        await messages.aclose()


async def test_a_master_has_no_lanes(nodes: Nodes) -> None:
    server, dialer = nodes.pair(Party.MASTER)
    async with serving(nodes, server, echo, None) as address:
        lane = await dialer.dial_lane(address)
        try:
            await send_preamble(lane, b"0123456789abcdef", 0)
            assert await lane.receive_some() == b""
        except trio.BrokenResourceError:
            pass
        await lane.aclose()


async def test_a_peers_fault_ends_its_connection_only(nodes: Nodes) -> None:
    server, _ = nodes.make(Party.MASTER)
    dialers = [nodes.make(Party.PEER)[0] for _ in range(2)]
    async with serving(nodes, server, echo) as address:
        good, bad = [await dialer.dial(address, party=Party.MASTER) for dialer in dialers]
        await bad.stream.send_all(b"\xff" * 64)
        with pytest.raises((trio.EndOfChannel, trio.BrokenResourceError)):
            await MessageStream(bad.stream).receive()
        messages = MessageStream(good.stream)
        await messages.send(Heartbeat(3))
        assert await messages.receive() == Heartbeat(3)
        await bad.stream.aclose()
        await messages.aclose()


async def test_a_bug_in_a_handler_ends_the_server(nodes: Nodes) -> None:
    server, dialer = nodes.pair(Party.MASTER)

    async def on_channel(_: Channel) -> None:
        raise KeyError("a bug")

    async def run() -> None:
        async with serving(nodes, server, on_channel) as address:
            channel = await dialer.dial(address, party=Party.MASTER)
            try:
                await trio.sleep_forever()
            finally:
                await trio.aclose_forcefully(channel.stream)

    with pytest.raises(ExceptionGroup) as raised:
        await run()
    assert raised.group_contains(KeyError, match="a bug")


async def test_a_closed_stream_ends_cleanly_at_the_other_side(nodes: Nodes) -> None:
    server, dialer = nodes.pair(Party.MASTER)
    ended = trio.Event()

    async def on_channel(channel: Channel) -> None:
        messages = MessageStream(channel.stream)
        await messages.receive_expected(Heartbeat)
        with pytest.raises(trio.EndOfChannel):
            await messages.receive()
        ended.set()

    async with serving(nodes, server, on_channel) as address:
        messages = MessageStream((await dialer.dial(address, party=Party.MASTER)).stream)
        await messages.send(Heartbeat(1))
        await messages.aclose()
        await ended.wait()
        with pytest.raises(trio.ClosedResourceError):
            await messages.send(Heartbeat(2))


async def test_a_refusal_is_read_though_more_was_under_way(nodes: Nodes) -> None:
    server, dialer = nodes.pair(Party.MASTER)
    refusal = Refused(RefusalCode.FULL, "no room")

    async def on_channel(channel: Channel) -> None:
        messages = MessageStream(channel.stream)
        await messages.receive()
        await messages.send_final(refusal)

    async with serving(nodes, server, on_channel) as address:
        messages = MessageStream((await dialer.dial(address, party=Party.MASTER)).stream)
        for number in range(100):
            await messages.send(Heartbeat(number))
        assert await messages.receive() == refusal
        await messages.aclose()


async def test_nobody_there_is_an_os_error(nodes: Nodes) -> None:
    server, dialer = nodes.pair()
    async with serving(nodes, server, echo) as address:
        pass
    with pytest.raises(OSError, match="connect"):
        await dialer.dial(address, party=Party.PEER)
    with pytest.raises(OSError, match="connect"):
        await dialer.dial_lane(address)


async def test_a_taken_port_is_the_users_to_mend(nodes: Nodes) -> None:
    server, _ = nodes.make(Party.PEER)
    async with serving(nodes, server, echo) as address:
        with pytest.raises(UserError, match="taken") as raised:
            await server.serve([address], echo, None)
        assert raised.value.exit_code == 4
    async with trio.open_nursery() as nursery:  # and free again
        await nursery.start(server.serve, [address], echo, None)
        nursery.cancel_scope.cancel()


async def test_work_off_the_loop_returns_and_raises(nodes: Nodes) -> None:
    network, _ = nodes.make(Party.PEER)
    assert await network.run_sync(lambda: 6 * 7) == 42
    with pytest.raises(ZeroDivisionError):
        await network.run_sync(lambda: 1 // 0)


async def test_much_travels_both_ways_at_once(nodes: Nodes) -> None:
    server, dialer = nodes.pair()
    count = 300

    async def on_channel(channel: Channel) -> None:
        await swap(MessageStream(channel.stream))
        await trio.sleep_forever()

    async def swap(messages: MessageStream) -> None:
        async with trio.open_nursery() as both:

            async def send() -> None:
                for number in range(count):
                    await messages.send(Notice(f"{number} " + "x" * 990))

            both.start_soon(send)
            for number in range(count):
                told = await messages.receive_expected(Notice)
                assert told.text.startswith(f"{number} ")

    async with serving(nodes, server, on_channel) as address:
        messages = MessageStream((await dialer.dial(address, party=Party.PEER)).stream)
        await swap(messages)
        await messages.aclose()


@pytest.mark.real_time
async def test_real_streams_are_what_trio_calls_streams(tmp_path: Path) -> None:
    nodes = socket_nodes(tmp_path)
    server, dialer = nodes.pair()
    send, receive = trio.open_memory_channel[trio.abc.Stream](1)

    async def on_channel(channel: Channel) -> None:
        await send.send(channel.stream)
        await trio.sleep_forever()

    async with serving(nodes, server, on_channel) as address:

        async def make() -> tuple[trio.abc.Stream, trio.abc.Stream]:
            channel = await dialer.dial(address, party=Party.PEER)
            return channel.stream, await receive.receive()

        await trio.testing.check_two_way_stream(make, None)

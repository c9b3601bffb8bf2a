"""Nodes with hubs in one virtual world; each is told its view by the test."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from holdfast.collectives.links.hub import LinkHub
from holdfast.collectives.links.link import Link
from holdfast.collectives.links.link_parts import LaneRules
from holdfast.collectives.links.rates.rate_limiter import RateLimiter
from holdfast.collectives.links.rates.send_priority import SendRank
from holdfast.collectives.links.send_queue import Load
from holdfast.protocol import messages as m
from holdfast.protocol.addresses import Address
from holdfast.protocol.network.interface import Channel, Network
from holdfast.protocol.network.lane import Buffer, FrameHeader, FrameKind
from holdfast.protocol.network.sockets import SocketNetwork
from holdfast.protocol.trust.authority import Authority
from holdfast.simulation.memory_network import MemoryNetwork, MemoryWorld
from tests.background import background
from tests.trust import admitted

PORT = 7_700
EVERYWHERE = Address("::", PORT)


def note(number: int) -> m.IndexRequest:
    """Return a message that a link hands on."""
    return m.IndexRequest(m.FragmentHead(0, number, b""))


def peer_id(number: int) -> str:
    return f"{number:032x}"


def member(number: int, *addresses: str, joined: int | None = None) -> m.MemberInfo:
    return m.MemberInfo(
        peer=peer_id(number),
        name=f"n{number}",
        number=number if joined is None else joined,
        addresses=addresses or (f"n{number}:{PORT}",),
        role=m.Role.CONTRIBUTOR,
        in_sync=True,
    )


def view(*numbers: int) -> list[m.MemberInfo]:
    return [member(number) for number in numbers]


class OneFrame:
    """A source of a single frame."""

    def __init__(self, header: FrameHeader, payload: Buffer) -> None:
        assert len(payload) == header.payload_bytes
        self._frame: Load | None = lambda: (header, payload)

    def next_frame(self) -> Load | None:
        frame, self._frame = self._frame, None
        return frame

    def left(self) -> int:
        return int(self._frame is not None)


async def send_frame(link: Link, header: FrameHeader, payload: Buffer) -> None:
    """Send a frame by itself; returns when the network took it."""
    rank = SendRank.COPY if header.kind is FrameKind.BLOCK else SendRank.ROUND
    await link.send_from(OneFrame(header, payload), rank)


async def start_hub(
    nursery: trio.Nursery,
    hub: LinkHub,
    network: Network,
    where: Address = EVERYWHERE,
    *,
    on_channel: Callable[[Channel], Awaitable[None]] | None = None,
) -> Address:
    """Serve a hub's network and run it; returns an address of it."""
    handlers = (on_channel or hub.handle_channel, hub.handle_lane)
    bound: Sequence[Address] = await nursery.start(network.serve, [where], *handlers)
    await nursery.start(hub.run)
    return bound[0]


@define(eq=False)
class Node:
    network: MemoryNetwork
    hub: LinkHub
    scope: trio.CancelScope
    heard: list[tuple[str, m.Message]]
    dialled: list[str]  # who opened a control stream to us


@define(eq=False)
class Sink:
    """Takes every frame."""

    frames: list[tuple[str, int, bytes]] = field(factory=list)
    abandoned: list[tuple[str, int]] = field(factory=list)
    keep: bool = True

    def place(self, _peer: str, header: FrameHeader) -> memoryview:
        return memoryview(bytearray(header.payload_bytes))

    def deliver(self, peer: str, header: FrameHeader, payload: memoryview) -> None:
        if self.keep:
            self.frames.append((peer, header.index, bytes(payload)))

    def abandon(self, peer: str, header: FrameHeader, view: memoryview) -> None:
        self.abandoned.append((peer, header.index))


def frame(index: int, payload: bytes, *, round_: int = 1, attempt: int = 1) -> FrameHeader:
    return FrameHeader(FrameKind.CONTRIBUTION, round_, attempt, index, 0, len(payload))


KEY = (FrameKind.CONTRIBUTION, 1, 1)


class Net:
    """Nodes that live in one world; each is told its view by the test."""

    def __init__(
        self,
        nursery: trio.Nursery,
        world: MemoryWorld | None = None,
        rules: LaneRules | None = None,
    ) -> None:
        self.nursery = nursery
        self.rules = rules or LaneRules()
        self.world = world or MemoryWorld(random.Random(0))

    async def node(self, number: int, members: list[m.MemberInfo]) -> Node:
        network = self.world.host(f"n{number}", peer_id(number))
        heard: list[tuple[str, m.Message]] = []
        dialled: list[str] = []

        async def on_message(peer: str, message: m.Message) -> None:
            heard.append((peer, message))

        hub = LinkHub(network, peer_id(number), on_message=on_message)
        hub.configure(rules=self.rules, silence_s=math.inf)
        node = Node(network, hub, trio.CancelScope(), heard, dialled)
        hub.set_members(members)
        await self.nursery.start(self._live, node)
        return node

    async def _live(self, node: Node, task_status: trio.TaskStatus[None]) -> None:
        async def on_channel(channel: Channel) -> None:
            node.dialled.append(channel.peer)
            await node.hub.handle_channel(channel)

        with node.scope:
            async with trio.open_nursery() as nursery:
                await start_hub(nursery, node.hub, node.network, on_channel=on_channel)
                task_status.started()

    async def pair(self) -> tuple[Node, Node, Link, Link]:
        """Two nodes and both ends of their link; the second one dialled."""
        a, b = await self.node(0, view(0, 1)), await self.node(1, view(0, 1))
        return a, b, await a.hub.link(peer_id(1)), await b.hub.link(peer_id(0))


@asynccontextmanager
async def a_net(
    world: MemoryWorld | None = None, rules: LaneRules | None = None
) -> AsyncIterator[Net]:
    async with background() as nursery:
        yield Net(nursery, world, rules)


@asynccontextmanager
async def a_pair(
    rules: LaneRules | None = None, /, **line: Any
) -> AsyncIterator[tuple[Node, Node, Link, Link]]:
    """Two nodes and both ends of their link over such a line; the second one dialled."""
    async with a_net(MemoryWorld(random.Random(0), **line), rules) as net:
        yield await net.pair()


@define(eq=False)
class RealNode:
    network: SocketNetwork
    hub: LinkHub
    address: str
    heard: list[m.Message]


@asynccontextmanager
async def real_nodes(
    directory: Path,
    count: int = 2,
    *,
    rules: LaneRules | None = None,
    upload: RateLimiter | None = None,
    download: RateLimiter | None = None,
) -> AsyncIterator[list[RealNode]]:
    """Linked nodes with loopback sockets: their lanes are worked by threads. The first one has the
    caps.
    """
    authority = Authority.load_or_create(directory, "run")
    found: list[RealNode] = []
    async with background() as nursery:
        for number in range(count):
            credentials = admitted(authority, directory)
            network, heard = SocketNetwork(credentials), list[m.Message]()

            async def hear(_peer: str, message: m.Message, heard: list[m.Message] = heard) -> None:
                heard.append(message)

            hub = LinkHub(
                network,
                credentials.peer_id,
                on_message=hear,
                upload=upload if number == 0 else None,
                download=download if number == 0 else None,
            )
            hub.configure(rules=rules or LaneRules(), silence_s=math.inf)
            bound = await start_hub(nursery, hub, network, Address("127.0.0.1", 0))
            found.append(RealNode(network, hub, str(bound), heard))
        members = [
            m.MemberInfo(
                node.hub.me, f"n{number}", number, (node.address,), m.Role.CONTRIBUTOR, True
            )
            for number, node in enumerate(found)
        ]
        for node in found:
            node.hub.set_members(members)
        yield found

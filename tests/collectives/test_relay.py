"""A relay: the connections that it admits, what it forwards, and what it can read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from holdfast.collectives.links.hub import LinkHub
from holdfast.collectives.links.relay_forwarding import PARKED_MAX, RelayForwarder
from holdfast.protocol import messages as m
from holdfast.protocol.addresses import Address
from holdfast.protocol.network.relay_ticket import PAIRED, RelayPreamble, RelayRole
from holdfast.protocol.network.sockets import SocketNetwork
from holdfast.protocol.network.stream import run_handler
from holdfast.protocol.trust.authority import Authority
from tests.background import background, until
from tests.collectives.net import KEY, Sink, frame, send_frame
from tests.trust import admitted

TICKET = bytes(range(32))
OFFER = m.RelayOffer(1e9, 1, 0, only=True)


def note(stream: trio.SocketStream, seen: bytearray) -> None:
    """Record what comes on a connection."""
    receive = stream.receive_some

    async def receive_some(max_bytes: int | None = None) -> bytes:
        data = bytes(await receive(max_bytes))
        seen.extend(data)
        return data

    stream.receive_some = receive_some  # type: ignore[method-assign]


class At:
    """A relay on a real port that records all that reaches it."""

    def __init__(self) -> None:
        self.forwarder = RelayForwarder(OFFER)
        self.address = Address("127.0.0.1", 0)
        self.seen = bytearray()
        self.streams: list[trio.SocketStream] = []

    async def handle(self, stream: trio.SocketStream) -> None:
        note(stream, self.seen)
        await run_handler(self.forwarder.handle, stream, stream, "a test")

    async def dial(self, first: bytes) -> trio.SocketStream:
        """Open a connection and send its first bytes."""
        stream = await trio.open_tcp_stream(self.address.host, self.address.port)
        self.streams.append(stream)
        await stream.send_all(first)
        return stream

    async def show(self, role: RelayRole, ticket: bytes = TICKET) -> trio.SocketStream:
        return await self.dial(RelayPreamble(role, ticket).pack())

    async def pair(self, ticket: bytes = TICKET) -> tuple[trio.SocketStream, trio.SocketStream]:
        """Open a parked connection and a call, which the relay joins."""
        parked, call = (
            await self.show(RelayRole.PARK, ticket),
            await self.show(RelayRole.CALL, ticket),
        )
        assert await parked.receive_some(1) == await call.receive_some(1) == PAIRED
        return parked, call


@asynccontextmanager
async def a_relay() -> AsyncIterator[At]:
    at = At()
    async with background() as nursery:
        serve = partial(trio.serve_tcp, at.handle, 0, host="127.0.0.1")
        (listener,) = await nursery.start(serve)
        at.address = Address(*listener.socket.getsockname())
        yield at
        for stream in at.streams:
            await trio.aclose_forcefully(stream)


@pytest.mark.real_time
async def test_a_connection_without_a_valid_ticket_is_closed() -> None:
    async with a_relay() as at:
        at.forwarder.carry(m.RelayPair(TICKET, ()))
        for first in (
            RelayPreamble(RelayRole.CALL, b"x" * 32).pack(),
            b"\x52\x01\x07" + TICKET,
            b"G" * 35,
        ):
            stream = await at.dial(first)
            assert await stream.receive_some() == b""
        parked, call = await at.pair()
        await call.send_all(b"there")
        assert await parked.receive_some() == b"there"
        at.forwarder.uncarry(TICKET)
        assert await call.receive_some() == b""
        late = await at.show(RelayRole.CALL)
        assert await late.receive_some() == b""


@pytest.mark.real_time
async def test_the_oldest_of_too_many_parked_connections_are_closed() -> None:
    async with a_relay() as at:
        at.forwarder.carry(m.RelayPair(TICKET, ()))
        parked = [await at.show(RelayRole.PARK) for _ in range(PARKED_MAX + 1)]
        async with trio.open_nursery() as nursery:  # until the first of them ends
            ended: list[trio.SocketStream] = []

            async def wait_end(stream: trio.SocketStream) -> None:
                if await stream.receive_some(1) == b"":
                    ended.append(stream)
                    nursery.cancel_scope.cancel()

            for stream in parked:
                nursery.start_soon(wait_end, stream)
        assert len(ended) == 1
        call = await at.show(RelayRole.CALL)
        assert await call.receive_some(1) == PAIRED


@pytest.mark.real_time
async def test_more_pairs_than_were_offered_are_not_carried() -> None:
    async with a_relay() as at:
        at.forwarder.carry(m.RelayPair(TICKET, ()))
        await at.pair()
        at.forwarder.carry(m.RelayPair(b"y" * 32, ()))
        stream = await at.show(RelayRole.PARK, b"y" * 32)
        assert await stream.receive_some() == b""


@pytest.mark.real_time
async def test_a_ticket_that_nobody_uses_makes_way_for_a_new_masters() -> None:
    async with a_relay() as at:
        at.forwarder.carry(m.RelayPair(TICKET, ()))  # of a master that is gone
        at.forwarder.carry(m.RelayPair(b"y" * 32, ()))
        assert at.forwarder.report().pairs == 1
        await at.pair(b"y" * 32)


@pytest.mark.real_time
async def test_a_link_by_relay_carries_frames_that_the_relay_cannot_read(tmp_path: Path) -> None:
    authority = Authority.load_or_create(tmp_path, "run")
    heard: list[m.Message] = []
    payload = b"secret weights " * 4_000

    async def hear(_peer: str, message: m.Message) -> None:
        heard.append(message)

    async with a_relay() as at, background() as nursery:
        at.forwarder.carry(m.RelayPair(TICKET, ()))
        hubs: list[LinkHub] = []
        for _ in range(2):
            held = admitted(authority, tmp_path)
            hubs.append(LinkHub(SocketNetwork(held), held.peer_id, on_message=hear))
            await nursery.start(hubs[-1].run)
        members = [
            m.MemberInfo(hub.me, "n", number, (), m.Role.CONTRIBUTOR, True, reachable=False)
            for number, hub in enumerate(hubs)
        ]
        for hub, other, dials in ((hubs[0], hubs[1], False), (hubs[1], hubs[0], True)):
            hub.set_members(members)
            hub.set_route(
                m.Route(
                    other.me, 1, m.RouteKind.RELAYED, dials, "f" * 32, (str(at.address),), TICKET
                )
            )
        link = await hubs[0].link(hubs[1].me)
        request = m.IndexRequest(m.FragmentHead(0, 1, b"lineage that no relay may see"))
        await link.send(request)
        sink = Sink()
        with hubs[1].register(KEY, sink):
            await send_frame(link, frame(0, payload), payload)
            await until(lambda: request in heard and sink.frames)
        assert sink.frames == [(hubs[0].me, 0, payload)]
        assert len(at.seen) > len(payload)
        assert b"lineage that" not in at.seen
        assert payload[:15] not in at.seen
        assert at.forwarder.carried_bytes == pytest.approx(len(at.seen), rel=0.1)

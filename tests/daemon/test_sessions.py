"""A peer's session with the master in virtual time: its first and its last messages."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import pytest
import trio
from attrs import define

from holdfast.daemon.master.journal.journal_base import GrantRow
from holdfast.daemon.master.journal.journal_store import JournalStore
from holdfast.daemon.master.master_service import MasterService
from holdfast.daemon.master.peer_greeting import GREETINGS_MAX, HELLO_S, PeerGreeting
from holdfast.membership.master.state.master_effects import Effect
from holdfast.protocol import message_quota, wire
from holdfast.protocol.messages import (
    VERSION_MAX,
    Applied,
    FragmentHead,
    Heartbeat,
    Hello,
    Leaving,
    Message,
    RefusalCode,
    Refused,
    Released,
    Role,
    View,
    Welcome,
)
from holdfast.protocol.network.stream import MessageStream
from holdfast.protocol.packed_orders import OrderReader
from holdfast.protocol.trust.authority import Party
from holdfast.simulation.memory_network import MemoryNetwork, MemoryWorld
from holdfast.simulation.swarm import MASTER_ADDRESS, MASTER_ID, RUN_ID
from tests.background import background
from tests.daemon.loopback import a_service

T = TypeVar("T")

SPEC = """
[run]
name = "sessions"
[membership]
deadline_s = 5
"""


class SlowDisk(MemoryNetwork):
    """The master's host, on which work in threads (the journal) takes ``seconds``."""

    seconds = 0.0

    async def run_sync(
        self, function: Callable[[], T], limiter: trio.CapacityLimiter | None = None
    ) -> T:
        await trio.sleep(self.seconds)
        return function()


@define(eq=False)
class Table:
    """A master, and connections that a test drives message by message."""

    nursery: trio.Nursery
    world: MemoryWorld
    store: JournalStore
    disk: SlowDisk
    master: MasterService

    @property
    def greeting(self) -> PeerGreeting:
        return self.master.sessions._greeting

    def admit(self, name: str, number: int) -> MemoryNetwork:
        peer = f"{number:032x}"
        self.store.admit(peer, GrantRow(Role.CONTRIBUTOR, True, name))
        return self.world.host(name, peer, Party.PEER)

    async def dial(self, network: MemoryNetwork, incarnation: int = 1) -> MessageStream:
        """Connect as a peer and send Hello."""
        channel = await network.dial(MASTER_ADDRESS, party=Party.MASTER)
        stream = MessageStream(channel.stream)
        hello = Hello(VERSION_MAX, VERSION_MAX, RUN_ID, "x", (), incarnation, None, (), b"", ())
        await stream.send(hello)
        return stream


@asynccontextmanager
async def a_table(bytes_per_s: float = 1e9) -> AsyncIterator[Table]:
    async with background() as nursery:
        world = MemoryWorld(random.Random(1), bytes_per_s=bytes_per_s)
        store = JournalStore(":memory:")
        network = world.host("master", MASTER_ID, Party.MASTER)
        disk = SlowDisk(world, network._host)
        master = a_service(SPEC, store, disk, [MASTER_ADDRESS], probe=False)
        await nursery.start(master.run)
        yield Table(nursery, world, store, disk, master)


async def all_of(stream: MessageStream) -> list[Message]:
    """Receive all messages until the end of the stream."""
    heard: list[Message] = []
    with trio.fail_after(60):
        while True:
            try:
                heard.append(await stream.receive())
            except trio.EndOfChannel:
                return heard


# ---------------------------------------------------------------- first words


async def test_welcome_comes_before_a_heartbeat_however_slow_the_journal() -> None:
    async with a_table() as table:
        table.disk.seconds = 4.0  # heartbeats are due every second
        stream = await table.dial(table.admit("a", 1))
        assert isinstance(await stream.receive(), Welcome)


async def test_messages_for_a_connection_do_not_reach_the_next_one() -> None:
    async with a_table() as table:
        network = table.admit("a", 1)
        first = await table.dial(network)
        assert isinstance(await first.receive(), Welcome)
        table.disk.seconds = 2.0
        table.master.decide(
            table.master.coordinator.pause
        )  # its record, then a view, are on the way
        other = await table.dial(table.admit("b", 2))
        again = await table.dial(network, incarnation=2)
        assert isinstance(await again.receive(), Welcome)
        assert isinstance(await other.receive(), Welcome)


@pytest.mark.fault(
    "a peer connects again and again while the disk is busy",
    "each decision is for one connection",
    "it hears only what was meant for its last one",
)
async def test_each_of_many_connections_hears_what_was_meant_for_it() -> None:
    """Three processes of one peer connect while the disk is busy; none gets another's messages."""
    async with a_table() as table:
        network = table.admit("a", 1)
        table.disk.seconds = 2.0
        streams = [await table.dial(network, incarnation) for incarnation in (1, 2, 3)]
        *gone, last = streams
        for number, stream in enumerate(gone, 1):
            heard = await all_of(stream)
            assert [m.number for m in heard if isinstance(m, Welcome)] == [number]
            assert isinstance(heard[-1], Refused)
            assert heard[-1].code is RefusalCode.DUPLICATE
        first = await last.receive()
        assert isinstance(first, Welcome)
        assert first.number == 3


async def test_a_peer_that_is_dropped_and_returns_before_it_is_told_stays() -> None:
    async with a_table() as table:
        network = table.admit("a", 1)
        first = await table.dial(network)
        assert isinstance(await first.receive(), Welcome)
        table.disk.seconds = 2.0
        table.master.decide(table.master.coordinator.pause)
        await first.send(Applied(1, FragmentHead(0, 9, bytes(32))))  # nothing is founded here
        await trio.sleep(0.5)
        assert not table.master.sessions
        again = await table.dial(network, incarnation=2)
        assert isinstance(await again.receive(), Welcome)
        last = (await all_of(first))[-1]
        assert isinstance(last, Refused)
        assert last.code is RefusalCode.PROTOCOL
        assert list(table.master.sessions._sessions) == [f"{1:032x}"]


# ---------------------------------------------------------------- last words


@pytest.mark.parametrize("bytes_per_s", [1e9, 2_000.0])
async def test_a_leaving_peer_is_released_even_over_a_slow_link(bytes_per_s: float) -> None:
    async with a_table(bytes_per_s=bytes_per_s) as table:
        streams = [await table.dial(table.admit(f"peer{n}", n)) for n in range(1, 9)]
        await trio.sleep(1)
        for stream in streams:  # each one's leave sends views to the others, which are in their way
            await stream.send(Leaving("enough"))
        for stream in streams:
            heard = await all_of(stream)
            assert isinstance(heard[-2], Released), heard
            assert heard[-1] == Refused(RefusalCode.LEFT, "you asked to leave")


async def test_a_kicked_peer_is_told_after_the_queued_messages() -> None:
    async with a_table(bytes_per_s=3_000.0) as table:
        stream = await table.dial(table.admit("a", 1))
        for number in range(2, 12):
            await table.dial(table.admit(f"peer{number}", number))
        peer = f"{1:032x}"
        coordinator = table.master.coordinator
        table.master.decide(lambda now_s: coordinator.kick(peer, "rude", now_s))
        heard = await all_of(stream)
        assert isinstance(heard[0], Welcome)
        unpack = OrderReader().unpack
        told = [unpack(each) for each in heard]
        assert [m.number for m in told if isinstance(m, View)], "views were on the way"
        last = heard[-1]
        assert isinstance(last, Refused)
        assert last.code is RefusalCode.KICKED


async def test_a_peer_that_does_not_read_is_dropped_in_bounded_time() -> None:
    async with a_table() as table:
        network = table.admit("deaf", 1)
        await table.dial(network)
        await trio.sleep(1)
        table.world.freeze("deaf")
        peer = f"{1:032x}"
        coordinator = table.master.coordinator
        table.master.decide(lambda now_s: coordinator.kick(peer, "rude", now_s))
        assert peer not in coordinator.context.roster
        await trio.sleep(10)
        assert not table.master.sessions


async def test_a_peer_that_sends_garbage_is_told_and_dropped_at_once() -> None:
    async with a_table() as table:
        stream = await table.dial(table.admit("a", 1))
        assert isinstance(await stream.receive(), Welcome)
        await stream._stream.send_all(b"\x00\x00\x00\x04junk")
        heard = await all_of(stream)
        last = heard[-1]
        assert isinstance(last, Refused)
        assert last.code is RefusalCode.PROTOCOL
        assert not len(table.master.coordinator.context.roster)


@pytest.mark.fault(
    "a member floods a control stream", "its quota of items", "it is heard more slowly, it is named"
)
async def test_a_peer_that_floods_its_master_is_heard_slowly_and_named_and_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_quota, "ITEMS_AT_ONCE", 20_000.0)
    async with a_table() as table:
        network = table.admit("a", 1)
        stream, other = await table.dial(network), await table.dial(table.admit("b", 2))
        for each in (stream, other):
            assert isinstance(await each.receive(), Welcome)
        heard: Counter[str] = Counter()
        receive = table.master.coordinator.receive

        def count(
            peer: str, message: Message, now_s: float, *, settle: bool = True
        ) -> list[Effect]:
            heard[peer] += 1
            return receive(peer, message, now_s, settle=settle)

        monkeypatch.setattr(table.master.coordinator, "receive", count)

        body = wire.encode(Heartbeat())
        many = 1_000 * (len(body).to_bytes(4, "big") + body)

        async def flood() -> None:
            with suppress(trio.BrokenResourceError):
                while True:
                    await stream._stream.send_all(many)

        async def speak() -> None:
            for _ in range(10):
                await other.send(Heartbeat())
                await trio.sleep(0.5)

        async with background() as nursery:
            nursery.start_soon(flood)
            await speak()
        items = message_quota.ITEMS_AT_ONCE + message_quota.ITEMS_PER_S * 5.0
        assert 0.5 < heard[f"{1:032x}"] * (message_quota.MESSAGE_ITEMS + 15) / items <= 1.05
        assert heard[f"{2:032x}"] == 10, "the other one is heard as ever"
        context = table.master.coordinator.context
        assert len(context.roster) == 2, "nobody is cut off"
        named = [event for event in context.events if "exceeds its message quota" in event.text]
        assert [event.peer for event in named] == [f"{1:032x}"]


async def test_a_new_connection_brings_no_new_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_quota, "ITEMS_AT_ONCE", 20_000.0)
    async with a_table() as table:
        network = table.admit("a", 1)
        stream = await table.dial(network)
        assert isinstance(await stream.receive(), Welcome)
        now_s = trio.current_time()
        table.greeting._quotas.of(f"{1:032x}", now_s).spend(20_000 + 250_000, 0, now_s)
        await stream.aclose()
        again = await table.dial(network, incarnation=2)
        assert isinstance(await again.receive(), Welcome)
        assert 4.9 < trio.current_time() - now_s < HELLO_S


@pytest.mark.fault(
    "a key connects again and again, and says nothing",
    "connections of it without a session",
    "the fifth is closed unheard",
)
async def test_a_key_that_connects_again_and_again_and_says_nothing_has_few_places() -> None:
    async with a_table() as table:
        network = table.admit("a", 1)
        silent = [await network.dial(MASTER_ADDRESS, party=Party.MASTER) for _ in range(6)]
        with trio.fail_after(HELLO_S / 2):
            for channel in silent[GREETINGS_MAX:]:
                assert await channel.stream.receive_some() == b""
        assert isinstance(await (await table.dial(table.admit("b", 2))).receive(), Welcome)
        await trio.sleep(HELLO_S)
        assert isinstance(await (await table.dial(network)).receive(), Welcome)
        assert not table.greeting._greetings


async def test_a_kicked_peer_that_returns_is_refused_without_another_event() -> None:
    async with a_table() as table:
        network = table.admit("a", 1)
        coordinator = table.master.coordinator
        table.master.decide(lambda now_s: coordinator.kick(f"{1:032x}", "rude", now_s))
        before = len(coordinator.context.events)
        for _ in range(3):
            (last,) = await all_of(await table.dial(network))
            assert isinstance(last, Refused)
            assert (last.code, "rude" in last.reason) == (RefusalCode.KICKED, True)
        assert len(coordinator.context.events) == before


async def test_a_peer_without_a_grant_is_refused() -> None:
    async with a_table() as table:
        stream = await table.dial(table.world.host("who", f"{7:032x}", Party.PEER))
        heard = await all_of(stream)
        assert [type(each) for each in heard] == [Refused]
        assert not any(isinstance(each, Heartbeat) for each in heard)

"""State transfer: any donors, any faults, and still the same state or an error that names them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import trio
import trio.testing
from attrs import Factory, define
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint import blocks
from holdfast.checkpoint.donor import QUEUED_MAX, Donor
from holdfast.checkpoint.joiner import Joiner
from holdfast.checkpoint.shared_state import SharedState
from holdfast.checkpoint.state_transfer import FetchFailedError, FetchReport
from holdfast.collectives.links.frame_routing import FrameRouter, Sink
from holdfast.collectives.links.rates.send_priority import SendRank
from holdfast.collectives.links.send_queue import FrameSource
from holdfast.protocol.errors import PeerLostError, RemoteProtocolError
from holdfast.protocol.messages import (
    BlocksRefused,
    BlocksRequest,
    FragmentHead,
    FragmentSize,
    Index,
    IndexRequest,
    Message,
    SyncFragment,
)
from holdfast.protocol.network.lane import FrameHeader
from holdfast.simulation.memory_network import MemoryWorld
from holdfast.simulation.virtual_time import run_virtually
from tests.background import background
from tests.checkpoint import test_shared_state
from tests.checkpoint.test_shared_state import content, step

BLOCK_BYTES = 64
# 30 blocks of values, 20 of momentum, 2 of counters; the last of each is short.
SIZE = FragmentSize(value_count=16 * 29 + 3, momentum_count=16 * 19 + 1, counter_count=9)
BLOCK_COUNT = 52
EVERY_BLOCK = frozenset(range(BLOCK_COUNT))
STATE_BYTES = 4 * (SIZE.value_count + SIZE.momentum_count) + 8 * SIZE.counter_count
JOINER = f"{0:032x}"


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with mock.patch.object(blocks, "BLOCK_BYTES", BLOCK_BYTES):
        yield


# ---------------------------------------------------------------- states


def make_state(*sizes: FragmentSize) -> SharedState:
    return test_shared_state.make_state(*(sizes or (SIZE,)))


def trained(rounds: int = 2, seed: int = 0) -> SharedState:
    """A state some rounds on; the same for the same arguments."""
    state = make_state()
    rng = np.random.default_rng(seed)
    state.load_initial(
        0, rng.standard_normal(SIZE.value_count, dtype=np.float32), rng.integers(1, 9, 9)
    )
    for _ in range(rounds):
        advance(state, rng)
    return state


def advance(state: SharedState, rng: np.random.Generator) -> None:
    mean = rng.standard_normal(SIZE.value_count, dtype=np.float32)
    state.apply(0, state.heads()[0].version + 1, rng.integers(1, 9, 9), step(mean))


# ---------------------------------------------------------------- a world of faults


@define
class Faults:
    """The faults of one donor, or of the line to it.

    Attributes:
      corrupt: blocks that it serves with a flipped bit.
      cut: blocks that it serves too short.
      lost: blocks of which nothing ever comes, though the link is fine.
      bad_index: it serves a wrong index.
      refusals: index requests that it refuses before it answers one.
      frames_max: blocks that it sends before ``then``.
      then: "stall" (nothing comes any more), "lose" (the link breaks) or "refuse".
      delay_s: of each frame, at most; frames overtake each other.
    """

    corrupt: frozenset[int] = frozenset()
    cut: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    bad_index: bool = False
    refusals: int = 0
    frames_max: int = 10**9
    then: str = "stall"
    delay_s: float = 0.01

    @property
    def lies(self) -> bool:
        return self.bad_index or bool(self.corrupt or self.cut)

    @property
    def serves_all(self) -> bool:
        whole = not self.lost and self.frames_max >= BLOCK_COUNT
        return not self.lies and whole and self.refusals < 5


@define(eq=False)
class FakeLink:
    """One direction of a link; ``carry`` and ``carry_frame`` are the other side's ears."""

    peer: str
    carry: Callable[[Message], Awaitable[None]]
    carry_frame: Callable[[FrameHeader, bytes], Awaitable[None]]
    lost: trio.Event = Factory(trio.Event)
    reason: str = ""

    async def send(self, message: Message) -> None:
        await trio.lowlevel.checkpoint()
        if self.lost.is_set():
            raise PeerLostError(self.peer, self.reason)
        await self.carry(message)

    async def send_from(
        self, source: FrameSource, rank: SendRank = SendRank.ROUND, age: int = 0
    ) -> None:
        assert rank is SendRank.COPY
        while True:
            await trio.lowlevel.checkpoint()
            if self.lost.is_set():
                raise PeerLostError(self.peer, self.reason)
            if (load := source.next_frame()) is None:
                assert not source.left()
                return
            if (frame := load()) is not None:
                header, payload = frame
                assert len(payload) == header.payload_bytes
                await self.carry_frame(header, bytes(payload))


@define(eq=False)
class FakeHub:
    router: FrameRouter = Factory(FrameRouter)
    links: dict[str, FakeLink] = Factory(dict)

    async def link(self, peer: str, deadline_s: float = 15.0) -> FakeLink:
        await trio.lowlevel.checkpoint()
        if peer not in self.links or self.links[peer].lost.is_set():
            raise PeerLostError(peer, "no link")
        return self.links[peer]

    def register(
        self, key: tuple[int, ...], sink: Sink, *, threads: bool = False
    ) -> AbstractContextManager[None]:
        return self.router.register(key, sink, threads=threads)


class World:
    """A joiner and its donors, connected by links that do what ``Faults`` says."""

    def __init__(self, nursery: trio.Nursery, state: SharedState, seed: int = 0) -> None:
        self.nursery = nursery
        self.rng = random.Random(seed)
        self.network = MemoryWorld(random.Random(seed)).host("joiner", JOINER)
        self.state = state
        self.hub = cast(Any, FakeHub())
        self.joiner = Joiner(state, self.hub, self.network)
        self.served: dict[str, list[int]] = {}
        self.requests: list[tuple[str, Message]] = []

    async def add_donor(self, number: int, state: SharedState, faults: Faults | None = None) -> str:
        """A donor that runs production code behind a link with faults; returns its peer id."""
        peer = f"{number:032x}"
        faults = faults if faults is not None else Faults()
        served = self.served.setdefault(peer, [])
        donor_hub = cast(Any, FakeHub())
        donor = Donor(state, donor_hub, self.network)
        refusals_left = faults.refusals

        def lose(reason: str) -> None:
            for link in (self.hub.links[peer], donor_hub.links[JOINER]):
                link.reason = reason
                link.lost.set()

        async def to_donor(message: Message) -> None:
            nonlocal refusals_left
            self.requests.append((peer, message))
            if isinstance(message, IndexRequest) and refusals_left:
                refusals_left -= 1
                head = message.head
                self.joiner.receive(peer, BlocksRefused(head.fragment, head.version, 0, "later"))
                return
            assert isinstance(message, IndexRequest | BlocksRequest)
            donor.receive(JOINER, message)

        async def to_joiner(message: Message) -> None:
            if isinstance(message, Index) and faults.bad_index:
                message = Index(message.head, message.digests[32:] + message.digests[:32])
            assert isinstance(message, Index | BlocksRefused)
            self.joiner.receive(peer, message)

        async def frame_to_joiner(header: FrameHeader, payload: bytes) -> None:
            if len(served) >= faults.frames_max:
                if faults.then == "lose":
                    lose("it broke")
                elif faults.then == "refuse":
                    self.joiner.receive(peer, BlocksRefused(0, 2, header.transfer, "no more"))
                return
            if header.index in faults.lost:
                return
            served.append(header.index)
            self.nursery.start_soon(frame_arrives, header, payload)

        async def frame_arrives(header: FrameHeader, payload: bytes) -> None:
            await trio.sleep(self.rng.random() * faults.delay_s)
            data = bytearray(payload)
            if header.index in faults.corrupt:
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            if header.index in faults.cut:
                del data[-1]
                header = FrameHeader(header.kind, 0, 0, header.index, header.transfer, len(data))
            sink, view = await self.hub.router.place(peer, header)
            if sink is not None and view is not None:
                view[:] = data
                self.hub.router.deliver(sink, peer, header, view)

        async def no_frames(_header: FrameHeader, _payload: bytes) -> None:
            raise AssertionError("joiners send no frames")

        self.hub.links[peer] = FakeLink(peer, to_donor, no_frames)
        donor_hub.links[JOINER] = FakeLink(JOINER, to_joiner, frame_to_joiner)
        await self.nursery.start(donor.run)
        return peer

    async def add_donors(self, state: SharedState, *faults: Faults) -> list[str]:
        return [await self.add_donor(number, state, each) for number, each in enumerate(faults, 1)]

    def lose(self, peer: str) -> None:
        self.hub.links[peer].reason = "it broke"
        self.hub.links[peer].lost.set()

    async def fetch(self, head: FragmentHead) -> FetchReport:
        return await self.joiner.fetch(SyncFragment(head, tuple(self.hub.links)))


@asynccontextmanager
async def a_world(target: SharedState | None = None, seed: int = 0) -> AsyncIterator[World]:
    async with background() as nursery:
        yield World(nursery, make_state() if target is None else target, seed)


# ---------------------------------------------------------------- the good way


async def test_an_empty_peer_fetches_every_block_once_from_all_donors() -> None:
    source, target = trained(), make_state()
    seen: list[tuple[int, int]] = []
    async with a_world(target) as world:
        peers = [await world.add_donor(number, trained()) for number in (1, 2, 3)]
        order = SyncFragment(source.heads()[0], tuple(peers))
        report = await world.joiner.fetch(
            order, lambda copy, *_: seen.append((copy.done_blocks, copy.done_bytes))
        )
    assert target.heads() == source.heads()
    assert content(target) == content(source)
    assert sorted(block for served in world.served.values() for block in served) == list(
        range(BLOCK_COUNT)
    )
    assert all(len(served) > 5 for served in world.served.values())
    assert report == FetchReport(STATE_BYTES, tuple(peers), ())
    assert [blocks for blocks, _bytes in seen] == list(range(BLOCK_COUNT + 1))
    assert [seen[0][1], seen[-1][1]] == [0, STATE_BYTES]


async def test_a_fast_donor_gives_more_and_a_slow_one_holds_nobody_up() -> None:
    target = make_state()
    async with a_world(target) as world:
        slow = await world.add_donor(1, trained(), Faults(delay_s=15))
        fast = await world.add_donor(2, trained(), Faults(delay_s=0.01))
        started_s = trio.current_time()
        await world.fetch(trained().heads()[0])
    assert len(world.served[slow]) <= 4 < 40 < len(world.served[fast])
    assert trio.current_time() - started_s < 6, "what the slow one owes, the fast one gives"


async def asked_for(shared_donor: bool) -> list[int]:
    """The fragments of the blocks that a joiner of two fragments asks for, in order."""
    rng = np.random.default_rng(1)
    source, target = make_state(SIZE, SIZE), make_state(SIZE, SIZE)
    for fragment in (0, 1):
        values = rng.standard_normal(SIZE.value_count, dtype=np.float32)
        source.load_initial(fragment, values, rng.integers(1, 9, 9))
    async with a_world(target) as world:
        donors = [await world.add_donor(number, source) for number in (1, 2)]
        async with trio.open_nursery() as fetches:
            for head in source.heads():
                peer = donors[0] if shared_donor else donors[head.fragment]
                fetches.start_soon(world.joiner.fetch, SyncFragment(head, (peer,)))
                await trio.testing.wait_all_tasks_blocked()
    assert target.heads() == source.heads()
    requests = [message for _peer, message in world.requests if isinstance(message, BlocksRequest)]
    return [request.fragment for request in requests for _block in request.blocks]


async def test_a_donor_gives_one_fragment_after_the_other() -> None:
    asked = await asked_for(shared_donor=True)
    assert asked.count(0) == asked.count(1) > 30
    assert asked == sorted(asked)


async def test_fragments_of_different_donors_come_side_by_side() -> None:
    asked = await asked_for(shared_donor=False)
    assert asked.count(0) == asked.count(1) > 30
    assert 1 in asked[:10]


async def test_a_long_way_is_filled_with_requests() -> None:
    started_s = trio.current_time()
    await fetch_with(make_state(), Faults(delay_s=0.4))
    # Two blocks at a time would need 26 delays of 0.2 s and more.
    assert trio.current_time() - started_s < 2.5


async def test_a_state_that_is_equal_costs_no_byte_and_no_message() -> None:
    target = trained()
    async with a_world(target) as world:
        await world.add_donor(1, trained())
        report = await world.fetch(target.heads()[0])
    assert (report.received_bytes, report.donors, world.requests) == (0, (), [])
    assert target.heads() == trained().heads()


@pytest.mark.parametrize("newer", [False, True])
async def test_a_version_that_lies_on_disk_needs_no_donor(newer: bool) -> None:
    """Into an empty fragment, and in the place of what the run has given up."""
    target, saved = trained(3) if newer else make_state(), trained()
    (head,) = saved.heads()
    async with a_world(target) as world:
        lies_there = saved.fragments[0].parts, saved.fragments[0].index(head.version)
        world.joiner.on_disk = {head: lies_there}.get
        report = await world.joiner.fetch(SyncFragment(head, ()))
    assert (report.received_bytes, target.heads()) == (0, (head,))
    assert content(target) == content(saved)


async def test_equal_bytes_under_another_version_cost_an_index_and_no_block() -> None:
    source, target = trained(), trained()
    source.apply(0, 3, source.fragments[0].parts.counters.copy(), lambda v, m: None)
    report, world, _ = await fetch_with(target, Faults(), source=source)
    assert report.received_bytes == 0
    assert [type(message) for _, message in world.requests] == [IndexRequest]


@pytest.mark.fault("a copy of the state differs")
@pytest.mark.parametrize("told_by_its_head", [True, False])
async def test_only_blocks_that_differ_travel(told_by_its_head: bool) -> None:
    source, target = trained(), trained()
    if not told_by_its_head:  # another root, with nearly the same bytes: a round that went wrong
        target.apply(0, 3, target.fragments[0].parts.counters.copy(), lambda v, m: None)
    parts = target.fragments[0].parts
    parts.values[[5, 100]] += 1
    parts.momentum[-1] += 1
    parts.counters[-1] += 1
    report, world, (peer,) = await fetch_with(target, Faults(), source=source)
    assert sorted(world.served[peer]) == [0, 6, 49, 51]
    assert report.received_bytes == 64 + 64 + 4 + 8


async def test_a_pinned_version_is_fetched_while_the_donors_train_on() -> None:
    target = make_state()
    donors = [trained(), trained()]
    head, before = donors[0].heads()[0], content(donors[0])
    rng = np.random.default_rng(1)
    async with a_world(target) as world:
        for number, state in enumerate(donors, 1):
            assert state.fragments[0].pin(2, JOINER)
            await world.add_donor(number, state, Faults(delay_s=1))

        async def train() -> None:
            for _ in range(5):
                for state in donors:
                    advance(state, rng)
                await trio.sleep(0.7)

        world.nursery.start_soon(train)
        report = await world.fetch(head)
    assert content(target) == before
    assert target.heads() == (head,)
    assert report.received_bytes == STATE_BYTES
    assert donors[0].heads()[0].version > 3


async def test_a_donor_that_gets_to_the_version_a_little_later_is_asked_again() -> None:
    source, target = trained(), make_state()
    late = trained(rounds=1)
    async with a_world(target) as world:
        peer = await world.add_donor(1, late)

        async def catch_up() -> None:
            await trio.sleep(1.5)
            rng = np.random.default_rng(0)
            rng.standard_normal(SIZE.value_count, dtype=np.float32)
            rng.integers(1, 9, 9)
            advance(make := trained(rounds=0), rng)
            assert make.heads() == late.heads()
            advance(late, rng)

        world.nursery.start_soon(catch_up)
        report = await world.fetch(source.heads()[0])
    assert report.donors == (peer,)
    assert content(target) == content(source)


# ---------------------------------------------------------------- faults, one by one


async def fetch_with(
    target: SharedState, *faults: Faults, source: SharedState | None = None
) -> tuple[FetchReport, World, list[str]]:
    source = source or trained()
    async with a_world(target) as world:
        peers = await world.add_donors(source, *faults)
        report = await world.fetch(source.heads()[0])
    assert content(target) == content(source)
    assert target.heads() == source.heads()
    return report, world, peers


async def fail_with(target: SharedState, *faults: Faults) -> tuple[FetchFailedError, list[str]]:
    """The error of a fetch that must fail, and the donors."""
    source = trained()
    before = target.heads(), content(target)
    async with a_world(target) as world:
        peers = await world.add_donors(source, *faults)
        with pytest.raises(FetchFailedError) as caught:
            await world.fetch(source.heads()[0])
    if before[0]:  # a valid fragment stays what it was
        assert (target.heads(), content(target)) == before
    else:
        assert target.heads() == ()
    assert set(caught.value.reasons) == set(peers)
    return caught.value, peers


@pytest.mark.fault("a donor dies, stalls or lies")
@pytest.mark.parametrize("liar", [Faults(corrupt=EVERY_BLOCK), Faults(cut=EVERY_BLOCK)])
async def test_a_donor_that_serves_wrong_bytes_is_dropped_and_named(liar: Faults) -> None:
    report, world, peers = await fetch_with(make_state(), liar, Faults())
    assert report.bad_donors == (peers[0],)
    assert report.donors == (peers[1],)
    assert sorted(world.served[peers[1]]) == list(range(BLOCK_COUNT))  # the liar's blocks too
    assert world.served[peers[0]]


@pytest.mark.fault(
    "one block in a hundred of a donor's is wrong",
    "its digest, as it comes",
    "refused, asked of others; the donor is dropped and named",
)
async def test_a_few_wrong_blocks_among_good_ones_are_enough_to_be_named() -> None:
    few = Faults(corrupt=frozenset(range(3, BLOCK_COUNT, 13)))
    report, world, peers = await fetch_with(make_state(), Faults(), few, Faults())
    assert report.bad_donors == (peers[1],)
    assert peers[1] in report.donors, "what it gave before is good, for it was checked"
    good = [block for peer in (peers[0], peers[2]) for block in world.served[peer]]
    assert set(good) >= few.corrupt & set(world.served[peers[1]])


async def test_a_donor_with_a_wrong_index_is_dropped_and_named() -> None:
    report, world, peers = await fetch_with(make_state(), Faults(bad_index=True), Faults())
    assert report.bad_donors == (peers[0],)
    assert world.served[peers[0]] == []


async def test_a_liar_alone_is_an_error_that_names_it() -> None:
    error, peers = await fail_with(make_state(), Faults(corrupt=frozenset({51})))
    assert error.bad_donors == tuple(peers)
    assert "block 51" in str(error)


async def test_without_any_link_the_error_says_so() -> None:
    target = make_state()
    async with a_world(target) as world:
        peer = await world.add_donor(1, trained())
        world.lose(peer)
        with pytest.raises(FetchFailedError, match="no link") as caught:
            await world.fetch(trained().heads()[0])
        with pytest.raises(FetchFailedError, match="no donors"):
            await world.joiner.fetch(SyncFragment(trained().heads()[0], ()))
    assert caught.value.bad_donors == ()


@pytest.mark.fault(
    "a donor dies, stalls or lies",
    "lost link, silence, digests",
    "others serve its blocks; a liar is named",
)
@pytest.mark.parametrize("then", ["stall", "lose", "refuse"])
@pytest.mark.parametrize("frames", [0, 7])
async def test_what_a_failing_donor_owed_comes_from_the_others(then: str, frames: int) -> None:
    failing = Faults(frames_max=frames, then=then)
    started_s = trio.current_time()
    report, world, peers = await fetch_with(make_state(), failing, Faults(delay_s=0.5))
    assert report.bad_donors == ()
    assert len(world.served[peers[0]]) == frames
    # Silence takes a while to notice; everything else counts at once.
    assert trio.current_time() - started_s < (40 if then == "stall" else 15)


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("then", ["stall", "lose", "refuse"])
async def test_when_all_donors_fail_so_does_the_fetch(then: str, valid: bool) -> None:
    target = trained(seed=9) if valid else make_state()
    failing = Faults(frames_max=10, then=then)
    error, _ = await fail_with(target, failing, failing)
    assert error.bad_donors == ()
    # The next try takes up what this one got.
    report, world, _ = await fetch_with(target, Faults())
    served_count = sum(len(served) for served in world.served.values())
    if then == "stall":
        assert served_count == BLOCK_COUNT - 20
    else:  # some were on their way when the link broke
        assert BLOCK_COUNT - 20 <= served_count < BLOCK_COUNT
    assert report.bad_donors == ()


async def test_a_donor_that_never_answers_is_given_up() -> None:
    target = make_state()
    async with a_world(target) as world:
        peer = await world.add_donor(1, trained())

        async def swallow(_message: Message) -> None:
            return

        world.hub.links[peer].carry = swallow
        with pytest.raises(FetchFailedError, match="sent nothing for 20 s"):
            await world.fetch(trained().heads()[0])
        world.hub.links[peer].carry = lambda _message: trio.sleep_forever()
        with pytest.raises(FetchFailedError, match="takes no messages"):
            await world.fetch(trained().heads()[0])


async def test_a_donor_with_another_copy_refuses_rather_than_lies() -> None:
    source, target = trained(), make_state()
    async with a_world(target) as world:
        drifted = await world.add_donor(1, trained(seed=5))
        good = await world.add_donor(2, source)
        report = await world.fetch(source.heads()[0])
    assert (report.donors, report.bad_donors) == ((good,), ())
    assert world.served[drifted] == []


async def test_a_fetch_that_is_cancelled_leaves_a_valid_fragment_alone() -> None:
    target = trained(seed=3)
    before = target.heads(), content(target)
    async with a_world(target) as world:
        await world.add_donor(1, trained(), Faults(frames_max=20))
        with trio.move_on_after(5) as scope:
            await world.fetch(trained().heads()[0])
        assert scope.cancelled_caught
    assert (target.heads(), content(target)) == before


async def test_a_new_order_may_follow_a_cancelled_one_at_once() -> None:
    source, target = trained(), make_state()
    async with a_world(target) as world:
        await world.add_donor(1, source, Faults(delay_s=3))
        scope = trio.CancelScope()

        async def first() -> None:
            with scope:
                await world.fetch(source.heads()[0])

        world.nursery.start_soon(first)
        await trio.sleep(4)
        scope.cancel()
        report = await world.fetch(source.heads()[0])
    assert 0 < report.received_bytes < STATE_BYTES  # the first one's blocks were not lost
    assert content(target) == content(source)


async def test_answers_and_frames_that_nobody_asked_for_change_nothing() -> None:
    source, target = trained(), make_state()
    async with a_world(target) as world:
        honest = await world.add_donor(1, source, Faults(delay_s=3))
        head = source.heads()[0]
        outsider = f"{77:032x}"

        async def interfere() -> None:
            for _ in range(20):
                await trio.sleep(0.2)
                for peer in (outsider, honest):
                    world.joiner.receive(peer, Index(head, b"\0" * 64))
                    world.joiner.receive(peer, BlocksRefused(0, 2, 999, "no"))
                    world.joiner.receive(peer, BlocksRefused(1, 2, 1, "no"))
                world.joiner.receive(outsider, BlocksRefused(0, 2, 1, "no"))

        world.nursery.start_soon(interfere)
        report = await world.fetch(head)
    assert report == FetchReport(STATE_BYTES, (honest,), ())


async def test_an_index_of_an_earlier_fetch_is_not_taken_for_a_lie() -> None:
    source, target = trained(), make_state()
    async with a_world(target) as world:
        peer = await world.add_donor(1, source)
        link = world.hub.links[peer]
        answer = link.carry

        async def late_answer_first(message: Message) -> None:
            if isinstance(message, IndexRequest):
                old = FragmentHead(0, 1, bytes(32))
                world.joiner.receive(peer, Index(old, b"\0" * 32 * BLOCK_COUNT))
                world.joiner.receive(peer, BlocksRefused(0, 1, 0, "gone"))
            await answer(message)

        link.carry = late_answer_first
        report = await world.fetch(source.heads()[0])
    assert (report.donors, report.bad_donors) == ((peer,), ())


# ---------------------------------------------------------------- the donor's limits


async def test_a_donor_refuses_requests_that_make_no_sense() -> None:
    async with a_world() as world:
        donor = Donor(trained(), cast(Any, FakeHub()), world.network)
        await world.nursery.start(donor.run)
        for request in (
            IndexRequest(FragmentHead(1, 0, b"")),
            BlocksRequest(1, 2, 1, (0,)),
            BlocksRequest(0, 2, 1, (BLOCK_COUNT,)),
            BlocksRequest(0, 2, 2**32, (0,)),
            BlocksRequest(0, 2, 1, (0,) * (QUEUED_MAX + 1)),
        ):
            with pytest.raises(RemoteProtocolError):
                donor.receive(JOINER, request)
        donor.receive(JOINER, BlocksRequest(0, 2, 1, (0,) * 10))  # no link: dropped
        assert not +donor._unsent


async def test_what_was_asked_over_a_lost_link_is_not_sent_over_the_next() -> None:
    sent: list[int] = []
    async with a_world() as world:
        hub = cast(Any, FakeHub())

        async def hear(_message: Message) -> None:
            raise AssertionError("nothing is refused")

        async def slow_frames(header: FrameHeader, _payload: bytes) -> None:
            sent.append(header.transfer)
            await trio.sleep(1)
            if old.lost.is_set():
                raise PeerLostError(JOINER, "it broke")

        async def frames(header: FrameHeader, _payload: bytes) -> None:
            sent.append(header.transfer)

        old = FakeLink(JOINER, hear, slow_frames)
        hub.links[JOINER] = old
        donor = Donor(trained(), hub, world.network)
        donor.receive(JOINER, BlocksRequest(0, 2, 1, tuple(range(20))))
        await world.nursery.start(donor.run)  # what came before is served now
        await trio.sleep(0.5)
        old.lost.set()
        hub.links[JOINER] = FakeLink(JOINER, hear, frames)
        donor.receive(JOINER, BlocksRequest(0, 2, 2, (3, 4)))
        await trio.sleep(5)
        assert not +donor._unsent
    assert sent == [1, 2, 2]


async def test_a_version_that_is_gone_is_refused_once() -> None:
    state = trained()
    said: list[Message] = []
    async with a_world() as world:
        hub = cast(Any, FakeHub())

        async def hear(message: Message) -> None:
            said.append(message)

        async def no_frames(_header: FrameHeader, _payload: bytes) -> None:
            raise AssertionError("there is nothing to send")

        hub.links[JOINER] = FakeLink(JOINER, hear, no_frames)
        donor = Donor(state, hub, world.network)
        await world.nursery.start(donor.run)
        donor.receive(JOINER, BlocksRequest(0, 1, 5, tuple(range(20))))
        donor.receive(JOINER, IndexRequest(FragmentHead(0, 1, bytes(32))))
        await trio.sleep(1)
    assert all(isinstance(message, BlocksRefused) for message in said)
    transfers = [message.transfer for message in said if isinstance(message, BlocksRefused)]
    assert transfers.count(0) == 1
    assert transfers.count(5) == 1


# ---------------------------------------------------------------- all faults together


async def outcome_of(world: World, head: FragmentHead) -> FetchReport | FetchFailedError:
    try:
        return await world.fetch(head)
    except FetchFailedError as error:
        return error


some_blocks = st.frozensets(st.integers(0, BLOCK_COUNT - 1), max_size=3)
some_faults = st.builds(
    Faults,
    corrupt=some_blocks,
    cut=st.one_of(st.just(frozenset()), some_blocks),
    lost=st.one_of(st.just(frozenset()), some_blocks, st.just(EVERY_BLOCK)),
    bad_index=st.sampled_from([False, False, False, True]),
    refusals=st.sampled_from([0, 0, 1, 4, 5]),
    frames_max=st.one_of(st.just(10**9), st.integers(0, BLOCK_COUNT)),
    then=st.sampled_from(["stall", "lose", "refuse"]),
    delay_s=st.sampled_from([0.0, 0.01, 1.0, 8.0]),
)


@pytest.mark.fault("one block in a hundred of a donor's is wrong")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    donors=st.lists(st.one_of(st.just(Faults()), some_faults), min_size=1, max_size=5),
    held=st.sampled_from(["nothing", "another", "damaged", "older"]),
    damage=st.lists(st.integers(0, SIZE.value_count - 1), max_size=6),
    seed=st.integers(0, 2**32),
)
def test_the_same_state_or_an_error_that_names_the_liars(
    donors: list[Faults], held: str, damage: list[int], seed: int
) -> None:
    makers: dict[str, Callable[[], SharedState]] = {
        "nothing": make_state,
        "another": lambda: trained(seed=1),
        "damaged": trained,
        "older": lambda: trained(rounds=1),
    }
    target = makers[held]()
    source = trained()
    if held == "damaged":
        target.fragments[0].parts.values[damage] += 1
    before = target.heads(), content(target)

    async def main() -> None:
        async with a_world(target, seed) as world:
            peers = await world.add_donors(source, *donors)
            liars = {peer for peer, faults in zip(peers, donors, strict=True) if faults.lies}
            with trio.fail_after(600):
                outcome = await outcome_of(world, source.heads()[0])
                if isinstance(outcome, FetchFailedError):
                    event("failed")
                    assert not any(faults.serves_all for faults in donors)
                    assert set(outcome.bad_donors) <= liars
                    assert set(outcome.reasons) == set(peers)
                    if before[0]:
                        assert (target.heads(), content(target)) == before
                    else:
                        assert target.heads() == ()
                else:
                    event(f"{len(outcome.donors)} donors gave, {len(outcome.bad_donors)} lied")
                    assert target.heads() == source.heads()
                    assert content(target) == content(source)
                    assert set(outcome.bad_donors) <= liars
                    assert target._open_transfer(0) is None

    run_virtually(main, seed=0)

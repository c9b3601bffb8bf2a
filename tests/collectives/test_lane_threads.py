"""Links over real sockets: their lanes' threads break, wait, hang up and go as they should."""

from __future__ import annotations

import contextlib
import math
import random
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trio
from attrs import define, field

from holdfast.collectives.links import lane_threads, send_queue
from holdfast.collectives.links.lane_pool import CONGESTION_AGAIN_S
from holdfast.collectives.links.link import Link
from holdfast.collectives.links.link_parts import LaneRules
from holdfast.collectives.links.rates import line_rate
from holdfast.collectives.links.rates.line_watch import LineWatch
from holdfast.collectives.links.rates.rate_limiter import BURST_S, RateLimiter
from holdfast.collectives.links.rates.send_priority import SendRank
from holdfast.collectives.links.send_queue import Frame, Load
from holdfast.protocol.network.lane import FrameHeader
from holdfast.protocol.network.socket_options import congestion_of, retransmitted_bytes
from holdfast.protocol.wakeups import Loop
from tests.background import SOON_S, background, until
from tests.collectives.net import KEY, RealNode, frame, note, real_nodes
from tests.lossy import drops_everything

pytestmark = pytest.mark.real_time


@define(eq=False)
class ThreadSink:
    """Keeps what arrived, in this order; may be called from threads."""

    arrived: list[tuple[int, bytes]] = field(factory=list)
    keep: bool = True
    only_thread: int | None = None  # the event loop's, where others must not call

    def check_thread(self) -> None:
        assert self.only_thread in (None, threading.get_ident())

    def place(self, _peer: str, header: FrameHeader) -> memoryview:
        self.check_thread()
        return memoryview(bytearray(header.payload_bytes))

    def deliver(self, _peer: str, header: FrameHeader, payload: memoryview) -> None:
        self.check_thread()
        self.arrived.append((header.index, bytes(payload) if self.keep else b""))

    def abandon(self, _peer: str, _header: FrameHeader, _view: memoryview) -> None:
        self.check_thread()


class Frames:
    """A source of a number of frames; the contents follow from their indices."""

    def __init__(self, count: int, payload_bytes: int) -> None:
        self.count, self.payload_bytes, self.position = count, payload_bytes, 0

    def payload(self, index: int) -> bytes:
        return random.Random(index).randbytes(64) * (self.payload_bytes // 64)

    def next_frame(self) -> Load | None:
        index = self.position
        if index == self.count:
            return None
        self.position += 1

        def load() -> Frame:
            payload = self.payload(index)
            return frame(index, payload), payload

        return load

    def left(self) -> int:
        return self.count - self.position


async def link_between(a: RealNode, b: RealNode, lanes: int = 2) -> Link:
    link = await a.hub.link(b.hub.me)
    await until(lambda: len(link.lanes.working) >= lanes)
    return link


def sockets_of(link: Link) -> list[trio.socket.SocketType]:
    streams = [lane.stream for lane in link.lanes.working]
    return [stream.socket for stream in streams if isinstance(stream, trio.SocketStream)]


def break_lane(link: Link, position: int) -> None:
    with contextlib.suppress(OSError):  # the other end was faster
        sockets_of(link)[position].shutdown(socket.SHUT_RDWR)


def busy_threads() -> int:
    return lane_threads._LANE_THREADS.borrowed_tokens


@pytest.mark.parametrize("threads", [True, False])
async def test_every_frame_arrives_once_though_lanes_keep_breaking(
    tmp_path: Path, threads: bool
) -> None:
    rng = random.Random(0)
    async with real_nodes(tmp_path, rules=LaneRules(4, 4)) as (a, b):
        link, back = await link_between(b, a, 4), await link_between(a, b, 4)
        sink = ThreadSink(only_thread=None if threads else threading.get_ident())
        source = Frames(150, 2**20)
        with a.hub.register(KEY, sink, threads=threads), trio.fail_after(SOON_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(link.send_from, source)
                breaks = 0
                while breaks < 3 or source.position < source.count - 20:
                    await trio.sleep(0.01)
                    victim = rng.choice((link, back))
                    if victim.lanes.working:
                        break_lane(victim, rng.randrange(len(victim.lanes.working)))
                        breaks += 1
            await until(lambda: len(sink.arrived) == source.count)
        assert sorted(sink.arrived) == [(index, source.payload(index)) for index in range(150)]
        assert not link.lost.is_set()
        assert not back.lost.is_set()


async def test_open_lanes_change_their_congestion_control_once_they_may(tmp_path: Path) -> None:
    """The kernel lets every process have reno; it stands for a module that was loaded meanwhile."""
    async with real_nodes(tmp_path, rules=LaneRules(2, 2, "cubic")) as (_a, b):
        link = await link_between(b, _a, 2)
        link.lanes.rules = LaneRules(2, 2, "reno")
        before = {lane.facts.congestion for lane in link.lanes.working}
        link.lanes.watch(CONGESTION_AGAIN_S / 2)
        assert {lane.facts.congestion for lane in link.lanes.working} == before
        link.lanes.watch(CONGESTION_AGAIN_S / 2)
        assert {lane.facts.congestion for lane in link.lanes.working} == {"reno"}
        assert {congestion_of(sock) for sock in sockets_of(link)} == {"reno"}


async def test_an_idle_link_uses_no_threads_and_a_lost_one_neither(tmp_path: Path) -> None:
    async with real_nodes(tmp_path) as (a, b):
        link = await link_between(b, a)
        sink = ThreadSink()
        with a.hub.register(KEY, sink, threads=True):
            await link.send_from(Frames(20, 2**20))
            await until(lambda: not busy_threads())
            await link.send_from(Frames(20, 2**20))  # they come back
        async with trio.open_nursery() as nursery:
            with a.hub.register((*KEY[:2], 2), sink, threads=True):
                nursery.start_soon(_send_and_be_cut_off, link)
                await trio.sleep(0.1)
                link.close("enough")
                with trio.fail_after(SOON_S):
                    await link.finished.wait()
        await until(lambda: not busy_threads())


async def _send_and_be_cut_off(link: Link) -> None:
    with pytest.raises(Exception, match="enough"):
        await link.send_from(Frames(10_000, 2**20))


def lost_bytes(link: Link) -> int:
    """Ask the kernel about the lanes that are open."""
    return sum(map(retransmitted_bytes, sockets_of(link)))


async def test_retransmitted_bytes_of_lanes_and_links_that_ended_count(tmp_path: Path) -> None:
    async with real_nodes(tmp_path, rules=LaneRules(2, 2)) as (a, b):
        link, back = await link_between(b, a), await link_between(a, b)
        sink = ThreadSink()
        with a.hub.register(KEY, sink, threads=True), trio.fail_after(SOON_S):
            with contextlib.ExitStack() as lost:
                for sock in sockets_of(back):
                    lost.enter_context(drops_everything(sock))
                await link.send_from(Frames(4, 2**14))
                await until(lambda: lost_bytes(link))
            await until(lambda: len(sink.arrived) == 4)
            old = set(link.lanes.working)
            counted = lost_bytes(link)  # not asked of the link, which must know it after their end
            assert back.lanes.count_retransmitted() == 0, "it sent nothing that was lost"
            for position in (1, 0):
                break_lane(link, position)
            await until(lambda: len(link.lanes.working) == 2 and not old & set(link.lanes.working))
            assert lost_bytes(link) == 0
            assert link.lanes.count_retransmitted() == b.hub.count_retransmitted() == counted
            link.close("enough")
            await link.finished.wait()
            await until(lambda: b.hub.links.get(a.hub.me) not in (None, link))
            assert b.hub.links[a.hub.me].lanes.count_retransmitted() == 0
            assert b.hub.count_retransmitted() == counted


@define(eq=False)
class ShutSink(ThreadSink):
    """Takes nothing until it is opened."""

    opened: threading.Event = field(factory=threading.Event)

    def place(self, peer: str, header: FrameHeader) -> memoryview:
        assert self.opened.wait(SOON_S)
        return super().place(peer, header)


async def test_bytes_in_the_kernels_send_buffer_are_under_way(tmp_path: Path) -> None:
    """Otherwise a line looks as fast as memory, and the plan gives the slowest peers the most."""
    async with real_nodes(tmp_path) as (a, b):
        link = await link_between(b, a)
        sink, source = ShutSink(), Frames(4, 2**14)
        with a.hub.register(KEY, sink, threads=True), trio.fail_after(SOON_S):
            b.hub.take_measurements()  # of lanes' first words
            try:
                await link.send_from(source)
                taken = b.hub.take_measurements().sent
                assert taken.carried_bytes == 0
                assert taken.busy_s > 0.0
            finally:
                sink.opened.set()
            sent_bytes = 0
            while sent_bytes < 4 * 2**14:
                await trio.sleep(0.01)
                later = b.hub.take_measurements().sent
                sent_bytes += later.carried_bytes
        assert sent_bytes == 4 * 2**14
        assert b.hub.take_measurements().sent.busy_s == 0.0, "nothing is under way any more"


async def test_messages_pass_while_bulk_fills_a_capped_link(tmp_path: Path) -> None:
    async with real_nodes(tmp_path, upload=RateLimiter(2e6)) as (a, b):
        link = await link_between(a, b)
        with b.hub.register(KEY, ThreadSink(keep=False), threads=True):
            async with background() as nursery:
                nursery.start_soon(link.send_from, Frames(10_000, 2**20))
                await trio.sleep(0.5)
                for sequence in range(50):
                    await link.send(note(sequence))
                await until(lambda: len(b.heard) == 50)  # behind the bulk it would be hours
    assert b.heard == [note(sequence) for sequence in range(50)]


@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_cap_holds_over_real_sockets(tmp_path: Path, way: str) -> None:
    """Over any stretch of time no more passes than the burst and the rate times that time."""
    rate, lanes = 4e6, 2
    cap = RateLimiter(rate)
    up, down = (cap, None) if way == "up" else (None, cap)
    rules = LaneRules(lanes, lanes)
    async with real_nodes(tmp_path, 3, rules=rules, upload=up, download=down) as (a, *others):
        ends = [(a, other) if way == "up" else (other, a) for other in others]
        links = [await link_between(source, target, lanes) for source, target in ends]

        def carried_bytes() -> int:
            return a.hub.sent_bytes if way == "up" else a.hub.received_bytes

        before_bytes, began_s = carried_bytes(), trio.current_time()
        async with background() as nursery:
            for link, (_source, target) in zip(links, ends, strict=True):
                nursery.start_soon(_sink_for_ever, target)
                nursery.start_soon(link.send_from, Frames(10_000, 2**18))
            await until(lambda: carried_bytes() - before_bytes >= 1.5 * rate)
            carried, elapsed_s = carried_bytes() - before_bytes, trio.current_time() - began_s
    # A receiver takes from the limiter after a slice came: each lane may be one slice ahead.
    ahead_bytes = len(links) * lanes * cap.slice_bytes if way == "down" else 0
    assert carried <= rate * (BURST_S + elapsed_s) + ahead_bytes


async def test_links_get_equal_parts_of_the_pace_whatever_their_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LineWatch, "look", lambda *_: None)  # the path is too short to be paced
    async with real_nodes(tmp_path, 3, rules=LaneRules(4, 4)) as (a, *others):
        many, few = [await link_between(a, other, 4) for other in others]
        for node in (a, others[0]):
            node.hub.configure(rules=LaneRules(16, 16), silence_s=math.inf)
        many.close("it gets other rules")
        await many.finished.wait()
        with trio.fail_after(SOON_S):
            while len((many := await link_between(a, others[0], 4)).lanes.working) < 16:
                await trio.sleep(0.01)
        pace = RateLimiter(6e6, burst_s=0.02, slice_s=0.005)
        a.hub._shared.line._limiter = pace
        async with background() as nursery:
            for link, target in zip((many, few), others, strict=True):
                nursery.start_soon(_sink_for_ever, target)
                nursery.start_soon(link.send_from, Frames(10_000, 2**16))
            await until(lambda: many.lanes.sent_bytes + few.lanes.sent_bytes >= 12e6)
        # One after the other it would be 16 to 4.
        assert 0.6 < many.lanes.sent_bytes / few.lanes.sent_bytes < 1.7


@pytest.mark.fault(
    "copies and rounds want the same line", "frames of rounds under way", "rounds first"
)
async def test_a_frame_of_a_copy_lets_a_round_pass_in_its_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_queue, "WAIT_S_MAX", math.inf)
    # The path is short, also where a busy machine is slow to answer: nobody knows what rounds
    # leave.
    monkeypatch.setattr(line_rate, "ROUND_TRIP_S_MIN", math.inf)
    async with real_nodes(tmp_path, 3, rules=LaneRules(1, 1)) as (a, b, c):
        priority = a.hub._shared.send_priority
        priority.share = 0.0
        begun = trio.Event()

        class Copy(Frames):
            def next_frame(self) -> Load | None:
                load = super().next_frame()

                def load_as_a_round_begins() -> Frame | None:
                    priority.begin(SendRank.ROUND, loop.now_s())
                    loop.soon(begun.set)
                    return load() if load is not None else None

                return load_as_a_round_begins

        loop = Loop()
        copying, ours = await link_between(a, b, 1), await link_between(a, c, 1)
        copy, results = ThreadSink(keep=False), ThreadSink(keep=False)
        with b.hub.register(KEY, copy, threads=True), c.hub.register(KEY, results, threads=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(copying.send_from, Copy(1, 2**20), SendRank.COPY)
                with trio.fail_after(SOON_S):
                    await begun.wait()
                    await ours.send_from(Frames(32, 2**20))
                    await until(lambda: len(results.arrived) == 32, 0.001)
                    assert not copy.arrived, "it is shorter by far"
                    priority.end(SendRank.ROUND, 0, loop.now_s())
                    await until(lambda: copy.arrived)


async def _sink_for_ever(node: RealNode) -> None:
    if KEY not in node.hub.router._sinks:
        with node.hub.register(KEY, ThreadSink(keep=False), threads=True):
            await trio.sleep_forever()


async def test_closing_in_the_middle_of_everything_ends_at_once(tmp_path: Path) -> None:
    with trio.fail_after(SOON_S):
        async with real_nodes(tmp_path, upload=RateLimiter(1e5)) as (a, b):
            link = await link_between(a, b)
            async with background() as nursery:
                nursery.start_soon(link.send_from, Frames(10_000, 2**23))
                await until(busy_threads)
                await trio.sleep(0.3)  # the frame waits for the cap, the other end for the frame
                assert busy_threads()
            link.close("enough")  # only here: the other side does not help
            await link.finished.wait()
    assert busy_threads() == 0


def test_an_interrupt_in_the_middle_of_a_transfer_ends_the_process(tmp_path: Path) -> None:
    script = f"""
import sys, trio
from pathlib import Path
from tests.collectives.test_lane_threads import *
async def main():
    async with real_nodes(Path({str(tmp_path)!r})) as (a, b):
        link = await link_between(a, b)
        with b.hub.register(KEY, ThreadSink(keep=False), threads=True):
            print("busy", flush=True)
            await link.send_from(Frames(10**9, 2**20))
trio.run(main, restrict_keyboard_interrupt_to_checkpoints=True)
"""
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"busy\n"
        process.send_signal(signal.SIGINT)
        try:
            _out, errors = process.communicate(timeout=SOON_S)
        finally:
            process.kill()
    assert b"KeyboardInterrupt" in errors

"""Streams of a virtual network: pairs of pipes between two hosts, in virtual time.

Bytes pass a pipe in order. The sender waits for room in the pipe's buffer and for its turn on the
line (streams of one pair take turns, a segment at a time), then the segment travels for the line's
delay.
"""

from __future__ import annotations

import enum
import math
from collections import deque

import trio
from attrs import define, field

from ..protocol.trust.authority import Party
from .memory_lines import MemoryHostLine, MemoryLines, MemoryLink, Sent
from .virtual_time import Alarm

SEGMENT_BYTES = 65_536  # bytes that a stream puts on a link in one turn
RECEIVE_BYTES = 65_536  # default of ``receive_some``
AHEAD_S = 0.001  # the sender of a control stream may continue this long before its bytes have left
FIRST_FREE_PORT = 40_000


def _leaves_s(way: MemoryLink | MemoryHostLine, ready_s: float, count_bytes: int) -> float:
    """Queue bytes on a line and return the time at which they have left."""
    if way.bytes_per_s == math.inf:
        return ready_s
    way.free_s = max(way.free_s, ready_s) + count_bytes / way.bytes_per_s
    return way.free_s


class Pipe:
    """One direction of a stream."""

    def __init__(self, lines: MemoryLines, source: Host, target: Host, lane: bool) -> None:
        self._lines = lines
        self.source = source
        self.target = target
        self.lane = lane
        self._segments: deque[tuple[float, bytes]] = deque()  # (arrival time, data)
        self._buffered_bytes = 0
        self._end_s = math.inf  # time at which the reader learns that the stream has ended
        self._end_is_reset = False
        self._gone_s = math.inf  # time at which the writer learns that the reader is gone
        self._writer_closed = False
        self._reader_closed = False
        self._departure = Alarm()  # the current segment has left
        self._room = Alarm()  # the buffer has room
        self._news = Alarm()  # the reader has something to read or raise

    def wake(self) -> None:
        self._room.ring()
        self._news.ring()

    def _held(self) -> bool:
        return self._lines.held(self.source.name, self.target.name)

    def _news_held(self) -> bool:
        """Return whether the news that the reader is gone is held on its way back."""
        return self._lines.held(self.target.name, self.source.name)

    # ------------------------------------------------------------ the writer's end

    def check_writable(self) -> None:
        if not self.source.alive:
            raise trio.BrokenResourceError("this host crashed")
        if self._writer_closed:
            raise trio.ClosedResourceError("this side closed the stream")
        if (
            self._gone_s < math.inf
            and trio.current_time() >= self._gone_s
            and not self._news_held()
        ):
            raise trio.BrokenResourceError("the other side is gone")

    async def wait_room(self) -> bool:
        """Wait for room in the buffer; return True if it had to wait."""
        self.check_writable()
        waited = False
        while self._buffered_bytes >= min(self._lines.buffer_bytes, self.link.window_bytes):
            await self._room.wait(math.inf if self._news_held() else self._gone_s)
            self.check_writable()
            waited = True
        return waited

    @property
    def link(self) -> MemoryLink:
        return self._lines.direction(self.source.name, self.target.name)

    async def transmit(self, data: bytes) -> bool:
        """Send a segment when its turn comes; return True if it had to wait."""
        link = self.link
        now_s = leaves_s = trio.current_time()
        ahead_s = 0.0 if self.lane else AHEAD_S
        waited = False
        lines = self._lines.lines_between(self.source.name, self.target.name)
        ways: list[MemoryLink | MemoryHostLine] = [link, *lines]
        for way in ways:
            leaves_s = _leaves_s(way, leaves_s, len(data))
            if leaves_s > now_s + ahead_s:
                await self._departure.wait(leaves_s)
                self.check_writable()
                now_s, waited = trio.current_time(), True
        if self._gone_s < math.inf:
            return waited  # lost: the reader is gone, but the writer does not know yet
        jitter_s = self._lines.rng.uniform(0.0, link.jitter_s) if link.jitter_s else 0.0
        # If jitter makes a segment arrive before an earlier one, it waits in the queue.
        self._segments.append((leaves_s + link.delay_s + jitter_s, data))
        self._buffered_bytes += len(data)
        if not self._held():
            self._news.bring_forward(self._segments[0][0])
        return waited

    def end(self, *, reset: bool) -> None:
        """End the stream: the writer closed it, or was cut off."""
        self._writer_closed = self._writer_closed or not reset
        if self._end_s == math.inf:
            link = self._lines.direction(self.source.name, self.target.name)
            self._end_s = trio.current_time() + link.delay_s
            self._end_is_reset = reset
        self.wake()

    def lose_tail(self) -> None:
        """Drop a random tail of the unread bytes, as if they had not left the sender."""
        keep_bytes = self._lines.rng.randint(0, self._buffered_bytes)
        kept: deque[tuple[float, bytes]] = deque()
        for arrival_s, data in self._segments:
            if keep_bytes <= 0:
                break
            kept.append((arrival_s, data[:keep_bytes]))
            keep_bytes -= len(data)
        self._segments = kept
        self._buffered_bytes = sum(len(data) for _, data in kept)

    # ------------------------------------------------------------ the reader's end

    async def receive(self, max_bytes: int) -> bytes:
        waited = False
        while (wake_s := self._next_news_s()) > trio.current_time():
            await self._news.wait(wake_s)
            waited = True
        if not waited:
            await trio.lowlevel.checkpoint()
        self._check_readable()
        if self._segments:
            return self._take(max_bytes)
        if self._end_is_reset:
            raise trio.BrokenResourceError("the connection was reset")
        return b""

    def _check_readable(self) -> None:
        if not self.target.alive:
            raise trio.BrokenResourceError("this host crashed")
        if self._reader_closed:
            raise trio.ClosedResourceError("this side closed the stream")

    def _next_news_s(self) -> float:
        """Return the time at which there is something to read or raise, as known now."""
        if not self.target.alive or self._reader_closed:
            return -math.inf
        if self._held():
            return math.inf
        return self._segments[0][0] if self._segments else self._end_s

    def _take(self, max_bytes: int) -> bytes:
        arrival_s, data = self._segments.popleft()
        taken, rest = data[:max_bytes], data[max_bytes:]
        if rest:
            self._segments.appendleft((arrival_s, rest))
        self._buffered_bytes -= len(taken)
        self._room.ring()
        return taken

    def unread(self, data: bytes) -> None:
        if data:
            self._segments.appendleft((trio.current_time(), data))
            self._buffered_bytes += len(data)

    def stop_reading(self) -> None:
        """Close the reader's end; the writer learns it after the link's delay."""
        link = self._lines.direction(self.target.name, self.source.name)
        self._reader_closed = True
        self._segments.clear()
        self.lose_reader(link.delay_s)

    def lose_reader(self, after_s: float) -> None:
        """Lose all bytes sent from now on; the writer learns it after ``after_s``."""
        self._gone_s = min(self._gone_s, trio.current_time() + after_s)
        self.wake()


class _OneAtATime:
    """A context that only one task may enter at a time."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._busy = False

    def __enter__(self) -> None:
        if self._busy:
            raise trio.BusyResourceError(f"another task is {self._doing} on this stream")
        self._busy = True

    def __exit__(self, *_: object) -> None:
        self._busy = False


class MemoryStream(trio.abc.HalfCloseableStream):
    """One end of a connection between two virtual hosts."""

    def __init__(self, lines: MemoryLines, host: Host, outward: Pipe, inward: Pipe) -> None:
        self._lines = lines
        self._host = host
        self._outward = outward
        self._inward = inward
        self._only_sender = _OneAtATime("sending")
        self._only_receiver = _OneAtATime("receiving")
        self._closed = False
        self.port = self.far_port = 0  # local port, if this end dialled; the other end's
        host.streams[self] = None

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._only_sender:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._outward.check_writable()
            if self._is_torn():
                self.cut()
            content = self._lines.pass_filter(
                Sent(self._host.name, self.other, self._outward.lane, bytes(data))
            )
            waited = False
            for start in range(0, len(content), SEGMENT_BYTES):
                waited |= await self._outward.wait_room()
                waited |= await self._outward.transmit(content[start : start + SEGMENT_BYTES])
            if not waited:
                await trio.lowlevel.cancel_shielded_checkpoint()

    def _is_torn(self) -> bool:
        return not self._outward.lane and self._lines.is_torn(self._host.name, self.other)

    async def wait_send_all_might_not_block(self) -> None:
        with self._only_sender:
            await trio.lowlevel.checkpoint()
            await self._outward.wait_room()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is None:
            max_bytes = RECEIVE_BYTES
        if not isinstance(max_bytes, int):
            raise TypeError("max_bytes must be an integer")
        if max_bytes < 1:
            raise ValueError("max_bytes must be at least 1")
        with self._only_receiver:
            return await self._inward.receive(max_bytes)

    async def send_eof(self) -> None:
        with self._only_sender:
            self._outward.end(reset=False)
            await trio.lowlevel.checkpoint()

    def unread(self, data: bytes) -> None:
        """Put back the data received last."""
        self._inward.unread(data)

    @property
    def round_trip_s(self) -> float:
        """The round-trip time without other traffic."""
        there, back = self._outward.link, self._inward.link
        return there.delay_s + back.delay_s

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._outward.end(reset=False)
            self._inward.stop_reading()
            self._host.streams.pop(self, None)
        await trio.lowlevel.checkpoint()

    def crash(self) -> None:
        """Break the stream: this end's host crashed; the other end learns it after the delay."""
        self._outward.lose_tail()
        self._outward.end(reset=True)
        self._inward.stop_reading()

    def cut(self) -> None:
        """Break the stream at both ends; bytes in flight still arrive."""
        for pipe in (self._outward, self._inward):
            pipe.end(reset=True)
            pipe.lose_reader(0.0)

    def wake(self) -> None:
        """Let both pipes notice that a fault began or ended."""
        self._outward.wake()
        self._inward.wake()

    @property
    def other(self) -> str:
        """The name of the host at the other end."""
        return self._outward.target.name


class DialKind(enum.Enum):
    """The purpose of a dialled stream, which a real one shows by its first byte."""

    CONTROL = enum.auto()
    LANE = enum.auto()
    RELAY = enum.auto()


Accepted = tuple["MemoryStream", "Host", DialKind]  # accepted end, dialling host, purpose


@define(eq=False)
class Host:
    """One life of a host; a crash ends it, ``MemoryWorld.host`` begins the next."""

    name: str
    peer: str
    party: Party
    alive: bool = True
    listeners: dict[int, trio.MemorySendChannel[Accepted]] = field(factory=dict)
    streams: dict[MemoryStream, None] = field(factory=dict)  # a set in order of creation
    next_port: int = FIRST_FREE_PORT  # local port of its next dial, for hosts behind a NAT

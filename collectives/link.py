"""A link: everything between this node and one other member.

One control stream (messages, inside TLS) and a few lanes (frames of bulk bytes). The lanes have no
static split: a frame goes to the lane that is idle first. A link lives and dies as one: when any of
its streams breaks, or accepts no byte for ``stall_s``, all of it is closed, ``lost`` is set, and
whoever waits is told. So it is when nothing at all comes from the other side for ``silence_s``:
both sides send a ``Heartbeat`` several times in that span.

    run                    until the link is lost; closes all its streams
     ├── read_messages     control stream -> on_message
     ├── write_messages    outbox of messages -> control stream
     ├── beat              a heartbeat now and then
     ├── listen            counts the silence
     ├── read_frames       one per lane: lane -> router -> sink
     ├── write_frames      one per lane: outlet -> lane
     └── hang_up           wakes the lanes' threads when all this is cancelled

Nothing is ever sent from the caller's task: a caller that is cancelled in the middle of a frame
would tear the lane. It may leave a frame that is still queued; one that is on its way is finished.

Over real sockets the lanes' tasks hand their lane to a thread whenever there is something to do. It
works without the event loop as long as frames follow each other: it takes them from the outlet, or
gives them to sinks that may be called from threads. The loop is asked about frames that nobody
waits for yet. So an idle link costs no thread, and a busy one no event.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

import trio
from attrs import define, field

from ..protocol.errors import LocalProtocolError, PeerLostError, RemoteProtocolError
from ..protocol.lane import (
    HEADER_BYTES,
    PIECE_BYTES,
    TAG_BYTES,
    Buffer,
    FrameHeader,
    Lane,
)
from ..protocol.messages import Heartbeat, Message
from ..protocol.socket_lane import SocketLane
from ..protocol.stream import MessageStream
from .limiter import UploadLimiter
from .meter import Meter
from .outlet import FrameSource, OneFrame, Outlet, Taken
from .routing import FrameRouter, Sink

LANE_COUNT = 2  # lanes of a link, numbered from 0
STALL_S = 20.0  # a slice that no one takes for this long means that the other side is gone
# Bytes given to a stream at once: what has to move within ``stall_s``, per lane (about 100 kbit/s).
SLICE_BYTES = HEADER_BYTES + PIECE_BYTES + TAG_BYTES
# A lane's thread that has nothing to do waits so long before it goes: longer than the gaps within a
# round, so that threads come and go by round, not by frame.
LINGER_S = 0.1
# Lanes' threads have places of their own: they must not wait behind other work, nor it behind them.
_LANE_THREADS = trio.CapacityLimiter(math.inf)

BEATS_PER_SILENCE = 4  # heartbeats in the time after which silence means loss

T = TypeVar("T")

OnMessage = Callable[[str, Message], Awaitable[None]]


class PacedStream(trio.abc.Stream):
    """A stream that sends in slices: capped by the node's limiter, broken when one gets stuck.

    Args:
      limiter: None: no cap.
      stall_s: how long the transport may take over one slice; waiting for the cap does not count.
      meter: counts what is sent, and the time the transport takes; likewise.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        stall_s: float,
        limiter: UploadLimiter | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._stream = stream
        self._stall_s = stall_s
        self._limiter = limiter
        self._meter = meter if meter is not None else Meter()

    async def send_all(self, data: Buffer) -> None:
        view = memoryview(data)
        done = 0
        while done < len(view):
            slice_bytes = SLICE_BYTES
            if self._limiter is not None:
                slice_bytes = min(slice_bytes, self._limiter.slice_bytes)
            piece = view[done : done + slice_bytes]
            if self._limiter is not None:
                await self._limiter.take(len(piece))
            carried_bytes = 0
            self._meter.begin()
            try:
                with trio.move_on_after(self._stall_s) as scope:
                    await self._stream.send_all(piece)
                    carried_bytes = len(piece)
            finally:
                self._meter.end(carried_bytes)
            if scope.cancelled_caught:
                raise trio.BrokenResourceError(f"nothing could be sent for {self._stall_s:g} s")
            done += len(piece)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


@define(eq=False)
class _Job(Generic[T]):
    """Something to be sent, and whether it was."""

    what: T
    sent: bool = False
    ended: trio.Event = field(factory=trio.Event)


class _Outbox(Generic[T]):
    """What waits to be sent, first come, first served, by whichever writer is idle.

    Its length is bounded by those who wait in it: everyone waits for what they put in.
    """

    def __init__(self) -> None:
        self._queue: deque[_Job[T]] = deque()
        self._taken: set[_Job[T]] = set()
        self._idle = trio.lowlevel.ParkingLot()
        self._closed = False

    async def put(self, what: T) -> bool:
        """Wait until ``what`` was sent (True) or never will be (False)."""
        if self._closed:
            await trio.lowlevel.checkpoint()
            return False
        job = _Job(what)
        self._queue.append(job)
        self._idle.unpark()
        try:
            await job.ended.wait()
        except trio.Cancelled:
            if job not in self._taken and not job.sent and not self._closed:
                self._queue.remove(job)
            raise
        return job.sent

    async def take(self) -> _Job[T]:
        while not self._queue:
            await self._idle.park()
        job = self._queue.popleft()
        self._taken.add(job)
        return job

    def finish(self, job: _Job[T]) -> None:
        self._taken.discard(job)
        job.sent = True
        job.ended.set()

    def close(self) -> None:
        self._closed = True
        for job in (*self._queue, *self._taken):
            job.ended.set()
        self._queue.clear()
        self._taken.clear()


@define(eq=False)
class LaneEnds:
    """Both directions of a lane: sending is paced, receiving reads the bare stream."""

    stream: trio.abc.Stream
    sender: Lane
    receiver: Lane
    in_threads: SocketLane | None = None  # while the link runs, over a real socket


class Link:
    """See the top of this file. Made by ``LinkHub``.

    Attributes:
      peer: who is at the other end.
      lost: set once the link is lost; ``reason`` then says why.
      finished: set once all its streams are closed.
      sent_meter: what its lanes send.

    Args:
      node_sent, node_received: meters of all the node's links together.
    """

    def __init__(
        self,
        peer: str,
        stream: trio.abc.Stream,
        router: FrameRouter,
        on_message: OnMessage,
        stall_s: float = STALL_S,
        limiter: UploadLimiter | None = None,
        silence_s: float = math.inf,
        node_sent: Meter | None = None,
        node_received: Meter | None = None,
    ) -> None:
        self.peer = peer
        self.lost = trio.Event()
        self.finished = trio.Event()
        self.reason = ""
        self.messages = MessageStream(PacedStream(stream, stall_s))
        self.sent_meter = Meter(node_sent)
        self._received_meter = Meter(node_received)
        self._streams = [stream]
        self._lanes: dict[int, LaneEnds] = {}
        self._lanes_up = trio.Event()
        self._open_lane_count = 0
        self._router = router
        self._on_message = on_message
        self._stall_s = stall_s
        self._limiter = limiter
        self._silence_s = silence_s
        self._silent_s = 0.0  # how long nothing has come
        self._clock_offset_s = trio.current_time() - time.perf_counter()
        self._scope = trio.CancelScope()
        self._message_outbox: _Outbox[Message] = _Outbox()
        self._outlet = Outlet()

    # ------------------------------------------------------------ for everyone

    async def send(self, message: Message) -> None:
        """Send on the control stream; returns when the network took it.

        Raises:
          PeerLostError: the link is lost; the message may or may not have arrived.

        Cancellation: safe; the message is sent or not.
        """
        if not await self._message_outbox.put(message):
            raise PeerLostError(self.peer, self.reason)

    async def send_frame(self, header: FrameHeader, payload: Buffer) -> None:
        """Send over the lane that is idle first; returns when the network took it.

        Frames that one task sends after another leave in order, but arrive in order only per lane.

        Args:
          payload: must not change until the frame is sent or the link is lost, even if this call is
            cancelled before.

        Raises:
          PeerLostError: the link is lost; the frame may or may not have arrived.

        Cancellation: safe; the frame is sent whole or not at all.
        """
        if len(payload) != header.payload_bytes:
            raise LocalProtocolError(f"{len(payload)} bytes for {header}")
        await self.send_from(OneFrame(header, payload))

    async def send_from(self, source: FrameSource) -> None:
        """Send all frames of a source, over whichever lane is idle, in turn with other sources.

        Returns when the network took the last one.

        Raises:
          PeerLostError: the link is lost; the last frames may or may not have arrived.

        Cancellation: safe; frames that are on their way are finished, no others are taken.
        """
        if not await self._outlet.drain(source):
            raise PeerLostError(self.peer, self.reason)

    def wake(self) -> None:
        """A source may have more frames than when it was last asked; from any thread."""
        self._outlet.wake()

    @property
    def sent_bytes(self) -> int:
        """Bytes of all frames sent, overhead included."""
        return sum(lane.sender.sent_bytes for lane in self._lanes.values())

    @property
    def received_bytes(self) -> int:
        """Bytes of all frames received, overhead included."""
        return sum(lane.receiver.received_bytes for lane in self._lanes.values())

    def close(self, reason: str) -> None:
        """Give the link up; only the first reason is kept."""
        if self.lost.is_set():
            return
        self.reason = reason
        self.lost.set()
        self._message_outbox.close()
        self._outlet.close()
        self._scope.cancel()

    # ------------------------------------------------------------ for the hub

    def make_lane(self, stream: trio.abc.Stream, send_key: bytes, receive_key: bytes) -> LaneEnds:
        paced = PacedStream(stream, self._stall_s, self._limiter, self.sent_meter)
        return LaneEnds(
            stream=stream,
            sender=Lane(paced, send_key, receive_key),
            receiver=Lane(stream, send_key, receive_key),
        )

    def claim_lane(self, number: int, lane: LaneEnds) -> None:
        """Make ``lane`` this link's, before its first record is sent.

        A lane number is used at most once in a link's life: its keys must never encrypt twice.

        Raises:
          RemoteProtocolError: no such number, or it is taken.
        """
        if number >= LANE_COUNT or number in self._lanes or self.lost.is_set():
            raise RemoteProtocolError(f"lane {number} is not wanted")
        self._lanes[number] = lane
        self._streams.append(lane.stream)

    @property
    def lanes(self) -> tuple[LaneEnds, ...]:
        return tuple(self._lanes.values())

    def lane_opened(self) -> None:
        """One more lane is open both ways."""
        self._open_lane_count += 1
        if self._open_lane_count == LANE_COUNT:
            self._lanes_up.set()

    async def wait_lanes(self) -> None:
        await self._lanes_up.wait()

    async def run(self) -> None:
        """Carry messages and frames until the link is lost; then close everything of it."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._guard, self._read_messages)
                    nursery.start_soon(self._guard, self._write_messages)
                    if self._silence_s < math.inf:
                        nursery.start_soon(self._guard, self._beat)
                        nursery.start_soon(self._listen)
                    self._start_lanes(nursery)
        finally:
            for lane in self._lanes.values():
                if lane.in_threads is not None:
                    lane.in_threads.release()
            await self.aclose()

    def _start_lanes(self, nursery: trio.Nursery) -> None:
        for lane in self._lanes.values():
            if not isinstance(lane.stream, trio.SocketStream):
                nursery.start_soon(self._guard, partial(self._read_frames, lane))
                nursery.start_soon(self._guard, partial(self._write_frames, lane))
                continue
            lane.in_threads = work = self._in_threads(lane, lane.stream)
            nursery.start_soon(self._guard, partial(self._keep_reading, lane.stream, work))
            nursery.start_soon(self._guard, partial(self._keep_writing, work))
            nursery.start_soon(self._hang_up, work)

    async def aclose(self) -> None:
        """Close all streams at once, without goodbyes."""
        self.close("this node closed the link")
        with trio.CancelScope(shield=True):  # forceful closing does not wait for anybody
            for stream in self._streams:
                await trio.aclose_forcefully(stream)
        self.finished.set()

    async def _guard(self, task: Callable[[], Awaitable[None]]) -> None:
        """The one place where the other side's faults, and the network's, end the link."""
        try:
            await task()
        except trio.EndOfChannel:
            self.close("the other side closed the link")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.close(f"the connection broke ({error})")
        except (RemoteProtocolError, PeerLostError) as error:
            self.close(str(error))

    async def _read_messages(self) -> None:
        while True:
            message = await self.messages.receive()
            self._silent_s = 0.0
            if not isinstance(message, Heartbeat):
                await self._on_message(self.peer, message)

    async def _beat(self) -> None:
        for sequence in itertools.count():
            await self.send(Heartbeat(sequence))
            await trio.sleep(self._silence_s / BEATS_PER_SILENCE)

    async def _listen(self) -> None:
        """Give the link up when the other side is silent.

        Only the time in which we were awake counts: after our own process was stopped, or the
        machine slept, what the others sent meanwhile is still to be read.
        """
        tick_s = self._silence_s / (4 * BEATS_PER_SILENCE)
        while self._silent_s < self._silence_s:
            await trio.sleep(tick_s)
            self._silent_s += tick_s
        self.close(f"nothing was heard for {self._silence_s:g} s")

    async def _write_messages(self) -> None:
        while True:
            job = await self._message_outbox.take()
            await self.messages.send(job.what)
            self._message_outbox.finish(job)

    async def _read_frames(self, lane: LaneEnds) -> None:
        sink: Sink | None = None
        view: memoryview | None = None
        under_way = False  # a frame whose header is here: what comes now comes as fast as it can

        async def place(header: FrameHeader) -> memoryview | None:
            nonlocal sink, view, under_way
            sink, view = await self._router.place(self.peer, header)
            self._received_meter.begin()
            under_way = True
            return view

        while True:
            carried_bytes = 0
            try:
                header, _payload = await lane.receiver.receive(place)
                carried_bytes = header.payload_bytes
            finally:
                if under_way:
                    self._received_meter.end(carried_bytes)
                    under_way = False
            self._silent_s = 0.0
            if sink is not None and view is not None:
                self._router.deliver(sink, self.peer, header, view)
            sink = view = None

    async def _write_frames(self, lane: LaneEnds) -> None:
        while True:
            taken = await self._outlet.take()
            frame = taken[1]()
            if frame is not None:
                await lane.sender.send(*frame)
            self._outlet.finish(taken)
            del taken, frame  # an idle lane must not keep a whole result in memory

    # ------------------------------------------------------------ lanes in threads

    def _in_threads(self, lane: LaneEnds, stream: trio.SocketStream) -> SocketLane:
        limiter = self._limiter
        if limiter is None:
            return SocketLane(stream, lane.sender, lane.receiver, stall_s=self._stall_s)
        return SocketLane(
            stream,
            lane.sender,
            lane.receiver,
            stall_s=self._stall_s,
            pace=lambda count: limiter.reserve(count, self._now_s()),
            share_bytes=lambda: min(SLICE_BYTES, limiter.slice_bytes),
        )

    def _now_s(self) -> float:
        """Trio's time, for threads: their clock only differs by a constant."""
        return time.perf_counter() + self._clock_offset_s

    async def _hang_up(self, work: SocketLane) -> None:
        """Nothing else can wake a thread that waits for the other side."""
        try:
            await trio.sleep_forever()
        finally:
            work.close()
            self._outlet.close()

    async def _keep_reading(self, stream: trio.SocketStream, work: SocketLane) -> None:
        while True:
            header = await _in_lane_thread(partial(self._read_in_thread, work))
            if header is None:
                await trio.lowlevel.wait_readable(stream.socket)
                continue
            sink, view = await self._router.place(self.peer, header)
            if sink is not None and view is not None and self._router.in_threads(header):
                await _in_lane_thread(partial(self._receive_in_thread, work, header, sink, view))
            else:
                await _in_lane_thread(partial(self._payload_in_thread, work, header, view))
                if sink is not None and view is not None:
                    self._router.deliver(sink, self.peer, header, view)
            del sink, view

    def _read_in_thread(self, work: SocketLane) -> FrameHeader | None:
        """Read until nothing comes (None), or a frame that the event loop must be asked about."""
        while (header := work.receive_header(LINGER_S)) is not None:
            placed = self._router.place_in_thread(self.peer, header)
            if placed is None:
                return header
            self._receive_in_thread(work, header, *placed)
            del placed  # an idle lane must not keep a whole result in memory
        return None

    def _receive_in_thread(
        self, work: SocketLane, header: FrameHeader, sink: Sink, view: memoryview
    ) -> None:
        self._payload_in_thread(work, header, view)
        self._router.deliver(sink, self.peer, header, view)

    def _payload_in_thread(
        self, work: SocketLane, header: FrameHeader, view: memoryview | None
    ) -> None:
        carried_bytes = 0
        self._received_meter.begin(self._now_s())
        try:
            work.receive_payload(header, view)
            carried_bytes = header.payload_bytes
        finally:
            self._received_meter.end(carried_bytes, self._now_s())
        self._silent_s = 0.0

    async def _keep_writing(self, work: SocketLane) -> None:
        while True:
            first = [await self._outlet.take()]
            await _in_lane_thread(partial(self._write_in_thread, work, first))

    def _write_in_thread(self, work: SocketLane, first: list[Taken]) -> None:
        """Send ``first`` (taken from the list) and what follows it, until nothing does."""
        taken: Taken | None = first.pop()
        while taken is not None:
            frame = taken[1]()
            if frame is not None:
                header, payload = frame
                self.sent_meter.begin(self._now_s())
                try:
                    work.send(header, payload)
                finally:
                    self.sent_meter.end(header.payload_bytes, self._now_s())
                del header, payload
            self._outlet.finish(taken)
            del taken, frame  # an idle lane must not keep a whole result in memory
            taken = self._outlet.take_in_thread(LINGER_S)


async def _in_lane_thread(function: Callable[[], T]) -> T:
    """Run it to its end, whatever is cancelled: ``_hang_up`` sees to it that this is soon."""
    return await trio.to_thread.run_sync(function, limiter=_LANE_THREADS)

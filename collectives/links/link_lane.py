"""One lane of a link, from its first frame to its last.

    run                    until the lane breaks or is over
     ├── read              lane -> router -> sink
     ├── write             outlet -> lane
     └── hang_up           wakes the threads when all this is cancelled

A lane keeps what it has sent until the other side has said that it came: TCP's word for "sent" is
not "arrived". When the lane is gone, what did not arrive goes back to the outlet, for other lanes.

A lane ends in one of two ways. It *retires* when it is not needed: each side finishes the frame under
way, sends no more, and reads to the end of what the other one sends. Or it *breaks*. In both cases
each side then tells the other how many frames it got, and nothing is sent again that came.

Over real sockets the two directions hand the lane to a thread whenever there is something to do. It
works without the event loop as long as frames follow each other: it takes them from the outlet, or
gives them to sinks that may be called from threads. The loop is asked about frames that nobody waits
for yet. So an idle lane costs no thread, and a busy one no event.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import trio
from attrs import define, field

from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import LaneReceived
from ...protocol.network.interface import LaneFacts
from ...protocol.network.lane import FrameHeader, Lane
from ...protocol.network.socket_lane import LanePace, SocketLane
from .frame_routing import Sink
from .link_parts import SharedByLanes
from .paced_stream import SLICE_BYTES, PacedStream
from .rate_limiter import RateLimiter
from .rate_meter import Meter
from .send_queue import TakenFrame

# A lane's thread that has nothing to do waits so long before it goes: longer than the gaps within a
# round, so that threads come and go by round, not by frame.
LINGER_S = 0.1
# Lanes' threads have places of their own: they must not wait behind other work, nor it behind them.
_LANE_THREADS = trio.CapacityLimiter(math.inf)

T = TypeVar("T")


@define(eq=False)
class _Unacknowledged:
    """What was sent and is not known to have arrived.

    One lane's writer appends, perhaps in a thread; the event loop removes: a deque's own locking is
    enough, for both know what is at their end.
    """

    frames: deque[TakenFrame] = field(factory=deque)
    arrived_count: int = 0
    # Bytes of frames that a meter counts as under way; in the order of ``frames``.
    metered: deque[int] = field(factory=deque)

    def acknowledge(self, count: int, meter: Meter) -> bool:
        """So many frames arrived in all; False if that cannot be."""
        if not self.arrived_count <= count <= self.arrived_count + len(self.frames):
            return False
        for _ in range(count - self.arrived_count):
            self.frames.popleft()
            if self.metered:
                meter.end(self.metered.popleft())
        self.arrived_count = count
        return True

    def unmeter(self, meter: Meter) -> None:
        """Nothing is under way any more, wherever it came to."""
        while self.metered:
            self.metered.popleft()
            meter.end(0)


class LinkLane:
    """See the top of this file. Made by whoever dials or accepts it; run by its ``Link``.

    Attributes:
      number: used once in a link's life, like the keys that belong to it.
      sender, receiver: both directions; sending is paced.
      facts: what the kernel says about the path, when the lane was opened.
      reason: why it ended.
      finished: set when its stream is closed.
      receiving: a frame has begun to come and is not whole yet.
      writing: a frame is being sent.
      closed_there: set when the other side reads it no more.
      still_s: how long nothing has moved, though something should; counted by the link.
    """

    def __init__(
        self,
        number: int,
        stream: trio.abc.Stream,
        send_key: bytes,
        receive_key: bytes,
        shared: SharedByLanes,
    ) -> None:
        self.number = number
        self.stream = stream
        self._paced = PacedStream(
            stream,
            upload=shared.node.upload,
            download=shared.node.download,
            meter=shared.sent_meter,
        )
        in_threads = isinstance(stream, trio.SocketStream)
        self.sender = Lane(self._paced, send_key, receive_key)
        self.receiver = Lane(stream if in_threads else self._paced, send_key, receive_key)
        self.facts = LaneFacts()
        self.reason = ""
        self.finished = trio.Event()
        self.closed_there = trio.Event()
        self.still_s = 0.0
        self.receiving = (
            False  # these two are set by the lane's threads, and only looked at elsewhere
        )
        self.writing = False
        self._shared = shared
        self._router = shared.node.router
        self._fan_out = shared.node.fan_out
        self._work: SocketLane | None = None  # while it is worked by threads
        self._unacknowledged = _Unacknowledged()
        self._received_frames = 0
        self._arrived_bytes = 0
        self._acknowledged: LaneReceived | None = None
        self._moved: tuple[int, int, int] = (0, 0, 0)
        self._retiring = False  # set on the event loop, read by the writer's thread
        self._idle_scope = trio.CancelScope()  # of a writer that waits for a frame
        self._scope = trio.CancelScope()

    # ------------------------------------------------------------ for its link

    async def run(self) -> None:
        """Carry frames until the lane is over; then close its stream."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await self._carry(nursery)
                    nursery.cancel_scope.cancel()
        finally:
            if self._work is not None:
                self._work.release()
            self._unacknowledged.unmeter(self._shared.sent_meter)
            with trio.CancelScope(shield=True):  # forceful closing does not wait for anybody
                await trio.aclose_forcefully(self.stream)
            self.still_s = 0.0
            self.finished.set()

    async def _carry(self, hang_up: trio.Nursery) -> None:
        read, write = self._read_frames, self._write_frames
        if isinstance(self.stream, trio.SocketStream):
            self._work = work = self._in_threads(self.stream)
            read = partial(self._keep_reading, self.stream, work)
            write = partial(self._keep_writing, work)
            hang_up.start_soon(self._hang_up, work)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._guard, write)
            await self._guard(read)

    def retire(self) -> None:
        """Send no more frames; the lane ends when the other side does the same."""
        self._retiring = True
        self._idle_scope.cancel()

    def close(self, reason: str) -> None:
        """End it at once; only the first reason is kept."""
        self.reason = self.reason or reason
        self._scope.cancel()

    @property
    def retiring(self) -> bool:
        return self._retiring

    @property
    def sending(self) -> bool:
        """Whether anything was sent that is not known to have arrived."""
        return bool(self._unacknowledged.frames)

    @property
    def arrived_bytes(self) -> int:
        """What came at the other side, as far as it said."""
        return self._arrived_bytes

    def acknowledge(self, received: LaneReceived) -> None:
        """The other side says what it got.

        Raises:
          RemoteProtocolError: that cannot be.
        """
        if (
            not self._unacknowledged.acknowledge(received.frames, self._shared.sent_meter)
            or received.bytes < self._arrived_bytes
        ):
            raise RemoteProtocolError(f"it got more on lane {self.number} than was sent, or less")
        self._arrived_bytes = received.bytes
        if received.closed:
            self.closed_there.set()
            self.close("the other side closed it")

    def take_received(self) -> LaneReceived | None:
        """What is to be acknowledged; None if that was done already."""
        received = LaneReceived(
            self.number, self._received_frames, self.received_bytes, self.finished.is_set()
        )
        if received == self._acknowledged:
            return None
        self._acknowledged = received
        return received

    def watch(self, elapsed_s: float) -> None:
        """So much time has passed: count how long nothing has moved."""
        moved = (self._unacknowledged.arrived_count, self._arrived_bytes, self.sent_bytes)
        owed = self.sending or self.finished.is_set()  # in the end, its last word
        if owed and moved == self._moved:
            self.still_s += elapsed_s
        else:
            self.still_s = 0.0
        self._moved = moved

    def give_back(self) -> None:
        """It is over on both sides: what did not arrive goes to the other lanes."""
        frames = list(self._unacknowledged.frames)
        self._unacknowledged.frames.clear()
        self._shared.send_queue.put_back(frames)

    @property
    def sent_bytes(self) -> int:
        """What the transport has taken, parts of frames too."""
        return self._paced.sent_bytes + (0 if self._work is None else self._work.sent_bytes)

    @property
    def received_bytes(self) -> int:
        """What has come out of the transport, parts of frames too."""
        return self._paced.received_bytes + (0 if self._work is None else self._work.received_bytes)

    async def _guard(self, task: Callable[[], Awaitable[None]]) -> None:
        """The one place where what the network does ends the lane, and what a peer does the link."""
        try:
            await task()
        except trio.EndOfChannel:
            self.retire()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.close(f"the connection broke ({error})")
        except RemoteProtocolError as error:  # not authentic, or junk
            self._shared.lose_link(str(error))

    # ------------------------------------------------------------ lanes in tasks

    async def _read_frames(self) -> None:
        shared = self._shared
        sink: Sink | None = None
        view: memoryview | None = None
        begun: FrameHeader | None = None  # its header is here; what comes now comes as it can

        async def place(header: FrameHeader) -> memoryview | None:
            nonlocal sink, view, begun
            self.receiving = True
            shared.note_received()
            sink, view = await self._router.place(shared.peer, header)
            shared.received_meter.begin()
            begun = header
            return view

        while True:
            carried_bytes = 0
            try:
                header, _payload = await self.receiver.receive(place)
                carried_bytes = header.payload_bytes
            except BaseException:
                if begun is not None and sink is not None and view is not None:
                    self._router.abandon(sink, shared.peer, begun, view)
                raise
            finally:
                if begun is not None:
                    shared.received_meter.end(carried_bytes)
                    begun = None
            if sink is not None and view is not None:
                self._router.deliver(sink, shared.peer, header, view)
            sink = view = None
            self._received()

    async def _write_frames(self) -> None:
        shared = self._shared
        while (taken := await self._take()) is not None:
            frame = taken.load()
            if frame is not None:
                self._unacknowledged.frames.append(taken)
                await self._fan_out.enter(shared.peer)
                try:
                    await self.sender.send(*frame)
                finally:
                    self._fan_out.leave(shared.peer)
            shared.send_queue.finish(taken, 0 if frame is None else len(frame[1]))
            del taken, frame  # an idle lane must not keep a whole result in memory
        if isinstance(self.stream, trio.abc.HalfCloseableStream):
            await self.stream.send_eof()

    async def _take(self) -> TakenFrame | None:
        """The next frame; None if the lane is to send no more."""
        self.writing = False
        if self._retiring:
            return None
        taken = self._shared.send_queue.take_nowait()
        if taken is None:
            with trio.CancelScope() as self._idle_scope:
                taken = await self._shared.send_queue.take()
        self.writing = taken is not None
        return taken

    # ------------------------------------------------------------ lanes in threads

    def _in_threads(self, stream: trio.SocketStream) -> SocketLane:
        return SocketLane(
            stream,
            self.sender,
            self.receiver,
            upload=self._pace(self._shared.node.upload),
            download=self._pace(self._shared.node.download),
        )

    def _pace(self, limiter: RateLimiter | None) -> LanePace | None:
        if limiter is None:
            return None
        return LanePace(
            lambda count: limiter.reserve(count, self._shared.loop.now_s()),
            lambda: min(SLICE_BYTES, limiter.slice_bytes),
        )

    async def _hang_up(self, work: SocketLane) -> None:
        """Nothing else can wake a thread that waits for the other side."""
        try:
            await trio.sleep_forever()
        finally:
            work.close()
            self._retiring = True
            self._shared.send_queue.wake()

    async def _keep_reading(self, stream: trio.SocketStream, work: SocketLane) -> None:
        router, peer = self._router, self._shared.peer
        while True:
            header = await _in_lane_thread(partial(self._read_in_thread, work))
            if header is None:
                await trio.lowlevel.wait_readable(stream.socket)
                continue
            sink, view = await router.place(peer, header)
            if sink is None or view is None:
                await _in_lane_thread(partial(self._payload_in_thread, work, header, None))
            elif router.in_threads(header):
                await _in_lane_thread(partial(self._receive_in_thread, work, header, sink, view))
            else:
                try:
                    await _in_lane_thread(partial(self._payload_in_thread, work, header, view))
                except BaseException:
                    router.abandon(sink, peer, header, view)
                    raise
                router.deliver(sink, peer, header, view)
            self._received()
            del sink, view

    def _read_in_thread(self, work: SocketLane) -> FrameHeader | None:
        """Read until nothing comes (None), or a frame that the event loop must be asked about."""
        shared = self._shared
        while (header := work.receive_header(LINGER_S)) is not None:
            self.receiving = True
            shared.note_received()
            placed = self._router.place_in_thread(shared.peer, header)
            if placed is None:
                return header
            self._receive_in_thread(work, header, *placed)
            self._received()
            del placed  # an idle lane must not keep a whole result in memory
        return None

    def _received(self) -> None:
        self._received_frames += 1
        self.receiving = False
        self._shared.note_received()

    def _receive_in_thread(
        self, work: SocketLane, header: FrameHeader, sink: Sink, view: memoryview
    ) -> None:
        router, peer = self._router, self._shared.peer
        try:
            self._payload_in_thread(work, header, view)
        except BaseException:
            router.abandon(sink, peer, header, view)
            raise
        router.deliver(sink, peer, header, view)

    def _payload_in_thread(
        self, work: SocketLane, header: FrameHeader, view: memoryview | None
    ) -> None:
        meter, now_s = self._shared.received_meter, self._shared.loop.now_s
        carried_bytes = 0
        meter.begin(now_s())
        try:
            work.receive_payload(header, view)
            carried_bytes = header.payload_bytes
        finally:
            meter.end(carried_bytes, now_s())

    async def _keep_writing(self, work: SocketLane) -> None:
        while (taken := await self._take()) is not None:
            first = [taken]
            del taken
            await _in_lane_thread(partial(self._write_in_thread, work, first))
        work.send_eof()

    def _write_in_thread(self, work: SocketLane, first: list[TakenFrame]) -> None:
        """Send ``first`` (taken from the list) and what follows it, until nothing does."""
        shared, now_s = self._shared, self._shared.loop.now_s
        taken: TakenFrame | None = first.pop()
        while taken is not None:
            frame = taken.load()
            carried_bytes = 0
            if frame is not None:
                header, payload = frame
                self._unacknowledged.frames.append(taken)
                self._fan_out.enter_in_thread(shared.peer)
                # Under way until it has arrived: the system takes megabytes at once.
                shared.sent_meter.begin(now_s())
                self._unacknowledged.metered.append(header.payload_bytes)
                try:
                    work.send(header, payload)
                    carried_bytes = header.payload_bytes
                finally:
                    self._fan_out.leave(shared.peer)
                del header, payload
            shared.send_queue.finish(taken, carried_bytes)
            del taken, frame  # an idle lane must not keep a whole result in memory
            self.writing = False
            taken = None if self._retiring else shared.send_queue.take_in_thread(LINGER_S)
            self.writing = taken is not None


async def _in_lane_thread(function: Callable[[], T]) -> T:
    """Run it to its end, whatever is cancelled: ``_hang_up`` sees to it that this is soon.

    It is begun, too: the frame that it was given is then accounted for like all others.
    """
    with trio.CancelScope(shield=True):
        result = await trio.to_thread.run_sync(function, limiter=_LANE_THREADS)
    return result  # noqa: RET504  mypy cannot know that a shield swallows nothing

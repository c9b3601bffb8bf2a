"""One lane of a link, from its first frame to its last.

    run                    until the lane breaks or is over
     ├── read              lane -> router -> sink
     ├── write             send queue -> lane
     └── hang_up           wakes the threads when the lane is cancelled

A lane keeps what it has sent until the other side has acknowledged it: what TCP has sent may not
arrive. When the lane has ended, frames that did not arrive go back to the send queue, for other lanes.

A lane ends in one of two ways. It *retires* when it is not needed: each side finishes the frame under
way, sends no more, and reads to the end of what the other side sends. Or it *breaks*. In both cases
each side then tells the other how many frames arrived, and no frame that arrived is sent again.

Over real sockets each direction hands the lane to a thread whenever there is something to do. The
thread works without the event loop as long as frames follow each other: it takes them from the send
queue, or gives them to sinks that may be called from threads. The event loop is asked about frames
whose sink has not registered yet. So an idle lane costs no thread, and a busy lane no events.
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

# How long a lane's thread that has nothing to do waits before it ends: longer than the gaps within a
# round, so that threads come and go by round, not by frame.
LINGER_S = 0.1
# Lanes' threads have a limiter of their own: they must not wait for other work, nor other work for them.
_LANE_THREADS = trio.CapacityLimiter(math.inf)

T = TypeVar("T")


@define(eq=False)
class _Unacknowledged:
    """Frames that were sent and are not known to have arrived.

    The lane's writer appends at one end, perhaps in a thread; the event loop removes at the other. A
    deque's own locking is enough for that.
    """

    frames: deque[TakenFrame] = field(factory=deque)
    arrived_count: int = 0
    # Bytes of the frames that a meter counts as under way, in the order of ``frames``.
    metered: deque[int] = field(factory=deque)

    def acknowledge(self, count: int, meter: Meter) -> bool:
        """Drop the frames that have arrived.

        Args:
          count: frames that arrived since the lane was opened.

        Returns:
          Whether that is possible: no more arrived than was sent, and no fewer than before.
        """
        if not self.arrived_count <= count <= self.arrived_count + len(self.frames):
            return False
        for _ in range(count - self.arrived_count):
            self.frames.popleft()
            if self.metered:
                meter.end(self.metered.popleft())
        self.arrived_count = count
        return True

    def unmeter(self, meter: Meter) -> None:
        """Tell the meter that nothing is under way any more, whether it arrived or not."""
        while self.metered:
            self.metered.popleft()
            meter.end(0)


class LinkLane:
    """See the top of this file. Made by a handshake; run by its link's ``LanePool``.

    Attributes:
      number: used once in a link's life, like the keys that belong to it.
      sender, receiver: both directions; sending is paced.
      facts: what the kernel says about the path, when the lane was opened.
      reason: why it ended.
      finished: set when its stream is closed.
      receiving: whether a frame has begun to come and is not whole yet; threads may set it.
      writing: whether a frame is being sent; threads may set it.
      closed_there: set when the other side has closed the lane.
      still_s: how long nothing has moved, though something should.
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
        self.receiving = False
        self.writing = False
        self._shared = shared
        self._router = shared.node.router
        self._fan_out = shared.node.fan_out
        self._socket_lane: SocketLane | None = None  # once threads carry the frames
        self._unacknowledged = _Unacknowledged()
        self._received_frames = 0
        self._arrived_bytes = 0
        self._acknowledged: LaneReceived | None = None  # the last one given to the link
        self._moved: tuple[int, int, int] = (0, 0, 0)  # counts at the last call of ``watch``
        self._retiring = False  # set on the event loop, read by the writer's thread
        self._idle_scope = trio.CancelScope()  # of a writer that waits for a frame
        self._scope = trio.CancelScope()

    # ------------------------------------------------------------ for the lane pool

    async def run(self) -> None:
        """Carry frames until the lane is over; then close its stream."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await self._carry(nursery)
                    nursery.cancel_scope.cancel()
        finally:
            if self._socket_lane is not None:
                self._socket_lane.release()
            self._unacknowledged.unmeter(self._shared.sent_meter)
            with trio.CancelScope(shield=True):  # forceful closing waits for no peer
                await trio.aclose_forcefully(self.stream)
            self.still_s = 0.0
            self.finished.set()

    async def _carry(self, hang_up: trio.Nursery) -> None:
        read, write = self._read_frames, self._write_frames
        if isinstance(self.stream, trio.SocketStream):
            self._socket_lane = socket_lane = self._make_socket_lane(self.stream)
            read = partial(self._keep_reading, self.stream, socket_lane)
            write = partial(self._keep_writing, socket_lane)
            hang_up.start_soon(self._hang_up, socket_lane)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._guard, write)
            await self._guard(read)

    def retire(self) -> None:
        """Send no more frames. The lane ends when the other side does the same."""
        self._retiring = True
        self._idle_scope.cancel()

    def close(self, reason: str) -> None:
        """End it at once; only the first reason is kept."""
        self.reason = self.reason or reason
        self._scope.cancel()

    @property
    def retiring(self) -> bool:
        """Return whether the lane sends no more frames."""
        return self._retiring

    @property
    def sending(self) -> bool:
        """Return whether a frame was sent that is not known to have arrived."""
        return bool(self._unacknowledged.frames)

    @property
    def arrived_bytes(self) -> int:
        """Bytes that arrived at the other side, as far as it has acknowledged them."""
        return self._arrived_bytes

    def acknowledge(self, received: LaneReceived) -> None:
        """Take note of what arrived at the other side.

        Raises:
          RemoteProtocolError: more than was sent, or less than it acknowledged before.
        """
        if (
            not self._unacknowledged.acknowledge(received.frames, self._shared.sent_meter)
            or received.bytes < self._arrived_bytes
        ):
            raise RemoteProtocolError(
                f"it acknowledges more on lane {self.number} than was sent, or less than before"
            )
        self._arrived_bytes = received.bytes
        if received.closed:
            self.closed_there.set()
            self.close("the other side closed it")

    def take_received(self) -> LaneReceived | None:
        """Return what is to be acknowledged; None if all of it was."""
        received = LaneReceived(
            self.number, self._received_frames, self.received_bytes, self.finished.is_set()
        )
        if received == self._acknowledged:
            return None
        self._acknowledged = received
        return received

    def watch(self, elapsed_s: float) -> None:
        """Count for how long nothing has moved, though something should.

        Args:
          elapsed_s: time since the last call.
        """
        moved = (self._unacknowledged.arrived_count, self._arrived_bytes, self.sent_bytes)
        # Once the lane has ended here, the other side owes its last acknowledgement.
        owed = self.sending or self.finished.is_set()
        if owed and moved == self._moved:
            self.still_s += elapsed_s
        else:
            self.still_s = 0.0
        self._moved = moved

    def give_back(self) -> None:
        """Give frames that did not arrive to other lanes, once both sides have closed this lane."""
        frames = list(self._unacknowledged.frames)
        self._unacknowledged.frames.clear()
        self._shared.send_queue.put_back(frames)

    @property
    def sent_bytes(self) -> int:
        """Bytes that the transport has taken, parts of frames included."""
        return self._paced.sent_bytes + (
            0 if self._socket_lane is None else self._socket_lane.sent_bytes
        )

    @property
    def received_bytes(self) -> int:
        """Bytes that came out of the transport, parts of frames included."""
        return self._paced.received_bytes + (
            0 if self._socket_lane is None else self._socket_lane.received_bytes
        )

    async def _guard(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a direction; end the lane for a fault of the network, the link for one of the peer."""
        try:
            await task()
        except trio.EndOfChannel:
            self.retire()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.close(f"the connection broke ({error})")
        except RemoteProtocolError as error:  # a frame that is not authentic, or malformed
            self._shared.lose_link(str(error))

    # ------------------------------------------------------------ lanes in tasks

    async def _read_frames(self) -> None:
        shared = self._shared
        sink: Sink | None = None
        view: memoryview | None = None
        begun: FrameHeader | None = None  # of the frame whose payload is being received

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
            self._note_received()

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
        """Wait for the next frame; return None if the lane is to send no more."""
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

    def _make_socket_lane(self, stream: trio.SocketStream) -> SocketLane:
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

    async def _hang_up(self, socket_lane: SocketLane) -> None:
        """Wake the lane's threads when the lane is cancelled, for nothing else can."""
        try:
            await trio.sleep_forever()
        finally:
            socket_lane.close()
            self._retiring = True
            self._shared.send_queue.wake()

    async def _keep_reading(self, stream: trio.SocketStream, socket_lane: SocketLane) -> None:
        router, peer = self._router, self._shared.peer
        while True:
            header = await _run_in_lane_thread(partial(self._read_frames_in_thread, socket_lane))
            if header is None:
                await trio.lowlevel.wait_readable(stream.socket)
                continue
            sink, view = await router.place(peer, header)
            if sink is None or view is None:
                await _run_in_lane_thread(
                    partial(self._receive_payload_in_thread, socket_lane, header, None)
                )
            elif router.in_threads(header):
                await _run_in_lane_thread(
                    partial(self._receive_frame_in_thread, socket_lane, header, sink, view)
                )
            else:
                try:
                    await _run_in_lane_thread(
                        partial(self._receive_payload_in_thread, socket_lane, header, view)
                    )
                except BaseException:
                    router.abandon(sink, peer, header, view)
                    raise
                router.deliver(sink, peer, header, view)
            self._note_received()
            del sink, view

    def _read_frames_in_thread(self, socket_lane: SocketLane) -> FrameHeader | None:
        """Receive frames until one needs the event loop.

        Returns:
          The header of that frame; None if nothing came for ``LINGER_S``.
        """
        shared = self._shared
        while (header := socket_lane.receive_header(LINGER_S)) is not None:
            self.receiving = True
            shared.note_received()
            placed = self._router.place_in_thread(shared.peer, header)
            if placed is None:
                return header
            self._receive_frame_in_thread(socket_lane, header, *placed)
            self._note_received()
            del placed  # an idle lane must not keep a whole result in memory
        return None

    def _note_received(self) -> None:
        self._received_frames += 1
        self.receiving = False
        self._shared.note_received()

    def _receive_frame_in_thread(
        self, socket_lane: SocketLane, header: FrameHeader, sink: Sink, view: memoryview
    ) -> None:
        router, peer = self._router, self._shared.peer
        try:
            self._receive_payload_in_thread(socket_lane, header, view)
        except BaseException:
            router.abandon(sink, peer, header, view)
            raise
        router.deliver(sink, peer, header, view)

    def _receive_payload_in_thread(
        self, socket_lane: SocketLane, header: FrameHeader, view: memoryview | None
    ) -> None:
        meter, now_s = self._shared.received_meter, self._shared.loop.now_s
        carried_bytes = 0
        meter.begin(now_s())
        try:
            socket_lane.receive_payload(header, view)
            carried_bytes = header.payload_bytes
        finally:
            meter.end(carried_bytes, now_s())

    async def _keep_writing(self, socket_lane: SocketLane) -> None:
        while (taken := await self._take()) is not None:
            first = [taken]
            del taken
            await _run_in_lane_thread(partial(self._write_frames_in_thread, socket_lane, first))
        socket_lane.send_eof()

    def _write_frames_in_thread(self, socket_lane: SocketLane, first: list[TakenFrame]) -> None:
        """Send ``first`` (taken out of the list) and the frames after it, until the queue is empty."""
        shared, now_s = self._shared, self._shared.loop.now_s
        taken: TakenFrame | None = first.pop()
        while taken is not None:
            frame = taken.load()
            carried_bytes = 0
            if frame is not None:
                header, payload = frame
                self._unacknowledged.frames.append(taken)
                self._fan_out.enter_in_thread(shared.peer)
                # Under way until it has arrived: the kernel takes megabytes at once.
                shared.sent_meter.begin(now_s())
                self._unacknowledged.metered.append(header.payload_bytes)
                try:
                    socket_lane.send(header, payload)
                    carried_bytes = header.payload_bytes
                finally:
                    self._fan_out.leave(shared.peer)
                del header, payload
            shared.send_queue.finish(taken, carried_bytes)
            del taken, frame  # an idle lane must not keep a whole result in memory
            self.writing = False
            taken = None if self._retiring else shared.send_queue.take_in_thread(LINGER_S)
            self.writing = taken is not None


async def _run_in_lane_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread to its end, even if cancelled; ``_hang_up`` makes it end soon.

    It always begins, too, so that the frame that it was given is accounted for like all others.
    """
    with trio.CancelScope(shield=True):
        result = await trio.to_thread.run_sync(function, limiter=_LANE_THREADS)
    return result  # noqa: RET504  mypy cannot know that a shield swallows nothing

"""The frames of one lane: taken from the send queue, under way, acknowledged, received.

``LinkLane`` owns this record; ``LaneTasks`` or ``LaneThreads`` carry the frames and update it,
perhaps in a thread per direction. The writer appends to the deques at one end, the event loop
removes at the other: a deque's own locking is enough for that.
"""

from __future__ import annotations

from collections import deque

import trio
from attrs import define

from ...protocol.network.lane import FrameHeader, Lane
from .frame_routing import Sink
from .link_parts import SharedByLanes
from .send_queue import TakenFrame


class LaneFrames:
    """See the top of this file.

    Attributes:
      receiving: whether a frame has begun to come and is not whole yet.
      writing: whether a frame is being sent.
      retiring: whether no more frames are to be sent; set on the event loop.
      received_count: frames that came.
      arrived_count: sent frames that the other side has acknowledged.
    """

    def __init__(self, shared: SharedByLanes) -> None:
        self.receiving = False
        self.writing = False
        self.retiring = False
        self.received_count = 0
        self.arrived_count = 0
        self._shared = shared
        self._unacknowledged: deque[TakenFrame] = deque()
        # Bytes of the frames that the meter counts as under way, in the order of those frames.
        self._metered: deque[int] = deque()
        self._idle_scope = trio.CancelScope()  # of a writer that waits for a frame

    # ------------------------------------------------------------ sending

    async def take(self) -> TakenFrame | None:
        """Wait for the next frame to send; return None if the lane is to send no more."""
        self.writing = False
        if self.retiring:
            return None
        taken = self._shared.send_queue.take_nowait()
        if taken is None:
            with trio.CancelScope() as self._idle_scope:
                taken = await self._shared.send_queue.take()
        self.writing = taken is not None
        return taken

    def take_in_thread(self, wait_s: float) -> TakenFrame | None:
        """Wait for the next frame, in a thread; return None if there is none within ``wait_s``."""
        self.writing = False
        taken = None if self.retiring else self._shared.send_queue.take_in_thread(wait_s)
        self.writing = taken is not None
        return taken

    def retire(self) -> None:
        """Take no more frames; wake a task that waits for one."""
        self.retiring = True
        self._idle_scope.cancel()

    def add_sent(self, taken: TakenFrame) -> None:
        """Keep a frame, before it is sent, until it is acknowledged."""
        self._unacknowledged.append(taken)

    def meter_sent(self, payload_bytes: int) -> None:
        """Count the last frame as under way until it is acknowledged."""
        self._shared.sent_meter.begin(self._shared.loop.now_s())
        self._metered.append(payload_bytes)

    @property
    def sending(self) -> bool:
        """Return whether a frame was sent that is not known to have arrived."""
        return bool(self._unacknowledged)

    def acknowledge(self, count: int) -> bool:
        """Drop frames that have arrived, now ``count`` since the lane was opened.

        Returns:
          Whether that is possible: no more than were sent, and no fewer than before.
        """
        if not self.arrived_count <= count <= self.arrived_count + len(self._unacknowledged):
            return False
        metered_count = carried_bytes = 0
        for _ in range(count - self.arrived_count):
            self._unacknowledged.popleft()
            if self._metered:
                metered_count += 1
                carried_bytes += self._metered.popleft()
        if metered_count:
            self._shared.sent_meter.end(carried_bytes, count=metered_count)
        self.arrived_count = count
        return True

    def unmeter(self) -> None:
        """Tell the meter that nothing is under way any more, whether it arrived or not."""
        while self._metered:
            self._metered.popleft()
            self._shared.sent_meter.end(0)

    def give_back(self) -> None:
        """Give the frames that did not arrive to other lanes."""
        frames = list(self._unacknowledged)
        self._unacknowledged.clear()
        self._shared.send_queue.put_back(frames)

    # ------------------------------------------------------------ receiving

    def note_begun(self) -> None:
        self.receiving = True
        self._shared.note_received()

    def note_received(self) -> None:
        self.received_count += 1
        self.receiving = False
        self._shared.note_received()


# ---------------------------------------------------------------- lanes in memory


@define(eq=False)
class LaneTasks:
    """The two directions of a lane in tasks of the event loop: for lanes in memory."""

    _stream: trio.abc.Stream
    _lane: Lane
    _frames: LaneFrames
    _shared: SharedByLanes

    async def read(self) -> None:
        """Receive frames until trio.EndOfChannel."""
        router, peer, meter = (
            self._shared.node.router,
            self._shared.peer,
            self._shared.received_meter,
        )
        sink: Sink | None = None
        view: memoryview | None = None
        begun: FrameHeader | None = None  # of the frame whose payload is being received

        async def place(header: FrameHeader) -> memoryview | None:
            nonlocal sink, view, begun
            self._frames.note_begun()
            sink, view = await router.place(peer, header)
            meter.begin()
            begun = header
            return view

        while True:
            carried_bytes = 0
            try:
                header, _payload = await self._lane.receive(place)
                carried_bytes = header.payload_bytes
            except BaseException:
                if begun is not None and sink is not None and view is not None:
                    router.abandon(sink, peer, begun, view)
                raise
            finally:
                if begun is not None:
                    meter.end(carried_bytes)
                    begun = None
            if sink is not None and view is not None:
                router.deliver(sink, peer, header, view)
            sink = view = None
            self._frames.note_received()

    async def write(self) -> None:
        """Send frames until the lane retires; then end the stream in this direction."""
        while (taken := await self._frames.take()) is not None:
            frame = taken.load()
            if frame is not None:
                self._frames.add_sent(taken)
                await self._lane.send(*frame)
            self._shared.send_queue.finish(taken, 0 if frame is None else len(frame[1]))
            del taken, frame  # an idle lane must not keep a whole result in memory
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            await self._stream.send_eof()

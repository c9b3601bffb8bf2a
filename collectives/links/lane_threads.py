"""The two directions of a lane in threads: for lanes over sockets.

Each direction hands the lane to a thread whenever there is something to do. The thread works
without the event loop as long as frames follow each other: it takes them from the send queue, or
gives them to sinks that may be called from threads. The event loop is asked about frames whose sink
has not registered yet. So an idle lane costs no thread, and a busy lane no events.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio

from ...protocol.network.lane import FrameHeader, Lane
from ...protocol.network.socket_lane import LanePace, SocketLane
from .frame_routing import Sink
from .lane_frames import LaneFrames
from .link_parts import SharedByLanes
from .rates.rate_limiter import RateLimiter
from .rates.rate_meter import SLICE_BYTES
from .rates.send_priority import SendRank
from .send_queue import TakenFrame

# How long a lane's thread that has nothing to do waits before it ends: longer than the gaps within
# a round, on a slow line too, so that threads come and go by round, not by frame.
LINGER_S = 1.0
# A frame that a round's frames may overtake is sent in pieces of this size.
TURN_BYTES = 64 * 1024
# Lanes' threads have a limiter of their own: they and other work must not wait for each other.
_LANE_THREADS = trio.CapacityLimiter(math.inf)

T = TypeVar("T")


class LaneThreads:
    """See the top of this file. Made by ``LinkLane``.

    Attributes:
      socket_lane: the lane, for threads; counts the bytes that they send and receive.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        lane: Lane,
        frames: LaneFrames,
        shared: SharedByLanes,
    ) -> None:
        self._stream = stream
        self._frames = frames
        self._shared = shared
        self._router = shared.node.router
        self.socket_lane = SocketLane(
            stream,
            lane,
            upload=self._paced_by_line(),
            download=self._pace(shared.node.download),
        )

    def _paced_by_line(self) -> LanePace:
        line, now_s = self._shared.node.line, self._shared.loop.now_s
        weight = partial(self._shared.node.send_backlog.weight, self._shared.peer)

        def share_bytes() -> int:
            slice_bytes = line.slice_bytes
            return int(weight() * slice_bytes) if slice_bytes else 0

        return LanePace(lambda count: line.reserve(count, now_s()), share_bytes, self._shared.turns)

    def _pace(self, limiter: RateLimiter | None) -> LanePace | None:
        if limiter is None:
            return None
        return LanePace(
            lambda count: limiter.reserve(count, self._shared.loop.now_s()),
            lambda: min(SLICE_BYTES, limiter.slice_bytes),
        )

    async def hang_up(self) -> None:
        """Wake the lane's threads when the lane is cancelled, for nothing else can."""
        try:
            await trio.sleep_forever()
        finally:
            self.socket_lane.close()
            self._frames.retiring = True
            self._shared.send_queue.wake()

    # ------------------------------------------------------------ receiving

    async def read(self) -> None:
        """Receive frames until trio.EndOfChannel."""
        router, peer = self._router, self._shared.peer
        while True:
            header = await _run_in_lane_thread(self._read_frames)
            if header is None:
                await trio.lowlevel.wait_readable(self._stream.socket)
                continue
            sink, view = await router.place(peer, header)
            if sink is None or view is None:
                await _run_in_lane_thread(partial(self._receive_payload, header, None))
            elif router.in_threads(header):
                await _run_in_lane_thread(partial(self._receive_frame, header, sink, view))
            else:
                try:
                    await _run_in_lane_thread(partial(self._receive_payload, header, view))
                except BaseException:
                    router.abandon(sink, peer, header, view)
                    raise
                router.deliver(sink, peer, header, view)
            self._frames.note_received()
            del sink, view

    def _read_frames(self) -> FrameHeader | None:
        """Receive frames, in a thread, until one needs the event loop.

        Returns:
          The header of that frame; None if nothing came for ``LINGER_S``.
        """
        while (header := self.socket_lane.receive_header(LINGER_S)) is not None:
            self._frames.note_begun()
            placed = self._router.place_in_thread(self._shared.peer, header)
            if placed is None:
                return header
            self._receive_frame(header, *placed)
            self._frames.note_received()
            del placed  # an idle lane must not keep a whole result in memory
        return None

    def _receive_frame(self, header: FrameHeader, sink: Sink, view: memoryview) -> None:
        router, peer = self._router, self._shared.peer
        try:
            self._receive_payload(header, view)
        except BaseException:
            router.abandon(sink, peer, header, view)
            raise
        router.deliver(sink, peer, header, view)

    def _receive_payload(self, header: FrameHeader, view: memoryview | None) -> None:
        meter, now_s = self._shared.received_meter, self._shared.loop.now_s
        carried_bytes = 0
        meter.begin(now_s())
        try:
            self.socket_lane.receive_payload(header, view)
            carried_bytes = header.payload_bytes
        finally:
            meter.end(carried_bytes, now_s())

    # ------------------------------------------------------------ sending

    async def write(self) -> None:
        """Send frames until the lane retires; then end the stream in this direction."""
        while (taken := await self._frames.take()) is not None:
            first = [taken]
            del taken
            await _run_in_lane_thread(partial(self._write_frames, first))
        self.socket_lane.send_eof()

    def _write_frames(self, first: list[TakenFrame]) -> None:
        """Send ``first``, taken out of the list, and the frames after it until there are none."""
        taken: TakenFrame | None = first.pop()
        while taken is not None:
            frame = taken.load()
            carried_bytes = 0
            if frame is not None:
                header, payload = frame
                self._frames.add_sent(taken)
                # Under way until it has arrived: the kernel takes megabytes at once.
                self._frames.meter_sent(header.payload_bytes)
                turn, piece_bytes = None, sys.maxsize
                if taken.rank is not SendRank.ROUND:
                    turn, piece_bytes = partial(self._wait_turn, taken), TURN_BYTES
                self.socket_lane.send(header, payload, turn, piece_bytes)
                carried_bytes = header.payload_bytes
                del header, payload, turn
            self._shared.send_queue.finish(taken, carried_bytes)
            del taken, frame  # an idle lane must not keep a whole result in memory
            taken = self._frames.take_in_thread(LINGER_S)

    def _wait_turn(self, taken: TakenFrame, count: int) -> None:
        """Wait until the next piece of a frame may go."""
        while wait_s := self._shared.send_queue.turn_wait_s(taken, count):
            self.socket_lane.pause(wait_s)


async def _run_in_lane_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread to its end, even if cancelled; ``hang_up`` makes it end soon.

    It always begins, too, so that the frame that it was given is accounted for like all others.
    """
    with trio.CancelScope(shield=True):
        result = await trio.to_thread.run_sync(function, limiter=_LANE_THREADS)
    return result  # noqa: RET504  mypy cannot know that a shield swallows nothing

"""The two directions of a lane in tasks of the event loop: for lanes in memory."""

from __future__ import annotations

import trio
from attrs import define

from ...protocol.network.lane import FrameHeader, Lane
from .frame_routing import Sink
from .lane_frames import LaneFrames
from .link_parts import SharedByLanes


@define(eq=False)
class LaneTasks:
    """See the top of this file. Made by ``LinkLane``."""

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
        fan_out, peer = self._shared.node.fan_out, self._shared.peer
        while (taken := await self._frames.take()) is not None:
            frame = taken.load()
            if frame is not None:
                self._frames.add_sent(taken)
                await fan_out.enter(peer)
                try:
                    await self._lane.send(*frame)
                finally:
                    fan_out.leave(peer)
            self._shared.send_queue.finish(taken, 0 if frame is None else len(frame[1]))
            del taken, frame  # an idle lane must not keep a whole result in memory
        if isinstance(self._stream, trio.abc.HalfCloseableStream):
            await self._stream.send_eof()

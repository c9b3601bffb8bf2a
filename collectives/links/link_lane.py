"""One lane of a link, from its first frame to its last.

    run                    until the lane breaks or is over
     ├── read              lane -> router -> sink       ``LaneTasks`` or ``LaneThreads``
     ├── write             send queue -> lane           likewise
     └── hang_up           wakes the threads when the lane is cancelled

A lane keeps what it has sent (``LaneFrames``) until the other side has acknowledged it: what TCP
has sent may not arrive. When the lane has ended, frames that did not arrive go back to the send
queue, for other lanes.

A lane ends in one of two ways. It *retires* when it is not needed: each side finishes the frame
under way, sends no more, and reads to the end of what the other side sends. Or it *breaks*. In both
cases each side then tells the other how many frames arrived, and no frame that arrived is sent
again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
from attrs import evolve

from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import LaneReceived
from ...protocol.network.interface import LaneFacts
from ...protocol.network.lane import Lane
from ...protocol.network.socket_lane import SocketLane
from ...protocol.network.socket_options import (
    choose_congestion,
    congestion_of,
    retransmitted_bytes,
)
from .lane_frames import LaneFrames, LaneTasks
from .lane_threads import LaneThreads
from .link_parts import SharedByLanes
from .rates.rate_meter import MeteredStream


class LinkLane:
    """See the top of this file. Made by a handshake; run by its link's ``LanePool``.

    Attributes:
      number: used once in a link's life, like the keys that belong to it.
      records: the frames of both directions, until ``run`` carries them.
      facts: what the kernel said of the path at the opening; its congestion control now.
      reason: why it ended.
      finished: set when its stream is closed.
      arrived_bytes: bytes that arrived at the other side, as far as it has acknowledged them.
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
        self._metered = MeteredStream(stream, shared.sent_meter)
        self.records = Lane(self._metered, send_key, receive_key)
        self.facts = LaneFacts()
        self.reason = ""
        self.finished = trio.Event()
        self.closed_there = trio.Event()
        self.still_s = 0.0
        self.frames = LaneFrames(shared)
        self.arrived_bytes = 0
        self._shared = shared
        self._threads: LaneThreads | None = None  # once threads carry the frames
        self._acknowledged: LaneReceived | None = None  # the last one given to the link
        self._moved: tuple[int, int, int] = (0, 0, 0)  # counts at the last call of ``watch``
        self._scope = trio.CancelScope()
        self._retransmitted_bytes = 0  # when the kernel was last asked

    # ------------------------------------------------------------ for the lane pool

    async def run(self) -> None:
        """Carry frames until the lane is over; then close its stream."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    await self._carry(nursery)
                    nursery.cancel_scope.cancel()
        finally:
            if self._threads is not None:
                self._shared.node.line.remove(self._threads.socket_lane)
                self._threads.socket_lane.release()
            self.frames.unmeter()
            self.count_retransmitted()  # for the last time
            with trio.CancelScope(shield=True):  # forceful closing waits for no peer
                await trio.aclose_forcefully(self.stream)
            self.still_s = 0.0
            self.finished.set()

    async def _carry(self, hang_up: trio.Nursery) -> None:
        carrier: LaneTasks | LaneThreads
        parts = (self.records, self.frames, self._shared)
        if isinstance(self.stream, trio.SocketStream):
            carrier = self._threads = LaneThreads(self.stream, *parts)
            self._shared.node.line.add(carrier.socket_lane, self._shared.peer)
            hang_up.start_soon(carrier.hang_up)
        else:
            carrier = LaneTasks(self.stream, *parts)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._guard, carrier.write)
            await self._guard(carrier.read)

    def close(self, reason: str) -> None:
        """End it at once; only the first reason is kept."""
        self.reason = self.reason or reason
        self._scope.cancel()

    def acknowledge(self, received: LaneReceived) -> None:
        """Take note of what arrived at the other side.

        Raises:
          RemoteProtocolError: more than was sent, or less than it acknowledged before.
        """
        if not self.frames.acknowledge(received.frames) or received.bytes < self.arrived_bytes:
            raise RemoteProtocolError(
                f"it acknowledges more on lane {self.number} than was sent, or less than before"
            )
        self.arrived_bytes = received.bytes
        if received.closed:
            self.closed_there.set()
            self.close("the other side closed it")

    def take_received(self) -> LaneReceived | None:
        """Return what is to be acknowledged; None if all of it was."""
        received = LaneReceived(
            self.number, self.frames.received_count, self.received_bytes, self.finished.is_set()
        )
        if received == self._acknowledged:
            return None
        self._acknowledged = received
        return received

    def watch(self, elapsed_s: float) -> None:
        """Count for how long nothing has moved, though something should."""
        moved = (self.frames.arrived_count, self.arrived_bytes, self.sent_bytes)
        # Once the lane has ended here, the other side owes its last acknowledgement.
        owed = self.frames.sending or self.finished.is_set()
        if owed and moved == self._moved:
            self.still_s += elapsed_s
        else:
            self.still_s = 0.0
        self._moved = moved

    @property
    def on_socket(self) -> SocketLane | None:
        """The lane's connection, once threads carry its frames; None for a lane in memory."""
        return None if self._threads is None else self._threads.socket_lane

    @property
    def sent_bytes(self) -> int:
        in_threads = 0 if self._threads is None else self._threads.socket_lane.sent_bytes
        return self._metered.sent_bytes + in_threads

    @property
    def received_bytes(self) -> int:
        in_threads = 0 if self._threads is None else self._threads.socket_lane.received_bytes
        return self._metered.received_bytes + in_threads

    def count_retransmitted(self) -> int:
        """Return how many bytes the kernel has sent again on this lane, or did until its end."""
        if isinstance(self.stream, trio.SocketStream):
            now_bytes = retransmitted_bytes(self.stream.socket)
            self._retransmitted_bytes = max(self._retransmitted_bytes, now_bytes)
        return self._retransmitted_bytes

    def choose_congestion(self, name: str) -> None:
        """Use this congestion control from now on, if the kernel permits it by now."""
        if isinstance(self.stream, trio.SocketStream) and self.facts.congestion != name:
            choose_congestion(self.stream.socket, name)
            self.facts = evolve(self.facts, congestion=congestion_of(self.stream.socket))

    async def _guard(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a direction; end the lane for the network's fault, the link for the peer's."""
        try:
            await task()
        except trio.EndOfChannel:
            self.frames.retire()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.close(f"the connection broke ({error})")
        except RemoteProtocolError as error:  # a frame that is not authentic, or malformed
            self._shared.lose_link(str(error))

"""Probes: a measurement of how fast another member's line sends. The receiver asks for junk and times it.

    receiver                          sender
    measure --ProbeRequest----------> serve
            <--BLOCK frames of junk--         each authenticated, then dropped

The receiver's clock counts, because bytes that the sender's kernel has taken may not be on their way.
Only the second half of what came is timed, so that neither the delay of the path nor the connections'
slow start are in it. Both sides stop after the probe's bytes or seconds, whichever comes first, and at
once when ``stop`` is called because a round needs the lines.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import trio

from ...protocol.errors import PeerLostError
from ...protocol.messages import Probe, Probed, ProbeRequest
from ...protocol.network.lane import FrameHeader, FrameKind
from .hub import LinkHub
from .send_priority import SendRank
from .send_queue import Load

FRAME_BYTES = 16_384  # short, since as many arrive at once as there are lanes
JUNK = bytes(FRAME_BYTES)  # encrypted on its way, so nothing on the path can compress it
WAITS = 2  # all of a probe, delays included, may take this many times its seconds


class Arrivals:
    """A sink that records how many bytes of a probe came, and when.

    Attributes:
      whole: set once all bytes that were asked for have come.
    """

    def __init__(self, sender: str, wanted_bytes: int) -> None:
        self.whole = trio.Event()
        self._sender = sender
        self._wanted_bytes = wanted_bytes
        self._came_bytes = 0
        self._times: list[tuple[float, int]] = []  # (when, bytes until then), a frame each

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """Return memory for one frame; None to drop what was not asked for."""
        if peer != self._sender or header.payload_bytes > FRAME_BYTES or self.whole.is_set():
            return None
        return memoryview(bytearray(header.payload_bytes))

    def deliver(self, _peer: str, _header: FrameHeader, payload: memoryview) -> None:
        self._came_bytes += len(payload)
        self._times.append((trio.current_time(), self._came_bytes))
        if self._came_bytes >= self._wanted_bytes:
            self.whole.set()

    def abandon(self, _peer: str, _header: FrameHeader, _view: memoryview) -> None:
        """Do nothing: the frame comes again, or counts as missing."""

    def second_half(self) -> tuple[int, float]:
        """Return the bytes that came after the first half, and the seconds that they took.

        Both are zero if too few came to tell.
        """
        for began_s, bytes_before in self._times:
            if 2 * bytes_before >= self._came_bytes:
                ended_s = self._times[-1][0]
                carried_bytes = self._came_bytes - bytes_before
                return (carried_bytes, ended_s - began_s) if ended_s > began_s else (0, 0.0)
        return 0, 0.0


class Prober:
    """Both sides of all probes of a node. For its event loop only."""

    def __init__(self, hub: LinkHub) -> None:
        self._hub = hub
        self._running: set[trio.CancelScope] = set()

    async def measure(self, order: Probe) -> Probed:
        """Ask ``order.sender`` for junk and measure how fast it comes.

        Returns:
          The report for the master: 0 bytes in 0 seconds if the probe failed or was stopped.

        Cancellation: safe; what is still on its way is dropped as it comes.
        """
        arrivals = Arrivals(order.sender, order.bytes)
        transfer = secrets.randbits(32)
        with trio.move_on_after(WAITS * order.seconds) as scope, self._noted(scope):
            try:
                link = await self._hub.link(order.sender, order.seconds)
                with self._hub.register((FrameKind.BLOCK, transfer), arrivals):
                    await link.send(ProbeRequest(transfer, order.bytes, order.seconds))
                    await arrivals.whole.wait()
            except PeerLostError:
                pass  # what has come until then counts
        if scope.cancel_called and trio.current_time() < scope.deadline:
            return Probed(order.number, order.sender, 0, 0.0)  # stopped: a round used the line, too
        carried_bytes, seconds = arrivals.second_half()
        return Probed(order.number, order.sender, carried_bytes, seconds)

    async def serve(self, peer: str, request: ProbeRequest) -> None:
        """Send junk to a member that asked for it; the request's limits say how much.

        A request ends all earlier probes, so that members cannot add them up.
        """
        self.stop()
        if (link := self._hub.links.get(peer)) is None:
            return
        with trio.move_on_after(request.seconds) as scope, self._noted(scope):
            with suppress(PeerLostError):
                await link.send_from(_Junk(request.transfer, request.bytes), SendRank.COPY)

    def stop(self) -> None:
        """End all probes of this node, because a round needs the lines."""
        for scope in list(self._running):
            scope.cancel()

    @contextmanager
    def _noted(self, scope: trio.CancelScope) -> Iterator[None]:
        self._running.add(scope)
        try:
            yield
        finally:
            self._running.discard(scope)


class _Junk:
    """A source of a number of bytes, sent as fast as lanes take them."""

    def __init__(self, transfer: int, count_bytes: int) -> None:
        self._transfer = transfer
        self._left_bytes = count_bytes
        self._index = 0

    def next_frame(self) -> Load | None:
        length = min(FRAME_BYTES, self._left_bytes)
        if not length:
            return None
        header = FrameHeader(FrameKind.BLOCK, 0, 0, self._index, self._transfer, length)
        self._left_bytes -= length
        self._index += 1
        return lambda: (header, JUNK[:length])

    def exhausted(self) -> bool:
        return self._left_bytes == 0

"""How fast another member's line sends: it is asked for junk, and whoever asked times what arrives.

    receiver                          sender
    measure --ProbeRequest----------> serve
            <--BLOCK frames of junk--         each authenticated, then dropped

The receiver's clock is the one that counts: what a sender's system has taken is not yet on its way.
Only the second half of what came is timed, so that neither the way there nor the connections' slow
start are in it. Both sides stop after the probe's bytes or seconds, whichever comes first, and at
once when ``stop`` says that the lines are needed for a round.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

import trio

from ..protocol.errors import PeerLostError
from ..protocol.lane import Buffer, FrameHeader, FrameKind
from ..protocol.messages import Message, Probe, Probed, ProbeRequest
from .routing import Sink

FRAME_BYTES = 65_536  # short next to what a slow line carries in a probe's time
JUNK = bytes(FRAME_BYTES)  # encrypted on its way, so nothing there can compress it
SENDERS = 16  # frames handed to the link at once: enough for as many lanes as it may have
WAITS = 2  # times the probe's seconds that all of it may take, the way there and back included


class ProbeLink(Protocol):
    """What a probe needs of ``collectives.link.Link``."""

    async def send(self, message: Message) -> None: ...

    async def send_frame(self, header: FrameHeader, payload: Buffer) -> None: ...


class ProbeHub(Protocol):
    """What a probe needs of ``collectives.hub.LinkHub``."""

    @property
    def links(self) -> Mapping[str, ProbeLink]: ...

    async def link(self, peer: str, deadline_s: float = ...) -> ProbeLink: ...

    def register(self, key: tuple[int, ...], sink: Sink) -> AbstractContextManager[None]: ...


class Arrivals:
    """What came of a probe, and when; the hub's sink for its frames.

    Attributes:
      whole: set once all that was asked for is here.
    """

    def __init__(self, sender: str, wanted_bytes: int) -> None:
        self.whole = trio.Event()
        self._sender = sender
        self._wanted_bytes = wanted_bytes
        self._came_bytes = 0
        self._times: list[tuple[float, int]] = []  # (when, bytes until then), a frame each

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """Room for one frame; what nobody asked for is dropped."""
        if peer != self._sender or header.payload_bytes > FRAME_BYTES or self.whole.is_set():
            return None
        return memoryview(bytearray(header.payload_bytes))

    def deliver(self, _peer: str, _header: FrameHeader, payload: memoryview) -> None:
        self._came_bytes += len(payload)
        self._times.append((trio.current_time(), self._came_bytes))
        if self._came_bytes >= self._wanted_bytes:
            self.whole.set()

    def second_half(self) -> tuple[int, float]:
        """Bytes that came after the first half had, and the seconds they took; (0, 0.0): too few."""
        for began_s, bytes_before in self._times:
            if 2 * bytes_before >= self._came_bytes:
                ended_s = self._times[-1][0]
                carried_bytes = self._came_bytes - bytes_before
                return (carried_bytes, ended_s - began_s) if ended_s > began_s else (0, 0.0)
        return 0, 0.0


class Prober:
    """Both sides of all probes of a node. Touched by its event loop only."""

    def __init__(self, hub: ProbeHub) -> None:
        self._hub = hub
        self._running: set[trio.CancelScope] = set()

    async def measure(self, order: Probe) -> Probed:
        """Take junk of ``order.sender`` and say how fast it came.

        Returns:
          The report for the master: no bytes in no time if nothing came of it.

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
                pass  # what came until then counts
        if scope.cancel_called and trio.current_time() < scope.deadline:
            return Probed(order.number, order.sender, 0, 0.0)  # stopped: others had the line, too
        carried_bytes, seconds = arrivals.second_half()
        return Probed(order.number, order.sender, carried_bytes, seconds)

    async def serve(self, peer: str, request: ProbeRequest) -> None:
        """Send junk to a member that asked for it; the message's own limits say how much.

        One probe at a time: another one ends those before it, so nobody can add them up.
        """
        self.stop()
        if (link := self._hub.links.get(peer)) is None:
            return
        lengths = [FRAME_BYTES] * (request.bytes // FRAME_BYTES)
        if rest := request.bytes % FRAME_BYTES:
            lengths.append(rest)
        with trio.move_on_after(request.seconds) as scope, self._noted(scope):
            async with trio.open_nursery() as nursery:
                for _sender in range(min(SENDERS, len(lengths))):
                    nursery.start_soon(partial(_send_junk, link, request.transfer, lengths))

    def stop(self) -> None:
        """A round needs the lines: end all probes here."""
        for scope in list(self._running):
            scope.cancel()

    @contextmanager
    def _noted(self, scope: trio.CancelScope) -> Iterator[None]:
        self._running.add(scope)
        try:
            yield
        finally:
            self._running.discard(scope)


async def _send_junk(link: ProbeLink, transfer: int, lengths: list[int]) -> None:
    """Send frames until ``lengths``, which all senders share, is empty or the link is lost."""
    try:
        while lengths:
            length = lengths.pop()
            header = FrameHeader(
                kind=FrameKind.BLOCK,
                round=0,
                attempt=0,
                index=len(lengths),
                transfer=transfer,
                payload_bytes=length,
            )
            await link.send_frame(header, JUNK[:length])
    except PeerLostError:
        lengths.clear()

"""The route of a frame: from its header to the sink that waits for it.

A *sink* registers for a key while it wants frames. Frames may arrive before the order that makes
this node register (the order comes from the master, the frames from peers): the lane that carries
such a frame waits a while. Frames of a finished transfer or attempt are read and dropped at once,
so that they hold up no lane.

This file knows no links and no lanes; it never sends anything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import trio

from ...protocol.errors import LocalProtocolError, RemoteProtocolError
from ...protocol.network.lane import FrameHeader, FrameKind
from ...protocol.wakeups import Pulse

# How long a lane waits for a sink of its frame; then the frame is dropped. The sender would take a
# wait of ``LANE_STALL_S`` for a stall.
EARLY_WAIT_S = 10.0
# Rounds and transfers whose end is remembered. Late frames of others cost a lane the early wait.
ENDED_MAX = 4_096

Key = tuple[int, ...]


class Sink(Protocol):
    """A receiver of the frames of a key. All methods are synchronous and must not block.

    A sink that registers for threads may be called from several lanes' threads at once, and a last
    time just after its registration ended; ``deliver`` may then take as long as the frame's
    arithmetic does.
    """

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """Return memory for the payload (exactly ``payload_bytes``), or None to drop it.

        The header is not authenticated yet, so the peer must not be accused for it here: the header
        may have been changed on the way, and then the link is lost a moment later.
        """
        ...

    def deliver(self, peer: str, header: FrameHeader, payload: memoryview) -> None:
        """Take an authentic frame; ``payload`` is the object that ``place`` returned."""
        ...

    def abandon(self, peer: str, header: FrameHeader, view: memoryview) -> None:
        """Give up a frame whose lane broke before its payload was whole.

        Nothing is written to ``view``, which ``place`` returned, any more. The same frame may be
        placed again, from another lane. The header may never have been authentic.
        """
        ...


def frame_key(header: FrameHeader) -> Key:
    """Return (kind, round, attempt) for a chunk, (BLOCK, transfer) for a block."""
    if header.kind is FrameKind.BLOCK:
        return (FrameKind.BLOCK, header.transfer)
    return (header.kind, header.round, header.attempt)


class FrameRouter:
    """The table of sinks.

    Attributes:
      dropped_frames: how many frames found no sink, or were dropped by it.
    """

    def __init__(self) -> None:
        self.dropped_frames = 0
        self._sinks: dict[Key, Sink] = {}
        # The sinks that threads may call. Threads only look up keys in these two tables, each time
        # in one operation of the interpreter; everything else here belongs to the event loop.
        self._sinks_in_threads: dict[Key, Sink] = {}
        self._changed = Pulse()
        # Round -> last attempt that is over.
        self._ended_attempts: OrderedDict[int, int] = OrderedDict()
        self._ended_transfers: OrderedDict[Key, None] = OrderedDict()
        self._given_up: OrderedDict[Key, None] = OrderedDict()  # no sink registered in time

    @contextmanager
    def register(self, key: Key, sink: Sink, *, threads: bool = False) -> Iterator[None]:
        """Give ``sink`` the frames of ``key`` until the block ends; then the key is over for good.

        Registering an attempt of a round ends all earlier attempts of that round.

        Args:
          threads: the sink may be called from threads.

        Raises:
          LocalProtocolError: the key is taken, or a transfer's number was used before.
          RemoteProtocolError: the attempt is over, so the order for it is stale.
        """
        if key in self._sinks:
            raise LocalProtocolError(f"frames of {key} are registered already")
        if self._is_over(key):
            if key[0] == FrameKind.BLOCK:
                raise LocalProtocolError(f"transfer {key[1]} is over")
            raise RemoteProtocolError(f"attempt {key[2]} of round {key[1]} is over")
        if key[0] != FrameKind.BLOCK:
            self.forget_through(key[1], key[2] - 1)
        self._given_up.pop(key, None)
        self._sinks[key] = sink
        if threads:
            self._sinks_in_threads[key] = sink
        self._changed.notify_all()
        try:
            yield
        finally:
            del self._sinks[key]
            self._sinks_in_threads.pop(key, None)
            if key[0] == FrameKind.BLOCK:
                self._ended_transfers[key] = None
                _bound(self._ended_transfers)
            else:
                self.forget_through(key[1], key[2])
            self._changed.notify_all()

    def forget_through(self, round_: int, attempt: int) -> None:
        """Drop frames of this round, up to this attempt, from now on."""
        ended = self._ended_attempts.pop(round_, -1)
        self._ended_attempts[round_] = max(ended, attempt)
        _bound(self._ended_attempts)
        self._changed.notify_all()

    async def place(
        self, peer: str, header: FrameHeader
    ) -> tuple[Sink, memoryview] | tuple[None, None]:
        """Find the frame's sink and its memory, waiting for the sink if the frame is early.

        Only the first frames of a key wait. Once one has waited in vain, a sink that registers late
        misses a frame anyway, and a hundred more need not hold up their lane in turn.

        Returns:
          The sink and its memory; None twice if the frame is to be dropped.
        """
        key = frame_key(header)
        if key not in self._sinks:
            await self._wait_sink(key)
        sink = self._sinks.get(key)
        view = None if sink is None else sink.place(peer, header)
        if sink is None or view is None:
            self.dropped_frames += 1
            return None, None
        return sink, view

    async def _wait_sink(self, key: Key) -> None:
        with trio.move_on_after(EARLY_WAIT_S) as scope:
            while not (key in self._sinks or self._is_over(key) or key in self._given_up):
                await self._changed.wait()
        if scope.cancelled_caught:
            self._given_up[key] = None
            _bound(self._given_up)
            self._changed.notify_all()

    def place_in_thread(self, peer: str, header: FrameHeader) -> tuple[Sink, memoryview] | None:
        """Find the frame's sink and its memory, in a thread, or None: then ask ``place``."""
        sink = self._sinks_in_threads.get(frame_key(header))
        view = None if sink is None else sink.place(peer, header)
        return None if sink is None or view is None else (sink, view)

    def in_threads(self, header: FrameHeader) -> bool:
        """Return whether the frame's sink may be called from threads."""
        return frame_key(header) in self._sinks_in_threads

    def deliver(self, sink: Sink, peer: str, header: FrameHeader, payload: memoryview) -> None:
        """Hand an authentic payload to the sink that placed it, if it is still registered.

        Called in the thread that placed it, or on the event loop.
        """
        if self._sinks.get(frame_key(header)) is sink:
            sink.deliver(peer, header, payload)

    def abandon(self, sink: Sink, peer: str, header: FrameHeader, view: memoryview) -> None:
        """Tell the frame's sink that its payload will not come; called as ``deliver`` is."""
        if self._sinks.get(frame_key(header)) is sink:
            sink.abandon(peer, header, view)

    def _is_over(self, key: Key) -> bool:
        if key[0] == FrameKind.BLOCK:
            return key in self._ended_transfers
        return key not in self._sinks and self._ended_attempts.get(key[1], -1) >= key[2]


def _bound(table: OrderedDict[Any, Any]) -> None:
    """Remove the oldest entry of a table that is too long."""
    if len(table) > ENDED_MAX:
        table.popitem(last=False)

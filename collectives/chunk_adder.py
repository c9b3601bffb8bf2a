"""The frames that come in during a reduction: contributions are added up, results are checked.

``deliver`` does a frame's arithmetic at once, while its bytes are in the cache: the contribution
that completes a chunk has it added up, a result is checked, and either is hashed. Nothing here
waits for a frame, so a reduction cannot hold up a lane, nor two reductions each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from attrs import define, field

from ..protocol.errors import BadContributionError, RemoteProtocolError
from ..protocol.network.lane import FrameHeader
from ..protocol.wakeups import Loop
from .arithmetic import Values, reduce_counters
from .chunk_sender import ChunkSender
from .chunk_tracker import FrameDuty, UnwantedFrameError
from .combine import combine_chunk
from .norm_report import NOTHING, NormSums
from .reduction_context import ReductionContext
from .spot_check import digests_of


class ChunkAdder:
    """The arithmetic of a reduction. All methods are called by any thread, several at once.

    Lanes' threads call ``deliver``, worker threads ``add_up``. Two threads never work on one chunk.

    Args:
      sender: is given what this node has to send on.
      momentum: outer momentum before the round, of the first values of the fragment; contributions
        are compared with it. None if they are not to be.

    Attributes:
      added: by chunk that this node made: digests of what it added, for checkers; see
        ``spot_check``.
    """

    def __init__(
        self,
        context: ReductionContext,
        sender: ChunkSender,
        momentum: Values | None = None,
    ) -> None:
        self._context = context
        self._sender = sender
        self._momentum = NOTHING if momentum is None else momentum
        self._lock = threading.Lock()  # guards the next one; nothing else is done under it
        self._norms = NormSums(context.order.contributors)
        self.added: dict[int, bytes] = {}

    def deliver(self, peer: str, header: FrameHeader, payload: memoryview) -> tuple[bool, bool]:
        """Take in a frame, which is authentic now, so that its sender can be named.

        Returns:
          Whether all chunks are done now (at one call only), and the sender owes no more frames.

        Raises:
          BadContributionError: the reduction cannot go on, because of the peer that is named.
          RemoteProtocolError: the sender should not have sent this; its link is to be closed.
        """
        context = self._context
        try:
            duty, paid = context.tracker.deliver(peer, header, payload)
        except UnwantedFrameError as error:
            if error.owing:
                raise BadContributionError(peer, str(error)) from None
            raise RemoteProtocolError(f"peer {peer[:8]} {error}") from None
        complete = False
        if duty is FrameDuty.DECODE:
            context.result.decode(header.kind, header.index, payload, peer)
            self._sender.result_came(peer)
            complete = self._finish(header.index)
        elif duty is FrameDuty.ADD_UP:
            complete = self.add_up(header.index)
        return complete, paid

    def _finish(self, index: int) -> bool:
        self._sender.result_ready(index)
        return self._context.result.done(index)

    # ------------------------------------------------------------ sums

    def add_up(self, index: int) -> bool:
        """Add up a chunk that this node owns and that lacks nothing.

        Returns:
          Whether all chunks are done now (at one call only).

        Raises:
          BadContributionError: a contribution that must not be added.
        """
        context, tracker = self._context, self._context.tracker
        arrived = tracker.contributions(index)
        if context.encoded_input is not None:
            arrived[context.me] = context.own_chunk(index)
        self.make_result(index, arrived)
        if context.audited:
            self.added[index] = digests_of(context, index, arrived)
        del arrived  # its memory is used again from here on
        tracker.added_up(index)
        return self._finish(index)

    def make_result(self, index: int, arrived: Mapping[str, memoryview]) -> None:
        """Make the result of a chunk that this node owns.

        Args:
          arrived: encoded contributions, by peer.
        """
        context, result = self._context, self._context.result
        layout, contributors = context.layout, context.order.contributors
        room = result.room(index)
        if layout.cuts[index].is_counters:
            reduce_counters(list(arrived.values()), result.counters)
            np.frombuffer(room, "<i8")[:] = result.counters
            length = len(room)
        else:
            norms = NormSums(contributors, self._momentum[layout.cuts[index].values])
            length = combine_chunk(
                contributors,
                arrived,
                layout,
                context.radius,
                result.scratch(index),
                room,
                norms.take,
                context.factors,
            )
            norms.take_result(result.scratch(index))
            with self._lock:
                self._norms.add(norms)
        result.made(index, length, [each.peer in arrived for each in contributors])

    def norm_sums(self) -> tuple[bytes, float]:
        """Return the fields ``norm_sums`` and ``momentum_square`` of ``Reduced``."""
        return self._norms.norm_sums(), self._norms.momentum_square


@define(eq=False)
class ThreadEntry:
    """Other threads' entry to a reduction: the sink of its frames, and its workers' work.

    Arithmetic is done in the thread that calls; what follows for the reduction, on the event loop.
    """

    _context: ReductionContext
    _adder: ChunkAdder
    _on_bad: Callable[[BadContributionError], None]
    _on_complete: Callable[[], None]
    _on_paid: Callable[[str], None]
    _loop: Loop = field(factory=Loop, init=False)

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """See ``frame_routing.Sink``."""
        return self._context.tracker.place(peer, header)

    def abandon(self, peer: str, header: FrameHeader, view: memoryview) -> None:
        """See ``frame_routing.Sink``."""
        self._context.tracker.abandon(peer, header, view)

    def deliver(self, peer: str, header: FrameHeader, payload: memoryview) -> None:
        """See ``frame_routing.Sink``."""
        try:
            complete, paid = self._adder.deliver(peer, header, payload)
        except BadContributionError as error:
            self.fail(error)
            return
        if complete:
            self._loop.soon(self._on_complete)
        if paid:
            self._loop.soon(partial(self._on_paid, peer))

    def add_up(self, index: int) -> None:
        """See ``ChunkAdder.add_up``."""
        if self._adder.add_up(index):
            self._loop.soon(self._on_complete)

    def fail(self, error: BadContributionError) -> None:
        """End the reduction."""
        self._loop.soon(partial(self._on_bad, error))

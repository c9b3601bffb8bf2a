"""The frames that a node sends in a reduction, and the tasks that have links send them.

    ChunkSender    what can be sent: batches of chunks                         lanes' threads
    FrameMaker     the frames, when a lane asks for them                       lanes' threads
    SendTasks      one task per peer and direction, until its batch is sent    event loop

Nothing is pushed. A link asks a *source* (``_Batch``) for the next frame when one of its lanes is
idle. A source offers its chunks as they become ready.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import trio
from attrs import define, field, frozen

from ..protocol.errors import BadContributionError, PeerLostError
from ..protocol.network.lane import Buffer, FrameHeader, FrameKind
from .codecs.codecs import FrameCompressor
from .links.link import Link
from .links.rates.send_priority import SendRank
from .links.send_queue import Frame, FrameSource, Load
from .reduction_context import ReductionContext

# What an owner buffers of others' contributions while they are out of step. A contributor sends
# only this far ahead of the results that come back, so that fast ones do not fill the owner's
# memory while it waits for slow ones. With 8 contributors it is 9 MiB each: 1 Gbit/s over 75 ms.
CONTRIBUTIONS_BYTES_MAX = 64 * 2**20
AHEAD_MIN = 4  # chunks that a contributor may be ahead at least: enough to keep its lanes busy

OnBad = Callable[[BadContributionError], object]
LoadOf = Callable[[int, int], Load]  # of a chunk, given its index and attempt


@define(eq=False)
class _Batch:
    """The chunks of one kind for one peer, as they become ready; a ``FrameSource``.

    Attributes:
      attempt_of: returns the attempt under which a chunk is sent.
      load_of: returns what makes a chunk's frame.
      may_go: returns whether the next one may be sent now, and counts it.
      count: of all of them.
      ready: those that can be sent, in the order of sending; any thread appends to it.
    """

    attempt_of: Callable[[int], int]
    load_of: LoadOf
    may_go: Callable[[], bool] = lambda: True
    count: int = 0
    ready: list[int] = field(factory=list)
    position: int = 0

    def next_frame(self) -> Load | None:
        if self.position == len(self.ready) or not self.may_go():
            return None
        index = self.ready[self.position]
        self.position += 1
        return self.load_of(index, self.attempt_of(index))

    def left(self) -> int:
        return self.count - self.position


@frozen
class Send:
    """A source of frames for one peer: contributions, or else results."""

    peer: str
    source: FrameSource
    contribution: bool


class ChunkSender:
    """The chunks that this node can send, and their frames.

    ``plan``, ``spread`` and ``use_link`` are called on the event loop; everything else by any
    thread, several at once. No method waits.
    """

    def __init__(self, context: ReductionContext) -> None:
        self._context = context
        self._maker = FrameMaker(context)
        self._ahead_max = _most_chunks_ahead(context)
        self._lock = threading.Lock()  # guards the next two; nothing else is done under it
        self._ahead: Counter[str] = Counter()  # contributions less results that came, by owner
        self._held_back: set[str] = set()  # owners to which one more was refused
        # Entries are added on the event loop. The thread that completes a chunk removes it.
        self._takers: dict[int, list[_Batch]] = {}  # batches that wait for a chunk's result
        self._links: dict[str, Link] = {}  # replaced as a whole, since threads iterate over it

    # ------------------------------------------------------------ on the event loop

    def plan(self, chunks: Iterable[int], on_bad: OnBad) -> list[Send]:
        """Plan what to send of these chunks: contributions to owners, results of our own.

        Args:
          on_bad: called, in any thread, if our own values cannot be encoded.
        """
        context = self._context
        self._maker.on_bad = on_bad
        up: dict[str, _Batch] = {}
        down: dict[str, _Batch] = {}
        for index in chunks:
            owner = context.tracker.owner(index)
            if owner == context.me:
                takers = [down.setdefault(peer, self._results()) for peer in context.others]
                for batch in takers:
                    batch.count += 1
                self._takers[index] = takers
            elif context.encoded_input is not None:
                if owner not in up:
                    may_send = partial(self._may_contribute, owner)
                    up[owner] = _Batch(context.tracker.attempt_of, self.contribution_load, may_send)
                up[owner].count += 1
                up[owner].ready.append(index)
        return [
            *(Send(peer, up[peer], contribution=True) for peer in context.rotated(up)),
            *(Send(peer, down[peer], contribution=False) for peer in context.rotated(down)),
        ]

    def spread(self, lacking: dict[str, list[int]]) -> list[Send]:
        """Plan to send results that are here to the peers that lack them."""
        return [
            Send(peer, self._results(lacking[peer]), contribution=False)
            for peer in self._context.rotated(lacking)
        ]

    def use_link(self, peer: str, link: Link) -> None:
        """Wake this link from now on when there is more to send."""
        self._links = {**self._links, peer: link}

    def acknowledge_now(self) -> None:
        """Have the links confirm at once what has arrived."""
        for link in self._links.values():
            link.acknowledge_now()

    def forget_reduction(self) -> None:
        """Refer no more to the reduction, which is over; frames may be sent again after it."""
        self._maker.on_bad = _ignore

    def _results(self, ready: Sequence[int] = ()) -> _Batch:
        attempt_of = self._context.tracker.attempt_of
        return _Batch(attempt_of, self.result_load, count=len(ready), ready=list(ready))

    # ------------------------------------------------------------ in any thread

    def result_ready(self, index: int) -> None:
        """Send a chunk's result, which is here now, to the peers that take it from us."""
        takers = self._takers.pop(index, [])
        for batch in takers:
            batch.ready.append(index)
        if takers:
            for link in self._links.values():
                link.wake()

    def result_came(self, source: str) -> None:
        """Allow one more contribution to the peer that sent a result."""
        with self._lock:
            self._ahead[source] -= 1
            held_back = source in self._held_back
            self._held_back.discard(source)
        if held_back and (link := self._links.get(source)) is not None:
            link.wake()

    def _may_contribute(self, peer: str) -> bool:
        """Count one more contribution to a peer; returns False if it is too far ahead."""
        with self._lock:
            if self._ahead[peer] >= self._ahead_max:
                self._held_back.add(peer)
                return False
            self._ahead[peer] += 1
            return True

    def contribution_load(self, index: int, attempt: int) -> Load:
        """Return what makes the frame of our contribution to a chunk."""
        return partial(self._maker.contribution, index, attempt)

    def result_load(self, index: int, attempt: int) -> Load:
        """Return what makes the frame of a chunk's result; no frame if its file is not readable."""
        try:
            kind, payload = self._context.result.payload(index)
        except OSError:
            return _no_frame
        return partial(self._maker.result, kind, index, attempt, payload)


class FrameMaker:
    """The frames of one node in a reduction; made by any thread, several at once.

    A frame may be made again until it is acknowledged, which can be after the reduction. So this
    refers neither to the result nor to others' contributions: all would stay for one frame.

    Attributes:
      on_bad: called, in any thread, if this node's own values cannot be encoded.
    """

    def __init__(self, context: ReductionContext) -> None:
        self.on_bad: OnBad = _ignore
        self._me, self._order = context.me, context.order
        self._cuts = context.layout.cuts
        self._encoded_input = context.encoded_input
        self._compressor = FrameCompressor(context.layout.zstd_up)

    def contribution(self, index: int, attempt: int) -> Frame | None:
        """Make the frame of this node's contribution; returns None if it cannot be encoded."""
        assert self._encoded_input is not None
        try:
            payload: Buffer = self._encoded_input.encode(index)
        except ValueError as error:
            self.on_bad(BadContributionError(self._me, str(error)))
            return None
        if self._compressor.pays and not self._cuts[index].is_counters:
            payload = self._compressor.compress(memoryview(payload))
        return self._frame(FrameKind.CONTRIBUTION, index, attempt, payload)

    def result(self, kind: FrameKind, index: int, attempt: int, payload: Sequence[Buffer]) -> Frame:
        """Make the frame of a chunk's result, whose payload comes in pieces."""
        whole = payload[0] if len(payload) == 1 else b"".join(payload)
        return self._frame(kind, index, attempt, whole)

    def _frame(self, kind: FrameKind, index: int, attempt: int, payload: Buffer) -> Frame:
        order = self._order
        return FrameHeader(kind, order.round, attempt, index, order.fragment, len(payload)), payload


def _ignore(_error: BadContributionError) -> None:
    """Take the place of a reduction that is over."""


def _no_frame() -> None:
    """Make no frame: the receiver lacks the chunk, and fetches the fragment."""


def _most_chunks_ahead(context: ReductionContext) -> int:
    """Return how many chunks to send an owner beyond those whose result came back."""
    chunk_bytes = max((cut.up_bytes for cut in context.layout.cuts), default=1)
    senders = max(1, len(context.contributors) - 1)
    return max(AHEAD_MIN, CONTRIBUTIONS_BYTES_MAX // (senders * max(1, chunk_bytes)))


@define(eq=False)
class SendTasks:
    """One task for each ``Send``. All methods are called on the event loop.

    Tasks for peers that the round depends on run in the reduction's nursery. Those for other
    receivers run in the hub's: nothing waits for them, they may outlive it.

    Args:
      link_wait_s: how long to wait for a link that is not up.
      on_lost: called if the receiver of a contribution has no link. A lost receiver of results is
        skipped: if this node needs anything from it, its loss is noticed there.
    """

    _context: ReductionContext
    _sender: ChunkSender
    _nursery: trio.Nursery
    _link_wait_s: float
    _on_lost: Callable[[PeerLostError], None]
    _scopes: dict[str, list[trio.CancelScope]] = field(factory=dict, init=False)  # by peer
    # Those in the hub's nursery.
    _trailing: list[trio.CancelScope] = field(factory=list, init=False)

    def start(self, send: Send) -> None:
        """Begin to send, unless the peer is shut out."""
        peer = send.peer
        if self._context.tracker.is_shut_out(peer):
            return
        if peer in self._context.needed:
            scope = trio.CancelScope()
            self._nursery.start_soon(self._send_within, scope, send)
        else:
            task = partial(self._send, send)
            scope = self._context.hub.trailing.start(peer, self._context.order.round, task)
            self._trailing.append(scope)
        self._scopes.setdefault(peer, []).append(scope)

    def cancel(self, peer: str) -> None:
        """Send nothing more to a peer."""
        for scope in self._scopes.pop(peer, []):
            scope.cancel()

    def cancel_trailing(self) -> None:
        """Send nothing more to receivers that the round does not depend on."""
        for scope in self._trailing:
            scope.cancel()

    async def _send_within(self, scope: trio.CancelScope, send: Send) -> None:
        with scope:
            await self._send(send)

    async def _send(self, send: Send) -> None:
        try:
            link = await self._context.hub.link(send.peer, self._link_wait_s)
            self._sender.use_link(send.peer, link)
            order = self._context.order
            # Contributions first: a sum waits for the last of them, a result's chunks for nothing.
            age = 2 * order.round + (not send.contribution)
            await link.send_from(send.source, self._rank(send.peer), age)
        except PeerLostError as error:
            if send.contribution:
                self._on_lost(error)

    def _rank(self, peer: str) -> SendRank:
        """Return a low rank for a peer whose state is still being copied: it can wait."""
        needed = peer in self._context.needed or self._context.hub.is_in_sync(peer)
        return SendRank.ROUND if needed else SendRank.LISTENER

"""A reduction: the chunks' weighted mean, by a butterfly over links, repaired when peers are lost.

Every chunk has one owner. Contributors send their encoded chunk to its owner. The owner adds them
up, encodes the mean once, and sends the encoded bytes to every receiver. The owner, too, decodes
what it encoded. So all receivers decode the same bytes to the same bits.

    Reduction     start, flush, repair, finish, fail                     event loop
    SendTasks     one task per peer that gets frames (``chunk_sender``)  event loop
    ChunkSender   what can be sent, and the frames (``chunk_sender``)    any thread
    ChunkAdder    what comes in: sums, decoding (``chunk_adder``)        any thread
    ChunkTracker, RoundResult    the state and the bytes of each chunk   any thread

    Reduction.serve             until cancelled; reports the result when it is whole
     ├── _watch                 one per peer that still owes us a frame: reports its loss
     ├── SendTasks              contributions per owner, results per receiver: gives links a source
     └── _work                  adds up what no frame completed: own chunks, or after a loss

    the hub's nursery
     └── SendTasks              to receivers that only listen: they may lag, nothing waits for them

Chunks never pass through these tasks: the threads of links' lanes take frames from the sources and
bring frames to the sink (``ThreadEntry``), which has ``ChunkAdder`` do the arithmetic at once.

A loss does not end a reduction, the master repairs it. ``flush`` shuts the lost peers out and
returns which chunks are here; from then on our own chunks wait for the other contributors only.
``repair`` gives the chunks of lost owners to other peers: to a peer that holds the result and
spreads it as it is, or to a peer that adds the chunk up again from what contributors send again.
The set of a chunk's contributors is hashed with its result, so equal digests mean equal sets.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import trio
from attrs import frozen

from ..protocol import messages as m
from ..protocol.errors import (
    BadContributionError,
    HoldfastError,
    PeerLostError,
    RemoteProtocolError,
)
from ..protocol.network.interface import Network
from ..protocol.network.lane import FrameKind
from ..protocol.unnamed_file import IN_MEMORY_BYTES_MAX
from .arithmetic import Counters, Values
from .chunk_adder import ChunkAdder, ThreadEntry
from .chunk_sender import ChunkSender, SendTasks
from .encoded_input import EncodedInput
from .links.hub import LINK_WAIT_S
from .reduction_context import ReductionContext
from .result import unpack_bits
from .spot_check import SpotCheck

WORKERS = 2  # chunks that are added up at once where no frame's arrival does it
REDUCTION_KINDS = (FrameKind.CONTRIBUTION, FrameKind.RESULT, FrameKind.PARTIAL)


OnLost = Callable[[PeerLostError], None]


@frozen
class ReduceResult:
    """The result of a reduction at one receiver.

    Attributes:
      pieces: yields the weighted mean, chunk by chunk, as the place of its values and the values,
        float32, read-only; bit-identical everywhere. Heavy, for they are decoded then.
      counters: shape ``(counter_count,)``, int64: the elementwise maximum.
      digest: equal wherever the result's encoding and its manifest are; see ``RoundResult.digest``.
      manifest: which contributors are in which chunks; empty if all are in all.
      norm_sums, momentum_square: what this node measured of contributions; see
      ``messages.Reduced``.
    """

    pieces: Callable[[], Iterator[tuple[slice, Values]]]
    counters: Counters
    digest: bytes
    manifest: tuple[m.ContributorRun, ...] = ()
    norm_sums: bytes = b""
    momentum_square: float = 0.0

    @property
    def values(self) -> Values:
        """All values in one new array, ``(value_count,)``; read large fragments in pieces."""
        parts = [values for _where, values in self.pieces()]
        return np.concatenate(parts) if parts else np.empty(0, np.float32)


@frozen
class _Running:
    """The parts of a reduction that exist only while ``serve`` runs."""

    nursery: trio.Nursery
    keys: ExitStack  # of the sink at the hub
    entry: ThreadEntry
    tasks: SendTasks


class Reduction:
    """The life of a reduction on one node: start, flush, repair, finish or fail.

    All methods are called on the event loop.

    Args:
      context: the order, and this node's input.
      momentum: outer momentum before the round, of the first values of the fragment: contributions
        are compared with it, for statistics. Only read; None if they are not to be.
      link_wait_s: how long to wait for a link that is not up.
      on_lost: called for a peer that is lost while it owes this node something, once per attempt;
        the reduction then waits for ``flush`` and ``repair``.

    Attributes:
      attempt: the number of the order or of the last repair.
    """

    def __init__(
        self,
        context: ReductionContext,
        network: Network,
        *,
        on_lost: OnLost,
        momentum: Values | None = None,
        link_wait_s: float = LINK_WAIT_S,
    ) -> None:
        self.attempt = context.order.attempt
        self._context = context
        self._hub = context.hub
        self._network = network
        self._link_wait_s = link_wait_s
        self._on_lost: OnLost = on_lost
        self._sender = ChunkSender(context)
        self._adder = ChunkAdder(context, self._sender, momentum)

        self._watches: dict[str, trio.CancelScope] = {}
        self._losses: dict[str, PeerLostError] = {}  # of peers that owed us something then
        self._to_add_up: deque[int] = deque()  # chunks that no frame completes
        self._workers = 0
        self._complete = not context.layout.cuts
        self._reported_attempt = -1
        self._error: HoldfastError | None = None
        self._scope = trio.CancelScope()
        self._whole: Callable[[ReduceResult], None] = _ignore
        self._running: _Running | None = None

    @property
    def encoded_input(self) -> EncodedInput | None:
        """This node's encoded contribution, for a later order; None if it does not contribute."""
        return self._context.encoded_input

    # ------------------------------------------------------------ start and end

    async def serve(self, whole: Callable[[ReduceResult], None]) -> None:
        """Reduce, and stay until cancelled, ready to ``flush`` and ``repair``. Call it once.

        Every receiver ends with the same bits: each chunk is averaged once, by its owner, and the
        owner's encoded bytes are what every receiver decodes, the owner too. An owner's own
        contribution also passes through the codec, so every attempt adds the same numbers,
        whichever peer owns the chunk.

        Args:
          whole: called when the result is whole, and again after each repair when it is (still)
            whole under that attempt.

        Raises:
          BadContributionError: a peer (this node, too) sent what must not be added or applied.
          RemoteProtocolError: this attempt, or a later one of its round, ran here before.

        Cost:
          With ``n`` contributors, all of them receivers, and owner share ``w``, in payload bytes:
          ``(1 - w) * up_bytes + (n - 1) * w * down_bytes`` sent. Memory beside the values that are
          given: one encoded result, others' contributions of up to ``CONTRIBUTIONS_BYTES_MAX``, or
          ``AHEAD_MIN`` chunks of each if that is more, and the chunks that threads work on.

        Cancellation: safe at any point; the input is untouched, and not used afterwards.
        """
        self._whole = whole
        context, complete = self._context, self._became_complete
        entry = ThreadEntry(context, self._adder, self._fail, complete, self._stop_watch)
        # Planned before threads may bring frames: what these complete must find its batches.
        chunks = context.tracker.unheld()
        sends = self._sender.plan(chunks, entry.fail)
        running: _Running | None = None
        try:
            with ExitStack() as keys:
                for attempt in sorted({context.order.attempt, self.attempt}):
                    self._register(keys, entry, attempt)
                self._hub.trailing.stop(context.order.round)
                with self._scope:
                    async with trio.open_nursery() as nursery:
                        tasks = SendTasks(
                            context, self._sender, nursery, self._link_wait_s, on_lost=self._lose
                        )
                        self._running = running = _Running(nursery, keys, entry, tasks)
                        try:
                            self._watch_owing()
                            for send in sends:
                                tasks.start(send)
                            self._add_up_complete(chunks)
                            self._report_if_whole()
                            await trio.sleep_forever()  # a repair may come when all is done
                        finally:
                            # Threads may complete chunks when the nursery is closed.
                            self._running = None
            if self._error is not None:
                raise self._error
        finally:
            if running is not None and (not self._complete or self._error is not None):
                running.tasks.cancel_trailing()
            # Callbacks may refer to us; buffers must not wait until a cycle is found.
            self._on_lost = self._whole = _ignore
            self._sender.forget_reduction()

    def _register(self, keys: ExitStack, entry: ThreadEntry, attempt: int) -> None:
        for kind in REDUCTION_KINDS:
            key = (kind, self._context.order.round, attempt)
            keys.enter_context(self._hub.register(key, entry, threads=True))

    def _fail(self, error: HoldfastError) -> None:
        """End the reduction; only the first reason is reported."""
        if self._error is None:
            self._error = error
            self._scope.cancel()

    # ------------------------------------------------------------ chunks that no frame completes

    def _add_up_complete(self, chunks: Iterable[int]) -> None:
        self._put_to_work(self._context.tracker.begin_complete(chunks))

    def _put_to_work(self, chunks: Iterable[int]) -> None:
        self._to_add_up += chunks
        if self._running is not None:  # else ``serve`` does it when it begins
            for _missing in range(min(WORKERS, len(self._to_add_up)) - self._workers):
                self._workers += 1
                self._running.nursery.start_soon(self._work, self._running.entry)

    async def _work(self, entry: ThreadEntry) -> None:
        while self._to_add_up:
            index = self._to_add_up.popleft()
            try:
                await self._network.run_sync(partial(entry.add_up, index))
            except BadContributionError as error:
                self._fail(error)
        self._workers -= 1

    # ------------------------------------------------------------ losses and repairs

    def _watch_owing(self) -> None:
        """Watch the peers that owe us frames, and no others."""
        owing = self._context.tracker.owing()
        for peer in [peer for peer in self._watches if peer not in owing]:
            self._watches.pop(peer).cancel()
        for peer in owing:
            if peer in self._losses:
                self._on_lost(self._losses[peer])  # still lost, under this attempt
            elif peer not in self._watches and self._running is not None:
                scope = self._watches[peer] = trio.CancelScope()
                self._running.nursery.start_soon(self._watch, peer, scope)

    async def _watch(self, peer: str, scope: trio.CancelScope) -> None:
        with scope:
            try:
                link = await self._hub.link(peer, self._link_wait_s)
                await link.lost.wait()
            except PeerLostError as error:
                self._lose(error)
            else:
                self._lose(PeerLostError(peer, link.reason))

    def _stop_watch(self, peer: str) -> None:
        if (scope := self._watches.pop(peer, None)) is not None:
            scope.cancel()

    def _lose(self, error: PeerLostError) -> None:
        if error.peer not in self._losses and not self._context.tracker.is_shut_out(error.peer):
            self._losses[error.peer] = error
            self._on_lost(error)

    def flush(self, lost: Collection[str]) -> bytes:
        """Accept nothing more of the lost peers, and wait for nothing of them, in this round.

        What has fully arrived of their contributions stays in.

        Returns:
          A bit for each chunk, the first one lowest: whether its result is here.
        """
        complete = self._context.tracker.shut_out(lost)
        for peer in lost:
            self._stop_watch(peer)
            if self._running is not None:
                self._running.tasks.cancel(peer)
        self._put_to_work(complete)
        return self._context.tracker.held()

    def diagnosis(self) -> m.Diagnosis:
        """Report which peers this node waits for, and a digest of what it holds of each."""
        tracker, result = self._context.tracker, self._context.result
        contributions, results = tracker.lacking()
        made: dict[str, list[int]] = {}
        for index, maker in enumerate(tracker.makers()):
            made.setdefault(maker, []).append(index)
        digests = [
            m.MadeDigest(maker, digest)
            for maker, chunks in made.items()
            if (digest := result.digest_of_chunks(chunks))
        ]
        round_, attempt = self._context.order.round, self.attempt
        return m.Diagnosis(round_, attempt, tuple(contributions), tuple(results), tuple(digests))

    def repair(self, order: m.Repair) -> None:
        """Go on without the lost peers: others take over the chunks that they owned.

        Raises:
          RemoteProtocolError: the order does not fit the reduction, which should be cancelled then.
        """
        self.flush(order.lost)
        self.attempt = order.attempt
        context, tracker = self._context, self._context.tracker
        again: list[int] = []
        lacking: dict[str, list[int]] = {}  # what we hold and spread, by receiver
        for assignment in order.assignments:
            if assignment.owner not in context.order.receivers:
                raise RemoteProtocolError("a repair by a peer that does not take part")
            chunks = tracker.take_over(assignment, order.attempt)
            if assignment.from_scratch:
                again += chunks
            elif assignment.owner == context.me:
                receivers = context.order.receivers
                bits = unpack_bits(assignment.lacking, len(receivers))
                for peer in itertools.compress(receivers, bits):
                    lacking.setdefault(peer, []).extend(chunks)
        if (running := self._running) is not None:  # else ``serve`` does all that when it begins
            sends = self._sender.plan(again, running.entry.fail) + self._sender.spread(lacking)
            # From here on threads may bring frames of this attempt.
            self._register(running.keys, running.entry, order.attempt)
            for send in sends:
                running.tasks.start(send)
            self._add_up_complete(again)
        self._watch_owing()
        self._report_if_whole()

    # ------------------------------------------------------------ checks

    def audit(self, order: m.AuditOrder, tell: Callable[[m.Audited], object]) -> None:
        """Do this node's part in a check of the whole result; ``tell`` gets its findings."""
        if self._running is not None and order.attempt == self.attempt:
            check = SpotCheck(self._context, self._adder.added, self._network)
            self._running.nursery.start_soon(check.take_part, order, self._link_wait_s, tell)

    # ------------------------------------------------------------ the result

    def _became_complete(self) -> None:
        self._complete = True
        self._sender.acknowledge_now()
        self._report_if_whole()

    def _report_if_whole(self) -> None:
        if self._complete and self._running is not None:
            self._running.nursery.start_soon(self._report)

    async def _report(self) -> None:
        attempt = self.attempt
        result = await self._network.run_sync(self._make_result)
        if attempt == self.attempt != self._reported_attempt:
            self._reported_attempt = attempt
            self._whole(result)

    def move_result(self, folder: Path, *, to_send: bool) -> None:
        """Move the result, which is whole, out of memory into a file if it is large. Heavy.

        Args:
          to_send: only what this node sends is needed any more.
        """
        context, chunks = self._context, range(len(self._context.layout.cuts))
        if context.layout.down_bytes <= IN_MEMORY_BYTES_MAX:
            return
        kept = [each for each in chunks if not to_send or context.tracker.owner(each) == context.me]
        context.result.move_to_file(kept, folder)

    def _make_result(self) -> ReduceResult:
        """Collect the result, in a worker thread; only reads."""
        result = self._context.result
        norm_sums, momentum_square = self._adder.norm_sums()
        return ReduceResult(
            pieces=result.pieces,
            counters=result.counters,
            digest=result.digest(),
            manifest=result.manifest(),
            norm_sums=norm_sums,
            momentum_square=momentum_square,
        )


def _ignore(_what: object) -> None:
    """Take the place of a callback when nothing more is to be reported."""

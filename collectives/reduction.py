"""A reduction: the chunks' weighted mean, by a butterfly over links, repaired over deaths.

Every chunk has one owner. Contributors send it, encoded, to its owner; the owner adds, encodes the
mean once, decodes its own encoding, and sends the encoded bytes to every receiver. So all receivers
decode the same bytes to the same bits.

    Reduction.serve             until cancelled; reports the result when it is whole
     ├── watch                  one per peer that still owes us a frame: its loss is told
     ├── send                   contributions per owner, results per receiver: gives links a source
     └── work                   adds up what no frame completed: alone, or after a loss

    the hub's nursery
     └── send                   to receivers that only listen: they may lag, nobody waits for them

The chunks themselves never pass through these tasks. Links ask the *sources* (``_Contributions``,
``_Results``) for the next frame when a lane is idle, and hand what comes in to ``place`` and
``deliver``, over real sockets all of that in the lanes' threads. ``deliver`` does the frame's
arithmetic at once, while its bytes are in the cache: the contribution that completes a chunk has it
added up, a result is checked and decoded, and either is hashed if it is next. Nothing here ever
waits for a frame, so a reduction cannot hold up a lane, nor two reductions each other. The books are
kept by a ``ChunkTracker``, the bytes by a ``RoundResult``; both may be used by many threads.

A loss does not end a reduction, the master repairs it. ``flush`` shuts the lost out and says what is
held here; from then on chunks that we own wait for the others only. ``repair`` gives the chunks that
the lost owned to others: to one that holds the result and spreads it as it is, or to one that adds
up anew what the contributors send again. Which contributors are in a chunk comes with its result and
is hashed with it, so equal digests mean equal sets.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import trio
from attrs import define, evolve, field, frozen

from ..protocol.errors import (
    BadContributionError,
    HoldfastError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
)
from ..protocol.messages import ContributorRun, Diagnosis, FragmentSize, MadeDigest, Reduce, Repair
from ..protocol.network.interface import Network
from ..protocol.network.lane import Buffer, FrameHeader, FrameKind
from ..protocol.trust.notary import SEAL_BYTES, Notary
from .arithmetic import (
    ChunkLayout,
    Counters,
    MeanFactors,
    SumTerm,
    Values,
    reduce_counters,
    reduce_values,
)
from .audit_log import AuditLog, notary_for
from .chunk_tracker import ChunkTracker, FrameDuty, UnwantedFrameError
from .codecs.compression import FrameCompressor
from .codecs.error_feedback import Residual
from .combine import Rule, combine_chunk
from .encoded_input import EncodedInput
from .evidence import is_sealed, sealed
from .gather_tree import INNER_CODEC, ChunkRole, Tree
from .links.event_loop import Loop
from .links.hub import LINK_WAIT_S, LinkHub
from .links.link import Link
from .links.send_priority import SendRank
from .links.send_queue import Frame, FrameSource, Load
from .norm_report import NOTHING, NormSums
from .result import RoundResult

# What an owner buffers of others' contributions while they are out of step. A contributor sends only
# so far ahead of the results that come back, so that fast ones do not fill the owner's memory while
# it waits for slow ones. With 8 contributors it is 9 MiB each: 1 Gbit/s over 75 ms.
CONTRIBUTIONS_BYTES_MAX = 64 * 2**20
AHEAD_MIN = 4  # chunks that a contributor may be ahead at least: enough to keep its lanes busy
WORKERS = 2  # chunks that are added up at once where no frame's arrival does it
ONE = np.float32(1)
REDUCTION_KINDS = (FrameKind.CONTRIBUTION, FrameKind.RESULT, FrameKind.PARTIAL)


@frozen
class ReduceResult:
    """What a reduction gives at every receiver.

    Attributes:
      values: shape ``(value_count,)``, float32, read-only: the weighted mean; bit-identical
        everywhere.
      counters: shape ``(counter_count,)``, int64: the elementwise maximum.
      digest: equal wherever the result's encoding and its manifest are; see ``RoundResult.digest``.
      sent_bytes: payload bytes that this node sent until the result was whole.
      manifest: which contributors are in which chunks; empty: all in all.
      gauged, momentum_square: what was found of contributions here; see ``messages.Reduced``.
    """

    values: Values
    counters: Counters
    digest: bytes
    sent_bytes: int
    manifest: tuple[ContributorRun, ...] = ()
    norm_sums: bytes = b""
    momentum_square: float = 0.0


@define(eq=False)
class _Batch:
    """So many chunks for one peer; ``ready`` grows as they can be sent, in any thread."""

    count: int = 0
    ready: list[int] = field(factory=list)


@frozen
class _Send:
    """What one peer is to get."""

    peer: str
    source: FrameSource
    contribution: bool


class Reduction:
    """Replace nothing, return the contributors' weighted mean: see ``run`` and ``serve``.

    Args:
      order: the master's; names contributors, receivers and the plan. Contributors and owners must
        be receivers.
      me: this node's peer id, one of the receivers.
      size: of the fragment, as this node knows it.
      hub: where the links are; running.
      values: shape ``(value_count,)``, float32, C-contiguous; None if this node does not contribute
        or gives ``encoded_input``. Only read, and only while it runs, unless they stay.
      counters: shape ``(counter_count,)``, int64; None as for ``values``, or when there are none.
      encoded_input: that of an earlier order of the same round; used as far as it fits.
      residual: of this node's earlier contributions, if there is error feedback; it changes only
        by ``encoded_input.settle()``.
      values_stay: ``values`` will not change until the round is over, whatever becomes of this
        reduction; with codec fp32 they are then sent from where they are, which saves a copy.
      momentum: outer momentum before the round, of the first so many values: contributions are
        compared with it, for people. Only read; None: they are not.
      link_wait_s: how long to wait for a link that is not up.
      notary: signs what we contribute, and checks what others do, if the plan wants that.
      on_lost: told of a peer that is gone while it owes this node something, once per attempt; the
        reduction then waits for ``flush`` and ``repair``. None: the loss ends the reduction.

    Attributes:
      attempt: the number of the order or of the last repair.
      encoded_input: this node's encoded contribution, for a later order; None at a node that does
        not contribute.
      kept: what others may ask for, or we may ask others for; None: the plan wants no seals.

    Raises:
      RemoteProtocolError: the order contradicts itself, the fragment's size or who we are.
      LocalProtocolError: wrong dtype, rank or length.
    """

    def __init__(
        self,
        order: Reduce,
        me: str,
        size: FragmentSize,
        hub: LinkHub,
        network: Network,
        values: Values | None,
        counters: Counters | None,
        *,
        encoded_input: EncodedInput | None = None,
        residual: Residual | None = None,
        values_stay: bool = False,
        momentum: Values | None = None,
        link_wait_s: float = LINK_WAIT_S,
        notary: Notary | None = None,
        on_lost: Callable[[PeerLostError], None] | None = None,
    ) -> None:
        self.attempt = order.attempt
        self._order = order
        self._me = me
        self._size = size
        self._hub = hub
        self._network = network
        self._link_wait_s = link_wait_s
        self._on_lost = on_lost
        self._notary = notary_for(order.plan, notary)
        self._layout = ChunkLayout.of(order.plan, size)
        self._rule = Rule.of(order.plan, order.contributors)
        self._contributors = [contributor.peer for contributor in order.contributors]
        self._factors = MeanFactors.of(order.contributors)
        owners = [cut.owner for cut in self._layout.cuts]
        self._check_order(owners)
        self._tree = Tree(order.plan, owners, self._contributors, order.receivers, me)
        self._needed = {*self._contributors, *owners, *self._tree.leaders}
        # Within a site contributions travel as they are.
        near = evolve(order.plan, codec_up=INNER_CODEC)
        self._inner = ChunkLayout.of(near, size) if self._tree.sites else self._layout
        self.encoded_input = self._own_input(values, counters, encoded_input, residual, values_stay)
        self._squeezer = FrameCompressor(self._layout.zstd_up)
        self._ahead_max = self._most_chunks_ahead()
        self._result = RoundResult(self._layout, len(self._contributors), hub.buffers)
        self._tracker = ChunkTracker(
            self._layout,
            self._inner,
            self._tree,
            me,
            me in self._contributors,
            order.attempt,
            order.fragment,
            self._result,
            hub.chunk_buffers,
            SEAL_BYTES if self._notary is not None else 0,
        )
        self.kept = self._keep()

        self._momentum = NOTHING if momentum is None else momentum
        # Changed by lanes' threads, under ``_lock``, under which nothing else is done.
        self._lock = threading.Lock()
        self._gauge = NormSums()
        self._sent_bytes = 0
        self._ahead: Counter[str] = Counter()  # contributions less results that came, by owner

        # Entries are put in on the event loop and taken out once, by whoever has done the chunk.
        self._takers: dict[int, list[_Batch]] = {}  # batches that wait for a chunk's result
        self._gathered: dict[int, _Batch] = {}  # the batch that waits for what our site gives
        self._sums: dict[int, memoryview] = {}  # what our site gives to a chunk, encoded
        # Changed on the event loop in one operation, and read by lanes' threads.
        self._links: dict[str, Link] = {}  # that we send over, and that are told of new frames

        # The event loop's own.
        self._watches: dict[str, trio.CancelScope] = {}
        self._sends: dict[str, list[trio.CancelScope]] = {}
        self._trailing: list[trio.CancelScope] = []
        self._unsent_count = 0  # sources for peers that are needed
        self._losses: dict[str, PeerLostError] = {}  # of peers that owed us something then
        self._to_add_up: deque[int] = deque()  # chunks that no frame completes
        self._workers = 0
        self._complete = not self._layout.cuts
        self._reported_attempt = -1
        self._changed = trio.Event()
        self._error: HoldfastError | None = None
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None  # while it runs
        self._keys: ExitStack | None = None  # likewise
        self._loop: Loop | None = None
        self._whole: Callable[[ReduceResult], None] | None = None

    # ------------------------------------------------------------ the collective

    async def run(self) -> ReduceResult:
        """Reduce; every receiver that returns has the same bits.

        Each chunk is averaged once, by its owner, and the owner's encoded bytes are what everyone
        decodes, the owner too. An owner's own contribution also passes through the codec, so every
        attempt adds the same numbers, whoever owns the chunk.

        Returns when this node's result is whole and all whom the round depends on were given
        theirs; receivers that only listen are never waited for. Call it, or ``serve``, once.

        Raises:
          PeerLostError: a contributor or owner is gone, or its link did not come up in time; not
            if there is an ``on_lost``.
          BadContributionError: a peer (this node, too) sent what must not be added or applied.
          RemoteProtocolError: this attempt, or a later one of its round, ran here before.

        Cost:
          With ``n`` contributors, all of them receivers, and owner share ``w``, in payload bytes:
          ``(1 - w) * up_bytes + (n - 1) * w * down_bytes`` sent. Memory beside the values that are
          given: one encoded input (none if they stay and the codec is verbatim), one encoded result,
          one decoded result (none if the codec is verbatim), and others' contributions of up to
          ``CONTRIBUTIONS_BYTES_MAX``, or ``AHEAD_MIN`` chunks of each if that is more.

        Cancellation: safe at any point; the input is untouched, and not used afterwards.
        """
        results: list[ReduceResult] = []
        await self.serve(results.append, until_sent=True)
        return results[-1]

    async def serve(
        self, whole: Callable[[ReduceResult], None], *, until_sent: bool = False
    ) -> None:
        """As ``run``, but stay until cancelled, ready to ``flush`` and ``repair``.

        Args:
          whole: called when the result is whole, and again after each repair when it is (still)
            whole under that attempt.
          until_sent: return as ``run`` does.
        """
        self._loop, self._whole = Loop(), whole
        # Before lanes' threads may bring anything: what they complete finds who waits for it.
        chunks = self._tracker.unheld()
        sends = self._plan_sends(chunks)
        try:
            with ExitStack() as self._keys:
                for attempt in sorted({self._order.attempt, self.attempt}):
                    self._register(attempt)
                self._hub.stop_trailing(self._order.round)
                with self._scope:
                    async with trio.open_nursery() as self._nursery:
                        self._start(chunks, sends)
                        if until_sent:
                            await self._wait_sent()
                            self._scope.cancel()
                        await trio.sleep_forever()  # a repair may come when nothing is left to do
            if self._error is not None:
                raise self._error
        finally:
            self._nursery = self._keys = None
            # Who listened may refer to us; buffers must not wait until a cycle is found.
            self._on_lost = self._whole = _unheard
            if not self._complete or self._error is not None:
                for scope in self._trailing:
                    scope.cancel()

    def _register(self, attempt: int) -> None:
        assert self._keys is not None
        for kind in REDUCTION_KINDS:
            key = (kind, self._order.round, attempt)
            self._keys.enter_context(self._hub.register(key, self, threads=True))

    def _start(self, chunks: Sequence[tuple[int, ChunkRole]], sends: Sequence[_Send]) -> None:
        assert self._nursery is not None
        self._watch_owing()
        for send in sends:
            self._start_send(send)
        self._begin_complete(chunks)
        self._report_if_whole()

    def _begin_complete(self, chunks: Iterable[tuple[int, ChunkRole]]) -> None:
        """Add up what no frame will complete."""
        self._put_to_work(self._tracker.begin_complete(index for index, _part in chunks))

    def _put_to_work(self, chunks: Iterable[int]) -> None:
        self._to_add_up += chunks
        if self._nursery is not None:  # else ``serve`` does it when it begins
            for _missing in range(min(WORKERS, len(self._to_add_up)) - self._workers):
                self._workers += 1
                self._nursery.start_soon(self._work)

    async def _wait_sent(self) -> None:
        while self._reported_attempt != self.attempt or self._unsent_count:
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _soon(self, function: Callable[[], object]) -> None:
        """Call it on the event loop."""
        assert self._loop is not None
        self._loop.soon(function)

    def _fail(self, error: HoldfastError) -> None:
        """End the reduction; only the first reason is told."""
        if self._error is None:
            self._error = error
            self._scope.cancel()

    # ------------------------------------------------------------ losses and repairs

    def _watch_owing(self) -> None:
        """Watch those who owe us frames, and nobody else."""
        owing = self._tracker.owing()
        for peer in [peer for peer in self._watches if peer not in owing]:
            self._watches.pop(peer).cancel()
        for peer in owing:
            if peer in self._losses:
                self._tell_loss(self._losses[peer])  # still so, under this attempt
            elif peer not in self._watches and self._nursery is not None:
                scope = self._watches[peer] = trio.CancelScope()
                self._nursery.start_soon(self._watch, peer, scope)

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
        if error.peer not in self._losses and not self._tracker.is_shut_out(error.peer):
            self._losses[error.peer] = error
            self._tell_loss(error)

    def _tell_loss(self, error: PeerLostError) -> None:
        if self._on_lost is None:
            self._fail(error)
        else:
            self._on_lost(error)

    def flush(self, lost: Collection[str]) -> bytes:
        """Accept nothing more of the lost, and wait for nothing of them, in this round.

        What has fully arrived of their contributions stays in.

        Returns:
          A bit for each chunk, the first one lowest: whether its result is here.
        """
        complete = self._tracker.shut_out(lost)
        for peer in lost:
            self._stop_watch(peer)
            for scope in self._sends.pop(peer, []):
                scope.cancel()
        self._put_to_work(complete)
        return self._tracker.held()

    def diagnosis(self) -> Diagnosis:
        """Whom this node waits for, and what it holds of whom."""
        contributions, results = self._tracker.lacking()
        made: dict[str, list[int]] = {}
        for index, maker in enumerate(self._tracker.makers()):
            made.setdefault(maker, []).append(index)
        digests = [
            MadeDigest(maker, digest)
            for maker, chunks in made.items()
            if (digest := self._result.digest_of_chunks(chunks))
        ]
        round_, attempt = self._order.round, self.attempt
        return Diagnosis(round_, attempt, tuple(contributions), tuple(results), tuple(digests))

    def repair(self, order: Repair) -> None:
        """Go on without the lost: others take over the chunks that they owned.

        Raises:
          RemoteProtocolError: the order does not fit the reduction, which should be cancelled then.
        """
        self.flush(order.lost)
        self.attempt = order.attempt
        anew: list[tuple[int, ChunkRole]] = []
        lacking: dict[str, list[int]] = {}  # what we hold and spread, by receiver
        for assignment in order.assignments:
            if assignment.owner not in self._order.receivers:
                raise RemoteProtocolError("a repair by a peer that does not take part")
            chunks = self._tracker.take_over(assignment, order.attempt)
            if assignment.anew:
                anew += [(index, self._tracker.part(index)) for index in chunks]
            elif assignment.owner == self._me:
                for peer in self._members_of(assignment.lacking):
                    lacking.setdefault(peer, []).extend(chunks)
        if self._keys is not None:  # else ``serve`` does all that when it begins
            sends = self._plan_sends(anew)
            for peer in self._rotated(lacking):
                batch = _Batch(len(lacking[peer]), lacking[peer])
                sends.append(_Send(peer, _Results(self, batch), contribution=False))
            self._register(order.attempt)  # from here on threads may bring frames of it
            for send in sends:
                self._start_send(send)
            self._begin_complete(anew)
        self._watch_owing()
        self._report_if_whole()

    def _members_of(self, packed: bytes) -> list[str]:
        """The receivers whose bit is set."""
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        return [peer for peer, bit in zip(self._order.receivers, bits, strict=False) if bit]

    # ------------------------------------------------------------ sending

    def _plan_sends(self, chunks: Iterable[tuple[int, ChunkRole]]) -> list[_Send]:
        """What we send of these chunks: contributions, our own or our site's, and results."""
        up: dict[str, _Batch] = {}
        down: dict[str, _Batch] = {}
        for index, part in chunks:
            if part.parent is not None and (part.gathers or self.encoded_input is not None):
                batch = up.setdefault(part.parent, _Batch())
                batch.count += 1
                if part.gathers:
                    self._gathered[index] = batch
                else:
                    batch.ready.append(index)
            self._takers[index] = [down.setdefault(peer, _Batch()) for peer in part.takers]
            for batch in self._takers[index]:
                batch.count += 1
        return [
            *(
                _Send(p, _Contributions(self, p, up[p]), contribution=True)
                for p in self._rotated(up)
            ),
            *(_Send(p, _Results(self, down[p]), contribution=False) for p in self._rotated(down)),
        ]

    def _start_send(self, send: _Send) -> None:
        peer = send.peer
        if self._tracker.is_shut_out(peer):
            return
        assert self._nursery is not None
        task = partial(self._send, send)
        if peer in self._needed:
            scope = trio.CancelScope()
            self._unsent_count += 1
            self._nursery.start_soon(self._send_counted, scope, task)
        else:
            scope = self._hub.start_trailing(peer, self._order.round, task)
            self._trailing.append(scope)
        self._sends.setdefault(peer, []).append(scope)

    async def _send_counted(
        self, scope: trio.CancelScope, task: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            with scope:
                await task()
        finally:
            self._unsent_count -= 1
            self._wake()

    async def _send(self, send: _Send) -> None:
        """Have a link send all of a source.

        A receiver of results that is lost is skipped: if this node needs something of it, its watch
        says so; if not, whoever does will.
        """
        try:
            link = await self._hub.link(send.peer, self._link_wait_s)
            self._links = {**self._links, send.peer: link}
            await link.send_from(send.source, self._rank(send.peer), age=self._order.round)
        except PeerLostError as error:
            if send.contribution:
                self._lose(error)

    def _rank(self, peer: str) -> SendRank:
        """Who is still copied to can wait: its results lie there until its copy is whole."""
        needed = peer in self._needed or self._hub.is_in_sync(peer)
        return SendRank.ROUND if needed else SendRank.LISTENER

    def _load_contribution(self, index: int, attempt: int) -> Frame | None:
        """Called by lanes: what we, or we for our site, give to a chunk, as a frame."""
        own = index not in self._gathered
        try:
            payload: Buffer | None = self._encode_own(index) if own else self._sums.get(index)
        except BadContributionError as error:
            self._soon(partial(self._fail, error))
            return None
        if payload is None:
            return None  # asked again after the result came: it has arrived
        near = own and not self._tree.is_alone(self._me)
        if self._squeezer.pays and not near and not self._layout.cuts[index].is_counters:
            payload = self._squeezer.squeeze(memoryview(payload))
        if self._notary is not None:
            payload = sealed(self._notary, self._order, index, payload)
        return self._frame(FrameKind.CONTRIBUTION, index, attempt, payload)

    def _load_result(self, index: int, attempt: int) -> Frame:
        """Called by lanes: a chunk's result, as a frame."""
        kind, payload = self._result.payload(index)
        return self._frame(kind, index, attempt, payload)

    def _frame(self, kind: FrameKind, index: int, attempt: int, payload: Buffer) -> Frame:
        order = self._order
        with self._lock:
            self._sent_bytes += len(payload)
        header = FrameHeader(kind, order.round, attempt, index, order.fragment, len(payload))
        return header, payload

    # ------------------------------------------------------------ receiving

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """See ``routing.Sink``."""
        return self._tracker.place(peer, header)

    def abandon(self, peer: str, header: FrameHeader, view: memoryview) -> None:
        """See ``routing.Sink``."""
        self._tracker.abandon(peer, header, view)

    def deliver(self, peer: str, header: FrameHeader, payload: memoryview) -> None:
        """See ``routing.Sink``. The header is authentic now, so its sender can be named."""
        if header.kind is FrameKind.CONTRIBUTION and not self._is_sealed(peer, header, payload):
            error = BadContributionError(peer, "a contribution without its seal")
            self._soon(partial(self._fail, error))
            return
        try:
            duty, paid = self._tracker.deliver(peer, header, payload)
        except UnwantedFrameError as error:
            if not error.owing:
                raise RemoteProtocolError(f"peer {peer[:8]} {error}") from None
            self._soon(partial(self._fail, BadContributionError(peer, str(error))))
            return
        try:
            if duty is FrameDuty.DECODE:
                self._decode(peer, header, payload)
            elif duty is FrameDuty.ADD_UP:
                self._add_up(header.index)
        except BadContributionError as error:
            self._soon(partial(self._fail, error))
        else:
            if paid:
                self._soon(partial(self._stop_watch, peer))

    def _is_sealed(self, peer: str, header: FrameHeader, payload: memoryview) -> bool:
        notary = self._notary
        return notary is None or is_sealed(notary, self._order, header.index, peer, payload)

    # ------------------------------------------------------------ arithmetic

    async def _work(self) -> None:
        while self._to_add_up:
            index = self._to_add_up.popleft()
            try:
                await self._network.run_sync(partial(self._add_up, index))
            except BadContributionError as error:
                self._fail(error)
        self._workers -= 1

    def _encode_own(self, index: int) -> memoryview:
        assert self.encoded_input is not None
        try:
            self.encoded_input.encode(index)
        except ValueError as error:
            raise BadContributionError(self._me, str(error)) from error
        return self.encoded_input.chunk(index)

    def _add_up(self, index: int) -> None:
        """A chunk that we gather and that lacks nothing; perhaps in a thread."""
        arrived = self._tracker.contributions(index)
        if self._notary is not None:
            arrived = {peer: piece[:-SEAL_BYTES] for peer, piece in arrived.items()}
        if self.encoded_input is not None:
            arrived[self._me] = self._encode_own(index)
        if self._tracker.part(index).parent is None:
            self._make_result_of(index, arrived)
        else:
            self._make_sum_of(index, arrived)
        del arrived
        self._tracker.added_up(index)
        if self._tracker.part(index).parent is None:
            self._finish(index)
        else:
            self._gathered[index].ready.append(index)
            self._wake_links()

    def _make_result_of(self, index: int, arrived: Mapping[str, memoryview]) -> None:
        room = self._result.room(index)
        length, present = len(room), [True] * len(self._contributors)
        if not self._tree.sites:
            present = [peer in arrived for peer in self._contributors]
        if self._layout.cuts[index].is_counters:
            reduce_counters(list(arrived.values()), self._result.counters)
            np.frombuffer(room, "<i8")[:] = self._result.counters
        elif self._tree.sites:
            values, terms = self._result.values_of(index), self._terms(arrived)
            codec, divisor = self._layout.codec_down, self._factors.divisor
            with self._gauging(index) as gauge:
                length = reduce_values(terms, divisor, codec, values, room, gauge)
        else:
            values, order = self._result.values_of(index), self._order.contributors
            with self._gauging(index) as gauge:
                length = combine_chunk(
                    order, arrived, self._layout, self._rule, values, room, gauge
                )
        self._result.made(index, length, present)

    def _make_sum_of(self, index: int, arrived: Mapping[str, memoryview]) -> None:
        """What our site gives to a chunk that is owned elsewhere."""
        cut = self._layout.cuts[index]
        room = self._hub.chunk_buffers.take(cut.up_bytes)
        if cut.is_counters:
            reduce_counters(list(arrived.values()), np.frombuffer(room, "<i8"))
        else:
            values, terms = np.empty(cut.count, np.float32), self._terms(arrived)
            with self._gauging(index) as gauge:
                length = reduce_values(terms, ONE, self._layout.codec_up, values, room, gauge)
            room = room[:length]
        self._sums[index] = room

    @contextmanager
    def _gauging(self, index: int) -> Iterator[NormSums]:
        """What is found of a chunk's contributions while it is added up."""
        owned = self._tracker.part(index).parent is None
        gauge = NormSums(self._momentum[self._layout.cuts[index].values], owned=owned)
        yield gauge
        with self._lock:
            self._gauge.add(gauge)

    def _terms(self, arrived: Mapping[str, memoryview]) -> list[SumTerm]:
        """What a chunk's sum is made of: contributors in their order, then sites by their leaders."""
        terms = []
        factors = dict(zip(self._contributors, self._factors.factors, strict=True))
        for peer in (*factors, *(p for p in self._order.receivers if p not in factors)):
            if peer not in arrived:
                continue
            near = self._tree.is_near(peer)
            layout = self._inner if near else self._layout
            is_sum = not near and not self._tree.is_alone(peer)
            factor = ONE if is_sum else factors[peer]
            up, zstd = layout.codec_up, layout.zstd_up
            terms.append(SumTerm(peer, arrived[peer], factor, up, zstd, is_sum))
        return terms

    def _decode(self, source: str, header: FrameHeader, payload: memoryview) -> None:
        """A result that somebody else made; perhaps in a thread."""
        index = header.index
        self._result.decode(header.kind, index, payload, source)
        self._sums.pop(index, None)
        with self._lock:
            self._ahead[source] -= 1
        if (link := self._links.get(source)) is not None:
            link.wake()  # we may send it more contributions now
        self._finish(index)

    def _finish(self, index: int) -> None:
        takers = self._takers.pop(index, [])
        for batch in takers:
            batch.ready.append(index)
        if takers:
            self._wake_links()
        if self._result.done(index):
            self._soon(self._became_complete)

    def _wake_links(self) -> None:
        for link in self._links.values():
            link.wake()

    def _became_complete(self) -> None:
        self._complete = True
        for link in self._links.values():
            link.acknowledge_now()
        self._report_if_whole()

    def _report_if_whole(self) -> None:
        if self._complete and self._nursery is not None:
            self._nursery.start_soon(self._report)

    async def _report(self) -> None:
        attempt = self.attempt
        result = await self._network.run_sync(self._make_result)
        if attempt == self.attempt != self._reported_attempt:
            assert self._whole is not None
            self._reported_attempt = attempt
            self._whole(result)
            self._wake()

    def condense(self) -> bool:
        """The result is whole and not needed for a while: keep it encoded, if that is smaller."""
        return self._result.condense()

    def unfold(self) -> ReduceResult | None:
        """The result again, if it was condensed; heavy."""
        if not self._result.condensed:
            return None
        self._result.unfold()
        return self._make_result()

    def _make_result(self) -> ReduceResult:
        return ReduceResult(
            values=self._result.values(),
            counters=self._result.counters,
            digest=self._result.digest(),
            sent_bytes=self._sent_bytes,
            manifest=self._result.manifest(),
            norm_sums=self._gauge.norm_sums(self._contributors),
            momentum_square=self._gauge.momentum_square,
        )

    # ------------------------------------------------------------ who and what

    def _check_order(self, owners: Sequence[str]) -> None:
        receivers = set(self._order.receivers)
        if len(set(self._contributors)) != len(self._contributors):
            raise RemoteProtocolError("the order names a contributor twice")
        if len(receivers) != len(self._order.receivers):
            raise RemoteProtocolError("the order names a receiver twice")
        missing = {*self._contributors, *owners} - receivers
        if missing:
            raise RemoteProtocolError(f"peer {min(missing)[:8]} takes part but does not receive")
        if self._me not in receivers:
            raise RemoteProtocolError("the order does not name this node")

    def _own_input(
        self,
        values: Values | None,
        counters: Counters | None,
        earlier: EncodedInput | None,
        residual: Residual | None,
        values_stay: bool,
    ) -> EncodedInput | None:
        if self._me not in self._contributors:
            return None
        plan, lossy = self._order.plan, self._layout.codec_up.lossy
        if not self._tree.is_alone(self._me):
            plan, lossy = evolve(plan, codec_up=INNER_CODEC), False
        if earlier is not None and earlier.fits(plan, self._size):
            return earlier
        if counters is None and self._size.counter_count == 0:
            counters = np.empty(0, np.int64)
        if values is None or counters is None:
            raise LocalProtocolError("this node contributes, but has nothing to contribute")
        return EncodedInput(
            plan,
            self._size,
            values,
            counters,
            residual.begin() if residual is not None and lossy else None,
            values_stay=values_stay,
            pool=self._hub.buffers,
        )

    def _keep(self) -> AuditLog | None:
        if self._notary is None:
            return None
        order, layout, tracker, result = self._order, self._layout, self._tracker, self._result
        # It must not refer to us: what is kept is large, and goes when nobody refers to it.
        return AuditLog(order, layout, self._notary, tracker, result, self._me, self.encoded_input)

    def _most_chunks_ahead(self) -> int:
        """How many chunks we send an owner beyond those whose result came back."""
        chunk_bytes = max((cut.up_bytes for cut in self._layout.cuts), default=1)
        senders = max(1, len(self._contributors) - 1)
        return max(AHEAD_MIN, CONTRIBUTIONS_BYTES_MAX // (senders * max(1, chunk_bytes)))

    def _rotated(self, peers: Iterable[str]) -> list[str]:
        """The others among ``peers``, beginning after our own place in the order.

        So that not everybody begins with the same one.
        """
        receivers = self._order.receivers
        after = receivers.index(self._me)
        wanted = set(peers)
        return [p for p in (*receivers[after + 1 :], *receivers[:after]) if p in wanted]


def _unheard(_what: object) -> None:
    """In place of who listened, when nothing more is to be told."""


class _Contributions:
    """Contributions for one peer, as they can be sent; see ``outlet.FrameSource``."""

    def __init__(self, reduction: Reduction, peer: str, batch: _Batch) -> None:
        self._reduction = reduction
        self._peer = peer
        self._batch = batch
        self._position = 0

    def next_frame(self) -> Load | None:
        reduction = self._reduction
        if self._position == len(self._batch.ready):
            return None
        with reduction._lock:
            if reduction._ahead[self._peer] >= reduction._ahead_max:
                return None
            reduction._ahead[self._peer] += 1
        index = self._batch.ready[self._position]
        self._position += 1
        attempt = reduction._tracker.attempt_of(index)
        return partial(reduction._load_contribution, index, attempt)

    def exhausted(self) -> bool:
        return self._position == self._batch.count


class _Results:
    """Results for one receiver, as they get done; see ``outlet.FrameSource``."""

    def __init__(self, reduction: Reduction, batch: _Batch) -> None:
        self._reduction = reduction
        self._batch = batch
        self._position = 0

    def next_frame(self) -> Load | None:
        if self._position == len(self._batch.ready):
            return None
        index = self._batch.ready[self._position]
        self._position += 1
        attempt = self._reduction._tracker.attempt_of(index)
        return partial(self._reduction._load_result, index, attempt)

    def exhausted(self) -> bool:
        return self._position == self._batch.count

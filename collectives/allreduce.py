"""One attempt at a reduction: the chunks' weighted mean, by a butterfly over links.

Every chunk has one owner. Contributors send it, encoded, to its owner; the owner adds, encodes the
mean once, decodes its own encoding, and sends the encoded bytes to every receiver. So all receivers
decode the same bytes to the same bits.

    Reduction.serve             until cancelled; reports the result when it is whole
     ├── watch                  one per peer that still owes us a frame: its loss is told
     ├── send                   a few flows per owner and per receiver: contributions, results
     ├── work                   two: reduce the chunks we own, decode the others' (in threads)
     └── follow                 hashes the chunks in order, reports when it is through

    the hub's nursery
     └── send                   to receivers that only listen: they may lag, nobody waits for them

A loss does not end a reduction, the master repairs it. ``flush`` shuts the lost out and says what is
held here; from then on chunks that we own wait for the others only. ``repair`` gives the chunks that
the lost owned to others: to one that holds the result and spreads it as it is, or to one that adds
up anew what the contributors send again. Which contributors are in a chunk follows its mean on the
wire and is hashed with it, so equal digests mean equal sets. A chunk's frames carry the attempt under
which its present owner became that: what an earlier owner sent cannot be taken for it.

Frames come in through ``place`` and ``deliver``, called by the links' readers; these only take note
and never wait, so a reduction cannot hold up a lane, nor two reductions each other.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import trio
from attrs import define, field, frozen
from blake3 import blake3

from ..protocol.errors import (
    BadContributionError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
)
from ..protocol.lane import FrameHeader, FrameKind
from ..protocol.messages import Assignment, ContributorRun, FragmentSize, Reduce, Repair
from ..protocol.network import Network
from .arithmetic import (
    Counters,
    EncodedInput,
    Factors,
    Layout,
    Values,
    decode_checked,
    manifest_of,
    pack_set,
    reduce_counters,
    reduce_values,
    unpack_set,
)
from .hub import LINK_WAIT_S, LinkHub
from .link import LANE_COUNT, Link

# Frames offered to a link at once: one for each lane, and one that the next idle lane takes.
FLOWS_PER_LINK = LANE_COUNT + 1
WORKERS = 2  # one chunk's arithmetic overlaps with another's, without crowding out the trainer


@frozen
class ReduceResult:
    """What an attempt gives at every receiver.

    Attributes:
      values: shape ``(value_count,)``, float32: the weighted mean; bit-identical everywhere.
      counters: shape ``(counter_count,)``, int64: the elementwise maximum.
      digest: BLAKE3 of ``encoded``.
      sent_bytes: payload bytes that this node sent until the result was whole.
      encoded: the result as it was on the wire, chunk by chunk, counters last, read-only; for a
        replay see ``arithmetic.decode_result``.
      manifest: which contributors are in which chunks; empty: all in all.
      included: by chunk: whether our own contribution is in it.
      left_out: the values (slices of ``values``) that our own contribution is not in, though we
        are a contributor.
    """

    values: Values
    counters: Counters
    digest: bytes
    sent_bytes: int
    encoded: memoryview
    manifest: tuple[ContributorRun, ...] = ()
    included: tuple[bool, ...] = ()
    left_out: tuple[slice, ...] = ()


@define(eq=False)
class _Outgoing:
    """Chunks that wait to be sent to one peer; a few flows share them, in order."""

    queue: deque[int] = field(factory=deque)
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    changed: trio.Event = field(factory=trio.Event)
    unsent_count: int = 0  # in the queue or on their way
    closing: bool = False  # nothing is added any more
    ended: bool = False

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class Reduction:
    """Replace nothing, return the contributors' weighted mean: see ``run`` and ``serve``.

    Args:
      order: the master's; names contributors, receivers and the plan. Contributors and owners must
        be receivers.
      me: this node's peer id, one of the receivers.
      size: of the fragment, as this node knows it.
      hub: where the links are; running.
      values: shape ``(value_count,)``, float32, C-contiguous; None if this node does not contribute
        or gives ``encoded_input``. Only read, and only while it runs.
      counters: shape ``(counter_count,)``, int64; None as for ``values``, or when there are none.
      encoded_input: that of an earlier attempt at the same round; used as far as it fits.
      link_wait_s: how long to wait for a link that is not up.
      on_lost: told of a peer that is gone while it owes this node something, once per attempt; the
        reduction then waits for ``flush`` and ``repair``. None: the loss ends the reduction.

    Attributes:
      attempt: the number of the order or of the last repair.
      encoded_input: this node's encoded contribution, for the next attempt; None at a node that
        does not contribute.

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
        link_wait_s: float = LINK_WAIT_S,
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
        self._contributors = [contributor.peer for contributor in order.contributors]
        self._layout = Layout.of(order.plan, size, len(self._contributors))
        Factors.of(order.contributors)  # refuse scalars that cannot be used before anything is sent
        self._owner = [cut.owner for cut in self._layout.cuts]  # changed by repairs
        self._maker = list(self._owner)  # who adds up; another than the owner if that only spreads
        self._since = [order.attempt] * len(self._owner)  # the attempt that made the owner so
        self._check_order()
        self.encoded_input = self._own_input(values, counters, encoded_input)
        self._others = self._rotated(order.receivers)
        self._needed = dict.fromkeys([*self._contributors, *self._owner])
        self._shut: dict[str, None] = {}  # lost peers, from whom nothing is accepted

        count = len(self._owner)
        self._result = np.empty(self._layout.down_bytes, np.uint8).data
        self._wire = [self._result[cut.down] for cut in self._layout.cuts]
        self._moved = False  # some of ``_wire`` are not parts of ``_result`` any more
        self._values = np.empty(size.value_count, np.float32)
        self._counters = np.empty(size.counter_count, np.int64)
        self._up_bytes_max = max((cut.up_bytes for cut in self._layout.cuts), default=0)
        self._spare_buffers: list[memoryview] = []
        self._lent_buffers: dict[tuple[int, str], memoryview] = {}  # by chunk and contributor
        self._placed: dict[tuple[FrameKind, int, str], memoryview] = {}  # on their way in
        self._arrived: dict[int, dict[str, memoryview]] = {}  # contributions, by owned chunk
        others = [peer for peer in self._contributors if peer != me]
        self._missing = [len(others)] * count  # contributions an owned chunk still waits for
        self._queued = [False] * count  # owned chunks that are being, or have been, added up
        self._held = [False] * count  # results that are here, decoded or not
        self._done = [False] * count
        self._version = [0] * count  # grows when a result that was held becomes void
        self._working: set[int] = set()
        self._owed = self._expected_frames()  # frames still to come, by peer
        self._watches: dict[str, trio.CancelScope] = {}
        self._losses: dict[str, PeerLostError] = {}  # of peers that owed us something then
        self._outgoing: dict[tuple[FrameKind, str], _Outgoing] = {}
        self._progress = trio.Event()
        self._to_work, self._work_queue = trio.open_memory_channel[int](math.inf)
        self._hash_generation = 0
        self._sent_bytes = 0
        self._whole = False
        self._reported = False  # that it is whole, under the present attempt
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._keys: ExitStack | None = None
        self._error: PeerLostError | BadContributionError | RemoteProtocolError | None = None

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
          ``(1 - w) * up_bytes + (n - 1) * w * down_bytes`` sent. Memory: one encoded input, one
          encoded and one decoded result, and up to ``(n - 1) * w`` encoded inputs while the
          contributors are out of step.

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
        try:
            with ExitStack() as self._keys:
                self._register(self._order.attempt)
                for attempt in sorted(set(self._since) - {self._order.attempt}):
                    self._register(attempt)
                self._hub.stop_trailing(self._order.round)
                with self._scope:
                    async with trio.open_nursery() as self._nursery:
                        self._start(whole)
                        if until_sent:
                            self._nursery.start_soon(self._stop_when_sent)
            if self._error is not None:
                raise self._error
        finally:
            self._nursery = self._keys = None
            for out in self._outgoing.values():  # only those in the hub's nursery still run
                out.closing = True
                out.wake()
                if not self._whole or self._error is not None:
                    out.scope.cancel()

    def _register(self, attempt: int) -> None:
        assert self._keys is not None
        for kind in (FrameKind.CONTRIBUTION, FrameKind.RESULT):
            key = (kind, self._order.round, attempt)
            self._keys.enter_context(self._hub.register(key, self))

    def _start(self, whole: Callable[[ReduceResult], None]) -> None:
        assert self._nursery is not None
        for peer in self._owed:
            self._start_watch(peer)
        if self.encoded_input is not None:
            owned: dict[str, list[int]] = {}
            for index, owner in enumerate(self._owner):
                if not self._held[index]:
                    owned.setdefault(owner, []).append(index)
            for owner in self._rotated(list(owned)):
                self._enqueue(FrameKind.CONTRIBUTION, owner, owned[owner])
        if self._me in self._owner:
            for receiver in self._others:
                self._enqueue(FrameKind.RESULT, receiver, ())
        for _worker in range(WORKERS):
            self._nursery.start_soon(self._guard, self._work)
        self._nursery.start_soon(self._follow, whole)
        for index, owner in enumerate(self._owner):
            if owner == self._me:
                self._add_up_if_complete(index)

    async def _guard(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except (BadContributionError, RemoteProtocolError) as error:
            self._fail(error)

    def _fail(self, error: PeerLostError | BadContributionError | RemoteProtocolError) -> None:
        """End the attempt; only the first reason is told."""
        if self._error is None:
            self._error = error
            self._scope.cancel()

    async def _stop_when_sent(self) -> None:
        while not self._whole or any(
            out.unsent_count and not out.ended
            for (_kind, peer), out in self._outgoing.items()
            if peer in self._needed
        ):
            await self._progress.wait()
        self._scope.cancel()

    # ------------------------------------------------------------ losses and repairs

    def _start_watch(self, peer: str) -> None:
        assert self._nursery is not None
        scope = self._watches[peer] = trio.CancelScope()
        self._nursery.start_soon(self._watch, peer, scope)

    async def _watch(self, peer: str, scope: trio.CancelScope) -> None:
        """Wait for the loss of a peer that owes us frames; cancelled when it owes none."""
        with scope:
            try:
                link = await self._hub.link(peer, self._link_wait_s)
                await link.lost.wait()
            except PeerLostError as error:
                self._lose(error)
            else:
                self._lose(PeerLostError(peer, link.reason))

    def _lose(self, error: PeerLostError) -> None:
        if error.peer in self._shut or error.peer in self._losses:
            return
        self._losses[error.peer] = error
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
        for peer in lost:
            if peer not in self._shut and peer != self._me:
                self._shut[peer] = None
                self._shut_out(peer)
        self._wake()
        return np.packbits(np.array(self._held, np.bool_), bitorder="little").tobytes()

    def _shut_out(self, peer: str) -> None:
        self._owed.pop(peer, None)
        self._needed.pop(peer, None)
        if (watch := self._watches.pop(peer, None)) is not None:
            watch.cancel()
        for kind in (FrameKind.CONTRIBUTION, FrameKind.RESULT):
            if (out := self._outgoing.get((kind, peer))) is not None:
                out.ended = True
                out.scope.cancel()
        for key in [key for key in self._placed if key[2] == peer]:
            # A lane may still write there when it reads on: nobody else may use that memory.
            kind, index, _peer = key
            del self._placed[key]
            if kind is FrameKind.RESULT:
                self._renew_wire(index)
            elif kind is FrameKind.CONTRIBUTION:
                self._lent_buffers.pop((index, peer), None)
        if peer in self._contributors:
            for index, owner in enumerate(self._owner):
                if owner == self._me and not self._queued[index]:
                    if peer not in self._arrived.get(index, {}):
                        self._missing[index] -= 1
                    self._add_up_if_complete(index)

    def _renew_wire(self, index: int) -> None:
        self._moved = True
        self._wire[index] = np.empty(self._layout.cuts[index].down_bytes, np.uint8).data

    def repair(self, order: Repair) -> None:
        """Go on without the lost: others take over the chunks that they owned.

        Raises:
          RemoteProtocolError: the order does not fit the reduction.
        """
        self.flush(order.lost)
        self.attempt = order.attempt
        if self._keys is not None:
            self._register(order.attempt)
        for assignment in order.assignments:
            end = assignment.first_chunk + assignment.chunk_count
            if end > len(self._owner) or assignment.owner not in self._order.receivers:
                raise RemoteProtocolError("a repair of chunks or by peers that do not exist")
            chunks = range(assignment.first_chunk, end)
            for index in chunks:
                self._owner[index], self._since[index] = assignment.owner, order.attempt
                if assignment.anew:
                    self._begin_anew(index, assignment.owner)
            self._send_repaired(assignment, chunks)
        self._count_owed_again()
        self._reported = False
        self._wake()

    def _begin_anew(self, index: int, maker: str) -> None:
        self._maker[index] = maker
        if self._held[index]:
            self._held[index] = self._done[index] = False
            self._whole = False
            self._version[index] += 1
            self._hash_generation += 1
            self._renew_wire(index)
        if maker == self._me:
            # What a contribution needs here was never asked of us before: none has arrived.
            live = [p for p in self._contributors if p not in self._shut and p != self._me]
            self._missing[index] = len(live)
            self._queued[index] = False

    def _send_repaired(self, assignment: Assignment, chunks: Sequence[int]) -> None:
        if self._nursery is None:
            return  # not begun yet: ``_start`` sends what is to be sent
        if not assignment.anew:
            if assignment.owner == self._me:
                places = {peer: at for at, peer in enumerate(self._order.receivers)}
                lacking = np.unpackbits(
                    np.frombuffer(assignment.lacking, np.uint8), bitorder="little"
                )
                for peer in self._others:
                    at = places[peer]
                    if at < len(lacking) and lacking[at]:
                        self._enqueue(FrameKind.RESULT, peer, chunks, anew=True)
        elif assignment.owner == self._me:
            for index in chunks:
                self._add_up_if_complete(index)
        elif self.encoded_input is not None:
            self._enqueue(FrameKind.CONTRIBUTION, assignment.owner, chunks)

    def _count_owed_again(self) -> None:
        self._owed = self._expected_frames()
        for peer in [peer for peer in self._watches if peer not in self._owed]:
            self._watches.pop(peer).cancel()
        if self._nursery is None:
            return
        for peer in self._owed:
            if peer in self._losses:
                if self._on_lost is not None:
                    self._on_lost(self._losses[peer])  # still so, under this attempt
            elif peer not in self._watches:
                self._start_watch(peer)

    # ------------------------------------------------------------ sending

    def _enqueue(
        self, kind: FrameKind, peer: str, chunks: Sequence[int], *, anew: bool = False
    ) -> None:
        """Have chunks sent to a peer, after those that wait already.

        Args:
          anew: begin again after a loss of the link; otherwise such a receiver gets no more.
        """
        if peer == self._me or peer in self._shut or self._nursery is None:
            return
        out = self._outgoing.get((kind, peer))
        if out is None or (out.ended and (anew or kind is FrameKind.CONTRIBUTION)):
            out = self._outgoing[kind, peer] = _Outgoing()
            task = partial(self._send, kind, peer, out)
            if kind is FrameKind.CONTRIBUTION or peer in self._needed:
                self._nursery.start_soon(task)
            else:
                self._hub.start_trailing(peer, self._order.round, task)
        if out.ended:
            return
        out.queue.extend(chunks)
        out.unsent_count += len(chunks)
        out.wake()

    async def _send(self, kind: FrameKind, peer: str, out: _Outgoing) -> None:
        """Send what is in the queue, and what comes into it.

        A receiver of results that is lost is skipped: if this node needs something of it, its watch
        says so; if not, whoever does will.
        """
        try:
            with out.scope:
                while not out.queue and not out.closing:
                    await out.changed.wait()
                link = await self._hub.link(peer, self._link_wait_s)
                async with trio.open_nursery() as nursery:
                    for _flow in range(FLOWS_PER_LINK):
                        nursery.start_soon(self._flow, kind, link, out)
        except PeerLostError as error:
            self._send_failed(kind, error)
        finally:
            out.ended = True
            self._wake()

    def _send_failed(self, kind: FrameKind, error: PeerLostError) -> None:
        if kind is FrameKind.CONTRIBUTION:
            self._lose(error)

    async def _flow(self, kind: FrameKind, link: Link, out: _Outgoing) -> None:
        try:
            while out.queue or not out.closing:
                if not out.queue:
                    await out.changed.wait()
                    continue
                index = out.queue.popleft()
                payload = await self._payload(kind, index)
                await link.send_frame(self._header(kind, index, payload), payload)
                self._sent_bytes += len(payload)
                out.unsent_count -= 1
                if not out.unsent_count:
                    self._wake()
        except PeerLostError as error:
            out.ended = True
            out.scope.cancel()
            self._send_failed(kind, error)
        except BadContributionError as error:
            self._fail(error)

    async def _payload(self, kind: FrameKind, index: int) -> memoryview:
        if kind is FrameKind.RESULT:
            return self._wire[index]
        encoded = self.encoded_input
        assert encoded is not None
        if not encoded.is_encoded(index):
            await self._network.run_sync(partial(self._encode_own, index))
        return encoded.chunk(index)

    def _header(self, kind: FrameKind, index: int, payload: memoryview) -> FrameHeader:
        order = self._order
        attempt = self._since[index]
        return FrameHeader(kind, order.round, attempt, index, order.fragment, len(payload))

    # ------------------------------------------------------------ receiving

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """See ``routing.Sink``. What is wrong lands in a buffer that nobody reads."""
        if peer in self._shut or self._is_repeated(peer, header):
            return None
        if self._objection(peer, header) is not None:
            return memoryview(bytearray(header.payload_bytes))
        if header.kind is FrameKind.RESULT:
            view = self._wire[header.index]
        else:
            view = self._lend_buffer(header.index, peer)[: header.payload_bytes]
        self._placed[header.kind, header.index, peer] = view
        return view

    def deliver(self, peer: str, header: FrameHeader, payload: memoryview) -> None:
        """See ``routing.Sink``. The header is authentic now, so its sender can be named."""
        if peer in self._shut:
            return
        if self._placed.get((header.kind, header.index, peer)) is not payload:
            reason = self._objection(peer, header) or "sent a chunk twice"
            if peer in self._owed:
                self._fail(BadContributionError(peer, reason))
                return
            raise RemoteProtocolError(f"peer {peer[:8]} {reason}")
        del self._placed[header.kind, header.index, peer]
        if header.kind is FrameKind.RESULT:
            self._held[header.index] = True
            if header.index not in self._working:
                self._to_work.send_nowait(header.index)
        else:
            self._arrived.setdefault(header.index, {})[peer] = payload
            self._missing[header.index] -= 1
            self._add_up_if_complete(header.index)
        self._pay(peer)

    def _add_up_if_complete(self, index: int) -> None:
        """Begin with a chunk that we own, once all that can still come is here."""
        if self._queued[index] or self._missing[index] or self._maker[index] != self._me:
            return
        if self.encoded_input is None and not self._arrived.get(index):
            return  # nobody who contributed is left
        self._queued[index] = True
        self._to_work.send_nowait(index)

    def _is_repeated(self, peer: str, header: FrameHeader) -> bool:
        """Whether somebody spreads to us, after a repair, what we have already."""
        index = header.index
        return (
            header.kind is FrameKind.RESULT
            and index < len(self._owner)
            and self._held[index]
            and self._owner[index] == peer
            and header.attempt == self._since[index] > self._order.attempt
        )

    def _objection(self, peer: str, header: FrameHeader) -> str | None:
        """What is wrong with a frame, as the rest of a sentence about its sender."""
        if header.transfer != self._order.fragment:
            return f"sent a chunk of fragment {header.transfer}"
        if header.index >= len(self._layout.cuts):
            return f"sent chunk {header.index}, which does not exist"
        cut, owner = self._layout.cuts[header.index], self._owner[header.index]
        if header.kind is FrameKind.RESULT:
            wanted_bytes = cut.down_bytes
            if owner != peer:
                return f"sent a result for chunk {header.index}, which it does not own"
            twice = self._held[header.index]
        else:
            wanted_bytes = cut.up_bytes
            if owner != self._me or peer not in self._contributors:
                return f"sent a contribution to chunk {header.index} that nobody asked it for"
            twice = self._queued[header.index] or peer in self._arrived.get(header.index, {})
        if header.attempt != self._since[header.index]:
            return f"sent chunk {header.index} under attempt {header.attempt}"
        if header.payload_bytes != wanted_bytes:
            return f"sent {header.payload_bytes} bytes for a chunk of {wanted_bytes}"
        if twice or (header.kind, header.index, peer) in self._placed:
            return f"sent chunk {header.index} twice"
        return None

    def _pay(self, peer: str) -> None:
        self._owed[peer] -= 1
        if self._owed[peer] == 0:
            del self._owed[peer]
            if (watch := self._watches.pop(peer, None)) is not None:
                watch.cancel()

    def _lend_buffer(self, index: int, peer: str) -> memoryview:
        """A buffer for a contribution; they are used again chunk after chunk."""
        if not self._spare_buffers:
            self._spare_buffers.append(np.empty(self._up_bytes_max, np.uint8).data)
        buffer = self._lent_buffers[index, peer] = self._spare_buffers.pop()
        return buffer

    # ------------------------------------------------------------ arithmetic

    async def _work(self) -> None:
        async for index in self._work_queue:
            mine = self._maker[index] == self._me
            version = self._version[index]
            self._working.add(index)
            await self._network.run_sync(partial(self._reduce if mine else self._decode, index))
            self._working.discard(index)
            if version != self._version[index]:
                if self._held[index]:  # the new one has come meanwhile
                    self._to_work.send_nowait(index)
                continue
            if mine:
                self._held[index] = True
                for peer in self._arrived.pop(index, {}):
                    self._spare_buffers.append(self._lent_buffers.pop((index, peer)))
                for receiver in self._others:
                    self._enqueue(FrameKind.RESULT, receiver, (index,))
            self._done[index] = True
            self._wake()

    def _encode_own(self, index: int) -> None:
        assert self.encoded_input is not None
        try:
            self.encoded_input.encode(index)
        except ValueError as error:
            raise BadContributionError(self._me, str(error)) from error

    def _reduce(self, index: int) -> None:
        """In a thread: one chunk that we own."""
        cut = self._layout.cuts[index]
        arrived = dict(self._arrived.get(index, {}))
        if self.encoded_input is not None:
            self._encode_own(index)
            arrived[self._me] = self.encoded_input.chunk(index)
        present = [peer in arrived for peer in self._contributors]
        contributions = [arrived[peer] for peer in self._contributors if peer in arrived]
        encoded = self._wire[index]
        mean = encoded[: cut.mean_bytes]
        if cut.is_counters:
            reduce_counters(contributions, self._counters)
            np.frombuffer(mean, "<i8")[:] = self._counters
        else:
            reduce_values(
                self._layout,
                [c for c in self._order.contributors if c.peer in arrived],
                Factors.of(self._order.contributors, present),
                contributions,
                self._values[cut.values],
                mean,
            )
        encoded[cut.mean_bytes :] = pack_set(present)

    def _decode(self, index: int) -> None:
        """In a thread: one chunk that somebody else owns."""
        cut, maker = self._layout.cuts[index], self._maker[index]
        encoded = self._wire[index]
        mean = encoded[: cut.mean_bytes]
        try:
            unpack_set(encoded[cut.mean_bytes :], len(self._contributors))
        except ValueError as error:
            raise BadContributionError(maker, str(error)) from error
        if cut.is_counters:
            self._counters[:] = np.frombuffer(mean, "<i8")
        else:
            decode_checked(self._layout.codec_down, mean, self._values[cut.values], maker)

    async def _follow(self, whole: Callable[[ReduceResult], None]) -> None:
        """Hash the chunks in order; report when all are, and again after each repair."""
        hasher, position, generation = blake3(), 0, self._hash_generation
        while True:
            if generation != self._hash_generation:
                hasher, position, generation = blake3(), 0, self._hash_generation
            end = position
            while end < len(self._done) and self._done[end]:
                end += 1
            if end > position:
                for piece in self._pieces(position, end):
                    await self._network.run_sync(partial(hasher.update, piece))
                position = end
            elif position == len(self._done) and not self._reported:
                self._whole = self._reported = True
                whole(self._make_result(hasher.digest()))
                self._wake()
            else:
                await self._progress.wait()

    def _pieces(self, start: int, end: int) -> list[memoryview]:
        """The wire bytes of these chunks."""
        if self._moved:
            return self._wire[start:end]
        cuts = self._layout.cuts
        return [self._result[cuts[start].down.start : cuts[end - 1].down.stop]]

    def _make_result(self, digest: bytes) -> ReduceResult:
        count = len(self._contributors)
        cuts = self._layout.cuts
        sets = [bytes(wire[cut.mean_bytes :]) for wire, cut in zip(self._wire, cuts, strict=True)]
        included = [False] * len(cuts)
        if self._me in self._contributors:
            at = self._contributors.index(self._me)
            included = [bool(packed[at // 8] >> at % 8 & 1) for packed in sets]
        contributes = self._me in self._contributors
        return ReduceResult(
            values=self._values,
            counters=self._counters,
            digest=digest,
            sent_bytes=self._sent_bytes,
            encoded=memoryview(b"".join(self._wire)) if self._moved else self._result.toreadonly(),
            manifest=manifest_of(sets, pack_set([True] * count)),
            included=tuple(included),
            left_out=tuple(
                cut.values
                for cut, within in zip(cuts, included, strict=True)
                if contributes and not within and not cut.is_counters
            ),
        )

    def _wake(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

    # ------------------------------------------------------------ who and what

    def _check_order(self) -> None:
        receivers = set(self._order.receivers)
        if len(set(self._contributors)) != len(self._contributors):
            raise RemoteProtocolError("the order names a contributor twice")
        if len(receivers) != len(self._order.receivers):
            raise RemoteProtocolError("the order names a receiver twice")
        missing = (set(self._contributors) | set(self._owner)) - receivers
        if missing:
            raise RemoteProtocolError(f"peer {min(missing)[:8]} takes part but does not receive")
        if self._me not in receivers:
            raise RemoteProtocolError("the order does not name this node")

    def _own_input(
        self, values: Values | None, counters: Counters | None, earlier: EncodedInput | None
    ) -> EncodedInput | None:
        if self._me not in self._contributors:
            return None
        plan = self._order.plan
        if earlier is not None and earlier.fits(plan, self._size):
            return earlier
        if counters is None and self._size.counter_count == 0:
            counters = np.empty(0, np.int64)
        if values is None or counters is None:
            raise LocalProtocolError("this node contributes, but has nothing to contribute")
        return EncodedInput(plan, self._size, values, counters)

    def _expected_frames(self) -> dict[str, int]:
        """How many frames each peer still owes us; only peers that owe any."""
        owed: Counter[str] = Counter()
        live = [p for p in self._contributors if p not in self._shut and p != self._me]
        for index, owner in enumerate(self._owner):
            if owner != self._me:
                owed[owner] += not self._held[index]
            elif not self._queued[index] and not self._held[index]:
                arrived = self._arrived.get(index, {})
                owed.update(peer for peer in live if peer not in arrived)
        return {p: count for p, count in owed.items() if count > 0 and p not in self._shut}

    def _rotated(self, peers: Sequence[str]) -> list[str]:
        """The others among ``peers``, beginning after our own place in the order.

        So that not everybody begins with the same one.
        """
        after = self._order.receivers.index(self._me)
        place = {peer: position for position, peer in enumerate(self._order.receivers)}
        count = len(place)
        others = [peer for peer in peers if peer != self._me]
        return sorted(others, key=lambda peer: (place[peer] - after) % count)

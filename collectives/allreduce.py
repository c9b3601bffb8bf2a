"""One attempt at a reduction: the chunks' weighted mean, by a butterfly over links.

Every chunk has one owner. Contributors send it, encoded, to its owner; the owner adds, encodes the
mean once, decodes its own encoding, and sends the encoded bytes to every receiver. So all receivers
decode the same bytes to the same bits.

    Reduction.run               returns when this node's result is whole and all whom the round
     │                          depends on were given theirs
     ├── watch                  one per peer that still owes us a frame: its loss ends the attempt
     ├── send_contributions     a few per owner, sharing its chunks in order
     ├── send_results           a few per contributor and owner, sharing our chunks as they get done
     ├── work                   two: reduce the chunks we own, decode the others' (in threads)
     └── hash_result            follows the chunks in order

    the hub's nursery
     └── send_results           to receivers that only listen: they may lag, nobody waits for them

Frames come in through ``place`` and ``deliver``, called by the links' readers; these only take note
and never wait, so a reduction cannot hold up a lane, nor two reductions each other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import numpy as np
import trio
from attrs import define, frozen
from blake3 import blake3

from ..protocol.errors import (
    BadContributionError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
)
from ..protocol.lane import FrameHeader, FrameKind
from ..protocol.messages import FragmentSize, Reduce
from ..protocol.network import Network
from .arithmetic import (
    Counters,
    EncodedInput,
    Factors,
    Layout,
    Values,
    decode_checked,
    reduce_counters,
    reduce_values,
)
from .coding import Bytes
from .compression import Squeezer
from .feedback import Residual
from .hub import LINK_WAIT_S, LinkHub
from .lane_count import COUNT_FIRST
from .link import Link
from .result import EncodedResult

# Frames offered to a link at once: one for each lane, and one that the next idle lane takes.
FLOWS_PER_LINK = COUNT_FIRST + 1
WORKERS = 2  # one chunk's arithmetic overlaps with another's, without crowding out the trainer


@frozen
class ReduceResult:
    """What an attempt gives at every receiver.

    Attributes:
      values: shape ``(value_count,)``, float32: the weighted mean; bit-identical everywhere.
      counters: shape ``(counter_count,)``, int64: the elementwise maximum.
      digest: BLAKE3 of ``encoded``.
      sent_bytes: payload bytes that this node sent until the result was whole.
      encoded: the encoded result (what a frame carries before it is compressed), chunk by chunk,
        counters last, read-only; for a replay see ``arithmetic.decode_result``.
    """

    values: Values
    counters: Counters
    digest: bytes
    sent_bytes: int
    encoded: memoryview


class Reduction:
    """Replace nothing, return the contributors' weighted mean: see ``run``.

    Args:
      order: the master's; names contributors, receivers and the plan. Contributors and owners must
        be receivers.
      me: this node's peer id, one of the receivers.
      size: of the fragment, as this node knows it.
      hub: where the links are; running.
      values: shape ``(value_count,)``, float32, C-contiguous; None if this node does not contribute
        or gives ``encoded_input``. Only read, and only during ``run``.
      counters: shape ``(counter_count,)``, int64; None as for ``values``, or when there are none.
      encoded_input: that of an earlier attempt at the same round; used as far as it fits.
      residual: of this node's earlier contributions, if there is error feedback; it changes only
        by ``encoded_input.settle()``.
      link_wait_s: how long to wait for a link that is not up.

    Attributes:
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
        residual: Residual | None = None,
        link_wait_s: float = LINK_WAIT_S,
    ) -> None:
        self._order = order
        self._me = me
        self._size = size
        self._hub = hub
        self._network = network
        self._link_wait_s = link_wait_s
        self._layout = Layout.of(order.plan, size)
        self._factors = Factors.of(order.contributors)
        self._contributors = [contributor.peer for contributor in order.contributors]
        self._chunks: dict[str, list[int]] = {}  # by owner, in order
        for index, cut in enumerate(self._layout.cuts):
            self._chunks.setdefault(cut.owner, []).append(index)
        self._mine = self._chunks.get(me, [])
        self._check_order()
        self.encoded_input = self._own_input(values, counters, encoded_input, residual)

        self._result = EncodedResult(self._layout)
        self._squeezer = Squeezer(self._layout.zstd_up)
        self._values = np.empty(size.value_count, np.float32)
        self._counters = np.empty(size.counter_count, np.int64)
        self._up_bytes_max = max((cut.up_bytes for cut in self._layout.cuts), default=0)
        self._spare_buffers: list[memoryview] = []
        self._lent_buffers: dict[tuple[int, str], memoryview] = {}  # by chunk and contributor
        self._placed: dict[tuple[FrameKind, int, str], memoryview] = {}
        self._arrived: dict[int, dict[str, memoryview]] = {}  # contributions, by owned chunk
        self._owed = self._expected_frames()  # frames still to come, by peer
        self._watches: dict[str, trio.CancelScope] = {}
        self._reduced: list[int] = []  # owned chunks whose result is there, as they got done
        self._done = [False] * len(self._layout.cuts)
        self._done_count = 0
        self._progress = trio.Event()
        self._to_work, self._work_queue = trio.open_memory_channel[int](math.inf)
        self._hasher = blake3()
        self._sent_bytes = 0
        self._scope = trio.CancelScope()
        self._error: PeerLostError | BadContributionError | None = None

    # ------------------------------------------------------------ the collective

    async def run(self) -> ReduceResult:
        """Reduce; every receiver that returns has the same bits.

        Each chunk is averaged once, by its owner, and the owner's encoded bytes are what everyone
        decodes, the owner too. An owner's own contribution also passes through the codec, so every
        attempt adds the same numbers, whoever owns the chunk.

        The loss of a peer ends the attempt only while that peer still owes this node something;
        receivers that only listen are never waited for. Call it once.

        Raises:
          PeerLostError: a contributor or owner is gone, or its link did not come up in time.
          BadContributionError: a peer (this node, too) sent what must not be added or applied.
          RemoteProtocolError: this attempt, or a later one of its round, ran here before.

        Cost:
          With ``n`` contributors, all of them receivers, and owner share ``w``, in payload bytes:
          ``(1 - w) * up_bytes + (n - 1) * w * down_bytes`` sent. Memory: one encoded input, one
          encoded and one decoded result, and up to ``(n - 1) * w`` encoded inputs while the
          contributors are out of step.

        Cancellation: safe at any point; the input is untouched, and not used afterwards.
        """
        order = self._order
        contribution = (FrameKind.CONTRIBUTION, order.round, order.attempt)
        result = (FrameKind.RESULT, order.round, order.attempt)
        trailing: list[trio.CancelScope] = []
        whole = False
        try:
            with self._hub.register(contribution, self), self._hub.register(result, self):
                self._hub.stop_trailing(order.round)
                trailing += self._start_trailing()
                with self._scope:
                    async with trio.open_nursery() as nursery:
                        self._start(nursery)
            if self._error is not None:
                raise self._error
            whole = True
        finally:
            if not whole:
                for scope in trailing:
                    scope.cancel()
        return ReduceResult(
            values=self._values,
            counters=self._counters,
            digest=self._hasher.digest(),
            sent_bytes=self._sent_bytes,
            encoded=self._result.whole(),
        )

    def _start(self, nursery: trio.Nursery) -> None:
        for peer in self._owed:
            self._watches[peer] = trio.CancelScope()
            nursery.start_soon(self._guard, partial(self._watch, peer))
        if self.encoded_input is not None:
            for owner in self._rotated(list(self._chunks)):
                chunks = iter(self._chunks[owner])
                for _flow in range(FLOWS_PER_LINK):
                    task = partial(self._send_contributions, owner, chunks)
                    nursery.start_soon(self._guard, task)
        if self._mine:
            for receiver in self._rotated(self._needed):
                nursery.start_soon(partial(self._send_results, receiver))
        for _worker in range(WORKERS):
            nursery.start_soon(self._guard, self._work)
        nursery.start_soon(self._guard, self._hash_result)
        if set(self._contributors) <= {self._me}:
            for index in self._mine:
                self._to_work.send_nowait(index)
        if not self._done:
            self._to_work.close()

    def _start_trailing(self) -> list[trio.CancelScope]:
        needed = set(self._needed)
        listeners = [peer for peer in self._order.receivers if peer not in needed]
        if not self._mine:
            return []
        return [
            self._hub.start_trailing(
                receiver, self._order.round, partial(self._send_results, receiver)
            )
            for receiver in self._rotated(listeners)
        ]

    async def _guard(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except (PeerLostError, BadContributionError) as error:
            self._fail(error)

    def _fail(self, error: PeerLostError | BadContributionError) -> None:
        """End the attempt; only the first reason is told."""
        if self._error is None:
            self._error = error
            self._scope.cancel()

    async def _watch(self, peer: str) -> None:
        """Wait for the loss of a peer that owes us frames; cancelled when it owes none."""
        with self._watches[peer]:
            link = await self._hub.link(peer, self._link_wait_s)
            await link.lost.wait()
            raise PeerLostError(peer, link.reason)

    # ------------------------------------------------------------ sending

    async def _send_contributions(self, owner: str, chunks: Iterator[int]) -> None:
        link = await self._hub.link(owner, self._link_wait_s)
        encoded = self.encoded_input
        assert encoded is not None
        for index in chunks:
            if not encoded.is_encoded(index):
                await self._network.run_sync(partial(self._encode_own, index))
            payload: Bytes = encoded.chunk(index)
            if self._squeezer.pays and not self._layout.cuts[index].is_counters:
                squeeze = partial(self._squeezer.squeeze, encoded.chunk(index))
                payload = await self._network.run_sync(squeeze)
            await link.send_frame(self._header(FrameKind.CONTRIBUTION, index, payload), payload)
            self._sent_bytes += len(payload)

    async def _send_results(self, receiver: str) -> None:
        """Send our chunks' results as they get done.

        A receiver that is lost is skipped: if this node needs something of it, its watch says so;
        if not, whoever does will.
        """
        feed = _Feed()
        try:
            link = await self._hub.link(receiver, self._link_wait_s)
            async with trio.open_nursery() as nursery:
                for _flow in range(FLOWS_PER_LINK):
                    nursery.start_soon(self._feed_results, link, feed)
        except* PeerLostError:
            pass

    def _header(self, kind: FrameKind, index: int, payload: Bytes) -> FrameHeader:
        order = self._order
        return FrameHeader(kind, order.round, order.attempt, index, order.fragment, len(payload))

    async def _feed_results(self, link: Link, feed: _Feed) -> None:
        while feed.position < len(self._mine):
            if feed.position == len(self._reduced):
                await self._progress.wait()
                continue
            index = self._reduced[feed.position]
            feed.position += 1
            payload = self._result.payload(index)
            await link.send_frame(self._header(FrameKind.RESULT, index, payload), payload)
            self._sent_bytes += len(payload)

    # ------------------------------------------------------------ receiving

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """See ``routing.Sink``. What is wrong lands in a buffer that nobody reads."""
        if self._objection(peer, header) is not None:
            return memoryview(bytearray(header.payload_bytes))
        if header.kind is FrameKind.RESULT:
            view = self._result.place(header.index, header.payload_bytes)
        else:
            view = self._lend_buffer(header.index, peer)[: header.payload_bytes]
        self._placed[header.kind, header.index, peer] = view
        return view

    def deliver(self, peer: str, header: FrameHeader, payload: memoryview) -> None:
        """See ``routing.Sink``. The header is authentic now, so its sender can be named."""
        if self._placed.get((header.kind, header.index, peer)) is not payload:
            reason = self._objection(peer, header) or "sent a chunk twice"
            if peer in self._owed:
                self._fail(BadContributionError(peer, reason))
                return
            raise RemoteProtocolError(f"peer {peer[:8]} {reason}")
        if header.kind is FrameKind.RESULT:
            self._result.arrived(header.index, payload)
            self._to_work.send_nowait(header.index)
        else:
            arrived = self._arrived.setdefault(header.index, {})
            arrived[peer] = payload
            if len(arrived) == len(set(self._contributors) - {self._me}):
                self._to_work.send_nowait(header.index)
        self._pay(peer)

    def abandon(self, peer: str, header: FrameHeader, view: memoryview) -> None:
        """See ``routing.Sink``."""
        key = (header.kind, header.index, peer)
        if self._placed.get(key) is view:
            del self._placed[key]
            buffer = self._lent_buffers.pop((header.index, peer), None)
            if header.kind is FrameKind.CONTRIBUTION and buffer is not None:
                self._spare_buffers.append(buffer)

    def _objection(self, peer: str, header: FrameHeader) -> str | None:
        """What is wrong with a frame, as the rest of a sentence about its sender."""
        if header.transfer != self._order.fragment:
            return f"sent a chunk of fragment {header.transfer}"
        if header.index >= len(self._layout.cuts):
            return f"sent chunk {header.index}, which does not exist"
        cut = self._layout.cuts[header.index]
        if header.kind is FrameKind.RESULT:
            if cut.owner != peer:
                return f"sent a result for chunk {header.index}, which it does not own"
        elif cut.owner != self._me or peer not in self._contributors:
            return f"sent a contribution to chunk {header.index} that nobody asked it for"
        wrong_length = self._layout.objection(header.kind, header.index, header.payload_bytes)
        if wrong_length is not None:
            return wrong_length
        if (header.kind, header.index, peer) in self._placed:
            return f"sent chunk {header.index} twice"
        return None

    def _pay(self, peer: str) -> None:
        self._owed[peer] -= 1
        if self._owed[peer] == 0:
            self._watches[peer].cancel()

    def _lend_buffer(self, index: int, peer: str) -> memoryview:
        """A buffer for a contribution; they are used again chunk after chunk."""
        if not self._spare_buffers:
            self._spare_buffers.append(np.empty(self._up_bytes_max, np.uint8).data)
        buffer = self._lent_buffers[index, peer] = self._spare_buffers.pop()
        return buffer

    # ------------------------------------------------------------ arithmetic

    async def _work(self) -> None:
        async for index in self._work_queue:
            mine = self._layout.cuts[index].owner == self._me
            await self._network.run_sync(partial(self._reduce if mine else self._decode, index))
            if mine:
                self._reduced.append(index)
                for peer in self._arrived.pop(index, {}):
                    self._spare_buffers.append(self._lent_buffers.pop((index, peer)))
            self._done[index] = True
            self._done_count += 1
            if self._done_count == len(self._done):
                self._to_work.close()
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
        contributions = [arrived[peer] for peer in self._contributors]
        encoded = self._result.room(index)
        if cut.is_counters:
            reduce_counters(contributions, self._counters)
            np.frombuffer(encoded, "<i8")[:] = self._counters
        else:
            length = reduce_values(
                self._layout,
                self._order.contributors,
                self._factors,
                contributions,
                self._values[cut.values],
                encoded,
            )
            self._result.made(index, length)

    def _decode(self, index: int) -> None:
        """In a thread: one chunk that somebody else owns."""
        cut = self._layout.cuts[index]
        encoded = self._result.expand(index)
        if cut.is_counters:
            self._counters[:] = np.frombuffer(encoded, "<i8")
        else:
            codec, values = self._layout.codec_down, self._values[cut.values]
            decode_checked(codec, False, encoded, values, cut.owner)

    async def _hash_result(self) -> None:
        position = 0
        while position < len(self._done):
            end = position
            while end < len(self._done) and self._done[end]:
                end += 1
            if end == position:
                await self._progress.wait()
                continue
            for piece in self._result.pieces(position, end):
                await self._network.run_sync(partial(self._hasher.update, piece))
            position = end

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
        missing = (set(self._contributors) | set(self._chunks)) - receivers
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
        lossy = self._layout.codec_up.lossy
        correction = residual.begin() if residual is not None and lossy else None
        return EncodedInput(plan, self._size, values, counters, correction)

    def _expected_frames(self) -> dict[str, int]:
        """How many frames each peer owes us; only peers that owe any."""
        owed = Counter({owner: len(chunks) for owner, chunks in self._chunks.items()})
        for peer in self._contributors:
            owed[peer] += len(self._mine)
        del owed[self._me]
        return {peer: count for peer, count in owed.items() if count > 0}

    @property
    def _needed(self) -> list[str]:
        """Those whom the round depends on: contributors and owners, in order."""
        return list(dict.fromkeys([*self._contributors, *self._chunks]))

    def _rotated(self, peers: Sequence[str]) -> list[str]:
        """The others among ``peers``, beginning after our own place in the order.

        So that not everybody begins with the same one.
        """
        after = self._order.receivers.index(self._me)
        place = {peer: position for position, peer in enumerate(self._order.receivers)}
        count = len(place)
        others = [peer for peer in peers if peer != self._me]
        return sorted(others, key=lambda peer: (place[peer] - after) % count)


@define
class _Feed:
    """How far the flows to one receiver are in the list of reduced chunks; they share it."""

    position: int = 0

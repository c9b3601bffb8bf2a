"""One attempt at a reduction: the chunks' weighted mean, by a butterfly over links.

Every chunk has one owner. Contributors send it, encoded, to its owner; the owner adds, encodes the
mean once, decodes its own encoding, and sends the encoded bytes to every receiver. So all receivers
decode the same bytes to the same bits.

    Reduction.run               returns when this node's result is whole and all whom the round
     │                          depends on were given theirs
     ├── watch                  one per peer that still owes us a frame: its loss ends the attempt
     ├── send_contributions     one per owner: gives its chunks to the link, in order
     ├── send_results           one per contributor and owner: gives our chunks as they get done
     ├── reduce_alone           if nobody else contributes
     └── whole.wait

    the hub's nursery
     └── send_results           to receivers that only listen: they may lag, nobody waits for them

The chunks themselves never pass through these tasks. Links ask the *sources* (``_Contributions``,
``_Results``) for the next frame when a lane is idle, and hand what comes in to ``place`` and
``deliver``, over real sockets all of that in the lanes' threads. ``deliver`` does the frame's
arithmetic at once, while its bytes are in the cache: the contribution that completes a chunk reduces
it, a result is checked and decoded, and either is hashed if it is next. Nothing here ever waits for
a frame or a lock for long, so a reduction cannot hold up a lane, nor two reductions each other.

``_lock`` guards what frames change: the books of what was placed, arrived and owed, and the spare
buffers. It is held for some microseconds, never during arithmetic, and no other lock is taken
under it. Arithmetic needs none: each chunk is worked on by one thread, once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np
import trio
from attrs import frozen

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
from .hub import LINK_WAIT_S, LinkHub
from .link import Link
from .ordered_hash import OrderedHash
from .outlet import Loop, Outgoing

# What an owner buffers of others' contributions while they are out of step. A contributor sends only
# so far ahead of the results that come back, so that fast ones do not fill the owner's memory while
# it waits for slow ones. With 8 contributors it is 9 MiB each: 1 Gbit/s over 75 ms.
CONTRIBUTIONS_BYTES_MAX = 64 * 2**20
AHEAD_MIN = 4  # chunks that a contributor may be ahead at least: enough to keep its lanes busy


@frozen
class ReduceResult:
    """What an attempt gives at every receiver.

    Attributes:
      values: shape ``(value_count,)``, float32, read-only: the weighted mean; bit-identical
        everywhere. May share the memory of ``encoded``.
      counters: shape ``(counter_count,)``, int64: the elementwise maximum.
      digest: BLAKE3 of ``encoded``.
      sent_bytes: payload bytes that this node sent until the result was whole.
      encoded: the result as it was on the wire, chunk by chunk, counters last, read-only; for a
        replay see ``arithmetic.decode_result``.
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
        or gives ``encoded_input``. Only read, and only during ``run``, unless they stay.
      counters: shape ``(counter_count,)``, int64; None as for ``values``, or when there are none.
      encoded_input: that of an earlier attempt at the same round; used as far as it fits.
      values_stay: ``values`` will not change until the round is over, whatever becomes of this
        attempt; with codec fp32 they are then sent from where they are, which saves a copy.
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
        values_stay: bool = False,
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
        self.encoded_input = self._own_input(values, counters, encoded_input, values_stay)

        self._result = hub.buffers.take(self._layout.down_bytes)
        if self._layout.codec_down.verbatim:
            self._values = np.frombuffer(self._result, np.float32, count=size.value_count)
        else:
            self._values = np.empty(size.value_count, np.float32)
        self._counters = np.empty(size.counter_count, np.int64)

        self._lock = threading.Lock()  # see the top of this file
        self._up_bytes_max = max((cut.up_bytes for cut in self._layout.cuts), default=0)
        self._spare_buffers: list[memoryview] = []
        self._lent_buffers: dict[tuple[int, str], memoryview] = {}  # by chunk and contributor
        self._placed: dict[tuple[FrameKind, int, str], memoryview] = {}
        self._arrived: dict[int, dict[str, memoryview]] = {}  # contributions, by owned chunk
        self._owed = self._expected_frames()  # frames still to come, by peer
        self._results_from: Counter[str] = Counter()  # results that came, by owner
        self._sent_bytes = 0

        self._reduced: list[int] = []  # owned chunks whose result is there, as they got done
        self._hash = OrderedHash(self._result, [cut.down for cut in self._layout.cuts])
        self._links: tuple[Link, ...] = ()  # that may have to be told of new results
        self._owner_links: dict[str, Link] = {}
        # The event loop's own.
        self._watches: dict[str, trio.CancelScope] = {}
        self._whole = trio.Event()
        self._scope = trio.CancelScope()
        self._error: PeerLostError | BadContributionError | None = None
        self._loop: Loop | None = None  # while it runs

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
          ``(1 - w) * up_bytes + (n - 1) * w * down_bytes`` sent. Memory beside the values that are
          given: one encoded input (none if they stay and are not changed by the codec), one encoded
          result, one decoded result (none if the codec is verbatim), and others' contributions of
          up to ``CONTRIBUTIONS_BYTES_MAX``, or ``AHEAD_MIN`` chunks of each if that is more.

        Cancellation: safe at any point; the input is untouched, and not used afterwards.
        """
        order = self._order
        contribution = (FrameKind.CONTRIBUTION, order.round, order.attempt)
        result = (FrameKind.RESULT, order.round, order.attempt)
        trailing: list[trio.CancelScope] = []
        whole = False
        self._loop = Loop()
        try:
            with (
                self._hub.register(contribution, self, threads=True),
                self._hub.register(result, self, threads=True),
            ):
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
        values = self._values.view()
        values.flags.writeable = False
        return ReduceResult(
            values=values,
            counters=self._counters,
            digest=self._hash.digest(),
            sent_bytes=self._sent_bytes,
            encoded=self._result.toreadonly(),
        )

    def _start(self, nursery: trio.Nursery) -> None:
        for peer in self._owed:
            self._watches[peer] = trio.CancelScope()
            nursery.start_soon(self._guard, partial(self._watch, peer))
        if self.encoded_input is not None:
            for owner in self._rotated(list(self._chunks)):
                nursery.start_soon(self._guard, partial(self._send_contributions, owner))
        if self._mine:
            for receiver in self._rotated(self._needed):
                nursery.start_soon(partial(self._send_results, receiver))
        if self._mine and set(self._contributors) <= {self._me}:
            nursery.start_soon(self._guard, self._reduce_alone)
        if self._layout.cuts:
            nursery.start_soon(self._whole.wait)

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

    def _soon(self, function: Callable[[], object]) -> None:
        """Call it on the event loop."""
        assert self._loop is not None
        self._loop.soon(function)

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

    async def _send_contributions(self, owner: str) -> None:
        link = await self._hub.link(owner, self._link_wait_s)
        self._owner_links[owner] = link
        await link.send_from(_Contributions(self, owner))

    async def _send_results(self, receiver: str) -> None:
        """Send our chunks' results as they get done.

        A receiver that is lost is skipped: if this node needs something of it, its watch says so;
        if not, whoever does will.
        """
        try:
            link = await self._hub.link(receiver, self._link_wait_s)
            self._links = (*self._links, link)
            await link.send_from(_Results(self))
        except PeerLostError:
            pass

    def _header(self, kind: FrameKind, index: int) -> FrameHeader:
        order, cut = self._order, self._layout.cuts[index]
        payload_bytes = cut.down_bytes if kind is FrameKind.RESULT else cut.up_bytes
        return FrameHeader(kind, order.round, order.attempt, index, order.fragment, payload_bytes)

    def _load_contribution(self, index: int) -> memoryview | None:
        try:
            payload = self._encoded_own(index)
        except BadContributionError as error:
            self._soon(partial(self._fail, error))
            return None
        self._count_sent(payload)
        return payload

    def _load_result(self, index: int) -> memoryview:
        payload = self._result[self._layout.cuts[index].down]
        self._count_sent(payload)
        return payload

    def _count_sent(self, payload: memoryview) -> None:
        with self._lock:
            self._sent_bytes += len(payload)

    # ------------------------------------------------------------ receiving

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """See ``routing.Sink``. What is wrong lands in a buffer that nobody reads."""
        with self._lock:
            if self._objection(peer, header) is not None:
                return memoryview(bytearray(header.payload_bytes))
            if header.kind is FrameKind.RESULT:
                view = self._result[self._layout.cuts[header.index].down]
            else:
                view = self._lend_buffer(header.index, peer)[: header.payload_bytes]
            self._placed[header.kind, header.index, peer] = view
            return view

    def deliver(self, peer: str, header: FrameHeader, payload: memoryview) -> None:
        """See ``routing.Sink``. The header is authentic now, so its sender can be named."""
        index = header.index
        with self._lock:
            wanted = self._placed.get((header.kind, index, peer)) is payload
            reason = None if wanted else self._objection(peer, header) or "sent a chunk twice"
        if reason is not None:
            if peer not in self._owed:
                raise RemoteProtocolError(f"peer {peer[:8]} {reason}")
            self._soon(partial(self._fail, BadContributionError(peer, reason)))
            return
        try:
            if header.kind is FrameKind.RESULT:
                self._decode(index)
                self._result_came(peer)
            elif self._contribution_came(peer, index, payload):
                self._reduce(index)
        except BadContributionError as error:
            self._soon(partial(self._fail, error))
            return
        self._pay(peer)

    def _contribution_came(self, peer: str, index: int, payload: memoryview) -> bool:
        """Whether it was the last one that its chunk lacked."""
        with self._lock:
            arrived = self._arrived.setdefault(index, {})
            arrived[peer] = payload
            return len(arrived) == len(self._contributors) - (self._me in self._contributors)

    def _result_came(self, owner: str) -> None:
        with self._lock:
            self._results_from[owner] += 1
        if (link := self._owner_links.get(owner)) is not None:
            link.wake()  # we may send it more contributions now

    def _objection(self, peer: str, header: FrameHeader) -> str | None:
        """What is wrong with a frame, as the rest of a sentence about its sender."""
        if header.transfer != self._order.fragment:
            return f"sent a chunk of fragment {header.transfer}"
        if header.index >= len(self._layout.cuts):
            return f"sent chunk {header.index}, which does not exist"
        cut = self._layout.cuts[header.index]
        if header.kind is FrameKind.RESULT:
            wanted_bytes = cut.down_bytes
            if cut.owner != peer:
                return f"sent a result for chunk {header.index}, which it does not own"
        else:
            wanted_bytes = cut.up_bytes
            if cut.owner != self._me or peer not in self._contributors:
                return f"sent a contribution to chunk {header.index} that nobody asked it for"
        if header.payload_bytes != wanted_bytes:
            return f"sent {header.payload_bytes} bytes for a chunk of {wanted_bytes}"
        if (header.kind, header.index, peer) in self._placed:
            return f"sent chunk {header.index} twice"
        return None

    def _pay(self, peer: str) -> None:
        with self._lock:
            self._owed[peer] -= 1
            paid = self._owed[peer] == 0
        if paid:
            self._soon(self._watches[peer].cancel)

    def _lend_buffer(self, index: int, peer: str) -> memoryview:
        """A buffer for a contribution; they are used again chunk after chunk."""
        if not self._spare_buffers:
            self._spare_buffers.append(self._hub.chunk_buffers.take(self._up_bytes_max))
        buffer = self._lent_buffers[index, peer] = self._spare_buffers.pop()
        return buffer

    # ------------------------------------------------------------ arithmetic

    async def _reduce_alone(self) -> None:
        for index in self._mine:
            await self._network.run_sync(partial(self._reduce, index))

    def _encoded_own(self, index: int) -> memoryview:
        assert self.encoded_input is not None
        try:
            self.encoded_input.encode(index)
        except ValueError as error:
            raise BadContributionError(self._me, str(error)) from error
        return self.encoded_input.chunk(index)

    def _reduce(self, index: int) -> None:
        """One chunk that we own and all of whose contributions are here; perhaps in a thread."""
        cut = self._layout.cuts[index]
        with self._lock:
            arrived = self._arrived.pop(index, {})
        others = list(arrived)
        if self.encoded_input is not None:
            arrived[self._me] = self._encoded_own(index)
        contributions = [arrived[peer] for peer in self._contributors]
        encoded = self._result[cut.down]
        if cut.is_counters:
            reduce_counters(contributions, self._counters)
            np.frombuffer(encoded, "<i8")[:] = self._counters
        else:
            reduce_values(
                self._layout,
                self._order.contributors,
                self._factors,
                contributions,
                self._values[cut.values],
                encoded,
            )
        with self._lock:
            for peer in others:
                self._spare_buffers.append(self._lent_buffers.pop((index, peer)))
        self._reduced.append(index)
        for link in self._links:
            link.wake()
        self._chunk_done(index)

    def _decode(self, index: int) -> None:
        """One chunk that somebody else owns; perhaps in a thread."""
        cut = self._layout.cuts[index]
        encoded, values = self._result[cut.down], self._values[cut.values]
        if cut.is_counters:
            self._counters[:] = np.frombuffer(encoded, "<i8")
        elif not self._layout.codec_down.verbatim:
            decode_checked(self._layout.codec_down, encoded, values, cut.owner)
        elif not np.isfinite(values).all():
            raise BadContributionError(cut.owner, "a value that is not finite")
        self._chunk_done(index)

    def _chunk_done(self, index: int) -> None:
        if self._hash.piece_done(index):
            self._soon(self._whole.set)

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
        values_stay: bool,
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
        return EncodedInput(
            plan, self._size, values, counters, values_stay=values_stay, pool=self._hub.buffers
        )

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


class _Contributions:
    """Our contribution to an owner's chunks, in order; see ``outlet.FrameSource``."""

    def __init__(self, reduction: Reduction, owner: str) -> None:
        self._reduction = reduction
        self._owner = owner
        self._chunks = reduction._chunks[owner] if owner != reduction._me else []
        others = len(reduction._contributors) - (owner in reduction._contributors)
        chunk_bytes = max(1, reduction._up_bytes_max)
        share = CONTRIBUTIONS_BYTES_MAX // (max(1, others) * chunk_bytes)
        self._ahead_max = max(AHEAD_MIN, share)
        self._position = 0

    def next_frame(self) -> Outgoing | None:
        reduction = self._reduction
        ahead = self._position - reduction._results_from[self._owner]
        if self.exhausted() or ahead >= self._ahead_max:
            return None
        index = self._chunks[self._position]
        self._position += 1
        header = reduction._header(FrameKind.CONTRIBUTION, index)
        return Outgoing(header, partial(reduction._load_contribution, index))

    def exhausted(self) -> bool:
        return self._position == len(self._chunks)


class _Results:
    """Our chunks' results for one receiver, as they get done; see ``outlet.FrameSource``."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction
        self._position = 0

    def next_frame(self) -> Outgoing | None:
        reduction = self._reduction
        if self._position == len(reduction._reduced):
            return None
        index = reduction._reduced[self._position]
        self._position += 1
        header = reduction._header(FrameKind.RESULT, index)
        return Outgoing(header, partial(reduction._load_result, index))

    def exhausted(self) -> bool:
        return self._position == len(self._reduction._mine)

"""The spot check of a result: a member that is not a chunk's owner adds the chunk up again.

    contributors --> checker    their contributions to the chunk, once more
    owner --> checker           a digest of each contribution that it added
    checker --> master          whether the sum is the result that all hold

The master draws the chunks and their checkers when all have reported one result. Contributors keep
their inputs until the commit, as for a repair. A checker adds up as an owner does, so it gets the
same bytes. If it does not, the owner's digests show whether one contributor has sent the two
different things. No word of this is proof: see ``membership.master.rounds.audits``.

All frames are BLOCK frames of the order's transfer. Contributions have their chunk's index, digests
the index of the chunk plus the number of chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import trio
from attrs import define, field
from blake3 import blake3

from ..protocol.errors import BadContributionError, PeerLostError, RemoteProtocolError
from ..protocol.messages import Audited, AuditOrder, ChunkFinding
from ..protocol.network.interface import Network
from ..protocol.network.lane import Buffer, FrameHeader, FrameKind
from ..protocol.wakeups import Pulse
from .codecs.codecs import expand
from .combine import combined
from .links.rates.send_priority import SendRank
from .links.send_queue import Frame, Load
from .reduction_context import ReductionContext
from .result import unpack_bits

DIGEST_BYTES = 32


def digests_of(context: ReductionContext, index: int, pieces: Mapping[str, memoryview]) -> bytes:
    """Return BLAKE3 of each contribution to a chunk, in the order's order. Heavy.

    The digest is that of the encoding, so it does not depend on whether a frame was compressed.
    """
    room = context.layout.cuts[index].up_bytes

    def digest(data: Buffer) -> bytes:
        if context.layout.zstd_up and len(data) < room:
            with suppress(ValueError):  # a checker may have got anything
                data = expand(data, room)
        return blake3(data).digest()

    return b"".join(digest(pieces[peer]) for peer in context.contributors if peer in pieces)


@define(eq=False)
class SpotCheck:
    """One node's part in the checks of a reduction's result.

    Args:
      added: by chunk that this node made: ``digests_of`` what it added.
    """

    _context: ReductionContext
    _added: Mapping[int, bytes]
    _network: Network

    async def take_part(
        self, order: AuditOrder, patience_s: float, tell: Callable[[Audited], object]
    ) -> None:
        """Send the checkers what they need of this node, and check its own part of the order.

        Args:
          patience_s: how long to wait for a link, or for the next piece.
          tell: gets the findings, if this node is a checker.
        """
        async with trio.open_nursery() as nursery:
            for part in order.checks:
                if part.checker == self._context.me:
                    nursery.start_soon(self._check, order, part.chunks, patience_s, tell)
                else:
                    nursery.start_soon(self._send, order, part.checker, part.chunks, patience_s)

    # ------------------------------------------------------------ sending

    async def _send(
        self, order: AuditOrder, checker: str, chunks: Sequence[int], patience_s: float
    ) -> None:
        chunk_count = len(self._context.layout.cuts)
        source = _Pieces(order.transfer)
        for chunk in chunks:
            if self._context.encoded_input is not None:
                source.payloads.append((chunk, partial(self.contribution, chunk)))
            if chunk in self._added:
                source.payloads.append((chunk_count + chunk, partial(self.digests, chunk)))
        try:
            link = await self._context.hub.link(checker, patience_s)
            await link.send_from(source, SendRank.ROUND, age=2 * order.round)
        except PeerLostError:
            pass  # the checker reports what it did not get

    def contribution(self, chunk: int) -> Buffer | None:
        """Return what a checker gets as this node's contribution; None if it cannot be encoded."""
        try:
            return self._context.own_chunk(chunk)
        except BadContributionError:  # the round is over, and the values have changed
            return None

    def digests(self, chunk: int) -> Buffer:
        """Return what this node, a chunk's owner, says that it added."""
        return self._added[chunk]

    # ------------------------------------------------------------ checking

    async def _check(
        self,
        order: AuditOrder,
        chunks: Sequence[int],
        patience_s: float,
        tell: Callable[[Audited], object],
    ) -> None:
        chunk_count = len(self._context.layout.cuts)
        inputs = [_Input.of(self._context, chunk) for chunk in chunks if chunk < chunk_count]
        arrivals = _Arrivals(inputs, chunk_count)
        findings: list[ChunkFinding] = []
        with self._context.hub.register((FrameKind.BLOCK, order.transfer), arrivals):
            while arrivals.inputs:
                if not (whole := arrivals.take_whole()) and not await arrivals.more(patience_s):
                    break
                for each in whole:
                    found = await self._network.run_sync(partial(self.examine, each))
                    findings += [] if found is None else [found]
        left = arrivals.inputs.values()
        findings += [ChunkFinding(each.chunk, False, each.missing or "") for each in left]
        tell(Audited(order.round, order.attempt, order.transfer, tuple(findings)))

    def examine(self, given: _Input) -> ChunkFinding | None:
        """Compare a chunk with what its contributions make; None if they are equal. Heavy."""
        context, chunk = self._context, given.chunk
        pieces = {peer: memoryview(piece) for peer, piece in given.pieces.items()}
        if context.me in given.present:
            try:
                pieces[context.me] = context.own_chunk(chunk)
            except BadContributionError:  # the round is over, and the values have changed
                return ChunkFinding(chunk, False)
        try:
            contributors = context.order.contributors
            result = combined(contributors, pieces, context.layout, chunk, context.radius)
        except (BadContributionError, RemoteProtocolError, ValueError):
            result = b""  # what a contributor sent cannot be added
        if result == context.result.chunk(chunk):
            return None
        mine, owners = digests_of(context, chunk, pieces), given.digests
        unlike = [
            peer
            for at, peer in enumerate(given.present)
            if mine[(where := slice(at * DIGEST_BYTES, (at + 1) * DIGEST_BYTES))] != owners[where]
        ]
        return ChunkFinding(chunk, True, unlike[0] if len(unlike) == 1 else "")


@define(eq=False)
class _Pieces:
    """What a node sends one checker; a ``FrameSource`` of ``collectives.links.send_queue``."""

    transfer: int
    payloads: deque[tuple[int, Callable[[], Buffer | None]]] = field(factory=deque)

    def next_frame(self) -> Load | None:
        return partial(self._frame, *self.payloads.popleft()) if self.payloads else None

    def left(self) -> int:
        return len(self.payloads)

    def _frame(self, index: int, payload_of: Callable[[], Buffer | None]) -> Frame | None:
        payload = payload_of()
        if payload is None:
            return None
        header = FrameHeader(FrameKind.BLOCK, 0, 0, index, self.transfer, len(payload))
        return header, payload


@define(eq=False)
class _Input:
    """What a checker needs to add up one chunk, as it arrives.

    Attributes:
      owner: the member that made the chunk.
      present: contributors in the chunk, in the order's order.
      wanted: those whose contributions have to come.
      piece_bytes_max: limit of a contribution's length.
      pieces: contributions that came, by peer.
      digests: the owner's, once they came; empty until then.
    """

    chunk: int
    owner: str
    present: list[str]
    wanted: list[str]
    piece_bytes_max: int
    pieces: dict[str, Buffer] = field(factory=dict)
    digests: Buffer = b""

    @classmethod
    def of(cls, context: ReductionContext, chunk: int) -> _Input:
        contributors = context.contributors
        bits = unpack_bits(context.result.present(chunk), len(contributors))
        present = [peer for peer, here in zip(contributors, bits, strict=True) if here]
        return cls(
            chunk=chunk,
            owner=context.tracker.makers()[chunk],
            present=present,
            wanted=[peer for peer in present if peer != context.me],
            piece_bytes_max=context.layout.cuts[chunk].up_bytes,
        )

    @property
    def missing(self) -> str | None:
        """The first member of which something has to come; None if all is here."""
        lacking = (peer for peer in self.wanted if peer not in self.pieces)
        return next(lacking, None if self.digests else self.owner)

    def wants(self, peer: str, header: FrameHeader) -> bool:
        """Return whether a frame brings something that is missing, of a possible length."""
        if header.index == self.chunk:
            is_missing = peer in self.wanted and peer not in self.pieces
            return is_missing and header.payload_bytes <= self.piece_bytes_max
        is_missing = peer == self.owner and not self.digests
        return is_missing and header.payload_bytes == DIGEST_BYTES * len(self.present)

    def take(self, peer: str, header: FrameHeader, payload: memoryview) -> None:
        if header.index == self.chunk:
            self.pieces.setdefault(peer, payload)
        else:
            self.digests = self.digests or payload


class _Arrivals:
    """The sink of a checker's frames.

    Attributes:
      inputs: of the chunks that lack something, by chunk.
    """

    def __init__(self, inputs: Sequence[_Input], chunk_count: int) -> None:
        self.inputs = {each.chunk: each for each in inputs}
        self._chunk_count = chunk_count
        self._came = Pulse()

    def take_whole(self) -> list[_Input]:
        """Take out the inputs that lack nothing any more."""
        whole = [each for each in self.inputs.values() if each.missing is None]
        for each in whole:
            del self.inputs[each.chunk]
        return whole

    async def more(self, patience_s: float) -> bool:
        """Wait for the next frame; False if none comes in time."""
        with trio.move_on_after(patience_s):
            await self._came.wait()
            return True
        return False

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """See ``frame_routing.Sink``."""
        given = self.inputs.get(header.index % self._chunk_count)
        if given is None or not given.wants(peer, header):
            return None
        return memoryview(bytearray(header.payload_bytes))

    def deliver(self, peer: str, header: FrameHeader, payload: memoryview) -> None:
        """See ``frame_routing.Sink``."""
        if (given := self.inputs.get(header.index % self._chunk_count)) is not None:
            given.take(peer, header, payload)
            self._came.notify_all()

    def abandon(self, _peer: str, _header: FrameHeader, _view: memoryview) -> None:
        """Do nothing: the frame comes again, or is missing."""

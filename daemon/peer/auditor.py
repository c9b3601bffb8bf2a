"""A peer looks whether owners added up what they were given, and shows what it added itself.

    M →  Audit(round, chunks)                    to who holds the result, before it is committed
         P → P  EvidenceRequest(chunk)           to the chunk's owner
         P → P  BLOCK frames                     contributions with their seals, then the owner's seal
    → M  Audited(wrong, unseen)
    M →  ProofWanted(chunk, offset)              of who calls a chunk wrong, piece by piece
    → M  ProofPiece

What follows from what is shown is said in ``collectives.evidence``, what follows from that for the
run in ``membership.audits``.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Sequence
from functools import partial

import trio
from attrs import define, field

from ...collectives.audit_log import AuditLog
from ...collectives.evidence import ChunkEvidence, UnsignedError, examine
from ...collectives.links.send_priority import SendRank
from ...collectives.links.send_queue import Load
from ...collectives.reduction import Reduction
from ...protocol.errors import PeerLostError
from ...protocol.messages import (
    PROOF_PIECE_BYTES_MAX,
    Audited,
    AuditOrder,
    EvidenceRefused,
    EvidenceRequest,
    ProofPiece,
    ProofWanted,
)
from ...protocol.network.lane import Buffer, FrameHeader, FrameKind
from ...protocol.text import plain
from .peer_parts import PeerParts
from .reducer import Reducer

log = logging.getLogger("holdfast.peer")


class _Pieces:
    """What an owner shows, as frames; see ``collectives.outlet.FrameSource``."""

    def __init__(self, pieces: Sequence[Buffer], transfer: int) -> None:
        self._left = deque(enumerate(pieces))
        self._transfer = transfer

    def next_frame(self) -> Load | None:
        if not self._left:
            return None
        index, piece = self._left.popleft()
        header = FrameHeader(FrameKind.BLOCK, 0, 0, index, self._transfer, len(piece))
        return lambda: (header, piece)

    def exhausted(self) -> bool:
        return not self._left


@define(eq=False)
class _Asked:
    """What came of a request; the hub's sink for its frames.

    Attributes:
      news: a piece came, or a refusal.
    """

    owner: str
    count: int
    piece_bytes_max: int
    pieces: dict[int, memoryview] = field(factory=dict)
    refused: str = ""
    news: trio.Event = field(factory=trio.Event)

    @property
    def whole(self) -> bool:
        return len(self.pieces) == self.count

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        wanted = peer == self.owner and header.index < self.count
        if not wanted or header.index in self.pieces or header.payload_bytes > self.piece_bytes_max:
            return None
        return memoryview(bytearray(header.payload_bytes))

    def deliver(self, _peer: str, header: FrameHeader, payload: memoryview) -> None:
        self.pieces.setdefault(header.index, payload)
        self.news.set()

    def abandon(self, _peer: str, _header: FrameHeader, _view: memoryview) -> None:
        """It comes again, or counts as missing."""


@define(eq=False)
class _Findings:
    """What is said of the chunks of one order."""

    scope: trio.CancelScope = field(factory=trio.CancelScope)
    passed: set[int] = field(factory=set)
    wrong: list[int] = field(factory=list)
    reason: str = ""


class Auditor:
    """Both sides, for one peer. Touched by its event loop only."""

    def __init__(self, parts: PeerParts, reducer: Reducer) -> None:
        self._parts = parts
        self._reducer = reducer
        self._asked: dict[int, _Asked] = {}  # by transfer
        self._showing: set[str] = set()  # to whom: one chunk at a time

    # ------------------------------------------------------------ looking

    async def look(self, order: AuditOrder) -> None:
        """Have the owners of some chunks show what they added, and tell the master."""
        reduction = self._reducer.of_round(order.round)
        if reduction is None or reduction.audit_log is None or reduction.attempt != order.attempt:
            return  # another order is on its way
        findings, by_owner = _Findings(), dict[str, list[ChunkEvidence]]()
        for chunk in order.chunks:
            evidence = reduction.audit_log.evidence(chunk)
            if evidence is not None:
                by_owner.setdefault(evidence.owner, []).append(evidence)
        with findings.scope:
            async with trio.open_nursery() as nursery:
                for evidence_list in by_owner.values():
                    nursery.start_soon(self._look_at, reduction.audit_log, evidence_list, findings)
        seen, where = findings.passed.union(findings.wrong), (order.round, order.attempt)
        unseen = tuple(chunk for chunk in order.chunks if chunk not in seen)
        reason = plain(findings.reason)
        self._parts.tell_master(Audited(*where, tuple(findings.wrong), unseen, reason))

    async def _look_at(
        self, kept: AuditLog, evidence_list: list[ChunkEvidence], findings: _Findings
    ) -> None:
        """All that one owner has to show, one chunk after the other."""
        for evidence in evidence_list:
            try:
                shown = await self._fetch(kept, evidence)
                work = partial(examine, evidence, kept.notary, shown)
                fault = await self._parts.network.run_sync(work)
            except (UnsignedError, PeerLostError) as error:
                findings.reason = f"chunk {evidence.index} of {evidence.owner[:8]}: {error}"
                continue
            fault = self._verdict(evidence, fault)
            if not fault:
                findings.passed.add(evidence.index)
            else:
                log.warning("chunk %d of %s: %s", evidence.index, evidence.owner[:8], fault)
                kept.prove(evidence.index, shown)
                findings.wrong.append(evidence.index)
                findings.reason = fault
                # One proven lie is enough; the round is run again, and all else in it is void.
                findings.scope.cancel()

    def _verdict(self, _exhibit: ChunkEvidence, fault: str) -> str:
        """What we say is wrong with a chunk; a simulated liar says something else."""
        return fault

    async def _fetch(self, kept: AuditLog, evidence: ChunkEvidence) -> list[memoryview]:
        """What the owner shows.

        Raises:
          PeerLostError: it shows nothing, or not all of it.
        """
        patience_s = self._parts.spec.link_deadline_s
        asked = _Asked(
            evidence.owner, len(evidence.givers) + 1, kept.piece_bytes_max(evidence.index)
        )
        transfer = secrets.randbits(32)
        self._asked[transfer] = asked
        try:
            link = await self._parts.hub.link(evidence.owner, patience_s)
            with self._parts.hub.register((FrameKind.BLOCK, transfer), asked):
                await link.send(EvidenceRequest(transfer, evidence.order.round, evidence.index))
                while not (asked.whole or asked.refused):
                    asked.news = trio.Event()
                    with trio.move_on_after(patience_s) as waiting:
                        await asked.news.wait()
                    if waiting.cancelled_caught:
                        asked.refused = f"nothing came for {patience_s:g} s"
        finally:
            del self._asked[transfer]
        if asked.refused:
            raise PeerLostError(evidence.owner, asked.refused)
        return [asked.pieces[index] for index in range(asked.count)]

    def prove(self, wanted: ProofWanted) -> None:
        """The master wants a piece of what proves our accusation."""
        reduction = self._reducer.of_round(wanted.round)
        if reduction is None or reduction.audit_log is None or reduction.attempt != wanted.attempt:
            return
        proof = reduction.audit_log.proofs.get(wanted.chunk, b"")
        piece = proof[wanted.offset : wanted.offset + PROOF_PIECE_BYTES_MAX]
        where = (wanted.round, wanted.attempt, wanted.chunk, wanted.offset)
        self._parts.tell_master(ProofPiece(*where, len(proof), piece))

    # ------------------------------------------------------------ showing

    def receive(self, peer: str, message: EvidenceRequest | EvidenceRefused) -> None:
        """A member asks what we added, or will not show us."""
        if isinstance(message, EvidenceRequest):
            self._parts.start(self._show, peer, message)
            return
        asked = self._asked.get(message.transfer)
        if asked is not None and asked.owner == peer:
            asked.refused = message.reason or "it shows nothing"
            asked.news.set()

    async def _show(self, peer: str, request: EvidenceRequest) -> None:
        link = self._parts.hub.links.get(peer)
        if link is None:
            return
        free = peer not in self._showing
        self._showing.add(peer)
        try:
            reduction = self._reducer.of_round(request.round)
            pieces = await self._pieces(reduction, peer, request.chunk) if free else None
            if pieces is None:
                await link.send(EvidenceRefused(request.transfer, "it has nothing to show of that"))
            else:
                await link.send_from(
                    _Pieces(pieces, request.transfer), SendRank.ROUND, age=request.round
                )
        except PeerLostError:
            pass
        finally:
            if free:
                self._showing.discard(peer)

    async def _pieces(
        self, reduction: Reduction | None, peer: str, chunk: int
    ) -> list[Buffer] | None:
        if reduction is None or reduction.audit_log is None:
            return None
        if not reduction.audit_log.may_see(peer, self._parts.spec.reduce.audit):
            return None
        return await self._parts.network.run_sync(partial(reduction.audit_log.show, chunk))

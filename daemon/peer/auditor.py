"""Audits of chunk sums: a peer checks the evidence of chunk owners, and serves its own evidence.

    M →  AuditOrder(round, chunks)               to a peer that holds the result, before the commit
         P → P  EvidenceRequest(chunk)           to the chunk's owner
         P → P  BLOCK frames                     contributions with their seals, then the owner's seal
    → M  Audited(wrong, unseen)
    M →  ProofWanted(chunk, offset)              to a peer that reports a wrong chunk, piece by piece
    → M  ProofPiece

``collectives.evidence`` says what evidence proves; ``membership.master.rounds.audits`` says what
follows for the run.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import trio
from attrs import define, field

from ...collectives.audit_log import AuditLog
from ...collectives.evidence import ChunkEvidence, UnsignedError, examine
from ...collectives.links.hub import LinkHub
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
    Message,
    ProofPiece,
    ProofWanted,
)
from ...protocol.network.interface import Network
from ...protocol.network.lane import Buffer, FrameHeader, FrameKind
from ...protocol.text import plain
from .peer_config import CurrentSpec
from .reducer import Reducer

log = logging.getLogger("holdfast.peer")


class _EvidenceSource:
    """A chunk's evidence as frames; a ``FrameSource`` of ``collectives.links.send_queue``."""

    def __init__(self, pieces: Sequence[Buffer], transfer: int) -> None:
        self._left = deque(enumerate(pieces))
        self._transfer = transfer

    def next_frame(self) -> Load | None:
        if not self._left:
            return None
        index, piece = self._left.popleft()
        header = FrameHeader(FrameKind.BLOCK, 0, 0, index, self._transfer, len(piece))
        return lambda: (header, piece)

    def left(self) -> int:
        return len(self._left)


@define(eq=False)
class _EvidenceFetch:
    """One request for evidence, and the hub's sink for its frames.

    Attributes:
      count: pieces that the owner must send.
      refused: the reason why nothing more is expected; empty while pieces may come.
      changed: set when a piece or a refusal arrives.
    """

    owner: str
    count: int
    piece_bytes_max: int
    pieces: dict[int, memoryview] = field(factory=dict)
    refused: str = ""
    changed: trio.Event = field(factory=trio.Event)

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
        self.changed.set()

    def abandon(self, _peer: str, _header: FrameHeader, _view: memoryview) -> None:
        """Do nothing: the frame comes again, or counts as missing."""


@define(eq=False)
class _Findings:
    """Results for the chunks of one order."""

    scope: trio.CancelScope = field(factory=trio.CancelScope)
    passed: set[int] = field(factory=set)
    wrong: list[int] = field(factory=list)
    reason: str = ""


@define(eq=False, slots=False)
class Auditor:
    """Both sides of audits for one peer. Used from its event loop only.

    Args:
      start: runs a task until the service ends.
      tell: sends a message to the master.
    """

    _network: Network
    _hub: LinkHub
    _spec: CurrentSpec
    _reducer: Reducer
    _start: Callable[..., None] = field(kw_only=True)
    _tell: Callable[[Message], None] = field(kw_only=True)
    _fetches: dict[int, _EvidenceFetch] = field(factory=dict, init=False)  # by transfer
    # Peers that are being sent evidence: one chunk at a time.
    _serving: set[str] = field(factory=set, init=False)

    # ------------------------------------------------------------ checking

    async def check(self, order: AuditOrder) -> None:
        """Check the evidence of some chunks with their owners and report to the master."""
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
                    nursery.start_soon(
                        self._check_owner, reduction.audit_log, evidence_list, findings
                    )
        seen, where = findings.passed.union(findings.wrong), (order.round, order.attempt)
        unseen = tuple(chunk for chunk in order.chunks if chunk not in seen)
        reason = plain(findings.reason)
        self._tell(Audited(*where, tuple(findings.wrong), unseen, reason))

    async def _check_owner(
        self, audit_log: AuditLog, evidence_list: list[ChunkEvidence], findings: _Findings
    ) -> None:
        """Check the chunks of one owner, one after the other."""
        for evidence in evidence_list:
            try:
                shown = await self._fetch(audit_log, evidence)
                fault = await self._examine(audit_log, evidence, shown)
            except (UnsignedError, PeerLostError) as error:
                findings.reason = f"chunk {evidence.index} of {evidence.owner[:8]}: {error}"
                continue
            if not fault:
                findings.passed.add(evidence.index)
            else:
                log.warning("chunk %d of %s: %s", evidence.index, evidence.owner[:8], fault)
                audit_log.prove(evidence.index, shown)
                findings.wrong.append(evidence.index)
                findings.reason = fault
                # One proof is enough: the round is run again, and its other chunks are void.
                findings.scope.cancel()

    async def _examine(
        self, audit_log: AuditLog, evidence: ChunkEvidence, shown: list[memoryview]
    ) -> str:
        """Return what is wrong with a chunk; an empty string if it is correct."""
        return await self._network.run_sync(partial(examine, evidence, audit_log.notary, shown))

    async def _fetch(self, audit_log: AuditLog, evidence: ChunkEvidence) -> list[memoryview]:
        """Fetch the owner's evidence for a chunk.

        Raises:
          PeerLostError: the owner sends nothing, or not all of it.
        """
        patience_s = self._spec.value.link_deadline_s
        fetch = _EvidenceFetch(
            evidence.owner, len(evidence.givers) + 1, audit_log.piece_bytes_max(evidence.index)
        )
        transfer = secrets.randbits(32)
        self._fetches[transfer] = fetch
        try:
            link = await self._hub.link(evidence.owner, patience_s)
            with self._hub.register((FrameKind.BLOCK, transfer), fetch):
                await link.send(EvidenceRequest(transfer, evidence.order.round, evidence.index))
                while not (fetch.whole or fetch.refused):
                    fetch.changed = trio.Event()
                    with trio.move_on_after(patience_s) as waiting:
                        await fetch.changed.wait()
                    if waiting.cancelled_caught:
                        fetch.refused = f"nothing came for {patience_s:g} s"
        finally:
            del self._fetches[transfer]
        if fetch.refused:
            raise PeerLostError(evidence.owner, fetch.refused)
        return [fetch.pieces[index] for index in range(fetch.count)]

    def prove(self, wanted: ProofWanted) -> None:
        """Send the master a piece of the proof for a chunk that this peer reported."""
        reduction = self._reducer.of_round(wanted.round)
        if reduction is None or reduction.audit_log is None or reduction.attempt != wanted.attempt:
            return
        proof = reduction.audit_log.proofs.get(wanted.chunk, b"")
        piece = proof[wanted.offset : wanted.offset + PROOF_PIECE_BYTES_MAX]
        where = (wanted.round, wanted.attempt, wanted.chunk, wanted.offset)
        self._tell(ProofPiece(*where, len(proof), piece))

    # ------------------------------------------------------------ serving

    def receive(self, peer: str, message: EvidenceRequest | EvidenceRefused) -> None:
        """Take a member's request for evidence, or its refusal of a request."""
        if isinstance(message, EvidenceRequest):
            self._start(self._serve, peer, message)
            return
        fetch = self._fetches.get(message.transfer)
        if fetch is not None and fetch.owner == peer:
            fetch.refused = message.reason or "it shows no evidence"
            fetch.changed.set()

    async def _serve(self, peer: str, request: EvidenceRequest) -> None:
        link = self._hub.links.get(peer)
        if link is None:
            return
        free = peer not in self._serving
        self._serving.add(peer)
        try:
            reduction = self._reducer.of_round(request.round)
            pieces = await self._pieces(reduction, peer, request.chunk) if free else None
            if pieces is None:
                refusal = "it has no evidence for this chunk"
                await link.send(EvidenceRefused(request.transfer, refusal))
            else:
                source = _EvidenceSource(pieces, request.transfer)
                await link.send_from(source, SendRank.ROUND, age=request.round)
        except PeerLostError:
            pass
        finally:
            if free:
                self._serving.discard(peer)

    async def _pieces(
        self, reduction: Reduction | None, peer: str, chunk: int
    ) -> list[Buffer] | None:
        if reduction is None or reduction.audit_log is None:
            return None
        if not reduction.audit_log.may_see(peer, self._spec.value.reduce.audit):
            return None
        return await self._network.run_sync(partial(reduction.audit_log.show, chunk))

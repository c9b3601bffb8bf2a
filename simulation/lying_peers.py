"""Chunk owners that return wrong sums, and auditors that accuse honest peers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from attrs import define, evolve, field

from ..collectives.audit_log import AuditLog
from ..collectives.evidence import ChunkEvidence, sealed, statement_of_sum
from ..collectives.reduction import Reduction
from ..daemon.peer.auditor import Auditor
from ..daemon.peer.peer_service import PeerFactories, PeerService
from ..protocol.network.lane import Buffer


class Corrupts(Protocol):
    """An object that makes a daemon lie."""

    def corrupt(self, service: PeerService, factories: PeerFactories) -> PeerFactories:
        """Return factories for a service that is about to be made, with parts that lie."""
        ...


class Lie(enum.Enum):
    """A liar's behaviour. All but the accuser use one contribution in place of all others."""

    OWNER = "owner"  # and sends auditors the true contributions
    FORGER = "forger"  # and sends auditors forged contributions that fit its result
    SILENT = "silent"  # and sends auditors no evidence
    ACCUSER = "accuser"  # sums its chunks correctly, and reports those of other owners as wrong


@define
class Liar:
    """A lying peer.

    Attributes:
      chunks: number of chunks per round that it falsifies, if it owns as many.
      lied_in: rounds in which it lied or accused.
    """

    lie: Lie
    chunks: int = 1
    lied_in: set[int] = field(factory=set)

    def corrupt(self, _service: PeerService, factories: PeerFactories) -> PeerFactories:
        """Return factories with the part that tells this lie."""
        if self.lie is Lie.ACCUSER:
            return evolve(factories, auditor=partial(_LyingAuditor, self))
        make = factories.reduction

        def make_lying(*args: Any, **options: Any) -> Reduction:
            reduction = make(*args, **options)
            _LyingSums(self, reduction)
            return reduction

        return evolve(factories, reduction=make_lying)


class _LyingSums:
    """Makes wrong results of some chunks, and shows something else when it is asked.

    Args:
      reduction: an honest one that has not begun; its adder and its audit log are wrapped.
    """

    def __init__(self, liar: Liar, reduction: Reduction) -> None:
        self._liar = liar
        self._context = context = reduction._context
        own = [at for at, cut in enumerate(context.layout.cuts) if cut.owner == context.me]
        self._lied = dict.fromkeys(own[: liar.chunks], b"")  # what was counted as everybody's
        self._honest_result = reduction._adder.make_result
        reduction._adder.make_result = self._make_result  # type: ignore[method-assign]
        if (log := reduction.audit_log) is not None and liar.lie is not Lie.OWNER:
            log.show = partial(self._show, log.show)  # type: ignore[method-assign]

    def _make_result(self, index: int, arrived: Mapping[str, memoryview]) -> None:
        if index in self._lied and len(arrived) > 1:
            favourite = next(peer for peer in self._context.contributors if peer in arrived)
            self._lied[index] = bytes(arrived[favourite])
            arrived = dict.fromkeys(arrived, arrived[favourite])
            self._liar.lied_in.add(self._context.order.round)
        self._honest_result(index, arrived)

    def _show(
        self, honestly: Callable[[int], list[Buffer] | None], index: int
    ) -> list[Buffer] | None:
        shown = honestly(index)
        lied = self._lied.get(index, b"")
        if not lied or shown is None:
            return shown
        if self._liar.lie is Lie.SILENT:
            return None
        notary, order = self._context.notary, self._context.order
        assert notary is not None
        forged: list[Buffer] = [sealed(notary, order, index, lied) for _piece in shown[:-1]]
        return [*forged, notary.seal(statement_of_sum(order, index, forged))]


class _LyingAuditor(Auditor):
    def __init__(self, liar: Liar, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._liar = liar

    async def _examine(
        self, audit_log: AuditLog, evidence: ChunkEvidence, shown: list[memoryview]
    ) -> str:
        await super()._examine(audit_log, evidence, shown)
        self._liar.lied_in.add(evidence.order.round)
        return "it is wrong because I say so"

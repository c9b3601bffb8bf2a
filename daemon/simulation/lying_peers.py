"""Peers that lie about what they added, and peers that lie about others."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from attrs import define, evolve, field

from ...collectives.audit_log import AuditLog
from ...collectives.evidence import ChunkEvidence, sealed, statement_of_sum
from ...collectives.reduction import Reduction
from ...protocol.network.lane import Buffer
from ..peer.auditor import Auditor
from ..peer.peer_service import PeerFactories, PeerService


class Corrupts(Protocol):
    """Whatever makes a liar of a daemon."""

    def corrupt(self, service: PeerService, factories: PeerFactories) -> PeerFactories:
        """Return factories for a service that is about to be made, with parts that lie."""
        ...


class Lie(enum.Enum):
    """What a liar does. All but the accuser count one contribution as everybody's."""

    OWNER = "owner"  # and shows what it was given when it is asked
    FORGER = "forger"  # and shows what makes its result, as if that had been given
    SILENT = "silent"  # and shows nothing
    ACCUSER = "accuser"  # it owns its chunks honestly, and calls others' wrong


@define
class Liar:
    """One of them.

    Attributes:
      chunks: of each round in which it lies, if it owns as many.
      told: rounds in which it lied, or accused.
    """

    lie: Lie
    chunks: int = 1
    told: set[int] = field(factory=set)

    def corrupt(self, _service: PeerService, factories: PeerFactories) -> PeerFactories:
        """Return factories with the part that tells this lie."""
        if self.lie is Lie.ACCUSER:
            return evolve(factories, auditor=partial(_LyingAuditor, self))
        return evolve(factories, reduction=partial(_LyingReduction, self))


class _LyingReduction(Reduction):
    def __init__(self, liar: Liar, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._liar = liar
        own = [at for at, cut in enumerate(self._layout.cuts) if cut.owner == self._me]
        self._lied = dict.fromkeys(own[: liar.chunks], b"")  # what was counted as everybody's
        if self.kept is not None and liar.lie is not Lie.OWNER:
            self.kept.show = partial(self._show, self.kept.show)  # type: ignore[method-assign]

    def _make_result_of(self, index: int, arrived: Mapping[str, memoryview]) -> None:
        if index in self._lied and len(arrived) > 1:
            favourite = next(peer for peer in self._contributors if peer in arrived)
            self._lied[index] = bytes(arrived[favourite])
            arrived = dict.fromkeys(arrived, arrived[favourite])
            self._liar.told.add(self._order.round)
        super()._make_result_of(index, arrived)

    def _show(
        self, honestly: Callable[[int], list[Buffer] | None], index: int
    ) -> list[Buffer] | None:
        shown = honestly(index)
        lied = self._lied.get(index, b"")
        if not lied or shown is None:
            return shown
        if self._liar.lie is Lie.SILENT:
            return None
        assert self._notary is not None
        forged: list[Buffer] = [
            sealed(self._notary, self._order, index, lied) for _piece in shown[:-1]
        ]
        return [*forged, self._notary.seal(statement_of_sum(self._order, index, forged))]


class _LyingAuditor(Auditor):
    def __init__(self, liar: Liar, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._liar = liar

    async def _examine(
        self, audit_log: AuditLog, evidence: ChunkEvidence, shown: list[memoryview]
    ) -> str:
        await super()._examine(audit_log, evidence, shown)
        self._liar.told.add(evidence.order.round)
        return "it is wrong because I say so"

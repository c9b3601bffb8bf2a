"""Peers that lie about what they added, and peers that lie about others."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from attrs import define, field

from ...collectives.evidence import ChunkEvidence, sealed, statement_of_sum
from ...collectives.reduction import OnLost, Reduction
from ...protocol.messages import Reduce
from ...protocol.network.lane import Buffer
from ..peer.auditor import Auditor
from ..peer.peer_service import PeerService


class Corrupts(Protocol):
    """Whatever makes a liar of a daemon."""

    def corrupt(self, service: PeerService) -> None:
        """From now on this peer lies."""


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

    def corrupt(self, service: PeerService) -> None:
        """From now on this peer lies."""
        if self.lie is Lie.ACCUSER:
            service.auditor = _LyingAuditor(service.parts, service.reducer, self)
        else:
            make = service.reducer._make_reduction

            def make_reduction(order: Reduce, contribute: bool, on_lost: OnLost) -> Reduction:
                reduction = make(order, contribute, on_lost)
                _LyingSums(self, reduction)
                return reduction

            service.reducer._make_reduction = make_reduction  # type: ignore[method-assign]


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
            self._liar.told.add(self._context.order.round)
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
    def __init__(self, parts: Any, reducer: Any, liar: Liar) -> None:
        super().__init__(parts, reducer)
        self._liar = liar

    def _verdict(self, exhibit: ChunkEvidence, _fault: str) -> str:
        self._liar.told.add(exhibit.order.round)
        return "it is wrong because I say so"

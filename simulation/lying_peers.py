"""Peers that lie about sums: as chunk owner, as checker, or as contributor to a checker."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from attrs import define, field, frozen

from ..checkpoint.checkpoint_store import CheckpointStore
from ..collectives.reduction import Reduction
from ..collectives.spot_check import SpotCheck
from ..daemon.peer.peer_config import PeerConfig
from ..daemon.peer.reducer import Reducer
from ..daemon.peer.trainer.port import TrainerPort
from ..membership.master.rounds.audits import ALONE_MAX
from ..protocol.messages import Audited, AuditOrder, ChunkFinding
from ..protocol.network.interface import Network
from ..protocol.network.lane import Buffer
from .witnessed_services import WitnessedPeer


class Corrupts(Protocol):
    """An object that makes a daemon lie.

    Attributes:
      lie_count: lies so far.
    """

    @property
    def lie_count(self) -> int: ...

    def service(
        self,
        config: PeerConfig,
        network: Network,
        trainer: TrainerPort,
        *,
        checkpoints: CheckpointStore | None,
    ) -> WitnessedPeer:
        """Make a service with parts that lie."""
        ...


class Lie(enum.Enum):
    OWNER = "owner"  # uses one contribution in place of all others
    CHECKER = "checker"  # reports other sums in all chunks that it checks
    CONTRIBUTOR = "contributor"  # sends checkers something else than it sent the owners


@frozen
class Liar:
    """A peer that lies about sums in every round, as data."""

    name: str
    lie: Lie

    @property
    def causes(self) -> list[str]:
        return [f"{self.name} lies as {self.lie.value}"]

    def simpler(self) -> tuple[()]:
        """There is nothing to simplify."""
        return ()

    def expected_rounds(self, audit: float) -> float:
        """Return about how many rounds with a lie are expected until the liar is found out.

        It takes two contradictions. Each lie of a checker or of a contributor is one; a false sum
        has to be checked first.
        """
        return ALONE_MAX / audit if self.lie is Lie.OWNER else ALONE_MAX


@define
class LyingPeer:
    """A liar at work.

    Attributes:
      lied_in: rounds in which it lied.
    """

    lie: Lie
    lied_in: set[int] = field(factory=set)

    @property
    def lie_count(self) -> int:
        return len(self.lied_in)

    def service(self, *args: Any, **options: Any) -> WitnessedPeer:
        """Make a service with the part that tells this lie."""
        return _LyingService(self, *args, **options)

    def corrupt(self, reduction: Reduction) -> None:
        """Make a reduction that has not begun lie."""
        if self.lie is Lie.OWNER:
            _LyingSums(self, reduction)
        else:
            reduction.audit = partial(self._audit, reduction)  # type: ignore[method-assign]

    def _audit(
        self, reduction: Reduction, order: AuditOrder, tell: Callable[[Audited], object]
    ) -> None:
        running = reduction._running
        if running is not None and order.attempt == reduction.attempt:
            context, added = reduction._context, reduction._adder.added
            check = _LyingCheck(self, context, added, reduction._network)
            running.nursery.start_soon(check.take_part, order, reduction._link_wait_s, tell)


class _LyingService(WitnessedPeer):
    def __init__(self, liar: LyingPeer, *args: Any, **options: Any) -> None:
        self.liar = liar
        super().__init__(*args, **options)

    def make_reducer(self) -> Reducer:
        return CorruptReducer(self.context, self.hub, self.state_service, self.liar.corrupt)


@define(eq=False, slots=False)
class CorruptReducer(Reducer):
    """Makes reductions that lie."""

    _corrupt: Callable[[Reduction], object]

    def make_reduction(self, *args: Any, **options: Any) -> Reduction:
        reduction = super().make_reduction(*args, **options)
        self._corrupt(reduction)
        return reduction


class _LyingSums:
    """Makes a wrong result of the first chunk that it owns.

    Args:
      reduction: an honest one that has not begun; its adder is wrapped.
    """

    def __init__(self, liar: LyingPeer, reduction: Reduction) -> None:
        self._liar = liar
        self._context = context = reduction._context
        own = [at for at, cut in enumerate(context.layout.cuts) if cut.owner == context.me]
        self._false = own[:1]
        self._honest_result = reduction._adder.make_result
        reduction._adder.make_result = self._make_result  # type: ignore[method-assign]

    def _make_result(self, index: int, arrived: Mapping[str, memoryview]) -> None:
        if index in self._false and len(arrived) > 1:
            favourite = next(peer for peer in self._context.contributors if peer in arrived)
            arrived = dict.fromkeys(arrived, arrived[favourite])
            self._liar.lied_in.add(self._context.order.round)
        self._honest_result(index, arrived)


class _LyingCheck(SpotCheck):
    def __init__(self, liar: LyingPeer, *args: Any) -> None:
        super().__init__(*args)
        self._liar = liar

    def contribution(self, chunk: int) -> Buffer | None:
        payload = super().contribution(chunk)
        if payload is None or self._liar.lie is not Lie.CONTRIBUTOR:
            return payload
        self._liar.lied_in.add(self._context.order.round)
        other = bytearray(payload)
        other[2] ^= 0x20  # of the first float32: a smaller change is lost in rounding
        return other

    def examine(self, given: Any) -> ChunkFinding | None:
        found = super().examine(given)
        if self._liar.lie is not Lie.CHECKER:
            return found
        self._liar.lied_in.add(self._context.order.round)
        return ChunkFinding(given.chunk, differs=True)

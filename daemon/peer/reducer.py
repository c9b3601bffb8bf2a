"""A peer's part in rounds: it reduces, repairs and applies. ``Replica`` decides when.

    serve     one task per ``Reduce`` order: the reduction, until the round is over. A lost member
              does not end it: the loss is reported, and the master's ``Flush`` and ``Repair``
              continue it
    apply     one task per commit: the outer step, in a thread; never cancelled half-way

The input of a round is kept for a repeated order until the round is over, its result until it is
applied. The residual of error feedback is updated with the outer step of a round that has the
contribution in every chunk; a peer that was excluded from a chunk drops its residual, because its
fragment is fetched again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import numpy as np
import trio
from attrs import define, field

from ...collectives.codecs.codecs import parse_codec
from ...collectives.codecs.error_feedback import Residual
from ...collectives.encoded_input import EncodedInput
from ...collectives.links.hub import LinkHub
from ...collectives.reduction import ReduceResult, Reduction
from ...collectives.reduction_context import ReductionContext
from ...diloco.outer import outer_step
from ...membership.shared.manifest import is_everywhere
from ...membership.spec.spec import DilocoTable
from ...protocol import messages as m
from ...protocol.arena import Values
from ...protocol.errors import BadContributionError, PeerLostError, RemoteProtocolError
from .line_report import measured
from .peer_config import PeerContext
from .state_service import StateService

log = logging.getLogger("holdfast.peer")


@define(eq=False)
class _Running:
    """The reduction of a round's current order.

    Attributes:
      diloco: the settings of the master that ordered it; the next one may have others before it
        commits.
    """

    reduction: Reduction
    diloco: DilocoTable
    scope: trio.CancelScope = field(factory=trio.CancelScope)


@define(eq=False, slots=False)
class Reducer:
    """Reductions, repairs and outer steps of one peer."""

    _peer: PeerContext
    _hub: LinkHub
    _state_service: StateService
    # By round, these three.
    _running: dict[int, _Running] = field(factory=dict, init=False)
    _inputs: dict[int, EncodedInput] = field(factory=dict, init=False)
    _results: dict[int, ReduceResult] = field(factory=dict, init=False)
    # By fragment, if there is error feedback.
    _residuals: dict[int, Residual] = field(factory=dict, init=False)

    # ------------------------------------------------------------ reducing

    def start(self, order: m.Reduce, *, contribute: bool) -> None:
        """Begin a reduction; it replaces an earlier one of the round, even if that is complete."""
        self._end(order.round)

        def lost(error: PeerLostError) -> None:
            if self._running.get(order.round) is running:
                self._failed(order.round, reduction.attempt, (error.peer,), error.reason)

        try:
            reduction = self.make_reduction(order, lost, contribute=contribute)
        except RemoteProtocolError as error:
            self._failed(order.round, order.attempt, (), str(error))
            return
        if reduction.encoded_input is not None:
            self._inputs[order.round] = reduction.encoded_input
        if not self._running.keys() - self._results.keys():
            self._hub.take_measurements()  # drop measurements from before, when no round ran
        running = self._running[order.round] = _Running(reduction, self._peer.spec.value.diloco)
        self._peer.start(self._serve, order, running)

    def make_reduction(
        self, order: m.Reduce, on_lost: Callable[[PeerLostError], None], *, contribute: bool
    ) -> Reduction:
        """Make the reduction of an order.

        Raises:
          RemoteProtocolError: the order cannot be carried out.
        """
        posted, fragment = self._state_service.posted, order.fragment
        known_input = self._inputs.get(order.round) if contribute else None
        spec = self._peer.spec.value
        parts = self._state_service.state.fragments[fragment].parts
        context = ReductionContext(
            order,
            self._peer.config.me,
            self._state_service.size(fragment),
            self._hub,
            # The trainer posts nothing new before the next round opens.
            posted.values(fragment) if contribute else None,
            posted.counters(fragment) if contribute else None,
            encoded_input=known_input,
            residual=self.residual_of(fragment) if contribute and known_input is None else None,
            audited=spec.reduce.audit > 0,
        )
        return Reduction(
            context,
            self._peer.network,
            # The momentum changes only when the round is over.
            momentum=parts.momentum if contribute else None,
            # A member that cannot be reached is named before the master finds an unexplained stall.
            link_wait_s=spec.link_deadline_s,
            on_lost=on_lost,
        )

    async def _serve(self, order: m.Reduce, running: _Running) -> None:
        reduction = running.reduction

        def whole(result: ReduceResult) -> None:
            if self._running.get(order.round) is not running:
                return
            self._results[order.round] = result
            if reduction.attempt == order.attempt:  # the plan did not account for a repair
                self._peer.tell(measured(self._hub))
            effects = self._peer.replica.course.reduction_done(
                order.round,
                reduction.attempt,
                result.digest,
                result.manifest,
                result.norm_sums,
                result.momentum_square,
            )
            self._peer.perform(effects)

        with running.scope:
            try:
                await reduction.serve(whole)
            except BadContributionError as error:
                self._ended(order.round, running, (error.peer,), error.reason, bad=True)
            except RemoteProtocolError as error:
                self._ended(order.round, running, (), str(error))

    def running(self) -> list[Reduction]:
        """Return the reductions that have begun and whose round is not over."""
        return [running.reduction for running in self._running.values()]

    def audit(self, order: m.AuditOrder) -> None:
        """Send checkers this peer's contribution again, or check chunks, and report."""
        if (running := self._running.get(order.round)) is not None:
            running.reduction.audit(order, self._peer.tell)

    def flush(self, order: m.Flush) -> None:
        """Accept nothing more from the lost members and report the chunks that are held."""
        running = self._running.get(order.round)
        if running is not None:  # else it failed here, and the master was told
            results = running.reduction.flush(order.lost)
            self._peer.tell(m.Held(order.round, order.attempt, results))

    def diagnose(self, order: m.Diagnose) -> None:
        """Report what the reduction waits for and what it holds."""
        running = self._running.get(order.round)
        if running is None or running.reduction.attempt != order.attempt:
            self._peer.tell(m.Diagnosis(order.round, order.attempt))
        else:
            self._peer.tell(running.reduction.diagnosis())

    def repair(self, order: m.Repair) -> None:
        running = self._running.get(order.round)
        if running is None:
            return  # it failed here, and the master was told
        try:
            running.reduction.repair(order)
        except RemoteProtocolError as error:
            self._ended(order.round, running, (), str(error))

    def stop(self, round_id: int) -> None:
        """End the round's reduction and its remaining sends."""
        self._end(round_id)
        self._hub.trailing.stop(round_id)

    def store(self, round_id: int) -> None:
        """Move the result of a round that cannot be applied yet out of memory."""
        if (running := self._running.get(round_id)) is not None:
            self._move_result(running.reduction, to_send=False)

    def drop(self, round_id: int) -> None:
        """Forget a round that is over here; what is still sent of it need not stay in memory."""
        if (running := self._running.get(round_id)) is not None and self._hub.trailing.has(
            round_id
        ):
            self._move_result(running.reduction, to_send=True)
        self._end(round_id)
        self._results.pop(round_id, None)
        self._inputs.pop(round_id, None)

    def _move_result(self, reduction: Reduction, *, to_send: bool) -> None:
        if (folder := self._peer.config.versions) is not None:
            move = partial(reduction.move_result, folder, to_send=to_send)
            self._peer.start(self._peer.network.run_sync, move)

    def _end(self, round_id: int) -> None:
        running = self._running.pop(round_id, None)
        if running is not None:
            running.scope.cancel()

    def _ended(
        self,
        round_id: int,
        running: _Running,
        accused: tuple[str, ...],
        reason: str,
        *,
        bad: bool = False,
    ) -> None:
        if self._running.get(round_id) is running:
            self._end(round_id)
            self._failed(round_id, running.reduction.attempt, accused, reason, bad=bad)

    def _failed(
        self,
        round_id: int,
        attempt: int,
        accused: tuple[str, ...],
        reason: str,
        *,
        bad: bool = False,
    ) -> None:
        log.info("round %d attempt %d fails here: %s", round_id, attempt, reason)
        self._peer.perform(
            self._peer.replica.course.reduction_failed(round_id, attempt, accused, bad, reason)
        )

    # ------------------------------------------------------------ error feedback

    def residual_of(self, fragment: int) -> Residual | None:
        """Return what earlier contributions to a fragment left out.

        Returns:
          The residual; None without error feedback.
        """
        reduce = self._peer.spec.value.reduce
        codec, _zstd = parse_codec(reduce.codecs(fragment)[0])
        if not (codec.lossy and reduce.feedback_decay):
            self.forget_residual(fragment)
            return None
        if fragment not in self._residuals:
            self._residuals[fragment] = Residual(self._state_service.size(fragment).value_count)
        self._residuals[fragment].decay = np.float32(reduce.feedback_decay)
        return self._residuals[fragment]

    def settle(self, commit: m.Commit) -> None:
        """Update the residual for a contribution that is committed. Heavy."""
        me, contributors = self._peer.config.me, [c.peer for c in commit.contributors]
        if me not in contributors:
            return
        if not is_everywhere(commit.manifest, contributors.index(me)):
            self.forget_residual(commit.fragment)
        elif (encoded := self._inputs.get(commit.round)) is not None:
            encoded.settle()

    def forget_residual(self, fragment: int) -> None:
        """Drop a residual: the fragment is fetched again, or a chunk lacks the contribution."""
        self._residuals.pop(fragment, None)

    def forget_residuals(self) -> None:
        self._residuals.clear()

    # ------------------------------------------------------------ applying

    def result(self, round_id: int) -> ReduceResult:
        return self._results[round_id]

    async def apply(self, commit: m.Commit) -> None:
        """Take the outer step with the held result and report it."""
        state, diloco = self._state_service.state, self._running[commit.round].diloco
        result = self.result(commit.round)

        def step(values: Values, momentum: Values) -> None:
            for where, mean in result.pieces():
                outer_step(
                    values[where],
                    momentum[where],  # shorter, or empty, where the values are buffers
                    mean,
                    lr=diloco.outer_lr,
                    mu=diloco.outer_momentum,
                    nesterov=diloco.nesterov,
                )

        def work() -> m.FragmentHead:
            self.settle(commit)
            return state.apply(commit.fragment, commit.version + 1, result.counters, step)

        head = await self._peer.network.run_sync(work)
        self._peer.perform(self._peer.replica.course.applied(commit.round, head))

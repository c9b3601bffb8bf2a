"""A peer's part in rounds: it reduces, repairs, applies. What may happen when, the replica decides.

    serve     one task per order of the master: the reduction, until the round is over. Deaths do
              not end it: a loss is told, the master's ``Flush`` and ``Repair`` mend it
    apply     one per commit: the outer step, in a thread; never cancelled half-way

A round's encoded input is kept for a later order until the round is over, its result until it is
applied. What error feedback keeps of a contribution counts once the contribution is committed in
every chunk; who was shut out of some forgets it, as its copy is made anew.
"""

from __future__ import annotations

import logging

import trio
from attrs import define, evolve, field

from ...collectives.codecs.compression import parse_codec
from ...collectives.codecs.error_feedback import Residual
from ...collectives.encoded_input import EncodedInput
from ...collectives.reduction import OnLost, ReduceResult, Reduction
from ...diloco.outer import outer_step
from ...membership.manifest import is_everywhere
from ...protocol.arena import Values
from ...protocol.errors import BadContributionError, PeerLostError, RemoteProtocolError
from ...protocol.messages import (
    Commit,
    Diagnose,
    Diagnosis,
    Flush,
    FragmentHead,
    Held,
    Reduce,
    Repair,
)
from .peer_parts import PeerParts
from .state_service import StateService

log = logging.getLogger("holdfast.peer")


@define(eq=False)
class _Running:
    """A reduction of the present order of a round, and what ends it."""

    reduction: Reduction
    scope: trio.CancelScope = field(factory=trio.CancelScope)


class Reducer:
    """Carries out what the replica wants done in rounds."""

    def __init__(self, parts: PeerParts, state_service: StateService) -> None:
        self._parts = parts
        self._state_service = state_service
        self._running: dict[int, _Running] = {}  # by round, as the three that follow
        self._inputs: dict[int, EncodedInput] = {}
        self._results: dict[int, ReduceResult] = {}
        self._residuals: dict[int, Residual] = {}  # by fragment, if there is error feedback

    # ------------------------------------------------------------ reducing

    def start(self, order: Reduce, *, contribute: bool) -> None:
        """Begin a reduction; an earlier one of the round is void, though it may have ended well."""
        self._end(order.round)
        parts = self._parts

        def lost(error: PeerLostError) -> None:
            if self._running.get(order.round) is running:
                self._failed(order.round, reduction.attempt, (error.peer,), error.reason)

        try:
            reduction = self._make_reduction(order, contribute, lost)
        except RemoteProtocolError as error:
            self._failed(order.round, order.attempt, (), str(error))
            return
        if reduction.encoded_input is not None:
            self._inputs[order.round] = reduction.encoded_input
        if not self._running.keys() - self._results.keys():
            parts.hub.take_measurements()  # of before, when no round had the lines
        running = self._running[order.round] = _Running(reduction)
        parts.start(self._serve, order, running)

    def _make_reduction(self, order: Reduce, contribute: bool, on_lost: OnLost) -> Reduction:
        parts, posted, fragment = self._parts, self._state_service.posted, order.fragment
        kept = self._inputs.get(order.round) if contribute else None
        return Reduction(
            order,
            parts.config.me,
            self._state_service.size(fragment),
            parts.hub,
            parts.network,
            posted.values(fragment) if contribute else None,
            posted.counters(fragment) if contribute else None,
            encoded_input=kept,
            residual=self.residual_of(fragment) if contribute and kept is None else None,
            values_stay=True,  # the trainer posts nothing new before the next round opens
            # It changes when the round is over, and not before.
            momentum=self._state_service.state.momentum(fragment) if contribute else None,
            # A peer without a link is named before the master finds a stall without a culprit.
            link_wait_s=parts.spec.link_deadline_s,
            notary=parts.config.notary,
            on_lost=on_lost,
        )

    async def _serve(self, order: Reduce, running: _Running) -> None:
        parts, reduction = self._parts, running.reduction

        def whole(result: ReduceResult) -> None:
            if self._running.get(order.round) is not running:
                return
            if parts.replica.is_copying(order.fragment) and reduction.condense():
                # It may wait for long, and not alone.
                result = evolve(result, values=result.values[:0].copy())
            self._results[order.round] = result
            if reduction.attempt == order.attempt:  # a repair is not what the plan was for
                parts.tell_measured()
            parts.perform(
                parts.replica.reduction_done(
                    order.round,
                    reduction.attempt,
                    result.digest,
                    result.manifest,
                    result.norm_sums,
                    result.momentum_square,
                )
            )

        with running.scope:
            try:
                await reduction.serve(whole)
            except BadContributionError as error:
                self._ended(order.round, running, (error.peer,), error.reason, bad=True)
            except RemoteProtocolError as error:
                self._ended(order.round, running, (), str(error))

    def running(self) -> list[Reduction]:
        """Reductions that have begun and whose round is not over."""
        return [running.reduction for running in self._running.values()]

    def of_round(self, round_id: int) -> Reduction | None:
        """The one that runs, or has ended well and waits for the round's end."""
        running = self._running.get(round_id)
        return None if running is None else running.reduction

    def flush(self, order: Flush) -> None:
        """Accept nothing more of the lost; say what is held."""
        running = self._running.get(order.round)
        if running is not None:  # else it failed here, and the master was told
            results = running.reduction.flush(order.lost)
            self._parts.tell_master(Held(order.round, order.attempt, results))

    def diagnose(self, order: Diagnose) -> None:
        """Say what it waits for, and what it holds."""
        running = self._running.get(order.round)
        if running is None or running.reduction.attempt != order.attempt:
            self._parts.tell_master(Diagnosis(order.round, order.attempt))
        else:
            self._parts.tell_master(running.reduction.diagnosis())

    def repair(self, order: Repair) -> None:
        """Go on without the lost."""
        running = self._running.get(order.round)
        if running is None:
            return  # as in ``flush``
        try:
            running.reduction.repair(order)
        except RemoteProtocolError as error:
            self._ended(order.round, running, (), str(error))

    def stop(self, round_id: int) -> None:
        """End the round's reduction, and what it still sends to listeners."""
        self._end(round_id)
        self._parts.hub.stop_trailing(round_id)

    def drop(self, round_id: int) -> None:
        """The round is over here: forget all about it."""
        self._end(round_id)
        self._results.pop(round_id, None)
        self._inputs.pop(round_id, None)

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
        """A reduction cannot go on here."""
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
        replica = self._parts.replica
        self._parts.perform(replica.reduction_failed(round_id, attempt, accused, bad, reason))

    # ------------------------------------------------------------ error feedback

    def residual_of(self, fragment: int) -> Residual | None:
        """What earlier contributions to it left out; None: there is no error feedback."""
        spec = self._parts.spec
        codec, _zstd = parse_codec(spec.reduce.codecs(fragment)[0])
        if not (codec.lossy and spec.reduce.error_feedback):
            return None
        if fragment not in self._residuals:
            self._residuals[fragment] = Residual(
                self._state_service.size(fragment).value_count, spec.reduce.feedback_decay
            )
        return self._residuals[fragment]

    def settle(self, commit: Commit) -> None:
        """What was left out of a contribution counts once the contribution does."""
        me, contributors = self._parts.config.me, [c.peer for c in commit.contributors]
        if me not in contributors:
            return
        if not is_everywhere(commit.manifest, contributors.index(me)):
            self.forget_residual(commit.fragment)
        elif (kept := self._inputs.get(commit.round)) is not None:
            kept.settle()

    def forget_residual(self, fragment: int) -> None:
        """Our copy is made anew, or was not added whole: begin with nothing left."""
        self._residuals.pop(fragment, None)

    def forget_residuals(self) -> None:
        self._residuals.clear()

    # ------------------------------------------------------------ applying

    def result(self, round_id: int) -> ReduceResult:
        """What is held of a round that is being applied; heavy if it has waited for a copy."""
        running = self._running.get(round_id)
        if running is not None and (unfolded := running.reduction.unfold()) is not None:
            self._results[round_id] = unfolded
        return self._results[round_id]

    async def apply(self, commit: Commit) -> None:
        """The outer step with the held result; the replica hears of it."""
        parts, state = self._parts, self._state_service.state
        diloco = parts.spec.diloco

        def step(values: Values, momentum: Values, mean: Values) -> None:
            outer_step(
                values,
                momentum,
                mean,
                lr=diloco.outer_lr,
                mu=diloco.outer_momentum,
                nesterov=diloco.nesterov,
            )

        def work() -> FragmentHead:
            result = self.result(commit.round)
            return state.apply(
                commit.fragment, commit.version + 1, result.values, result.counters, step
            )

        head = await parts.network.run_sync(work)
        parts.perform(parts.replica.applied(commit.round, head))

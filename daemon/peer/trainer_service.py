"""A peer's conversation with its local trainer: it comes, posts, goes; what it does is measured.

The port carries the messages; when a trainer may begin and what counts, the replica decides.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable

import numpy as np
import trio

from ...collectives.codecs.error_feedback import Residual
from ...membership.master.state.roster import layout_difference
from ...membership.master.trainers import NO_STEP
from ...protocol.arena import (
    LOSS_SLOT,
    MAIL_SLOT,
    STEP_SLOT,
    TOKENS_SLOT,
    WAITING_SLOT,
    Arena,
    Values,
)
from ...protocol.messages import (
    ArenaOpened,
    Failing,
    FailureKind,
    InitialPosted,
    Message,
    Metrics,
    ModelLayout,
    Posted,
    PostInitial,
    Progress,
    Rejected,
    Remedy,
    TrainerAttached,
    TrainerFailed,
    TrainerLost,
)
from ...protocol.text import plain
from ..fragment_layout import fragments_of
from .peer_parts import PeerParts
from .state_service import StateService
from .step_watch import StepSample, StepWatch

log = logging.getLogger("holdfast.peer")

PACE_S = 10.0  # tokens/s is the mean over so long
# In so long, so often the shared state helps a trainer whose loss is not finite; after that it is
# started anew. What comes back at once is in its data or its code, and restarts are counted.
RELOADS_MAX = 2
RELOADS_S = 600.0
STILL_SAID_S = 60.0  # without a step, be it a first one that compiles: people wonder by then
NORM_CHUNK_COUNT = 1 << 18  # elements squared at a time in float64


class TrainerService:
    """Implements ``TrainerEvents``.

    Args:
      residual_of: of a fragment, what error feedback adds to the next contribution; None: nothing.

    Attributes:
      layout: of the trainer that is attached; None without one.
      failed: why there is none, and what is done about it; None while there is one.
    """

    def __init__(
        self,
        parts: PeerParts,
        state_service: StateService,
        residual_of: Callable[[int], Residual | None],
    ) -> None:
        self.layout: ModelLayout | None = None
        self.failed: TrainerFailed | None = None
        self._watch = StepWatch()
        self._reloads: deque[float] = deque()  # when, of late
        self._parts = parts
        self._residual_of = residual_of
        self._state_service = state_service
        self._founding = False
        self._metrics: dict[str, float] = {}
        self._pace: deque[tuple[float, int]] = deque()  # (time, tokens) of late, oldest first

    # ------------------------------------------------------------ the trainer reports

    def trainer_came(self, layout: ModelLayout) -> None:
        """A script attached."""
        self.layout, self.failed = layout, None
        self._reloads.clear()
        self._parts.tell_master(TrainerAttached(layout))
        if self._state_service.layout is not None and self._parts.known_spec is not None:
            self.admit()

    def trainer_said(self, message: Message) -> None:
        """Something from the script."""
        match message:
            case Posted():
                self._parts.start(self._check_posted, message)
            case InitialPosted():
                if self._founding:
                    self._founding = False
                    self._parts.start(self._state_service.take_initial)
            case Failing(kind=FailureKind.NAN):
                self._spoilt(message.reason)
            case Metrics():
                self._metrics.update(message.values)
            case _:
                log.warning("unexpected %s from the trainer", type(message).__name__)

    def trainer_went(self, reason: str) -> None:
        """The script is gone (it may come back)."""
        self.layout = None
        self._parts.tell_master(TrainerLost(reason))
        self._parts.perform(self._parts.replica.trainer_lost())

    def failed_with(self, message: TrainerFailed) -> None:
        """Its process failed: whoever started it says why, and what is done about it."""
        self.failed = message
        self._parts.report.told.append(f"the trainer: {said_of(message)}")
        self._parts.tell_master(message)

    def check_alive(self) -> None:
        """Look whether the trainer moves; away with one that does not. Once in a while."""
        parts, posted = self._parts, self._state_service.known_posted
        replica, spec = parts.replica, parts.known_spec
        if posted is None or spec is None or not replica.trainer.loaded or replica.finished:
            self._watch = StepWatch()
            return
        waiting = int(posted.slots[WAITING_SLOT])
        seen = StepSample(
            int(posted.slots[STEP_SLOT]),
            int(posted.slots[TOKENS_SLOT]),
            waiting - 1 if waiting else None,
            int(self._state_service.state.arena.slots[MAIL_SLOT]),
        )
        deadline_s = spec.trainer.step_deadline_s or math.inf
        if self._watch.look(trio.current_time(), seen, deadline_s):
            still_s, self._watch = self._watch.still_s, StepWatch()
            reason = f"no step for {still_s:.0f} s, after step {seen.step}"
            parts.trainer.end(FailureKind.HANG, reason, still_s)

    def why_still(self) -> str:
        """What people should know of a trainer that is attached and takes no step; else empty."""
        still_s = self._watch.still_s
        if still_s < STILL_SAID_S:
            return ""
        # Another figure now and then, not every second: each change goes to all who look.
        return f"{NO_STEP} for {still_s - still_s % STILL_SAID_S:.0f} s"

    def _spoilt(self, reason: str) -> None:
        """Its weights are not finite any more. The shared state is: let it have that."""
        now_s, parts = trio.current_time(), self._parts
        while self._reloads and now_s - self._reloads[0] > RELOADS_S:
            self._reloads.popleft()
        if len(self._reloads) >= RELOADS_MAX:
            again = f"{reason}, again after {len(self._reloads)} reloads of the shared state"
            parts.trainer.end(FailureKind.NAN, again, now_s - self._reloads[0])
            return
        self._reloads.append(now_s)
        log.warning("%s: it gets the shared state anew", reason)
        message = TrainerFailed(FailureKind.NAN, reason, Remedy.RELOAD, len(self._reloads))
        parts.report.told.append(f"the trainer: {said_of(message)}")
        parts.tell_master(message)
        parts.perform(parts.replica.trainer_came())

    async def _check_posted(self, message: Posted) -> None:
        """Measure the pseudo-gradient's norm; refuse what is not finite before anyone sees it."""
        parts, posted = self._parts, self._state_service.known_posted
        if posted is None or not 0 <= message.fragment < len(posted.sizes):
            return
        values = posted.values(message.fragment)
        # What will be sent: with what earlier contributions left out.
        residual = self._residual_of(message.fragment)
        norm = await parts.network.run_sync(lambda: l2_norm(values, residual))
        if math.isfinite(norm):
            parts.perform(parts.replica.posted(message, norm, ""))
            return
        reason = "the pseudo-gradient is not finite (NaN or infinity)"
        parts.report.told.append(f"round {message.round}: {reason}")
        log.warning("round %d: %s", message.round, reason)
        parts.perform(parts.replica.posted(message, None, reason))

    # ------------------------------------------------------------ what it is told

    def admit(self) -> None:
        """A trainer and the run's layout are there: let the one have the other, or refuse it."""
        layout, state = self._state_service.layout, self._state_service.state
        if self.layout is None or layout is None:
            return
        parts = self._parts
        if self.layout != layout:
            difference = layout_difference(layout, self.layout)
            parts.trainer.tell(Rejected(plain(f"its tensors are not the run's: {difference}")))
            return
        diloco = parts.spec.diloco
        parts.trainer.tell(
            ArenaOpened(
                tuple(f.tensors for f in fragments_of(layout, diloco)),
                state.sizes,
                diloco.overlap_steps,
                diloco.merge,
                parts.spec.trainer.nan_steps,
                preview=diloco.preview,
                outer_lr=diloco.outer_lr,
                outer_momentum=diloco.outer_momentum,
                nesterov=diloco.nesterov,
                local_checkpoint=parts.config.local_checkpoint
                if parts.spec.checkpoint.trainer
                else "",
            )
        )
        parts.perform(parts.replica.trainer_came())

    def found(self) -> None:
        """The run is empty and ours are its first weights."""
        if self.layout is None:
            return
        self._founding = True
        if self._state_service.use_layout(self.layout):
            self.admit()
        self._parts.trainer.tell(PostInitial())

    def reject(self, reason: str) -> None:
        """It works on memory that is no longer the run's."""
        if self.layout is not None:
            self.layout = None
            self._parts.trainer.tell(Rejected(reason))

    # ------------------------------------------------------------ what it does

    def progress(self) -> Progress:
        """What the trainer does right now, as the master and the status page see it."""
        step = tokens = 0
        waited_s = stepped_s = 0.0
        loss = None
        posted = self._state_service.known_posted
        if posted is not None:
            step = int(posted.slots[STEP_SLOT])
            tokens = int(posted.slots[TOKENS_SLOT])
            waited_s, stepped_s = _seconds(posted)
            value = float(posted.loss[0])
            loss = value if int(posted.slots[LOSS_SLOT]) and math.isfinite(value) else None
        hub = self._parts.hub
        return Progress(
            step,
            tokens,
            self._tokens_per_s(tokens),
            loss,
            self.why_still() or self._parts.report.phase,
            hub.sent_bytes,
            hub.received_bytes,
            self._state_service.received_bytes,
            dict(self._metrics),
            waited_s,
            stepped_s,
            self._state_service.copies(),
            self._state_service.saved_bytes,
        )

    def _tokens_per_s(self, tokens: int) -> float:
        now_s = trio.current_time()
        self._pace.append((now_s, tokens))
        while now_s - self._pace[0][0] > PACE_S:
            self._pace.popleft()
        then_s, tokens_then = self._pace[0]
        return max(0.0, (tokens - tokens_then) / (now_s - then_s)) if now_s > then_s else 0.0


def _seconds(posted: Arena) -> tuple[float, float]:
    """What the trainer wrote there, if it makes sense."""
    waited_s, stepped_s = (float(each) for each in posted.seconds)
    if not (0.0 <= waited_s < math.inf and 0.0 <= stepped_s < math.inf):
        return 0.0, 0.0
    return waited_s, stepped_s


def l2_norm(values: Values, residual: Residual | None = None) -> float:
    """Euclidean norm, summed in float64; not finite when any element is not.

    Args:
      residual: of error feedback, which is added to the values when they are encoded.
    """
    total = 0.0
    for start in range(0, len(values), NORM_CHUNK_COUNT):
        where = slice(start, start + NORM_CHUNK_COUNT)
        part = values[where].astype(np.float64)
        if residual is not None:
            part += residual.carried(where)
        total += float(np.dot(part, part))
    return math.sqrt(total) if math.isfinite(total) else math.inf


def said_of(failed: TrainerFailed) -> str:
    """A failure and what is done about it, for people."""
    what = f"{failed.kind.value} ({failed.reason})"
    match failed.remedy:
        case Remedy.RELOAD:
            return f"{what}; it gets the shared state anew"
        case Remedy.RESTART:
            return f"{what}; failure {failed.failure_count} in a row, restarting"
        case Remedy.NONE:
            return (
                f"{what}; given up after {failed.failure_count} failures in a row: "
                "mend it, then `holdfast retry`"
            )

"""A peer's connection to its local trainer: it attaches, posts and leaves, and its progress is
measured.

The port carries the messages; ``Replica`` decides when a trainer may begin and which posts count.
"""

from __future__ import annotations

import logging
import math
from collections import deque

import numpy as np
import trio
from attrs import define, field, frozen

from ...collectives.codecs.error_feedback import Residual
from ...collectives.links.hub import LinkHub
from ...membership.shared.layout_difference import layout_difference
from ...membership.shared.peer_rows import NO_STEP
from ...protocol import messages as m
from ...protocol.arena import (
    LOSS_SLOT,
    MAIL_SLOT,
    STEP_SLOT,
    TOKENS_SLOT,
    WAITING_SLOT,
    Arena,
    Values,
)
from ...protocol.text import plain
from ..fragment_layout import fragments_of
from .data_service import DataService
from .peer_config import PeerContext
from .reducer import Reducer
from .state_service import StateService

log = logging.getLogger("holdfast.peer")

PACE_S = 10.0  # tokens/s is the mean over this time
# A trainer whose weights are not finite gets the shared state again this often in RELOADS_S, or
# without a finite update in between; after that it is restarted. Weights that fail again at once
# have their cause in the data or the code, and restarts are counted.
RELOADS_MAX = 2
RELOADS_S = 600.0
STILL_SHOWN_S = 60.0  # without a step; a first one that compiles may take longer, and is shown, too
NORM_CHUNK_COUNT = 1 << 18  # elements squared at a time in float64
# Deadlines for the first step, which compiles, fills caches and starts loading data.
FIRST_STEP_DEADLINES = 4.0
LOOK_S_MAX = 5.0


@frozen
class StepSample:
    """A sample of a trainer's progress.

    Attributes:
      step, tokens: the trainer's counts; the tokens are those of its process.
      heard_count: messages that it has read, while it waits for another one; else None.
      sent_count: messages that were sent to it.
    """

    step: int
    tokens: int
    heard_count: int | None
    sent_count: int


@define
class StepWatch:
    """The watch over one trainer, from samples of what it writes into shared memory. Pure.

    A sample that differs from the last one is a sign of life; so is waiting, once the trainer has
    read all its messages. Each sample adds at most ``LOOK_S_MAX`` to the time without progress: if
    the daemon or the whole machine stood still, the trainer is not blamed.

    Attributes:
      still_s: seconds without progress.
    """

    still_s: float = 0.0
    _stepped: bool = False
    _last: StepSample | None = None
    _looked_s: float = 0.0

    def look(self, now_s: float, seen: StepSample, deadline_s: float) -> bool:
        """Take a sample and return True if the trainer exceeds its deadline."""
        before, looked_s = self._last, self._looked_s
        self._last, self._looked_s = seen, now_s
        self._stepped |= seen.tokens > 0 or seen.heard_count is not None
        idle = seen.heard_count is not None and seen.heard_count >= seen.sent_count
        moved = before is None or (seen.step, seen.tokens, seen.heard_count) != (
            before.step,
            before.tokens,
            before.heard_count,
        )
        if idle or moved:
            self.still_s = 0.0
            return False
        self.still_s += min(now_s - looked_s, LOOK_S_MAX)
        return self.still_s > deadline_s * (1.0 if self._stepped else FIRST_STEP_DEADLINES)


@define(eq=False, slots=False)
class TrainerService:
    """The peer's side of the trainer; implements ``TrainerEvents``.

    Attributes:
      layout: the attached trainer's; None without one.
      failed: the last failure of the trainer's process; None while one is attached.
    """

    _peer: PeerContext
    _hub: LinkHub
    _state_service: StateService
    _reducer: Reducer
    _data: DataService
    layout: m.ModelLayout | None = field(default=None, init=False)
    failed: m.TrainerFailed | None = field(default=None, init=False)
    _watch: StepWatch = field(factory=StepWatch, init=False)
    _reloads: deque[float] = field(factory=deque, init=False)  # times of recent reloads
    _finite_s: float = field(default=-math.inf, init=False)  # when an update was finite last
    _weights_count: int = field(default=0, init=False)  # trainers and reloads so far
    _supplying: bool = field(default=False, init=False)  # initial weights were requested
    _metrics: dict[str, m.LoggedFigure] = field(factory=dict, init=False)
    _pace: deque[tuple[float, int]] = field(factory=deque, init=False)  # recent (time, tokens)

    # ------------------------------------------------------------ reports from the trainer

    def trainer_came(self, layout: m.ModelLayout) -> None:
        self.layout, self.failed = layout, None
        self._weights_count += 1
        self._reloads.clear()
        self._peer.replica.leases.trainer_gone()
        self._peer.tell(m.TrainerAttached(layout))
        if self._state_service.layout is not None and self._peer.spec.known is not None:
            self.admit()

    def trainer_sent(self, message: m.Message) -> None:
        match message:
            case m.Posted():
                self._peer.start(self._check_posted, message)
            case m.InitialPosted():
                if self._supplying:
                    self._supplying = False
                    self._peer.start(self._state_service.take_initial)
            case m.Failing(kind=m.FailureKind.NAN):
                self._not_finite(message.reason)
            case m.Metrics():
                self._log(message)
            case _:
                log.warning("unexpected %s from the trainer", type(message).__name__)

    def trainer_went(self, reason: str) -> None:
        self.layout = None
        self._peer.tell(m.TrainerLost(reason))
        self._peer.perform(self._peer.replica.trainer_lost())

    def begin_draws(self, hello: m.DrawHello) -> m.Drawn | m.Rejected:
        return self._data.begin(hello)

    async def draw(self, hello: m.DrawHello, message: m.Draw) -> m.Drawn | m.Rejected:
        return await self._data.draw(hello, message)

    def failed_with(self, message: m.TrainerFailed) -> None:
        self.failed = message
        self._peer.report.notices.append(f"the trainer: {format_failure(message)}")
        self._peer.tell(message)

    def check_alive(self) -> None:
        """End a trainer that takes no steps. Called every second or so."""
        posted, spec, replica = (
            self._state_service.known_posted,
            self._peer.spec.known,
            self._peer.replica,
        )
        if posted is None or spec is None or not replica.trainer.loaded or replica.trainer.finished:
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
            self._peer.trainer.end(m.FailureKind.HANG, reason, still_s)

    def why_still(self) -> str:
        """Return a sentence about an attached trainer that takes no step; else an empty string."""
        still_s = self._watch.still_s
        if still_s < STILL_SHOWN_S:
            return ""
        # In whole minutes: each change is sent to the master and to all viewers.
        return f"{NO_STEP} for {still_s - still_s % STILL_SHOWN_S:.0f} s"

    def _not_finite(self, reason: str) -> None:
        """Reload the shared state into a trainer whose weights are not finite, or restart it."""
        now_s = trio.current_time()
        old_s = min(now_s - RELOADS_S, self._finite_s)
        while self._reloads and self._reloads[0] < old_s:
            self._reloads.popleft()
        self._weights_count += 1
        if len(self._reloads) >= RELOADS_MAX:
            again = f"{reason}, again after {len(self._reloads)} reloads of the shared state"
            self._peer.trainer.end(m.FailureKind.NAN, again, now_s - self._reloads[0])
            return
        self._reloads.append(now_s)
        log.warning("%s: it gets the shared state again", reason)
        message = m.TrainerFailed(m.FailureKind.NAN, reason, m.Remedy.RELOAD, len(self._reloads))
        self._peer.report.notices.append(f"the trainer: {format_failure(message)}")
        self._peer.tell(message)
        self._reducer.forget_residuals()
        self._peer.perform(self._peer.replica.trainer_spoilt())

    async def _check_posted(self, message: m.Posted) -> None:
        """Measure a pseudo-gradient's norm, and replace weights that are not finite."""
        posted = self._state_service.known_posted
        if posted is None or not 0 <= message.fragment < len(posted.sizes):
            return
        weights = self._weights_count
        values = posted.values(message.fragment)
        # The norm is of what will be sent, which includes the residual.
        residual = self._reducer.residual_of(message.fragment)
        norm = await self._peer.network.run_sync(lambda: l2_norm(values, residual))
        if math.isfinite(norm):
            self._finite_s = trio.current_time()
            self._peer.perform(self._peer.replica.course.posted(message, norm, ""))
            return
        reason = "the pseudo-gradient is not finite (NaN or infinity)"
        self._peer.perform(self._peer.replica.course.posted(message, None, reason))
        if self.layout is not None and self._weights_count == weights:  # else they are gone
            self._not_finite(f"round {message.round}: {reason}")

    def _log(self, message: m.Metrics) -> None:
        """Take figures of ``run.log``; new ones replace those that were logged the longest ago."""
        for name, value in message.values.items():
            self._metrics.pop(name, None)
            self._metrics[name] = m.LoggedFigure(value, message.step)
        for name in list(self._metrics)[: -m.METRICS_MAX]:
            del self._metrics[name]

    # ------------------------------------------------------------ messages to the trainer

    def admit(self) -> None:
        """Give the attached trainer the arenas, or reject it if its tensors are not the run's."""
        layout, state = self._state_service.layout, self._state_service.state
        if self.layout is None or layout is None:
            return
        if self.layout != layout:
            difference = layout_difference(layout, self.layout)
            self._peer.trainer.tell(
                m.Rejected(plain(f"its tensors are not the run's: {difference}"))
            )
            return
        spec = self._peer.spec.value
        diloco = spec.diloco
        self._peer.trainer.tell(
            m.ArenaOpened(
                tuple(f.tensors for f in fragments_of(layout, diloco)),
                state.sizes,
                diloco.overlap_steps,
                spec.trainer.nan_steps,
                local_checkpoint=self._peer.config.local_checkpoint
                if spec.checkpoint.trainer
                else "",
            )
        )
        self._peer.perform(self._peer.replica.trainer_came())

    def supply_weights(self) -> None:
        """Ask the trainer for the initial weights of a run that has none."""
        if self.layout is None:
            return
        self._supplying = True
        if self._state_service.use_layout(self.layout):
            self.admit()
        self._peer.trainer.tell(m.PostInitial())

    def reject(self, reason: str) -> None:
        """Send a trainer away whose memory is no longer the run's."""
        if self.layout is not None:
            self.layout = None
            self._peer.trainer.tell(m.Rejected(reason))

    # ------------------------------------------------------------ progress

    def progress(self) -> m.Progress:
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
        return m.Progress(
            step,
            tokens,
            self._tokens_per_s(tokens),
            loss,
            self.why_still() or self._peer.report.phase,
            self._hub.sent_bytes,
            self._hub.received_bytes,
            self._state_service.received_bytes,
            dict(self._metrics),
            waited_s,
            stepped_s,
            self._state_service.copies(),
            self._peer.report.accelerators,
        )

    def _tokens_per_s(self, tokens: int) -> float:
        now_s = trio.current_time()
        self._pace.append((now_s, tokens))
        while now_s - self._pace[0][0] > PACE_S:
            self._pace.popleft()
        then_s, tokens_then = self._pace[0]
        return max(0.0, (tokens - tokens_then) / (now_s - then_s)) if now_s > then_s else 0.0


def _seconds(posted: Arena) -> tuple[float, float]:
    """Return the seconds that the trainer waited and stepped, or zeros if it wrote nonsense."""
    waited_s, stepped_s = (float(each) for each in posted.seconds)
    if not (0.0 <= waited_s < math.inf and 0.0 <= stepped_s < math.inf):
        return 0.0, 0.0
    return waited_s, stepped_s


def l2_norm(values: Values, residual: Residual | None = None) -> float:
    """Return the Euclidean norm, summed in float64; not finite when any element is not.

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


def format_failure(failed: m.TrainerFailed) -> str:
    what = f"{failed.kind.value} ({failed.reason})"
    match failed.remedy:
        case m.Remedy.RELOAD:
            return f"{what}; it gets the shared state again"
        case m.Remedy.RESTART:
            return f"{what}; failure {failed.failure_count} in a row, restarting"
        case m.Remedy.NONE:
            return (
                f"{what}; given up after {failed.failure_count} failures in a row: "
                "fix it, then start this peer again"
            )

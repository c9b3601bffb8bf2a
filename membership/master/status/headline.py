"""A run in a few figures: loss, speed, traffic."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING

from ...shared.run_status import Headline, RunState
from ..rounds.outer_momentum import OuterMotion, format_motion, usual_motion
from ..rounds.round import RoundPhase

if TYPE_CHECKING:
    from ..coordinator import Coordinator

ETA_COMMITS = 10  # of the last ones the usual time between two tells when the run will be over


def is_waiting(state: RunState) -> bool:
    """Return whether nothing is trained that would be part of a round."""
    return state not in ("training", "finished")


def headline(coordinator: Coordinator, state: RunState) -> Headline:
    """Return the figures of the whole run; bytes are counted since this master started.

    Args:
      state: of the run; while it waits, it has no speed.
    """
    context, scheduler = coordinator.context, coordinator.scheduler
    waits = is_waiting(state)
    history, totals = context.history, context.totals
    data = history.data
    contributors = scheduler.contributors()
    steps = [member.progress.step for member in contributors if member.progress]
    losses = [
        (member.progress.loss, member.progress.tokens_per_s)
        for member in contributors
        if member.progress and member.progress.loss is not None
    ]
    motion = _committed_motion(coordinator)
    finite = [(loss, rate) for loss, rate in losses if math.isfinite(loss)]
    return Headline(
        loss=_mean_loss(finite),
        loss_min=min((loss for loss, _rate in finite), default=None),
        loss_max=max((loss for loss, _rate in finite), default=None),
        tokens=history.token_count // max(1, history.fragment_count),
        tokens_per_s=0.0
        if waits
        else sum(m.progress.tokens_per_s for m in contributors if m.progress),
        utilisation=None if waits else totals.utilisation(contributors),
        # The trainers' middle: the step of the last commit says little in a long round.
        step=max(history.step, statistics.median_low(steps or [0])),
        rounds=history.commit_count,
        rounds_wanted=context.spec.run.rounds or None,
        eta_s=left_s(coordinator, state),
        sent_bytes=totals.sent_bytes,
        saved_bytes=totals.parallel_bytes - totals.sent_bytes,
        epoch=data.epoch if data.length else None,
        epoch_share=data.spent_in(data.epoch) / data.length if data.length else None,
        outer_cosine=motion.cosine if motion else None,
        outer_gain=motion.gain if motion else None,
        outer_text=format_motion(motion),
    )


def _committed_motion(coordinator: Coordinator) -> OuterMotion | None:
    """Return what the outer momentum usually does in the last committed rounds."""
    past = coordinator.scheduler.round_table.past
    committed = (round_.motion for round_ in past if round_.phase is RoundPhase.COMMITTED)
    return usual_motion(committed, coordinator.context.history.fragment_count)


def _mean_loss(losses: list[tuple[float, float]]) -> float | None:
    """Return the mean weighted by tokens per second, or the plain mean while all rates are 0."""
    if not losses:
        return None
    weights = [rate for _, rate in losses]
    if not sum(weights):
        weights = [1.0] * len(losses)
    return sum(loss * w for (loss, _), w in zip(losses, weights, strict=True)) / sum(weights)


def left_s(coordinator: Coordinator, state: RunState) -> float | None:
    """Return the seconds until the run's end; None if not known, or while the run waits."""
    context = coordinator.context
    history, wanted = context.history, context.spec.run.rounds
    if not wanted or is_waiting(state) or history.paused:
        return None
    left = wanted - history.commit_count
    if history.finished or left <= 0:
        return 0.0
    past = coordinator.scheduler.round_table.past
    ends_s = [round_.ended_s for round_ in past if round_.phase is RoundPhase.COMMITTED][
        -ETA_COMMITS:
    ]
    if len(ends_s) < 2:
        return None
    # The median: a time in which the run waited is not part of its pace.
    return left * statistics.median(later - end for end, later in itertools.pairwise(ends_s))

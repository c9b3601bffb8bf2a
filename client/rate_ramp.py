"""The learning rate of a joiner, whose optimizer has no state yet.

An optimizer's first steps are too large: Adam's first one moves every weight by the whole learning rate,
whatever the gradient. At the start of a run the schedule's warm-up prevents that. A joiner finds the
schedule at its height, so its rate is scaled up from nearly zero again.
"""

from __future__ import annotations

RAMP_STEPS = 50  # own steps; Adam's second moments at 0.95 have forgotten their start by then


class RateRamp:
    """The factor on a trainer's learning rate, by its own steps, because the run's steps may jump."""

    def __init__(self) -> None:
        self._from_step: int | None = None

    def begin(self, step: int | None) -> None:
        """Begin a ramp at this step. None: no ramp, as at the run's own start."""
        self._from_step = step

    def scale(self, step: int) -> float:
        """Return the factor at a step: from ``1 / RAMP_STEPS`` at the ramp's first step up to 1."""
        if self._from_step is None:
            return 1.0
        return min(1.0, (step - self._from_step + 1) / RAMP_STEPS)

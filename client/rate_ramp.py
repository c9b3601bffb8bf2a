"""The learning rate of who comes into a run with an optimizer that knows nothing of it.

An optimizer's first steps are large for what it knows: Adam's first one moves every weight by the
whole learning rate, whatever the gradient. At the start of a run the schedule's warm-up is for that. Who
joins later finds the schedule at its height, so its rate is scaled up from nearly nothing once more.
"""

from __future__ import annotations

RAMP_STEPS = 50  # of our own; Adam's second moments at 0.95 have forgotten their start by then


class RateRamp:
    """Counts a trainer's own steps: the run's may jump."""

    def __init__(self) -> None:
        self._from_step: int | None = None

    def begin(self, step: int | None) -> None:
        """The optimizer starts anew; None: at the run's own start, where everybody's does."""
        self._from_step = step

    def scale(self, step: int) -> float:
        """From ``1 / RAMP_STEPS`` at the first step to 1."""
        if self._from_step is None:
            return 1.0
        return min(1.0, (step - self._from_step + 1) / RAMP_STEPS)

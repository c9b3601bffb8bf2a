"""The learning rate of who comes into a run with an optimizer that knows nothing of it.

An optimizer's first steps are large for what it knows: Adam's first one moves every weight by the
whole learning rate, whatever the gradient. At the start of a run the schedule's warm-up is for that. Who
joins later finds the schedule at its height, so its rate is scaled up from nearly nothing once more.
"""

from __future__ import annotations

RAMP_STEPS = 50  # of our own; Adam's second moments at 0.95 have forgotten their start by then


class Ramp:
    """Counts a trainer's own steps, though the run's global step may jump."""

    def __init__(self) -> None:
        self._from_step: int | None = None  # the run's, as if it had never jumped since

    def begin(self, step: int) -> None:
        """The optimizer starts anew. At the run's own start that is what everybody does."""
        self._from_step = step if step > 0 else None

    def jumped(self, step_count: int) -> None:
        """The run's step has moved without ours."""
        if self._from_step is not None:
            self._from_step += step_count

    def scale(self, step: int) -> float:
        """From ``1 / RAMP_STEPS`` at the first step to 1."""
        if self._from_step is None:
            return 1.0
        return min(1.0, (step - self._from_step + 1) / RAMP_STEPS)

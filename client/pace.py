"""How long a trainer's own steps take: what the master needs to know of a slow one."""

from __future__ import annotations


class Pace:
    """The mean time of the steps between two looks.

    Attributes:
      step_s: seconds of a step, without waiting; 0: not known yet.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        self._jumped_count = 0  # of the run's steps, those that were not ours
        self._last: tuple[float, int] | None = None  # seconds spent stepping, own steps

    def jumped(self, step_count: int) -> None:
        """The run's step has moved without ours."""
        self._jumped_count += step_count

    def measure(self, step: int, stepping_s: float) -> None:
        """Look again, at this step of the run and by a clock that stands while it waits."""
        own = step - self._jumped_count
        if self._last is not None and own > self._last[1]:
            self.step_s = max(0.0, stepping_s - self._last[0]) / (own - self._last[1])
        self._last = (stepping_s, own)

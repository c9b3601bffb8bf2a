"""How long a trainer's own steps take: what the master needs to know of a slow one."""

from __future__ import annotations


class StepTimes:
    """The mean time of the steps between two looks.

    Attributes:
      step_s: seconds of a step, without waiting; 0: not known yet.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        self._last: tuple[float, int] | None = None  # seconds spent stepping, own steps

    def measure(self, step: int, stepping_s: float) -> None:
        """Look again, at this one of our own steps and by a clock that stands while it waits."""
        if self._last is not None and step > self._last[1]:
            self.step_s = max(0.0, stepping_s - self._last[0]) / (step - self._last[1])
        self._last = (stepping_s, step)

"""Measures the duration of a trainer's steps, by which the master recognises a slow one."""

from __future__ import annotations


class StepTimes:
    """The mean duration of the steps between two measurements.

    Attributes:
      step_s: seconds of a step, without waiting; 0: not known yet.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        self._last: tuple[float, int] | None = None  # seconds spent stepping, own steps

    def measure(self, step: int, stepping_s: float) -> None:
        """Measure at one of the trainer's own steps, by a clock that stops while the trainer waits."""
        if self._last is not None and step > self._last[1]:
            self.step_s = max(0.0, stepping_s - self._last[0]) / (step - self._last[1])
        self._last = (stepping_s, step)

"""The script's optimizer, as far as the run touches it: its state after a load, and its rate ramp."""

from __future__ import annotations

import torch

from .rate_ramp import RateRamp


class InnerOptimizer:
    """Clears the optimizer's state when the steps behind it are dropped.

    Args:
      optimizer: the script's; None: the script did not pass it to ``attach``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        # It came without a state, and nothing is posted yet: its state would be from warm-up.
        self._idle = optimizer is not None and not optimizer.state
        self._spoilt = False  # it has seen losses that are not finite
        self._ramp = RateRamp()

    def rate_scale(self, own_step: int) -> float:
        """Return the factor on the learning rate, see ``rate_ramp``."""
        return self._ramp.scale(own_step)

    def mark_used(self) -> None:
        """Keep the state from now on: steps behind it are posted."""
        self._idle = False

    def mark_restored(self) -> None:
        """Keep the state from now on, without a ramp: it comes from a local checkpoint."""
        self._idle = False
        self._ramp.begin(None)

    def mark_spoilt(self) -> None:
        """Clear the state at the next load: it holds values that are not finite."""
        self._spoilt = True

    def renew(self, own_step: int | None, *, first: bool) -> None:
        """After a load, clear a state that belongs to dropped steps, and begin a ramp.

        Args:
          own_step: of the trainer; None at the run's own start, which needs no ramp.
          first: the trainer was not loaded before; an unknown optimizer is then taken for a new one.
        """
        if self._optimizer is None:
            if not first:
                return
        elif self._idle or self._spoilt:
            self._optimizer.state.clear()  # torch makes it again at the next step
        else:
            return
        self._spoilt = False
        self._ramp.begin(own_step)

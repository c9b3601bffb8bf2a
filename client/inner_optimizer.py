"""The script's optimizer, as far as the run touches it: its state after a load, and its rate ramp.

An optimizer's first steps are too large: Adam's first one moves every weight by the whole learning rate,
whatever the gradient. At the start of a run the schedule's warm-up prevents that. A joiner finds the
schedule at its height, so its rate is scaled up from nearly zero again.
"""

from __future__ import annotations

import torch

RAMP_STEPS = 50  # own steps; Adam's second moments at 0.95 have forgotten their start by then


def local_optimizer(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """Return the optimizer that holds the state: ``ZeroRedundancyOptimizer`` has one for this rank's part."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has taken steps; Adagrad's state is there before the first one."""
    states = optimizer.state.values()
    return any(not isinstance(each, dict) or each.get("step", 1) > 0 for each in states)


class InnerOptimizer:
    """Clears the optimizer's state when the steps behind it are dropped.

    Args:
      optimizer: the script's; None: the script did not pass it to ``attach``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer = local_optimizer(optimizer)
        # It came without a state, and nothing is posted yet: its state would be from warm-up.
        self._idle = optimizer is not None and not has_state(optimizer)
        self._spoilt = False  # the weights that it made are not finite
        self._ramp_from: int | None = None  # own step; the run's steps may jump

    def rate_scale(self, own_step: int) -> float:
        """Return the factor on the learning rate: from ``1 / RAMP_STEPS`` at a ramp's first step to 1."""
        if self._ramp_from is None:
            return 1.0
        return min(1.0, (own_step - self._ramp_from + 1) / RAMP_STEPS)

    def mark_used(self) -> None:
        """Keep the state from now on: steps behind it are posted."""
        self._idle = False

    def mark_restored(self) -> None:
        """Keep the state from now on, without a ramp: it comes from a local checkpoint."""
        self._idle = False
        self._ramp_from = None

    def mark_spoilt(self) -> None:
        """Clear the state at the next load: the weights that it made are not finite."""
        self._spoilt = True

    def renew(self, own_step: int | None, *, first: bool) -> None:
        """After a load, clear a state that belongs to dropped steps, and begin a ramp.

        Args:
          own_step: of the trainer; None at the run's own start, which needs no ramp.
          first: the trainer was not loaded before; an unknown optimizer is then taken for a new one.
        """
        if self._optimizer is None:
            if not (first or self._spoilt):
                return
        elif self._idle or self._spoilt:
            self._optimizer.state.clear()  # torch makes it again at the next step
        else:
            return
        self._spoilt = False
        self._ramp_from = own_step

"""The script's optimizer: its state after a load or a merge, and its rate ramp.

An optimizer's first steps are too large: Adam's first one moves every weight by the whole learning
rate, whatever the gradient. At the start of a run the schedule's warm-up prevents that. A joiner
finds the schedule at its height, so its rate is scaled up from nearly zero again.

An optimizer that computes its next step from a copy of the weights (the z of Schedule-Free) would
go on from where they were before a merge. So known copies take over what is written into the
weights; others are named.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator

import torch
from attrs import evolve

from .tensors import SharedTensor, local_part

RAMP_STEPS = 50  # own steps; Adam's second moments at 0.95 have forgotten their start by then

# By a part of the optimizer's class name, in lower case: what it calls copies of weights.
KNOWN_COPIES = {
    "asgd": ("ax",),
    "lookahead": ("slow_buffer", "slow_params"),
    "schedulefree": ("z", "x"),
}
# State that is less than this share of the weights' norm away from them looks like a copy.
ALIKE = 0.25
SAMPLE_COUNT = 1024  # elements of each tensor that are compared


def local_optimizer(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """Return the optimizer that holds the state: ``ZeroRedundancyOptimizer`` wraps it."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has taken steps; Adagrad has a state before its first one."""
    states = optimizer.state.values()
    return any(not isinstance(each, dict) or each.get("step", 1) > 0 for each in states)


class InnerOptimizer:
    """Clears the optimizer's state when its steps are dropped, and renews copies of weights.

    Args:
      optimizer: the script's; None: the script did not pass it to ``attach``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer = local_optimizer(optimizer)
        # It came without a state, and nothing is posted yet: its state would be from warm-up.
        self._idle = optimizer is not None and not has_state(optimizer)
        self._spoilt = False  # the weights that it made are not finite
        self._ramp_from: int | None = None  # own step; the run's steps may jump
        names = " ".join(kind.__name__.lower() for kind in type(optimizer).__mro__)
        self._known = {key for part, keys in KNOWN_COPIES.items() if part in names for key in keys}
        self._compared = False

    def rate_scale(self, own_step: int) -> float:
        """Return the factor on the learning rate: ``1 / RAMP_STEPS`` at a ramp's first step."""
        if self._ramp_from is None:
            return 1.0
        return min(1.0, (own_step - self._ramp_from + 1) / RAMP_STEPS)

    def mark_used(self) -> None:
        """Keep the state from now on: steps behind it are posted."""
        self._idle = False

    def mark_restored(self) -> None:
        """Keep the state from now on, without a ramp: it comes from a local checkpoint."""
        for parameter in self._parameters():
            self._renew_copies(parameter)  # they are of the checkpoint's step
        self._idle = False
        self._ramp_from = None

    def mark_spoilt(self) -> None:
        """Clear the state at the next load: the weights that it made are not finite."""
        self._spoilt = True

    def renew(self, own_step: int | None, *, first: bool) -> None:
        """After a load, clear a state that belongs to dropped steps, and begin a ramp.

        Args:
          own_step: of the trainer; None at the run's own start, which needs no ramp.
          first: the trainer was not loaded before; an unknown optimizer then counts as new.
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

    # ------------------------------------------------------------ copies of weights

    def bind(self, tensors: tuple[SharedTensor, ...]) -> tuple[SharedTensor, ...]:
        """Return the tensors such that their known copies take over what is written into them."""
        renew = self._renew_copies if self._known else None
        return tuple(evolve(each, written=renew) for each in tensors)

    def name_copies(self) -> None:
        """Warn of state that looks like the weights and is not known; once, when there is state."""
        if self._compared or self._optimizer is None or not self._optimizer.state:
            return
        self._compared = True
        excess: defaultdict[str, float] = defaultdict(float)  # of the squared distance
        for parameter in self._parameters():
            weights = _sample(local_part(parameter.detach()))
            for key, value in self._values(parameter):
                apart = (_sample(value) - weights).square().sum()
                excess[key] += float(apart - ALIKE**2 * weights.square().sum())
        for key in [each for each in excess if excess[each] < 0.0 and each not in self._known]:
            warnings.warn(
                f"the optimizer's state {key!r} looks like a copy of the weights; a round changes"
                " the weights and not this copy (see Optimizers in docs/script.md)",
                stacklevel=2,
            )

    def _renew_copies(self, parameter: torch.Tensor) -> None:
        for key, value in self._values(parameter):
            if key in self._known:
                value.copy_(local_part(parameter.detach()).reshape(value.shape))

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in [] if self._optimizer is None else self._optimizer.param_groups:
            yield from group["params"]

    def _values(self, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the state that has as many elements as a parameter."""
        state = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
        count = local_part(parameter.detach()).numel()
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and local_part(value).numel() == count:
                yield key, local_part(value)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE_COUNT)].float()

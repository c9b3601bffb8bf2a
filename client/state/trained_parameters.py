"""Finds what a run does not share: what was added, tied or replaced after ``attach``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..attach_errors import ModelError
from .tensors import entries_of, find_shared, identities_of

_BEFORE = (
    "build the model and its optimizer before holdfast.attach, and write new values into a"
    " parameter (`with torch.no_grad(): parameter.copy_(values)`)"
)


class TrainedParameters:
    """The tensors of the model and the optimizer at ``attach``.

    A tensor may be replaced in its place, since its present one is shared; a parameter together
    with the optimizer's. What the optimizer trained beside the model stays the script's own.

    Args:
      whole: of which ``model`` is a stage, see ``find_shared``.

    Raises:
      ModelError: a tensor cannot be shared, or the optimizer trains none of the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        whole: nn.Module | None = None,
    ) -> None:
        self._model = model
        self.tensors = find_shared(model, whole)
        self.optimizer = optimizer
        self._attached = [(each.spec.name, each.present) for each in self.tensors]
        trained, shared = list(self._trained()), self._shared()
        self._own = [each for each in trained if not _is_in(shared, each)]
        if trained and len(self._own) == len(trained):
            raise ModelError(
                "the optimizer trains none of this model's parameters: it was made for another"
                " model, or it keeps copies of the parameters, which would overwrite what the run"
                " merges",
                hint="make the optimizer from model.parameters() of the model that is attached",
            )

    def _trained(self) -> Iterator[torch.Tensor]:
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            yield from (each for each in group["params"] if each.requires_grad)

    def _shared(self) -> dict[object, str]:
        """Return the names of the shared tensors by their identities."""
        shared: dict[object, str] = {}
        for tensor in self.tensors:
            present, name = tensor.present, tensor.spec.name
            for identity in () if present is None else identities_of(present):
                if (other := shared.setdefault(identity, name)) != name:
                    raise ModelError(f"{other!r} and {name!r} were tied after attach", hint=_BEFORE)
        return shared

    def check(self) -> None:
        """Raise ModelError if the model has, or the optimizer trains, what is not shared."""
        shared = self._shared()
        for name, _, _, tensor in entries_of(self._model):
            if not _is_in(shared, tensor):
                raise ModelError(
                    f"tensor {name!r} came after attach: no peer gets it", hint=_BEFORE
                )
        own = {id(each) for each in self._own}
        for parameter in self._trained():
            if id(parameter) not in own and not _is_in(shared, parameter):
                found = (f"the old {name!r}" for name, each in self._attached if each is parameter)
                what = next(found, f"a new parameter of shape {tuple(parameter.shape)}")
                raise ModelError(f"the optimizer trains {what} since attach", hint=_BEFORE)


def _is_in(shared: dict[object, str], tensor: torch.Tensor) -> bool:
    return any(identity in shared for identity in identities_of(tensor))

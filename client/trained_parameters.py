"""Finds parameters that a script replaced after ``attach``: the optimizer would train the old ones in vain."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .attach_errors import ModelError
from .tensors import SharedTensor


class TrainedParameters:
    """The shared tensors that the optimizer trained at ``attach``.

    A buffer may be replaced, since its present tensor is the one that is shared. A parameter may be
    replaced together with the optimizer's.
    """

    def __init__(
        self, tensors: Sequence[SharedTensor], optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._optimizer = optimizer
        trained = self._trained()
        self._parameters = [
            (tensor, parameter)
            for tensor in tensors
            if id(parameter := tensor.holder[tensor.key]) in trained
        ]

    def _trained(self) -> set[int]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return {id(parameter) for group in groups for parameter in group["params"]}

    def check(self) -> None:
        """Raise ModelError if a trained parameter was replaced by one that the optimizer does not train."""
        replaced = [
            tensor
            for tensor, parameter in self._parameters
            if tensor.holder.get(tensor.key) is not parameter
        ]
        if not replaced:
            return
        trained = self._trained()
        for tensor in replaced:
            present = tensor.holder.get(tensor.key)
            if present is not None and id(present) not in trained:
                raise ModelError(
                    f"parameter {tensor.spec.name!r} was replaced after attach, and the optimizer "
                    "still trains the old one",
                    hint="write into it (`with torch.no_grad(): parameter.copy_(values)`), or "
                    "replace it before holdfast.attach",
                )

"""A replica's model, what trains it, and data parallel training of several at once.

The gradient of all replicas' windows together is the mean of their gradients, so a step on them in
one process is a step of synchronous data parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import nn

from benchmarks.learning_arms import Arm, Recipe
from examples.train import CONTEXT, GPT, GRADIENT_NORM_MAX, load_corpus, make_optimizer, windows

WEIGHT_DECAY = 0.1


@cache
def corpus() -> tuple[np.ndarray, np.ndarray]:
    """(training, held out): a file of the library's is in one of them."""
    return load_corpus()


class Learner:
    """A model with its inner optimizers, as they are at the run's first step."""

    def __init__(self, arm: Arm, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed)
        self.model = GPT()
        self.optimizers = make_optimizers(self.model, arm.inner)
        self._recipe = recipe

    def step(self, step: int, starts: np.ndarray, rate_scale: float = 1.0) -> float:
        """One inner step on the windows that begin at ``starts``; its loss.

        Args:
          rate_scale: of a newcomer's optimizer, below 1 in its first steps.
        """
        loss = self.model(*windows(corpus()[0], starts))
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self._recipe.rate(step) * rate_scale
            optimizer.step()
        return float(loss.item())


def make_optimizers(model: GPT, inner: str) -> list[torch.optim.Optimizer]:
    """``adamw``: as in the example. ``muon``: Muon for the layers' matrices, at AdamW's rates."""
    if inner == "adamw":
        return [make_optimizer(model)]
    matrices = [each for each in model.blocks.parameters() if each.dim() == 2]
    own = {id(each) for each in matrices}
    others = [each for each in model.parameters() if id(each) not in own]
    groups: list[dict[str, Any]] = [
        {"params": [each for each in others if each.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in others if each.dim() < 2], "weight_decay": 0.0},
    ]
    return [
        torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True),
        torch.optim.Muon(
            matrices, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw", momentum=0.95
        ),
    ]


def draw(chances: Sequence[np.random.Generator], batches: Sequence[int]) -> np.ndarray:
    """Where the next step's windows begin: so many of each of these replicas."""
    last = len(corpus()[0]) - CONTEXT
    drawn = [each.integers(last, size=batch) for each, batch in zip(chances, batches, strict=True)]
    return np.concatenate(drawn)


def weights_digest(model: nn.Module) -> bytes:
    digest = blake3()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.digest()

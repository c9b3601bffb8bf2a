"""A textbook DiLoCo to measure against: one process, torch's optimizers, no fragments, no
faults.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from attrs import frozen

# (worker, the worker's step) -> inputs and targets
Batches = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


@frozen
class Textbook:
    """Algorithm 1 of arXiv 2311.08105: AdamW inside, SGD with Nesterov momentum outside."""

    worker_count: int
    sync_every: int
    inner_lr: float
    outer_lr: float
    outer_momentum: float

    def inner(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.inner_lr)

    def train(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        batches: Batches,
        worker: int,
        round_: int,
    ) -> None:
        """One worker's inner steps of a round."""
        for step in range(self.sync_every):
            inputs, targets = batches(worker, round_ * self.sync_every + step)
            inner.zero_grad()
            torch.autograd.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            inner.step()

    def run(self, model: torch.nn.Module, batches: Batches, rounds: int) -> torch.nn.Module:
        """The global model after ``rounds`` outer steps from ``model``, which is not changed."""
        shared = copy.deepcopy(model)
        outer = torch.optim.SGD(
            shared.parameters(), lr=self.outer_lr, momentum=self.outer_momentum, nesterov=True
        )
        workers = [copy.deepcopy(model) for _ in range(self.worker_count)]
        inners = [self.inner(worker) for worker in workers]
        for round_ in range(rounds):
            for number, (worker, inner) in enumerate(zip(workers, inners, strict=True)):
                worker.load_state_dict(shared.state_dict())
                self.train(worker, inner, batches, number, round_)
            for index, parameter in enumerate(shared.parameters()):
                deltas = [
                    parameter.detach() - list(worker.parameters())[index].detach()
                    for worker in workers
                ]
                parameter.grad = torch.stack(deltas).mean(0)
            outer.step()
        return shared


@pytest.fixture
def textbook() -> Textbook:
    return Textbook(worker_count=3, sync_every=5, inner_lr=1e-2, outer_lr=0.7, outer_momentum=0.9)

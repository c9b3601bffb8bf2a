"""A model of equal weights, whose inner step adds a number to each: every sum is known."""

from __future__ import annotations

import time

import torch
from torch import nn

from holdfast.client.hook import Run
from tests.client.fake_daemon import WAIT_S


def line(value: float = 0.0, count: int = 3) -> nn.Linear:
    """A model of ``count`` equal weights."""
    model = nn.Linear(count, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def move(model: nn.Module, amount: float) -> None:
    """What an inner step does: every parameter grows by ``amount``."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(amount)


def step(run: Run, model: nn.Module, amount: float = 1.0, tokens: int = 1) -> None:
    move(model, amount)
    run.step(tokens=tokens)


def train(run: Run, model: nn.Module | None = None, pause_s: float = 0.0) -> None:
    """Take steps, of this model if one is given, until something happens."""
    deadline_s = time.monotonic() + WAIT_S
    while not run.finished and time.monotonic() < deadline_s:
        if model is not None:
            move(model, 1.0)
        run.step()
        time.sleep(pause_s)


def weights(model: nn.Linear) -> list[float]:
    return [float(value) for value in model.weight.detach().reshape(-1)]


def equals(model: nn.Linear, value: float) -> bool:
    return all(weight == value for weight in weights(model))

"""A script without a daemon, and the generators for its data."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.client.generators import Generators
from holdfast.protocol.errors import UserError


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_SOCKET", raising=False)


def test_it_trains_to_its_end_alone() -> None:
    seen: list[int] = []

    class Notes(holdfast.Callback):
        def on_step(self, step: holdfast.Step) -> None:
            seen.append(step.step)

    model, optimizer = model_and_optimizer()
    with holdfast.attach(
        model, optimizer, callbacks=[Notes()], standalone=True, total_steps=5
    ) as run:
        assert (run.is_leader, run.contributing, run.rate_scale) == (True, True, 1.0)
        assert run.total_steps == 5
        steps = 0
        while not run.finished:
            run.step(loss=0.5, tokens=2)
            run.log(rate=0.1)
            steps += 1
    assert (steps, run.global_step, run.round_count) == (5, 5, 0)
    assert seen == [1, 2, 3, 4, 5]


def test_the_environment_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STANDALONE", "1")
    run = holdfast.attach(*model_and_optimizer())
    assert run.total_steps is None
    for _step in range(100):
        run.step(loss=math.nan)  # no other weights can be had: it goes on
    assert not run.finished
    monkeypatch.setenv("HOLDFAST_STANDALONE_STEPS", "3")
    assert holdfast.attach(*model_and_optimizer()).total_steps == 3
    monkeypatch.setenv("HOLDFAST_STANDALONE_STEPS", "three")
    with pytest.raises(UserError, match="must be a whole number of steps, got 'three'"):
        holdfast.attach(*model_and_optimizer())


@pytest.mark.parametrize("value", ["", "0"])
def test_the_environment_can_say_no(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOLDFAST_STANDALONE", value)
    with pytest.raises(holdfast.NoDaemonError):
        holdfast.attach(*model_and_optimizer())


def test_a_length_of_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="total_steps must be 1 or more, got 0"):
        holdfast.attach(*model_and_optimizer(), standalone=True, total_steps=0)


# ---------------------------------------------------------------- generators


def draws(peer: str, start: str, step: int, kind: str = "torch") -> list[float]:
    made = Generators(peer, start).make(kind, step)
    if isinstance(made, np.random.Generator):
        return list(made.random(4))
    return torch.rand(4, generator=made).tolist()


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_no_peer_no_step_and_no_restart_draws_the_same(kind: str) -> None:
    first = draws("alder", "a.0", 0, kind)
    assert first == draws("alder", "a.0", 0, kind)
    assert first != draws("birch", "a.0", 0, kind)
    assert first != draws("alder", "a.0", 50, kind)
    assert first != draws("alder", "a.1", 0, kind)


def test_every_call_makes_another_generator() -> None:
    run = holdfast.attach(*model_and_optimizer(), standalone=True)
    first, second = run.generator(), run.generator()
    assert torch.rand(4, generator=first).tolist() != torch.rand(4, generator=second).tolist()
    assert isinstance(run.generator("numpy"), np.random.Generator)
    with pytest.raises(ValueError, match="give 'torch' or 'numpy'"):
        run.generator("jax")  # type: ignore[call-overload]

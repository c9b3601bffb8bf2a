"""Common training loops: schedules, clipping, torch.compile; and a joiner's learning rate."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.client.attach import attach
from holdfast.client.hook import Run
from holdfast.client.state.inner_optimizer import RAMP_STEPS
from holdfast.protocol.arena import STEP_SLOT
from holdfast.protocol.messages import Failing, Finished, SetRole
from tests.client.fake_daemon import FakeDaemon, settled, talking, wait_for
from tests.client.test_algorithm import adamw

COUNT = 3


def line() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(COUNT, 1, bias=False)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, COUNT)).sum().backward()
    optimizer.step()


# ---------------------------------------------------------------- a joiner's rate


def join(daemon: FakeDaemon, step: int = 700) -> None:
    daemon.open_arenas()
    daemon.share(0, 7, np.ones(COUNT, np.float32))
    daemon.load(step=step)


@pytest.mark.parametrize("known", [True, False])
def test_a_joiners_rate_ramps_over_its_own_steps(known: bool) -> None:
    model, jumped = line(), threading.Event()

    def script(daemon: FakeDaemon) -> None:
        join(daemon)
        settled(lambda: daemon.posted.slots[STEP_SLOT] == 710)
        daemon.commit(1, 0.0, contributed=False, step=5_000)
        jumped.set()

    with talking(script, stay=True) as path:
        with attach(model, adamw(model) if known else None, socket_path=path) as run:
            seen = []
            for number in range(RAMP_STEPS + 5):
                if number == 10:
                    wait_for(jumped)
                seen.append(run.rate_scale)
                run.step()
            assert run.global_step == 5_000 + RAMP_STEPS + 5 - 11
    assert seen[:RAMP_STEPS] == [(number + 1) / RAMP_STEPS for number in range(RAMP_STEPS)]
    assert seen[RAMP_STEPS:] == [1.0] * 5


@pytest.mark.parametrize(("step", "warm"), [(700, True), (0, False)])
def test_no_ramp_for_an_optimizer_with_a_state_nor_at_the_runs_first_step(
    step: int, warm: bool
) -> None:
    model = line()
    optimizer = adamw(model)
    if warm:
        one_step(model, optimizer)
    with talking(functools.partial(join, step=step), stay=True) as path:
        with attach(model, optimizer, socket_path=path) as run:
            assert run.rate_scale == 1.0


def test_a_spares_ramp_begins_when_its_turn_comes_and_a_resync_later_is_no_reason_for_one() -> None:
    model = line()
    optimizer = adamw(model)

    def script(daemon: FakeDaemon) -> None:
        daemon.open_arenas()
        daemon.share(0, 7, np.ones(COUNT, np.float32))
        daemon.say(SetRole(False, "all places are taken"))
        daemon.load(step=100)
        settled(lambda: daemon.posted.slots[STEP_SLOT] == 101)
        daemon.load(step=900, step_limit=900 + RAMP_STEPS)
        daemon.say(SetRole(True, ""))
        daemon.post_round(1, at_step=900 + RAMP_STEPS)
        daemon.load(step=2_000, step_limit=2_001)
        daemon.say(Finished())

    with talking(script, stay=True) as path, attach(model, optimizer, socket_path=path) as run:
        seen: dict[int, float] = {}
        while not run.finished:
            one_step(model, optimizer)
            run.step()
            seen.setdefault(run.global_step, run.rate_scale)
    assert seen[900] == 1 / RAMP_STEPS
    assert seen[910] == 11 / RAMP_STEPS
    assert seen[2_000] == 1.0


def test_who_lost_its_moments_with_its_weights_ramps_again() -> None:
    model = line()
    optimizer = adamw(model)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(nan_steps=2, step_limit=1)
        daemon.round(1, 1, change=0.0)
        daemon.hear(Failing)
        daemon.load(step=50, spoilt=True)

    with talking(script, stay=True) as path, attach(model, optimizer, socket_path=path) as run:
        for loss in (1.0, float("nan"), float("nan")):
            assert run.rate_scale == 1.0
            one_step(model, optimizer)
            run.step(loss=loss)
        assert run.rate_scale == 1 / RAMP_STEPS


def test_a_scheduler_follows_the_runs_step_and_the_ramp() -> None:
    def schedule(step: int) -> float:
        return 1.0 / (1 + step)

    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    with talking(join, stay=True) as path, attach(model, optimizer, socket_path=path) as run:
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda _: schedule(run.global_step) * run.rate_scale
        )
        for number in range(5):
            (rate,) = scheduler.get_last_lr()
            assert rate == optimizer.param_groups[0]["lr"]
            assert rate == 2.0 * schedule(700 + number) * ((number + 1) / RAMP_STEPS)
            one_step(model, optimizer)
            run.step()
            scheduler.step()


# ---------------------------------------------------------------- clipping, schedules, compilation

EVERY, ROUNDS, CHANGE = 3, 4, 0.25


def rate_at(step: int) -> float:
    return 1.0 / (1 + 0.1 * step)


def small_net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def loop(
    model: nn.Module, global_step: Callable[[], int], after_step: Callable[[], None]
) -> list[float]:
    """Run a common training loop with ``after_step`` in the place of ``run.step``; return the
    losses.
    """
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: rate_at(global_step()))
    chance = torch.Generator().manual_seed(9)
    losses = []
    for _ in range(EVERY * ROUNDS + 2):
        inputs = torch.randn(8, 4, generator=chance)
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        after_step()
        scheduler.step()
    return losses


def without_holdfast() -> tuple[nn.Module, list[float]]:
    """Run the same loop; every few steps all weights change, as by rounds."""
    model = small_net()
    shared = [parameter.detach().clone() for parameter in model.parameters()]
    steps = 0

    def after_step() -> None:
        nonlocal steps
        steps += 1
        if steps % EVERY == 0:
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), shared, strict=True):
                    value -= CHANGE
                    parameter.copy_(value)

    return model, loop(model, lambda: steps, after_step)


def rounds(daemon: FakeDaemon) -> None:
    daemon.start(step_limit=EVERY)
    for number in range(1, ROUNDS + 1):
        daemon.round(number, EVERY * number, CHANGE, step_limit=EVERY * (number + 1))


@pytest.mark.parametrize("compiled", [False, True])
def test_rounds_change_the_weights_and_nothing_else_of_a_loop(compiled: bool) -> None:
    """A compiled model sees merged weights without being compiled again. The backend runs the
    captured graph as it is: what a real one makes of it takes a compiler and a minute."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(
        graph: torch.fx.GraphModule, _: list[torch.Tensor]
    ) -> Callable[..., list[torch.Tensor]]:
        graphs.append(graph)
        return graph.forward

    inner = small_net()
    model: nn.Module = inner
    if compiled:
        model = torch.compile(inner, backend=backend)  # type: ignore[assignment]
    with talking(rounds, stay=True) as path, attach(model, socket_path=path) as run:
        losses = loop(model, lambda: run.global_step, functools.partial(stepped, run))
        assert run.round_count == ROUNDS
    reference, expected_losses = without_holdfast()
    assert losses == expected_losses
    expected = reference.state_dict()
    for name, tensor in inner.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert len(graphs) == compiled


def stepped(run: Run) -> None:
    run.step(loss=1.0, tokens=8)

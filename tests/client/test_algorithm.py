"""The hook and an averaging daemon in numpy are DiLoCo, and data-parallel SGD, to the bit or
nearly.

Every trainer runs on its own thread with its own socket; a barrier stands for the network.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import nn

from holdfast.client.attach import attach
from holdfast.client.hook import Run
from holdfast.diloco.outer import outer_step
from holdfast.protocol.arena import STEP_SLOT
from holdfast.protocol.messages import Finished
from tests.client import plain_model
from tests.client.fake_daemon import WAIT_S, FakeDaemon, settled, talking

Values = NDArray[np.float32]

INNER_RATE = 0.05
BATCH = 4


def make_model(seed: int = 3) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def flat(model: nn.Module) -> Values:
    values = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    array: Values = values.numpy().copy()
    return array


def batches(peer: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + peer)
    return [
        (torch.randn(BATCH, 5, generator=generator), torch.randn(BATCH, 1, generator=generator))
        for _ in range(count)
    ]


def inner_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    inputs, targets = batch
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=INNER_RATE)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@frozen
class Settings:
    """Of the outer loop: steps of a round, rounds, rate and momentum."""

    every: int
    rounds: int
    lr: float
    mu: float


class Averaging:
    """The daemons of a run together: the mean by weight, then the outer step.

    With ``delayed`` a round takes as long as the steps up to the next one.
    """

    def __init__(self, count: int, settings: Settings, delayed: bool) -> None:
        self.delayed = delayed
        self.posts: list[tuple[float, Values] | None] = [None] * count
        self.settings = settings
        self.barrier = threading.Barrier(count, timeout=WAIT_S)

    def serve(self, number: int, daemon: FakeDaemon) -> None:
        every = self.settings.every
        daemon.open_arenas(overlap_steps=every if self.delayed else 0)
        daemon.found()  # the models start equal, so each may found
        daemon.load(step_limit=every)
        momentum = np.zeros(daemon.sizes[0].momentum_count, np.float32)
        for round_number in range(1, self.settings.rounds + 1):
            at_step = round_number * every
            posted = daemon.post_round(round_number, at_step)
            assert (posted.step, posted.version) == (at_step, round_number - 1)
            if self.delayed:
                settled(lambda: daemon.posted.slots[STEP_SLOT] == at_step + every)  # noqa: B023
                assert daemon.hears_nothing(0.01), "it waits there"
            self.posts[number] = (float(posted.tokens), daemon.posted.values(0).copy())
            self.barrier.wait()
            mean = weighted_mean([post for post in self.posts if post is not None])
            self.barrier.wait()  # nobody posts again before all have read
            values = daemon.shared.values(0).copy()
            outer_step(values, momentum, mean, self.settings.lr, self.settings.mu, nesterov=True)
            daemon.commit(round_number, values, step=at_step, step_limit=at_step + every)
        daemon.say(Finished())


def weighted_mean(posts: Sequence[tuple[float, Values]]) -> Values:
    total = np.zeros_like(posts[0][1])
    for weight, values in posts:
        total += values * np.float32(weight)
    total /= np.float32(sum(weight for weight, _ in posts))
    return total


def train(
    number: int, path: str, optimizers: Optimizers, steps: int, results: list[Values | None]
) -> None:
    model = make_model()
    optimizer = optimizers(model)
    with attach(model, optimizer, socket_path=path) as run:
        for batch in batches(number, steps):
            inner_step(model, optimizer, batch)
            run.step(tokens=BATCH)
        finish(run)
    results[number] = flat(model)


def finish(run: Run) -> None:
    while not run.finished:
        run.step()


def train_together(
    count: int, optimizers: Optimizers, settings: Settings, *, delayed: bool = False
) -> list[Values]:
    """Return each trainer's weights after all rounds, through hook, sockets and arenas."""
    averaging = Averaging(count, settings, delayed)
    steps = settings.every * (settings.rounds + delayed)
    results: list[Values | None] = [None] * count

    def peer(number: int) -> None:
        with talking(functools.partial(averaging.serve, number), stay=True) as path:
            train(number, path, optimizers, steps, results)

    threads = [threading.Thread(target=peer, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [result for result in results if result is not None]
    assert len(done) == count
    return done


def diloco(count: int, optimizers: Optimizers, settings: Settings) -> Values:
    """The paper's loop, in one thread and without holdfast (arXiv 2311.08105, algorithm 1)."""
    models = [make_model() for _ in range(count)]
    inner = [optimizers(model) for model in models]
    every, rounds = settings.every, settings.rounds
    data = [batches(number, every * rounds) for number in range(count)]
    theta = flat(models[0])
    momentum = np.zeros_like(theta)
    rate, decay = np.float32(settings.lr), np.float32(settings.mu)
    for round_number in range(rounds):
        posts = []
        for model, optimizer, batch in zip(models, inner, data, strict=True):
            for step in range(round_number * every, (round_number + 1) * every):
                inner_step(model, optimizer, batch[step])
            posts.append((float(every * BATCH), theta - flat(model)))
        mean = weighted_mean(posts)
        momentum = np.add(momentum * decay, mean)
        theta = np.subtract(theta, (mean + momentum * decay) * rate)
        for model in models:
            vector = torch.from_numpy(theta.copy())
            nn.utils.vector_to_parameters(vector, model.parameters())
    return theta


@pytest.mark.parametrize("optimizers", [sgd, adamw])
def test_two_trainers_are_textbook_diloco_bit_for_bit(optimizers: Optimizers) -> None:
    settings = Settings(every=5, rounds=6, lr=0.7, mu=0.9)
    expected = diloco(2, optimizers, settings)
    for weights in train_together(2, optimizers, settings):
        assert weights.tobytes() == expected.tobytes()


def delayed_diloco(count: int, optimizers: Optimizers, settings: Settings) -> Values:
    """Each outer step comes one round late, under the steps taken meanwhile."""
    models = [make_model() for _ in range(count)]
    inner = [optimizers(model) for model in models]
    every, rounds = settings.every, settings.rounds
    data = [batches(number, every * (rounds + 1)) for number in range(count)]
    theta = flat(models[0])
    momentum = np.zeros_like(theta)
    posts: list[tuple[float, Values]] = []
    snapshots: list[Values] = []
    for round_number in range(rounds + 1):
        for model, optimizer, batch in zip(models, inner, data, strict=True):
            for step in range(round_number * every, (round_number + 1) * every):
                inner_step(model, optimizer, batch[step])
        if round_number > 0:
            mean = weighted_mean(posts)
            outer_step(theta, momentum, mean, settings.lr, settings.mu, nesterov=True)
            for model, snapshot in zip(models, snapshots, strict=True):
                merged = torch.from_numpy(theta - (snapshot - flat(model)))
                nn.utils.vector_to_parameters(merged, model.parameters())
        snapshots = [flat(model) for model in models]
        posts = [(float(every * BATCH), theta - snapshot) for snapshot in snapshots]
    return theta


@pytest.mark.parametrize("optimizers", [sgd, adamw])
def test_with_the_whole_round_as_overlap_it_is_diloco_one_round_late(
    optimizers: Optimizers,
) -> None:
    settings = Settings(every=5, rounds=6, lr=0.7, mu=0.7)
    expected = delayed_diloco(2, optimizers, settings)
    for weights in train_together(2, optimizers, settings, delayed=True):
        assert weights.tobytes() == expected.tobytes()


def test_one_inner_step_a_round_is_data_parallel_sgd() -> None:
    """With outer rate 1 and no momentum, averaging weights is averaging gradients."""
    steps, count = 20, 3
    model = make_model()
    optimizer = sgd(model)
    data = [batches(number, steps) for number in range(count)]
    for step in range(steps):
        inputs = torch.cat([data[number][step][0] for number in range(count)])
        targets = torch.cat([data[number][step][1] for number in range(count)])
        inner_step(model, optimizer, (inputs, targets))
    for weights in train_together(count, sgd, Settings(every=1, rounds=steps, lr=1.0, mu=0.0)):
        np.testing.assert_allclose(weights, flat(model), rtol=0, atol=1e-6)


def test_the_optimizers_state_stays_local_and_untouched() -> None:
    model = make_model()
    optimizer = adamw(model)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=1)
        daemon.round(1, 1, change=0.5)

    with talking(script, stay=True) as path, attach(model, optimizer, socket_path=path) as run:
        inner_step(model, optimizer, batches(0, 1)[0])
        before = [
            (state["exp_avg"].clone(), state["exp_avg_sq"].clone(), float(state["step"]))
            for state in optimizer.state.values()
        ]
        while run.round_count == 0:
            run.step()
        for state, (mean, square, step) in zip(optimizer.state.values(), before, strict=True):
            assert torch.equal(state["exp_avg"], mean)
            assert torch.equal(state["exp_avg_sq"], square)
            assert float(state["step"]) == step
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_overlap_trains_on_while_the_round_runs_and_blocks_when_it_is_used_up() -> None:
    tau = 3
    model = plain_model.line(1.0, count=1)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(overlap_steps=tau, step_limit=2)
        assert daemon.post_round(1, at_step=2, step_limit=2).step == 2
        assert daemon.posted.values(0).tolist() == [-1.0]
        settled(lambda: daemon.posted.slots[STEP_SLOT] >= 2 + tau)
        assert daemon.hears_nothing()
        assert daemon.posted.slots[STEP_SLOT] == 2 + tau  # and not a step further
        daemon.commit(1, 100.0, step=2, step_limit=6)
        posted = daemon.post_round(2, at_step=6)
        assert (posted.tokens, posted.version) == (4 * 10, 1)
        assert daemon.posted.values(0).tolist() == [-2.0]  # the steps since the first post
        daemon.end_round(2, committed=False)
        daemon.say(Finished())

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        seen = []
        while not run.finished:
            plain_model.step(run, model, 0.5, tokens=10)
            seen.append(model.weight.item())
        assert seen[:5] == [1.5, 2.0, 2.5, 3.0, 101.5]
        assert seen[-1] == 100.0

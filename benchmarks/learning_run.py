"""One arm of ``learning`` with one seed: lives through the run and says what was learned.

``dp`` arms are one process (``learning_script`` says why that is data parallel). All others are
runs of the production master and peers over the network in memory (``holdfast.simulation``), in
virtual time, with a real training script at each peer (``learning_trainer``).

What is judged are the shared parameters: held by all peers with the same bits, which is checked
against the roots that they all reported, byte by byte among them, and in the trainers' models.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import trio
from torch import nn

from benchmarks.learning_arms import (
    EVALUATION_BATCH,
    STEP_S,
    VALIDATION_WINDOWS,
    Arm,
    Outcome,
    Recipe,
)
from benchmarks.learning_script import Learner, corpus, draw, weights_digest
from benchmarks.learning_trainer import TorchTrainer
from examples.train import CONTEXT, GPT, windows
from holdfast.client.state.tensors import find_shared, layout_of
from holdfast.daemon.fragment_layout import fragments_of
from holdfast.simulation.swarm import Swarm
from holdfast.simulation.virtual_time import run_virtually

WAIT_S = 3_000.0  # virtual; nothing takes so long
REPLACED_AFTER_S = 2.0  # a machine that dies is replaced by another one
BF16_BYTES = 2


class DisagreementError(AssertionError):
    """Peers hold different weights."""


def run_arm(arm: Arm, recipe: Recipe, *, validation_windows: int = VALIDATION_WINDOWS) -> Outcome:
    """Live through it. The same arguments give the same outcome, but for ``seconds``."""
    torch.set_num_threads(1)
    began_s = time.monotonic()
    if arm.distributed:
        model, figures = run_virtually(
            lambda: _live_through(arm, recipe), seed=recipe.seed, seconds_max=2 * WAIT_S
        )
    else:
        model, figures = _run_alone(arm, recipe)
    parts = losses_of(model, validation_windows)
    loss = statistics.fmean(parts)
    digest = weights_digest(model).hex()
    seconds = time.monotonic() - began_s
    return Outcome(arm.name, recipe.seed, loss, parts, digest=digest, seconds=seconds, **figures)


@torch.no_grad()
def losses_of(model: nn.Module, window_count: int) -> list[float]:
    """Validation loss of parts of the held-out files, one after the other, on evenly spread
    windows.
    """
    held_out = corpus()[1]
    starts = np.linspace(0, len(held_out) - CONTEXT - 1, window_count).astype(np.int64)
    parts = starts.reshape(-1, min(EVALUATION_BATCH, window_count))
    return [float(model(*windows(held_out, part)).item()) for part in parts]


# ---------------------------------------------------------------- data parallel


def _run_alone(arm: Arm, recipe: Recipe) -> tuple[GPT, dict[str, Any]]:
    learner = Learner(arm, recipe)
    batches = [arm.batch(replica, recipe.batch) for replica in range(arm.peers)]
    chances = [recipe.chance(replica) for replica in range(arm.peers)]
    for step in range(recipe.steps):
        learner.step(step, draw(chances, batches))
    model = learner.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return model, {
        "tokens": recipe.steps * sum(batches) * CONTEXT,
        "round_bytes": 2 * (arm.peers - 1) * BF16_BYTES * parameters,
        "speed": None,
    }


# ---------------------------------------------------------------- peers


class LearningSwarm(Swarm):
    """A swarm whose trainers train."""

    def __init__(self, nursery: trio.Nursery, arm: Arm, recipe: Recipe) -> None:
        super().__init__(
            nursery,
            arm.toml(recipe.steps),
            seed=recipe.seed,
            layout=layout_of(find_shared(GPT())),
            step_s=STEP_S,
            delay_s=arm.delay_s,
        )
        self.witness.knows_contributions = False  # it checks all roots, and no means
        self.witness.knows_samples = False
        self.arm = arm
        self.recipe = recipe
        self.trainers: dict[str, TorchTrainer] = {}
        self.paces: dict[str, float] = {}  # by machine, how many times longer its steps take

    def make_trainer(self, name: str, peer: str, lives: int) -> TorchTrainer:
        replica = len(self.trainers)
        step_s = self.step_s * self.paces.setdefault(name, self.arm.slowness_of(replica))
        self.trainers[name] = trainer = TorchTrainer(
            peer,
            self.layout,
            self.witness,
            step_s=step_s,
            arm=self.arm,
            recipe=self.recipe,
            replica=replica,
        )
        return trainer

    @property
    def alive(self) -> list[str]:
        return [name for name, sim in self.peers.items() if sim.alive]

    async def committed_count(self, count: int) -> None:
        """Wait until so many rounds are committed."""
        await self.when(lambda: self.committed >= count, within_s=WAIT_S)

    @property
    def sent_bytes(self) -> int:
        return sum(self.world.sent_bytes.values())

    def shared_model(self, names: Sequence[str]) -> GPT:
        """The shared parameters as these hold them.

        Raises:
          DisagreementError: two of them hold different ones.
        """
        model = GPT()
        tensors = find_shared(model)
        fragments = fragments_of(self.layout, self.spec.diloco)
        for number, fragment in enumerate(fragments):
            copies = [self.peers[name].service.state_service.state.values(number) for name in names]
            for name, copy in zip(names, copies, strict=True):
                if copy.tobytes() != copies[0].tobytes():
                    raise DisagreementError(f"{name} and {names[0]} differ in fragment {number}")
            for place in fragment.places:
                values = copies[0][place.offset : place.offset + place.count]
                tensors[place.index].write(values)
        return model

    async def replace_some(self) -> None:
        """Every so often one peer dies, and another machine comes in its place."""
        every = self.arm.kill_rounds
        assert self.spec.run.rounds
        for count in range(every, self.spec.run.rounds, every):
            await self.committed_count(count)
            await trio.sleep(self.step_s * self.spec.diloco.sync_every / 2)
            dead, name = self.rng.choice(self.alive), f"peer{len(self.peers)}"
            self.crash(dead)
            await trio.sleep(REPLACED_AFTER_S)
            self.paces[name] = self.paces[dead]  # another machine of that kind
            self.add_peer(name, founder=False)


async def _live_through(arm: Arm, recipe: Recipe) -> tuple[GPT, dict[str, Any]]:
    async with trio.open_nursery() as nursery:
        swarm = LearningSwarm(nursery, arm, recipe)
        await swarm.start_master()
        for number in range(arm.peers):
            swarm.add_peer(f"peer{number}", founder=number == 0)
        if arm.kill_rounds:
            nursery.start_soon(swarm.replace_some)
        rounds = swarm.spec.run.rounds
        await swarm.committed_count(1)
        first_bytes = swarm.sent_bytes
        await swarm.committed_count(rounds)
        round_bytes = (swarm.sent_bytes - first_bytes) / max(1, rounds - 1)
        ended_s = trio.current_time()
        # A peer that came when all was over has heard of nothing.
        names = [name for name in swarm.alive if swarm.trainers[name].began_s <= ended_s]
        trainers = [swarm.trainers[name] for name in names]
        await swarm.until(lambda: all(trainer.digest for trainer in trainers))
        await swarm.when(lambda: all(map(swarm.in_sync, names)), within_s=WAIT_S)
        swarm.check_final(names)
        model = swarm.shared_model(names)
        if {trainer.digest for trainer in trainers} != {weights_digest(model)}:
            raise DisagreementError("a trainer ended with other weights than the run's")
        figures = {
            "tokens": sum(trainer.tokens for trainer in swarm.trainers.values()),
            "round_bytes": round_bytes,
            "speed": _speed(arm, recipe, list(swarm.trainers.values()), ended_s),
            "notes": _notes(swarm),
        }
        nursery.cancel_scope.cancel()
    return model, figures


def _speed(arm: Arm, recipe: Recipe, trainers: Sequence[TorchTrainer], ended_s: float) -> float:
    began_s = min(trainer.began_s for trainer in trainers)
    alone = sum(recipe.batch * CONTEXT / trainer.step_s for trainer in trainers[: arm.peers])
    return sum(trainer.tokens for trainer in trainers) / (ended_s - began_s) / alone


def _notes(swarm: LearningSwarm) -> dict[str, Any]:
    commits = swarm.witness.commits
    return {
        "rounds": len(commits),
        "peers": sum(trainer.tokens > 0 for trainer in swarm.trainers.values()),
        "killed": len(swarm.peers) - len(swarm.alive),
        "contributors_at_last": len(commits[-1].contributors),
        "contributions": sum(len(commit.contributors) for commit in commits),
        "virtual_s": trio.current_time(),
    }

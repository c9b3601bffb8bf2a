"""What moments of another trainer are worth to who joins: its loss in its first steps.

    python -m benchmarks.moments [--seeds 2] [--steps 400]

Two peers train ``examples/train.py``'s GPT, production master and peers in virtual time (see
``learning_run``); at half of the run a third one joins, with an optimizer that knows nothing. It draws
the same windows in every arm:

    cold     its rate is the schedule's at once
    ramp     its rate ramps (``run.rate_scale``), as it is by default
    int8     ``diloco.inner_state = "int8"``: it goes on from a contributor's moments

What is shown is the loss of its own weights on held-out bytes, after so many steps of its own, less
what it was at the first, and beside it that of a peer that was there from the beginning.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trio

from benchmarks.learning_arms import OUTER, Arm, Recipe
from benchmarks.learning_run import Judge, LearningSwarm
from benchmarks.learning_script import Learner, draw
from benchmarks.learning_trainer import TorchTrainer
from benchmarks.progress import say
from examples.train import CONTEXT
from holdfast.client.connection import Connection
from holdfast.client.hook import attach_over
from holdfast.protocol.virtual_time import run_virtually

ARMS = ("cold", "ramp", "int8")
SYNC_EVERY = 50
PEERS = 2
LOOKED_AT = (1, 5, 10, 20, 30, 40, 50)  # steps of the joiner's own
WINDOWS = 256
WAIT_S = 3_000.0  # virtual


class Joining(TorchTrainer):
    """A trainer that says how its own weights do in its first steps after ``joined`` is set.

    Attributes:
      losses: on held-out bytes, by its own steps since then; on what it trained on, at each of them.
    """

    cold = False
    joined: Callable[[], bool]
    losses: dict[int, float]
    trained: list[float]

    def _script(self, connection: Connection, wait: Callable[[float], None]) -> None:
        recipe, tokens = self._recipe, self._recipe.batch * CONTEXT
        chance, judge = recipe.chance(self._replica), Judge(WINDOWS)
        self.losses, self.trained = {}, []
        scale = [1.0]

        class Ramped(Recipe):
            def rate(self, step: int) -> float:
                return super().rate(step) * scale[0]

        learner = Learner(self._arm, Ramped(recipe.steps, recipe.batch, recipe.seed))
        model, optimizer = learner.model, learner.optimizers[0]
        with attach_over(
            lambda: connection, model, optimizer, lambda: self._now_s, lambda work: work()
        ) as run:
            own_steps = 0
            while not run.finished:
                if self.joined():
                    if own_steps + 1 in LOOKED_AT:
                        loss = statistics.fmean(judge.losses(model, WINDOWS))
                        self.losses.setdefault(own_steps + 1, loss)
                    own_steps += 1
                scale[0] = 1.0 if self.cold else run.rate_scale
                loss = learner.step(run.global_step, draw([chance], recipe))
                if self.joined() and len(self.trained) < LOOKED_AT[-1]:
                    self.trained.append(loss)
                wait(self.step_s)
                self.tokens += tokens
                run.step(loss=loss, tokens=tokens)


class JoiningSwarm(LearningSwarm):
    """One of whose trainers comes late."""

    late = False

    def __init__(self, nursery: trio.Nursery, arm: Arm, recipe: Recipe) -> None:
        self.all_trainers: list[Joining] = []
        super().__init__(nursery, arm, recipe)

    def make_trainer(self, name: str, peer: str, lives: int) -> TorchTrainer:
        trainer = Joining(
            peer,
            self.layout,
            self.witness,
            step_s=self.step_s,
            arm=self.arm,
            recipe=self.recipe,
            replica=len(self.trainers),
        )
        trainer.joined = lambda: self.late
        trainer.cold = self.arm.name == "cold"
        self.trainers[name] = trainer
        self.all_trainers.append(trainer)
        return trainer


def live_through(name: str, recipe: Recipe) -> dict[str, Any]:
    """One arm with one seed."""
    settings = {"sync_every": SYNC_EVERY, "min_members": PEERS, "overlap": 0, **OUTER}
    arm = Arm(name, name, PEERS + 1, name, settings)
    arm.settings["inner_state"] = "int8" if name == "int8" else "none"

    async def live() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
            async with trio.open_nursery() as nursery:
                swarm = JoiningSwarm(nursery, arm, recipe)
                swarm.disks = Path(folder)
                await swarm.start_master()
                for number in range(PEERS):
                    swarm.add_peer(f"peer{number}", founder=number == 0)
                half = arm.rounds(recipe.steps) // 2
                await swarm.committed_count(half)
                swarm.add_peer("joiner", founder=False)
                joiner = swarm.trainers["joiner"]
                await swarm.when(lambda: joiner.began_s < float("inf"), within_s=WAIT_S)
                swarm.late = True
                await swarm.until(
                    lambda: all(LOOKED_AT[-1] in each.losses for each in swarm.all_trainers)
                )
                assert swarm.master is not None
                status = swarm.master.coordinator.status(trio.current_time())
                found: dict[str, Any] = {
                    each: {"held out": trainer.losses, "trained on": trainer.trained}
                    for each, trainer in zip(swarm.peers, swarm.all_trainers, strict=True)
                }
                found["events"] = [e["text"] for e in status["events"] if "optimizer" in e["text"]]
                nursery.cancel_scope.cancel()
            return found

    return run_virtually(live, seed=recipe.seed, seconds_max=2 * WAIT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--arms", default=",".join(ARMS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(arguments.seeds):
        for name in arguments.arms.split(","):
            found = live_through(name, Recipe(steps=arguments.steps, seed=seed))
            for text in found.pop("events"):
                say(text)
            for peer in ("joiner", "peer0"):
                losses, trained = found[peer]["held out"], found[peer]["trained on"]
                points = "  ".join(f"{step}: {losses[step]:.4f}" for step in LOOKED_AT)
                mean = statistics.fmean(trained)
                say(f"seed {seed}  {name:5}  {peer:7}  {points}  trained on, mean {mean:.4f}")


if __name__ == "__main__":
    main()

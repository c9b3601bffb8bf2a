"""What moments of another trainer are worth to who joins: its loss in its first steps.

    python -m benchmarks.moments [--seeds 2] [--steps 240] [--batch 6] [--beta2 0.95]

Two peers train ``examples/train.py``'s GPT, production master and peers in virtual time (see
``learning_run``); at half of the run a third one joins, with an optimizer that knows nothing. It draws
the same windows in every arm:

    cold     its rate is the schedule's at once
    ramp     its rate ramps (``run.rate_scale``), as it is by default
    int8     ``diloco.inner_state = "int8"``: it goes on from a contributor's moments
    short    the same, and its rate ramps over ten steps

What is shown is the loss of its own weights on held-out bytes, after so many steps of its own, and beside
it that of a peer that was there from the beginning.
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

ARMS = ("cold", "ramp", "int8", "short")
SHORT_STEPS = 10
SYNC_EVERY = 60  # so that what is looked at is before its first contribution
PEERS = 2
LOOKED_AT = (1, 5, 10, 20, 30, 40, 50)  # steps of the joiner's own
BETA2 = 0.95  # of AdamW, as in the example; torch's own is 0.999
WINDOWS = 256
WAIT_S = 3_000.0  # virtual


class Joining(TorchTrainer):
    """A trainer that says how its own weights do in its first steps after ``joined`` is set.

    Attributes:
      losses: on held-out bytes, by its own steps since then; on what it trained on, at each of them.
    """

    arm_name = ""
    beta2 = BETA2
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
        for group in optimizer.param_groups:
            group["betas"] = (0.9, self.beta2)
        with attach_over(
            lambda: connection, model, optimizer, lambda: self._now_s, lambda work: work()
        ) as run:
            own_steps = 0
            while not run.finished:
                if self.joined() and self._replica != 1:  # of the two that were there, one will do
                    if own_steps + 1 in LOOKED_AT:
                        loss = statistics.fmean(judge.losses(model, WINDOWS))
                        self.losses.setdefault(own_steps + 1, loss)
                    own_steps += 1
                scale[0] = 1.0 if self.arm_name == "cold" else run.rate_scale
                if self.arm_name == "short" and self._replica == PEERS:
                    scale[0] = min(1.0, own_steps / SHORT_STEPS)
                loss = learner.step(run.global_step, draw([chance], recipe))
                if self.joined() and len(self.trained) < LOOKED_AT[-1]:
                    self.trained.append(loss)
                wait(self.step_s)
                self.tokens += tokens
                run.step(loss=loss, tokens=tokens)


class JoiningSwarm(LearningSwarm):
    """One of whose trainers comes late."""

    late = False
    beta2 = BETA2

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
        trainer.beta2 = self.beta2
        trainer.arm_name = self.arm.name
        self.trainers[name] = trainer
        self.all_trainers.append(trainer)
        return trainer


def live_through(name: str, recipe: Recipe, beta2: float) -> dict[str, Any]:
    """One arm with one seed."""
    settings = {"sync_every": SYNC_EVERY, "min_members": PEERS, "overlap": 0, **OUTER}
    arm = Arm(name, name, PEERS + 1, name, settings)
    arm.settings["inner_state"] = "int8" if name in ("int8", "short") else "none"

    async def live() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
            async with trio.open_nursery() as nursery:
                swarm = JoiningSwarm(nursery, arm, recipe)
                swarm.disks, swarm.beta2 = Path(folder), beta2
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
                    lambda: all(
                        LOOKED_AT[-1] in each.losses
                        for each in swarm.all_trainers
                        if each is not swarm.all_trainers[1]
                    )
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
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=240, help="of the whole run, were it to end")
    parser.add_argument("--beta2", type=float, default=BETA2)
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument("--arms", default=",".join(ARMS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for name in arguments.arms.split(","):
            recipe = Recipe(steps=arguments.steps, batch=arguments.batch, seed=seed)
            found = live_through(name, recipe, arguments.beta2)
            for text in found.pop("events"):
                say(text)
            for peer in ("joiner", "peer0"):
                losses, trained = found[peer]["held out"], found[peer]["trained on"]
                points = "  ".join(f"{step}: {losses[step]:.4f}" for step in LOOKED_AT)
                mean = statistics.fmean(trained)
                say(f"seed {seed}  {name:5}  {peer:7}  {points}  trained on, mean {mean:.4f}")


if __name__ == "__main__":
    main()

"""The training scripts of ``spot``: one model at one pace, and the loop that each system asks for.

A byte-level GPT of 0.8 million parameters learns the standard library's sources. A step computes
for a fiftieth of a second and lasts ``--step-s``, as one on an accelerator would: what a system
sends meanwhile costs no time. Each process writes down what it did, a line each:

    TIME s STEP          a step has ended
    TIME r STEP          all go on from this step: later ones that were done are lost
    TIME c OK            the steps since the last such line are in the run's model, or lost
    TIME m FRAGMENT OK   the same of all steps but the last, for a part of the model
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from examples.train import (
    CONTEXT,
    GPT,
    GRADIENT_NORM_MAX,
    LEARNING_RATE,
    WARMUP_STEPS,
    load_corpus,
    make_optimizer,
    windows,
)

BATCH = 4  # windows of a step
TOKENS = BATCH * CONTEXT
CORPUS = load_corpus()  # once, before the forks
DIARIES, MODEL, STOP, CHECKPOINT = "steps", "model.pt", "stop", "checkpoint.pt"
STORE_PORT, LIGHTHOUSE_PORT = 29_400, 29_510
FOREVER_S = 86_400.0


class Training:
    """The model, its steps at the given pace, and the diary."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.folder: Path = options.folder
        self.model = GPT()
        self.optimizer = make_optimizer(self.model)
        self._step_s = options.step_s
        self._chance = np.random.default_rng((options.place, os.getpid()))
        path = self.folder / DIARIES / f"{options.place}-{os.getpid()}"
        self._diary = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._due_s = time.monotonic()

    def note(self, *words: object) -> None:
        line = " ".join(map(str, (f"{time.monotonic():.4f}", *words)))
        os.write(self._diary, f"{line}\n".encode())

    def backward(
        self, model: nn.Module, step: int, average: Callable[[], None] = lambda: None
    ) -> float:
        """Compute the gradients of the next windows, at the rate of this step; return the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        starts = self._chance.integers(len(CORPUS[0]) - CONTEXT, size=BATCH)
        loss: torch.Tensor = model(*windows(CORPUS[0], starts))
        loss.backward()  # type: ignore[no-untyped-call]
        average()
        nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)
        return loss.item()

    def pace(self) -> None:
        """Sleep until the step is as long as steps are; one that took longer is not made up for."""
        self._due_s = max(self._due_s + self._step_s, time.monotonic())
        time.sleep(max(0.0, self._due_s - time.monotonic()))

    def stopped(self) -> bool:
        return (self.folder / STOP).exists()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def keep(self, name: str, **more: Any) -> None:
        """Write the state into the folder that all places share, whole or not at all."""
        fresh = self.folder / f"{name}.{os.getpid()}"
        torch.save({**self.state(), **more}, fresh)
        fresh.replace(self.folder / name)

    def end(self) -> None:
        """Write the weights, and wait to be killed: no system is to see this place leave."""
        self.keep(MODEL)
        time.sleep(FOREVER_S)


# ---------------------------------------------------------------- holdfast


class MergeNotes(holdfast.Callback):
    def __init__(self, training: Training) -> None:
        self._training = training

    def on_merge(self, merge: holdfast.Merge) -> None:
        self._training.note("m", merge.fragment, int(merge.contributed))


def holdfast_loop(training: Training, _options: argparse.Namespace) -> None:
    model, optimizer, step = training.model, training.optimizer, 0
    with holdfast.attach(model, optimizer, callbacks=[MergeNotes(training)]) as run:
        while not run.finished:
            optimizer.zero_grad(set_to_none=True)
            loss = training.backward(model, run.global_step)
            optimizer.step()
            training.pace()
            step += 1
            training.note("s", step)
            run.step(loss=loss, tokens=TOKENS)
        if run.is_leader:
            training.keep(MODEL)


# ---------------------------------------------------------------- torch's own


def ddp_loop(training: Training, options: argparse.Namespace) -> None:
    """DDP that goes on from the last checkpoint, under elastic torchrun."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    step, path = 0, training.folder / CHECKPOINT
    if path.exists():
        kept = torch.load(path)
        training.load(kept)
        step = kept["step"]
    model = nn.parallel.DistributedDataParallel(training.model)
    training.note("r", step)
    while not training.stopped():
        training.optimizer.zero_grad(set_to_none=True)
        training.backward(model, step)
        training.optimizer.step()
        training.pace()
        step += 1
        training.note("s", step)
        if dist.get_rank() == 0 and step % options.every == 0:
            training.keep(CHECKPOINT, step=step)
    training.end()


def serve_store(options: argparse.Namespace) -> None:
    """Serve what elastic torchrun's rendezvous keeps its state in."""
    store: Any = vars(dist)["TCPStore"]
    kept = store(options.address, STORE_PORT, is_master=True, wait_for_workers=False)
    time.sleep(FOREVER_S)
    del kept


# ---------------------------------------------------------------- torchft


def torchft_manager(options: argparse.Namespace, **how: Any) -> Any:
    """Return a manager as in torchft's examples; its store is in this process, without torchrun."""
    torchft = importlib.import_module("torchft")
    host, store = options.address, vars(dist)["TCPStore"]
    own = store(host, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)),
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        replica_id=f"spot_{options.place}",
        hostname=host,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=own.port,
        **how,
    )
    manager.own_store = own  # which lives as long
    return manager


def torchft_ddp_loop(training: Training, options: argparse.Namespace) -> None:
    """As torchft's train_ddp.py, but that its gradients are averaged here: with gloo the wrapper
    of torchft 0.2.0 (``ddp.py``, ``assert fut._fut``) ends the process when another one dies.
    """
    torchft = importlib.import_module("torchft")
    parameters = list(training.model.parameters())

    def average() -> None:
        gradients = [each.grad for each in parameters if each.grad is not None]
        mean = torch.cat([each.flatten() for each in gradients])
        manager.allreduce(mean).wait()
        for gradient, part in zip(
            gradients, torch.split(mean, [each.numel() for each in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))

    state = {"load_state_dict": training.load, "state_dict": training.state}
    manager = torchft_manager(options, **state)
    optimizer = torchft.Optimizer(manager, training.optimizer)
    while not training.stopped():
        before = manager.current_step()
        optimizer.zero_grad()
        training.backward(training.model, before, average)
        took_part = manager.is_participating()
        optimizer.step()
        training.pace()
        training.note("s", before)
        training.note("c", int(took_part and manager.current_step() > before))
    training.end()


def torchft_diloco_loop(training: Training, options: argparse.Namespace) -> None:
    """As the DiLoCo of torchft's tests, with the outer step of our streaming preset."""
    local_sgd = importlib.import_module("torchft.local_sgd")
    healed: list[bool] = []

    def load(state: dict[str, Any]) -> None:
        training.load(state)
        healed.append(True)  # and the steps of this round are those of the sender

    state = {"load_state_dict": load, "state_dict": training.state}
    manager = torchft_manager(options, use_async_quorum=False, **state)
    outer = torch.optim.SGD(training.model.parameters(), lr=0.7, momentum=0.7, nesterov=True)
    parts = [training.model], training.optimizer, outer
    how = {"sync_every": options.every, "use_bucketization": True}
    with local_sgd.DiLoCo(manager, *parts, **how) as diloco:
        step = 0
        while not training.stopped():
            rounds = manager.current_step()
            training.optimizer.zero_grad(set_to_none=True)
            training.backward(training.model, rounds * options.every + step)
            training.pace()
            training.note("s", step)
            training.optimizer.step()  # which makes the round, after the last one
            step = (step + 1) % options.every
            if step == 0:
                training.note("c", int(manager.current_step() > rounds and not healed))
                healed.clear()
        diloco._restore_parameters()  # those of the last round
    training.end()


def serve_lighthouse(_options: argparse.Namespace) -> None:
    """As torchft's README starts it."""
    coordination = importlib.import_module("torchft.coordination")
    times = {"join_timeout_ms": 10_000, "quorum_tick_ms": 100}
    kept = coordination.LighthouseServer(f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=1, **times)
    time.sleep(FOREVER_S)
    del kept


SERVERS = {"store": serve_store, "lighthouse": serve_lighthouse}
LOOPS = {
    "holdfast": holdfast_loop,
    "ddp": ddp_loop,
    "torchft-ddp": torchft_ddp_loop,
    "torchft-diloco": torchft_diloco_loop,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[*SERVERS, *LOOPS])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--place", type=int)
    parser.add_argument("--address")
    parser.add_argument("--every", type=int, help="steps to a checkpoint, or to a round")
    parser.add_argument("--step-s", type=float)
    options = parser.parse_args()
    if options.kind in SERVERS:
        SERVERS[options.kind](options)
    else:
        LOOPS[options.kind](Training(options), options)


if __name__ == "__main__":
    main()

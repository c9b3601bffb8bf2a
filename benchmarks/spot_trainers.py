"""The training scripts of ``spot``: one model, one pace, and the loop that each system asks for.

    spot_trainers.py holdfast|ddp|torchft-ddp|torchft-diloco|lighthouse|store OPTIONS

A byte-level GPT of 0.8 million parameters on the standard library's sources. A step computes a
fiftieth of a second and lasts ``--step-s``, as a step on an accelerator would; what is sent
meanwhile is hidden behind it. Each process writes what it did into a file, a line each:

    TIME s STEP          a step has ended
    TIME r STEP          everybody goes on from this step; later ones that were done are lost
    TIME c OK            a round has ended, with or without this place's steps
    TIME m FRAGMENT OK   the same of one fragment
"""

from __future__ import annotations

import argparse
import os
import sys
import time
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
CORPUS = load_corpus()  # before the forks
MODEL, STOP, CHECKPOINT = "model.pt", "stop", "checkpoint.pt"
OUTER = {"lr": 0.7, "momentum": 0.7, "nesterov": True}  # as the streaming preset


class Diary:
    """What a process did, and when."""

    def __init__(self, folder: Path, place: int) -> None:
        path = folder / "steps" / f"{place}-{os.getpid()}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, *words: object) -> None:
        line = " ".join(map(str, (f"{time.monotonic():.4f}", *words)))
        os.write(self._file, f"{line}\n".encode())


class Training:
    """The model, and its steps at the given pace."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.options = options
        self.model = GPT()
        self.optimizer = make_optimizer(self.model)
        self.diary = Diary(options.folder, options.place)
        self._chance = np.random.default_rng((options.place, os.getpid()))
        self._due_s = time.monotonic()

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """Return the loss of the next windows; ``step`` decides the rate of warm-up."""
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        starts = self._chance.integers(len(CORPUS[0]) - CONTEXT, size=BATCH)
        loss: torch.Tensor = model(*windows(CORPUS[0], starts))
        return loss

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM_MAX)

    def pace(self) -> None:
        """Sleep until the step has lasted as long as steps do; what took longer is not made up."""
        self._due_s = max(self._due_s + self.options.step_s, time.monotonic())
        time.sleep(max(0.0, self._due_s - time.monotonic()))

    def stopped(self) -> bool:
        return bool((self.options.folder / STOP).exists())

    def keep(self, name: str = MODEL, **more: Any) -> None:
        """Write the weights, whole or not at all."""
        path = self.options.folder / name
        fresh = path.with_name(f"{name}.{os.getpid()}")
        torch.save({"model": self.model.state_dict(), **more}, fresh)
        fresh.replace(path)

    def end(self) -> None:
        """Keep the weights and wait to be killed: nobody is to see this one leave."""
        self.keep()
        time.sleep(3600)


# ---------------------------------------------------------------- holdfast


class Merges(holdfast.Callback):
    def __init__(self, diary: Diary) -> None:
        self._diary = diary

    def on_merge(self, merge: holdfast.Merge) -> None:
        self._diary.note("m", merge.fragment, int(merge.contributed))


def train_holdfast(training: Training) -> None:
    model, optimizer = training.model, training.optimizer
    with holdfast.attach(model, optimizer, callbacks=[Merges(training.diary)]) as run:
        step = 0
        while not run.finished:
            optimizer.zero_grad(set_to_none=True)
            loss = training.loss(model, run.global_step)
            loss.backward()  # type: ignore[no-untyped-call]
            training.clip()
            optimizer.step()
            training.pace()
            step += 1
            training.diary.note("s", step)
            run.step(loss=loss.item(), tokens=TOKENS)
        if run.is_leader:
            training.keep()


# ---------------------------------------------------------------- torch's DDP and elastic agent


def train_ddp(training: Training) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    step, path = 0, training.options.folder / CHECKPOINT
    if path.exists():
        kept = torch.load(path)
        training.model.load_state_dict(kept["model"])
        training.optimizer.load_state_dict(kept["optimizer"])
        step = kept["step"]
    model = nn.parallel.DistributedDataParallel(training.model)
    training.diary.note("r", step)
    while not training.stopped():
        training.optimizer.zero_grad(set_to_none=True)
        training.loss(model, step).backward()  # type: ignore[no-untyped-call]
        training.clip()
        training.optimizer.step()
        training.pace()
        step += 1
        training.diary.note("s", step)
        if dist.get_rank() == 0 and step % training.options.every == 0:
            training.keep(CHECKPOINT, optimizer=training.optimizer.state_dict(), step=step)
    training.end()


# ---------------------------------------------------------------- torchft


def torchft_manager(training: Training, **how: Any) -> Any:
    """Return a manager as in torchft's examples; its store is in this process, without torchrun."""
    from torchft import Manager, ProcessGroupGloo

    host = training.options.address
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        replica_id=f"spot_{training.options.place}",
        hostname=host,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        **how,
    )
    manager.spot_store = store  # lives as long as the manager
    return manager


def train_torchft_ddp(training: Training) -> None:
    from torchft import DistributedDataParallel, Optimizer

    def load(state: Any) -> None:
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    def state() -> Any:
        kept = training.optimizer.state_dict()
        return {"model": training.model.state_dict(), "optimizer": kept}

    manager = torchft_manager(training, load_state_dict=load, state_dict=state)
    model = DistributedDataParallel(manager, training.model)
    optimizer = Optimizer(manager, training.optimizer)
    while not training.stopped():
        before = manager.current_step()
        optimizer.zero_grad()
        training.loss(model, before).backward()  # type: ignore[no-untyped-call]
        training.clip()
        took_part = manager.is_participating()
        optimizer.step()
        training.pace()
        training.diary.note("s", manager.current_step())
        training.diary.note("c", int(took_part and manager.current_step() > before))
    training.end()


def train_torchft_diloco(training: Training) -> None:
    from torchft.local_sgd import DiLoCo

    healed: list[int] = []

    def load(state: Any) -> None:
        healed.append(1)  # the steps of this round are those of the sender now
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    def state() -> Any:
        kept = training.optimizer.state_dict()
        return {"model": training.model.state_dict(), "optimizer": kept}

    manager = torchft_manager(
        training, load_state_dict=load, state_dict=state, use_async_quorum=False
    )
    outer = torch.optim.SGD(training.model.parameters(), **OUTER)
    with DiLoCo(
        manager, [training.model], training.optimizer, outer, sync_every=training.options.every
    ) as diloco:
        while not training.stopped():
            rounds = manager.current_step()
            training.optimizer.zero_grad(set_to_none=True)
            step = rounds * training.options.every + diloco._local_step
            training.loss(training.model, step).backward()  # type: ignore[no-untyped-call]
            training.clip()
            training.pace()
            last = diloco._local_step == training.options.every - 1
            training.diary.note("s", step)
            training.optimizer.step()  # the last one of a round makes the round
            if last:
                training.diary.note("c", int(manager.current_step() > rounds and not healed))
                healed.clear()
        diloco._restore_parameters()  # those of the last round
    training.end()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--place", type=int, default=0)
    parser.add_argument("--address", default="")
    parser.add_argument("--every", type=int, default=20, help="steps to a checkpoint or a round")
    parser.add_argument("--step-s", type=float, default=0.5)
    options = parser.parse_args()
    if options.kind == "store":
        store = dist.TCPStore(options.address, 29_400, is_master=True, wait_for_workers=False)
        time.sleep(86_400)
        del store
    elif options.kind == "lighthouse":
        from torchft.coordination import LighthouseServer

        # as torchft's README starts it
        lighthouse = LighthouseServer(
            "0.0.0.0:29510", min_replicas=1, join_timeout_ms=10_000, quorum_tick_ms=100
        )
        time.sleep(86_400)
        del lighthouse
    else:
        kinds = {
            "holdfast": train_holdfast,
            "ddp": train_ddp,
            "torchft-ddp": train_torchft_ddp,
            "torchft-diloco": train_torchft_diloco,
        }
        kinds[options.kind](Training(options))


if __name__ == "__main__":
    main()

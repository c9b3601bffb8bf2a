"""A small training script with torch: a few hundred parameters, data that follow from rank and
step.

It is run as a script under ``holdfast join``; the tests import its model and data to do the same
training without holdfast.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import holdfast

INPUTS = 8
BATCH = 16


def skip_the_compiler() -> None:
    """Optimizers import torch's compiler only to say that they are not to be compiled, and that is
    more than half of this script's start. They get what they want of it here."""
    stub: Any = types.ModuleType("torch._dynamo")
    stub.disable = lambda function, *_arguments, **_options: function
    stub.graph_break = lambda: None
    sys.modules["torch._dynamo"] = stub
    setattr(torch, "_dynamo", stub)  # noqa: B010 - as the import would


def make_model(width: int) -> nn.Module:
    """The same first weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, 1))


def make_optimizer(model: nn.Module, kind: str, rate: float) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate)
    return torch.optim.AdamW(model.parameters(), lr=rate)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's data for a step of the run: inputs ``(16, 8)`` and targets ``(16, 1)``."""
    inputs = np.random.default_rng((rank, step)).standard_normal((BATCH, INPUTS), np.float32)
    targets = np.sin(inputs.sum(axis=1, keepdims=True))
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int
) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    loss: torch.Tensor = nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def fail(kind: str, model: nn.Module) -> None:
    """In one of the ways in which training scripts fail."""
    match kind:
        case "memory":
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            resource.setrlimit(resource.RLIMIT_AS, (used, used))
            bytearray(2 * used)
        case "cuda":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        case "nan":
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        case _:
            sys.exit(17)


def save(model: nn.Module, path: Path) -> None:
    """All parameters as float32, in one file that is whole or absent."""
    arrays = {name: each.numpy() for name, each in model.state_dict().items()}
    scratch = path.with_suffix(".new.npz")
    np.savez(scratch, **arrays)
    scratch.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after every step")
    parser.add_argument("--crash", type=Path, help="kill itself while this file exists; removes it")
    parser.add_argument("--fault", type=Path, help="fail as this file says; removes it")
    parser.add_argument("--save", type=Path, help="the final parameters")
    parser.add_argument("--losses", type=Path, help="the step and loss of every step, in hex")
    arguments = parser.parse_args()

    skip_the_compiler()
    torch.set_num_threads(1)
    model = make_model(arguments.width)
    optimizer = make_optimizer(model, arguments.optimizer, arguments.rate)
    with holdfast.attach(model, optimizer) as run:
        while not run.finished:
            loss = train_step(model, optimizer, arguments.rank, run.global_step)
            if arguments.losses is not None:
                with arguments.losses.open("a") as file:
                    file.write(f"{run.global_step} {float(loss.item()).hex()}\n")
            run.step(loss=loss.item(), tokens=BATCH)
            if arguments.pause:
                time.sleep(arguments.pause)
            if arguments.crash is not None and arguments.crash.exists():
                arguments.crash.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            if arguments.fault is not None and arguments.fault.exists():
                kind = arguments.fault.read_text()
                arguments.fault.unlink()
                fail(kind, model)
    if arguments.save is not None:
        save(model, arguments.save)


if __name__ == "__main__":
    main()

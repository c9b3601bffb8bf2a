"""The demo's model in any size, with steps that only take their time: what a run makes it lose.

    holdfast join INVITE -- python benchmarks/overlap_trainer.py --step-s 0.1 --log steps.jsonl

Two cores cannot train four models, but they can carry four runs' communication. A step changes a
part of every tensor by noise, so that after ``--all-in`` steps no value is what it was and what is
averaged compresses like real updates; then it sleeps until its time is over, as a script does that
waits for its accelerator. Only that counts as training. Whatever else passes, in ``run.step`` or
because a core was not free when the sleep was over, is lost.

Weights begin as zeros: newcomers hold those already, and nothing has to be copied to them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from attrs import asdict, frozen
from torch import nn

import holdfast

sys.path.insert(0, str(Path(__file__).parents[1]))  # a daemon starts this file
from examples import train

NOISE = 1e-3  # standard deviation of what a step adds
NOISE_COUNT = 2**22  # drawn once: a step is to take time, not work


@frozen
class Mark:
    """Where a trainer was when rounds had been merged, by the clock that all processes here share.

    Attributes:
      rounds: merged until now.
      steps: taken, each of the length it should have.
      stepping_s: that they really took.
      waited_s: in ``run.step``, for the run.
      hook_s: in ``run.step``, for its own work: copies to and from the daemon, merges.
    """

    at_s: float
    rounds: int
    steps: int
    stepping_s: float
    waited_s: float
    hook_s: float


def scaled_model(width: int, layers: int) -> nn.Module:
    """The demo's, all zeros."""
    train.WIDTH, train.LAYERS = width, layers
    model = train.GPT()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@torch.no_grad()
def change(model: nn.Module, noise: torch.Tensor, step: int, all_in: int) -> None:
    """Add noise to one part of ``all_in`` of every tensor, by turns, and not the same each time."""
    turn, start = step % all_in, 0
    for parameter in model.parameters():
        values = parameter.view(-1)
        part = values[len(values) * turn // all_in : len(values) * (turn + 1) // all_in]
        offset = (start + step * 7_919) % (len(noise) - len(part))
        part.add_(noise[offset : offset + len(part)])
        start += len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=train.WIDTH)
    parser.add_argument("--layers", type=int, default=train.LAYERS)
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--all-in", type=int, default=100)
    parser.add_argument("--log", type=Path, required=True, help="a line for every merge")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = scaled_model(options.width, options.layers)
    steps, stepping_s, inside_s = 0, 0.0, 0.0
    with holdfast.attach(model) as run, options.log.open("a", buffering=1) as log:
        torch.manual_seed(run.seed)
        noise = NOISE * torch.randn(NOISE_COUNT)
        merged = run.round_count
        while not run.finished:
            begun_s = time.monotonic()
            change(model, noise, steps, options.all_in)
            time.sleep(max(0.0, begun_s + options.step_s - time.monotonic()))
            stepped_s = time.monotonic()
            run.step(loss=1.0, tokens=1)
            now_s = time.monotonic()
            steps += 1
            stepping_s += stepped_s - begun_s
            inside_s += now_s - stepped_s
            if run.round_count != merged:
                merged = run.round_count
                hook_s = inside_s - run.waited_s
                mark = Mark(now_s, merged, steps, stepping_s, run.waited_s, hook_s)
                log.write(json.dumps(asdict(mark)) + "\n")


if __name__ == "__main__":
    main()

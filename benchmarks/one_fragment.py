"""A training script with a state of any size and nothing to compute: rounds are all that counts.

holdfast join INVITE -- python one_fragment.py --mib 64 --step-s 0.05
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch
from torch import nn

import holdfast

CHANGED_VALUES = 2**16  # by a step; a pseudo-gradient of any kind takes equally long to add
# What a step adds is drawn once, for it is to take time and not work; other numbers at each step.
NOISE = 1e-3  # standard deviation
NOISE_COUNT = 2**22
NOISE_STRIDE = 7_919


class OneFragment(nn.Module):
    """So many float32 values, in tensors of equal size, all zeros at first."""

    def __init__(self, value_count: int, tensor_count: int) -> None:
        super().__init__()
        each = value_count // tensor_count
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(each)) for _ in range(tensor_count))


def changed_count(values: torch.Tensor, all_in: int) -> int:
    """How many values a step changes; in ``all_in`` steps all of them."""
    return -(-len(values) // all_in) if all_in else CHANGED_VALUES


def change(values: torch.Tensor, noise: torch.Tensor, step: int, all_in: int) -> None:
    """What a step does."""
    count = changed_count(values, all_in)
    start = step % all_in * count if all_in else 0
    part = values[start : start + count]
    offset = step * NOISE_STRIDE % (len(noise) - len(part))
    part += noise[offset : offset + len(part)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--values", type=int, help="in place of --mib: how many values")
    parser.add_argument("--tensors", type=int, default=1)
    parser.add_argument(
        "--all-in", type=int, default=0, help="change every value in so many steps; 0: only some"
    )
    parser.add_argument("--step-s", type=float, default=0.05)
    options = parser.parse_args()
    torch.set_num_threads(1)
    value_count = options.values or options.mib * 2**20 // 4
    model = OneFragment(value_count, options.tensors)
    count = changed_count(model.values[0], options.all_in)
    noise_count = NOISE_COUNT + count + NOISE_STRIDE * options.tensors
    noise = NOISE * torch.randn(noise_count, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with holdfast.attach(model, optimizer) as run:
        for step in itertools.count():
            if run.finished:
                break
            with torch.no_grad():
                for number, values in enumerate(model.values):
                    change(values, noise[NOISE_STRIDE * number :], step, options.all_in)
            time.sleep(options.step_s)
            run.step(loss=1.0, tokens=1)


if __name__ == "__main__":
    main()

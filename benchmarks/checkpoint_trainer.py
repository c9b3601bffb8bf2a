"""A script that keeps a core busy: a step is a fixed amount of arithmetic, so it shows who takes from it.

holdfast join INVITE -- python benchmarks/checkpoint_trainer.py --millions 16
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import holdfast

WIDTH = 512  # of the matrices that are multiplied
PART = 100  # a step changes this part of the values


class Weights(nn.Module):
    """So many million values, which nothing is computed from."""

    def __init__(self, millions: float) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(int(millions * 1e6)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--millions", type=float, default=16.0)
    parser.add_argument("--products", type=int, default=20, help="matrix products in a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Weights(options.millions)
    left, right = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    count = len(model.values) // PART
    noise = 1e-3 * torch.randn(count)
    with holdfast.attach(model) as run, torch.no_grad():
        while not run.finished:
            for _ in range(options.products):
                left = torch.tanh(left @ right)
            start = run.global_step % PART * count
            model.values[start : start + count] += noise
            run.step(loss=1.0, tokens=1)


if __name__ == "__main__":
    main()

"""A training script with one fragment of any size and nothing to compute: rounds are all that counts.

holdfast join INVITE -- python one_fragment.py --mib 64 --step-s 0.05
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import holdfast

CHANGED_VALUES = 2**16  # by a step; a pseudo-gradient of any kind takes equally long to add


class OneFragment(nn.Module):
    """So many float32 values, equal everywhere at first."""

    def __init__(self, value_count: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(value_count))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--step-s", type=float, default=0.05)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = OneFragment(options.mib * 2**20 // 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with holdfast.attach(model, optimizer) as run:
        while not run.finished:
            with torch.no_grad():
                model.values[:CHANGED_VALUES] += 1e-3
            time.sleep(options.step_s)
            run.step(loss=1.0, tokens=1)


if __name__ == "__main__":
    main()

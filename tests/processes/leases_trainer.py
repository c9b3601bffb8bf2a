"""A trainer that counts what it trains on, in the model itself: the training script under leases.

    holdfast join INVITE -- python leases_trainer.py --samples 2003 --row 2 --workers 2

The model has a counter for each peer's row, epoch and sample. The run merges counters by their
maximum, and a peer adds to its own row only, so after the run the sum over rows tells how often
each sample is in committed work, also if two peers trained on it in the same round.
``--shard-steps`` leases shards (``run.shards``) of so many steps instead, and counts each when its
last step is done.
"""

from __future__ import annotations

import argparse
import os
import time
from argparse import Namespace
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.client.hook import Run

Step = Callable[[torch.Tensor, int | None], None]
Count = Callable[[int, int], None]

# Epochs that are counted: a run of two begins a third one while its last leases are trained.
EPOCHS_MAX = 3
ROWS = 3  # peers that count


class Numbers(Dataset[int]):
    """Each sample is its own number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Counting(nn.Module):
    """A small model, and how often each peer has trained it on each sample."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(ROWS, EPOCHS_MAX, length, dtype=torch.int64))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--shard-steps", type=int, default=0)
    parser.add_argument("--row", type=int, required=True)
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Counting(options.samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = holdfast.attach(model, optimizer)
    seen = model.seen
    assert isinstance(seen, torch.Tensor)

    def step(batch: torch.Tensor, samples: int | None) -> None:
        loss = (model.layer(batch.float()[:, None] / options.samples) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(options.step_s)
        run.step(loss=loss.item(), tokens=len(batch), samples=samples)

    def count(sample: int, epoch: int) -> None:
        if epoch < EPOCHS_MAX:
            seen[options.row, epoch, sample] += 1

    if options.shard_steps:
        train_shards(run, options, step, count)
    else:
        train_samples(run, options, step, count)
    scratch = options.save.with_suffix(f".{os.getpid()}")
    torch.save(seen.sum(0), scratch)
    scratch.replace(options.save)
    run.close()


def train_samples(run: Run, options: Namespace, step: Step, count: Count) -> None:
    data = Numbers(options.samples)
    sampler = run.sampler(data)
    loader = DataLoader(data, options.batch, sampler=sampler, num_workers=options.workers)
    for batch in loader:
        if run.finished:
            break
        expected = list(islice(sampler._stream._kept, len(batch)))
        assert batch.tolist() == [sample for sample, _epoch in expected], "not as drawn"
        for sample, epoch in expected:
            count(sample, epoch)
        step(batch, len(batch))


def train_shards(run: Run, options: Namespace, step: Step, count: Count) -> None:
    shards = run.shards(range(options.samples))
    for shard in shards:
        batch = torch.full((options.batch,), shard)
        for _step in range(options.shard_steps - 1):
            step(batch, None)
        if run.finished:
            break
        count(shard, shards.epoch)
        step(batch, None)


if __name__ == "__main__":
    main()

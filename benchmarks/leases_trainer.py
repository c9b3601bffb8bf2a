"""A trainer that counts what it trains on, in the model itself: the training script under leases.

    holdfast join INVITE -- python leases_trainer.py --samples 10007 --workers 2

The model has a counter for each epoch and sample. The run merges counters by their maximum, so after the run
each peer's model tells how often each sample is in committed work.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast

EPOCHS_MAX = (
    6  # counted; a run of three epochs begins a fourth one while its last leases are trained
)


class Numbers(Dataset[int]):
    """Each sample is its own number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Counting(nn.Module):
    """A small model, and how often it was trained on each sample."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, width)
        self.register_buffer("seen", torch.zeros(EPOCHS_MAX, length, dtype=torch.int64))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=10_007)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Counting(options.samples, options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = holdfast.attach(model, optimizer)
    data = Numbers(options.samples)
    sampler = run.sampler(data)
    loader = DataLoader(
        data, options.batch, sampler=sampler, num_workers=options.workers, persistent_workers=False
    )
    seen = model.seen
    assert isinstance(seen, torch.Tensor)
    for batch in loader:
        if run.finished:
            break
        expected = sampler.untrained(len(batch))
        assert batch.tolist() == [sample for sample, _epoch in expected], "not as drawn"
        for sample, epoch in expected:
            if epoch < EPOCHS_MAX:
                seen[epoch, sample] += 1
        loss = (model.layer(batch.float()[:, None] / options.samples) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(options.step_s)
        run.step(loss=loss.item(), tokens=len(batch), samples=len(batch))
    if options.save is not None:
        scratch = options.save.with_suffix(f".{os.getpid()}")
        torch.save(seen, scratch)
        scratch.replace(options.save)
    run.close()


if __name__ == "__main__":
    main()

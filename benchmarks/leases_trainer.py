"""A trainer that counts what it trains on, in the model itself: the training script under leases.

    holdfast join INVITE -- python leases_trainer.py --samples 10007 --workers 2

With ``--plain`` each peer draws its samples at random, without leases; with ``--uncounted`` the model has no
counters, so that the data set may be of any size. Else the model has a counter for each epoch and sample. The run merges counters by their maximum, so after the run
each peer's model tells how often each sample is in committed work.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

import holdfast

EPOCHS_MAX = (
    6  # counted; a run of three epochs begins a fourth one while its last leases are trained
)


DRAWS_MAX = 100_000_000  # of a peer without leases; no benchmark draws so many


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
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--uncounted", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    counted = not (options.plain or options.uncounted)
    model = Counting(options.samples if counted else 1, options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = holdfast.attach(model, optimizer)
    data = Numbers(options.samples)
    leased = None if options.plain else run.sampler(data)
    endless = (
        RandomSampler(data, replacement=True, num_samples=DRAWS_MAX) if options.plain else leased
    )
    loader = DataLoader(data, options.batch, sampler=endless, num_workers=options.workers)
    seen = model.seen
    assert isinstance(seen, torch.Tensor)
    for batch in loader:
        if run.finished:
            break
        if leased is not None and counted:
            expected = leased.untrained(len(batch))
            assert batch.tolist() == [sample for sample, _epoch in expected], "not as drawn"
            for sample, epoch in expected:
                if epoch < EPOCHS_MAX:
                    seen[epoch, sample] += 1
        loss = (model.layer(batch.float()[:, None] / options.samples) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(options.step_s)
        samples = len(batch) if leased is not None else None
        run.step(loss=loss.item(), tokens=len(batch), samples=samples)
    if options.save is not None:
        scratch = options.save.with_suffix(f".{os.getpid()}")
        torch.save(seen, scratch)
        scratch.replace(options.save)
    run.close()


if __name__ == "__main__":
    main()

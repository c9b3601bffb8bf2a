"""Leased data in real processes: what is in committed work is each sample once an epoch."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import leases_trainer
from tests.processes.harness import WAIT_S, Fleet, contributing, spec

pytestmark = pytest.mark.slow

SAMPLES = 5_003
EPOCHS = 2
SCRIPT = (sys.executable, str(Path(leases_trainer.__file__)))


def leased_spec(epochs: int = EPOCHS, **keys: object) -> str:
    return spec(sync_every=5, **keys) + f"[data]\nepochs = {epochs}\n"  # type: ignore[arg-type]


def counts(path: Path, epoch: int) -> Counter[int]:
    """How many samples are in committed work so many times."""
    return Counter(torch.load(path)[epoch].tolist())


@pytest.mark.fault(
    "a peer that trains on leased samples is killed",
    "as any death",
    "samples that it had trained on and not contributed are leased to others, each once",
)
def test_every_sample_is_in_committed_work_once_an_epoch(fleet: Fleet) -> None:
    fleet.start_master(leased_spec())

    def join(name: str, *more: str) -> None:
        script = ("--samples", str(SAMPLES), "--step-s", "0.05", "--save", f"{name}.pt", *more)
        fleet.join(name, *script, founder=name == "alder", command=SCRIPT)

    join("alder")
    join("birch", "--workers", "1")
    fleet.until(lambda s: contributing(s, "alder", "birch"), "both contribute")
    join("cedar")
    fleet.until(lambda s: contributing(s, "cedar"), "cedar contributes")
    fleet.kill("birch")
    fleet.until_committed(2)
    join("birch")
    fleet.until(lambda s: contributing(s, "birch"), "birch is back")
    names = ("alder", "birch", "cedar")
    assert [fleet.nodes[name].wait(WAIT_S) for name in names] == [0, 0, 0]
    for name in names:
        for epoch in range(EPOCHS):
            assert counts(fleet.folder / f"{name}.pt", epoch) == {1: SAMPLES}, (name, epoch)

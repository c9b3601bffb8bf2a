"""Leased data in real processes: what is in committed work is each sample once an epoch."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.processes import leases_trainer
from tests.processes.harness import WAIT_S, Fleet, contributing, spec, spent_positions
from tests.processes.test_life_of_a_run import typed

pytestmark = pytest.mark.slow

SAMPLES, SHARDS = 5_003, 61
EPOCHS = 2
PEERS = ("alder", "birch", "cedar")  # each with counters of its own
SCRIPT = (sys.executable, str(Path(leases_trainer.__file__)))


def leased_spec(epochs: int = EPOCHS, **keys: object) -> str:
    return spec(sync_every=5, **keys) + f"[data]\nepochs = {epochs}\n"  # type: ignore[arg-type]


def start(fleet: Fleet, name: str, *script: str) -> None:
    own = ("--row", str(PEERS.index(name)), "--save", f"{name}.pt")
    fleet.join(name, *script, *own, founder=name == PEERS[0], command=SCRIPT)


def counts(path: Path, epoch: int) -> Counter[int]:
    """How many samples are in committed work so many times, of all peers together."""
    return Counter(torch.load(path)[epoch].tolist())


def spent(fleet: Fleet, length: int) -> dict[int, Counter[int]]:
    """How many positions of each whole epoch the journal's commits have spent so many times."""
    times = spent_positions(fleet)
    return {
        epoch: Counter(times[position] for position in range(epoch * length, (epoch + 1) * length))
        for epoch in range(EPOCHS)
    }


@pytest.mark.fault(
    "a peer that trains on leased samples is killed",
    "as any death",
    "samples that it had trained on and not contributed are leased to others, each once",
)
def test_every_sample_is_in_committed_work_once_an_epoch(fleet: Fleet) -> None:
    fleet.start_master(leased_spec(epochs=1))

    def join(name: str, *more: str) -> None:
        start(fleet, name, "--samples", str(SAMPLES), "--step-s", "0.05", *more)

    for name in ("alder", "birch"):
        join(name)
    fleet.until(lambda s: s["state"] == "finished" and not s["members"], "the first epoch")
    refused = typed(fleet, "resume")
    assert "the only epoch is committed" in refused.stderr
    assert "`holdfast resume --epochs N` lets it go on to epoch N" in refused.stderr
    resumed = typed(fleet, "resume", "--epochs", str(EPOCHS))
    assert f"the run goes on to epoch {EPOCHS}\n" in resumed.stdout

    join("alder")
    join("birch", "--workers", "1")
    fleet.until(lambda s: contributing(s, "alder", "birch"), "both contribute")
    join("cedar")
    fleet.until(lambda s: contributing(s, "cedar"), "cedar contributes")
    fleet.kill("birch")
    fleet.until_committed(2)
    join("birch")
    fleet.until(lambda s: contributing(s, "birch"), "birch is back")
    assert [fleet.nodes[name].wait(WAIT_S) for name in PEERS] == [0, 0, 0]
    for name in PEERS:
        for epoch in range(EPOCHS):
            assert counts(fleet.folder / f"{name}.pt", epoch) == {1: SAMPLES}, (name, epoch)
    assert spent(fleet, SAMPLES) == {epoch: Counter({1: SAMPLES}) for epoch in range(EPOCHS)}


@pytest.mark.fault(
    "a peer is killed in the middle of a leased shard",
    "as any death",
    "the shard is read again from its beginning by another peer; all others are in committed work"
    " once an epoch",
)
def test_every_shard_is_in_committed_work_once_an_epoch(fleet: Fleet) -> None:
    fleet.start_master(leased_spec())

    def join(name: str) -> None:
        steps = ("--shard-steps", "7", "--batch", "2")  # of a round of five: shards end anywhere
        start(fleet, name, "--samples", str(SHARDS), "--step-s", "0.05", *steps)

    for name in PEERS:
        join(name)
    fleet.until(lambda s: contributing(s, *PEERS), "all contribute")
    fleet.until_committed(2)
    fleet.kill("birch")
    fleet.until_committed(2)
    join("birch")
    fleet.until(lambda s: contributing(s, "birch"), "birch is back")
    assert fleet.master()["headline"]["epoch"] in (0, 1)
    assert [fleet.nodes[name].wait(WAIT_S) for name in PEERS] == [0, 0, 0]
    every = [
        counts(fleet.folder / f"{name}.pt", epoch) for name in PEERS for epoch in range(EPOCHS)
    ]
    assert all(times[0] == 0 for times in every)
    # One that had just ended when birch died may be read twice: it counts with the step after it.
    assert sum(times[1] for times in every[:EPOCHS]) >= EPOCHS * SHARDS - 1
    assert every[:EPOCHS] == every[EPOCHS : 2 * EPOCHS] == every[2 * EPOCHS :]
    assert spent(fleet, SHARDS) == {epoch: Counter({1: SHARDS}) for epoch in range(EPOCHS)}

"""Leased data in real processes: what is in committed work is each sample once an epoch."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.processes import leases_trainer
from tests.processes.harness import (
    Fleet,
    contributing,
    in_sync,
    spec,
    spent_positions,
)

pytestmark = pytest.mark.slow

SAMPLES, SHARDS = 1_201, 19
EPOCHS = 2
PEERS = ("alder", "birch", "cedar")  # each with counters of its own
SCRIPT = (sys.executable, str(Path(leases_trainer.__file__)))


def leased_spec(epochs: int = EPOCHS) -> str:
    return spec(sync_every=5) + f"[data]\nepochs = {epochs}\n"


def start(fleet: Fleet, name: str, *script: str) -> None:
    own = ("--row", str(PEERS.index(name)), "--save", f"{name}.pt")
    fleet.join(name, *script, *own, founder=name == PEERS[0], command=SCRIPT)


def join_a_live_run(fleet: Fleet, name: str, *script: str) -> None:
    """Start a peer while the run is paused: so few samples would be used up before it trains."""
    fleet.act("pause", {})
    start(fleet, name, *script)
    fleet.until(
        lambda s: in_sync(s, name) and fleet.peer(name)["trainer_pid"], f"{name} could train"
    )
    fleet.act("resume", {})
    fleet.until(lambda s: contributing(s, name), f"{name} contributes")


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

    steps = ("--samples", str(SAMPLES), "--batch", "8", "--step-s", "0.05")
    for name in ("alder", "birch"):
        start(fleet, name, *steps)
    fleet.until_finished("alder", "birch")
    refused = fleet.typed("resume")
    assert "the only epoch is committed" in refused.stderr
    assert "`holdfast resume --epochs N` lets it go on to epoch N" in refused.stderr
    resumed = fleet.typed("resume", "--epochs", str(EPOCHS))
    assert f"the run goes on to epoch {EPOCHS}\n" in resumed.stdout

    start(fleet, "alder", *steps)
    start(fleet, "birch", *steps, "--workers", "1")
    fleet.until(lambda s: contributing(s, "alder", "birch"), "both contribute")
    join_a_live_run(fleet, "cedar", *steps)
    fleet.kill("birch")
    fleet.until_committed(2)
    join_a_live_run(fleet, "birch", *steps)
    fleet.check_exits(*PEERS)
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
    # Seven steps a shard, five a round: shards end anywhere.
    steps = ("--samples", str(SHARDS), "--step-s", "0.05", "--batch", "2", "--shard-steps", "7")
    for name in PEERS:
        start(fleet, name, *steps)
    fleet.until(lambda s: contributing(s, *PEERS), "all contribute")
    fleet.until_committed(2)
    fleet.kill("birch")
    fleet.until_committed(2)
    join_a_live_run(fleet, "birch", *steps)
    assert fleet.master()["headline"]["epoch"] in (0, 1)
    fleet.check_exits(*PEERS)
    every = [
        counts(fleet.folder / f"{name}.pt", epoch) for name in PEERS for epoch in range(EPOCHS)
    ]
    assert all(times[0] == 0 for times in every)
    # One that had just ended when birch died may be read twice: it counts with the step after it.
    assert sum(times[1] for times in every[:EPOCHS]) >= EPOCHS * SHARDS - 1
    assert every[:EPOCHS] == every[EPOCHS : 2 * EPOCHS] == every[2 * EPOCHS :]
    assert spent(fleet, SHARDS) == {epoch: Counter({1: SHARDS}) for epoch in range(EPOCHS)}

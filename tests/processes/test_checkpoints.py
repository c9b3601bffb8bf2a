"""SIGKILL for everything at once, in the middle of training; then the same commands again."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import nn

from holdfast.checkpoint import checkpoints
from holdfast.checkpoint.checkpoint_store import FolderStore
from holdfast.checkpoint.checkpoints import Checkpoint
from holdfast.daemon.cli.checkpoints.export import export_safetensors
from tests.processes.harness import WITH_TORCH, Fleet, contributing, digests, in_sync, spec
from tests.processes.torch_trainer import batch, make_model

pytestmark = pytest.mark.slow

NAMES = "abc"


def newest(folder: Path) -> Checkpoint:
    place = FolderStore(folder)
    return checkpoints.open_checkpoint(place, checkpoints.names(place)[0])


def losses(path: Path) -> list[tuple[int, float]]:
    """By step, as a trainer computed them; its last line may be cut."""
    lines = path.read_text().rpartition("\n")[0].splitlines()
    return [(int(step), float.fromhex(loss)) for step, loss in map(str.split, lines)]


def loss_of(weights: Path | None, rank: int, step: int) -> float:
    """Return the loss of the plain model with these or its initial weights, on a rank's data for a
    step.
    """
    model = make_model(width=16)
    if weights is not None:
        model.load_state_dict(load_file(weights))
    inputs, targets = batch(rank, step)
    return nn.functional.mse_loss(model(inputs), targets).item()


@pytest.mark.fault("everybody is killed, in training or while checkpoints are written")
def test_after_a_kill_of_everything_the_run_goes_on_from_the_newest_checkpoint(
    fleet: Fleet,
) -> None:
    fleet.start_master(
        spec(min_members=2) + "[checkpoint]\nevery_rounds = 2\nkeep_count = 3\ntrainer = true\n"
    )
    apart = fleet.folder / "apart"  # where c writes, by its own command line

    life = 1

    def join(name: str, rank: int, founder: bool = False) -> None:
        more = ["--checkpoints", str(apart)] if name == "c" else []
        curve = ["--losses", str(fleet.folder / f"{name}.{life}")]
        fleet.join(
            name,
            *("--rank", str(rank), "--pause", "0.01", *curve),
            more=more,
            founder=founder,
            command=WITH_TORCH,
        )

    for rank, name in enumerate(NAMES):
        join(name, rank, founder=name == "a")
    fleet.until(lambda s: contributing(s, *NAMES) and s["committed"] >= 5, "five rounds")
    fleet.kill("master")
    for name in NAMES:
        fleet.kill(name)
    folders = {n: fleet.nodes[n].folder / "checkpoints" for n in "ab"} | {"c": apart}
    assert all((fleet.nodes[name].folder / "trainer.safetensors").exists() for name in NAMES)
    last = max(
        (newest(folder) for folder in folders.values()), key=lambda each: each.manifest.rounds
    )
    left, weights = last.manifest, fleet.folder / "left.safetensors"
    assert left.rounds >= 4
    export_safetensors(last, weights)

    life = 2
    fleet.restart_master()
    for rank, name in enumerate(NAMES):
        join(name, rank)
    status = fleet.until(
        lambda s: in_sync(s, *NAMES) and contributing(s, *NAMES) and s["step"] > left.step + 10,
        "the run goes on",
    )
    assert status["committed"] > left.rounds
    assert not [e for e in status["events"] if "first weights" in e["text"]]
    assert all("loaded a checkpoint" in fleet.nodes[name].log for name in NAMES)
    # The loss goes on where it was: the first trainer begins with the weights of that checkpoint.
    # (One that attaches while the next round is committed may be told the step before it, and load
    # its weights. One whose peer has an older checkpoint may take a step on that before its copy.)
    curves = {
        rank: [each for each in losses(fleet.folder / f"{name}.2") if each[0] >= left.step]
        for rank, name in enumerate(NAMES)
    }
    step = min(curve[0][0] for curve in curves.values())
    first = {rank: loss for rank, ((at, loss), *_) in curves.items() if at == step}
    expected = {rank: loss_of(weights, rank, step) for rank in first}
    assert any(first[rank] == pytest.approx(expected[rank], rel=1e-6) for rank in first), expected
    rank = min(first)
    trained, untrained = (
        [loss_of(each, rank, some) for some in range(step, step + 8)] for each in (weights, None)
    )
    assert trained != pytest.approx(untrained, rel=1e-3), "they were trained"

    fleet.settle(*NAMES)
    found = digests(fleet.master(), *NAMES)
    assert len(set(found.values())) == 1, found

    # What lies there loads into the plain model: see tests/daemon/test_export.py for the bits.
    # A trainer's own file may be newer than any checkpoint: its daemon was killed before that one.
    lines = "".join(fleet.nodes[name].log for name in NAMES).splitlines()
    assert not [x for x in lines if "is not used" in x and ": it is of step " not in x]
    out = fleet.folder / "model.safetensors"
    exported = fleet.spawn("export", "export", str(out), "--checkpoints", str(apart))
    assert exported.wait() == 0
    assert load_file(out)

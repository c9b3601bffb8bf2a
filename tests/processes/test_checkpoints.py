"""SIGKILL for everything at once, in the middle of training; then the same commands again."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from holdfast.checkpoint import checkpoints
from holdfast.checkpoint.checkpoints import Manifest
from holdfast.checkpoint.place import FolderPlace
from tests.processes.harness import Fleet, contributing, digests, in_sync, spec

pytestmark = pytest.mark.slow

NAMES = "abc"


def newest(folder: Path) -> Manifest:
    place = FolderPlace(folder)
    name = checkpoints.names(place)[0]
    return checkpoints.open_checkpoint(place, name).manifest


@pytest.mark.timeout(180)
def test_after_a_kill_of_everything_the_run_goes_on_from_the_newest_checkpoint(
    fleet: Fleet,
) -> None:
    fleet.start_master(
        spec(min_members=2) + "[checkpoint]\nevery_rounds = 2\nkeep_count = 3\ntrainer = true\n"
    )
    apart = fleet.folder / "apart"  # where c writes, by its own command line

    def join(name: str, rank: int, founder: bool = False) -> None:
        more = ["--checkpoints", str(apart)] if name == "c" else []
        fleet.join(name, "--rank", str(rank), "--pause", "0.005", more=more, founder=founder)

    for rank, name in enumerate(NAMES):
        join(name, rank, founder=name == "a")
    fleet.until(lambda s: contributing(s, *NAMES) and s["committed"] >= 5, "five rounds")
    fleet.nodes["master"].process.kill()
    fleet.nodes["master"].process.wait()
    for name in NAMES:
        fleet.kill(name)
    folders = {n: fleet.nodes[n].folder / "checkpoints" for n in "ab"} | {"c": apart}
    assert all((fleet.nodes[name].folder / "trainer.safetensors").exists() for name in NAMES)
    left = max((newest(folder) for folder in folders.values()), key=lambda m: m.rounds)
    assert left.rounds >= 4

    fleet.restart_master()
    for rank, name in enumerate(NAMES):
        join(name, rank)
    status = fleet.until(
        lambda s: in_sync(s, *NAMES) and contributing(s, *NAMES) and s["step"] > left.step + 10,
        "the run goes on",
    )
    assert status["committed"] > left.rounds
    assert not [e for e in status["events"] if "first weights" in e["text"]]
    assert all("took up a checkpoint" in fleet.nodes[name].log for name in NAMES)
    fleet.settle(*NAMES)
    found = digests(fleet.master(), *NAMES)
    assert len(set(found.values())) == 1, found

    # What lies there loads into the plain model: see tests/daemon/test_export.py for the bits.
    assert "is not used" not in "".join(fleet.nodes[name].log for name in NAMES)
    out = fleet.folder / "model.safetensors"
    exported = fleet.spawn("export", "export", str(out), "--checkpoints", str(apart))
    assert exported.wait() == 0
    assert load_file(out)

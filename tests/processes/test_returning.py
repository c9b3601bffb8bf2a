"""All peers and the master leave; those that return go on where the run was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.harness import Fleet, contributing, digests, in_sync, spec

pytestmark = pytest.mark.slow


@pytest.mark.fault("a checkpoint is damaged")
def test_the_run_goes_on_from_what_its_peers_kept_on_disk(fleet: Fleet) -> None:
    fleet.start_master(spec(min_members=2))
    for rank, name in enumerate("abc"):
        fleet.join(name, "--rank", str(rank), "--every-kind", founder=name == "a")
    fleet.until(lambda s: contributing(s, *"abc"), "a, b and c train")
    fleet.settle(*"abc")
    before = fleet.master()
    fleet.end(*"abc")
    for name in "abc":
        assert "writing a last checkpoint" in fleet.nodes[name].log
    fleet.end("master")

    # One of the files is damaged meanwhile: its peer says so, and fetches the state.
    damaged: Path = max((fleet.nodes["c"].folder / "checkpoints").iterdir())
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)

    fleet.restart_master()
    for rank, name in enumerate("abc"):
        fleet.join(name, "--rank", str(rank), "--every-kind")
    status = fleet.until(lambda s: in_sync(s, *"abc"), "all are in sync again")
    assert digests(status, *"abc") == digests(before, *"abc"), "the run is paused as it was"
    fleet.act("resume", {})
    status = fleet.until(
        lambda s: s["committed"] > before["committed"] + 2 and contributing(s, *"abc"),
        "the run goes on",
    )
    assert not [e for e in status["events"] if "first weights" in e["text"]]
    assert [fleet.peer(name)["state_received_bytes"] for name in "ab"] == [0, 0]
    assert fleet.peer("c")["state_received_bytes"] > 0
    assert "is damaged" in fleet.nodes["c"].log
    assert damaged.read_bytes() == data, "people may look at it"
    fleet.check_equal(*"abc")
    fleet.until(lambda s: s["copies"]["equal"] == 3, "all copies are equal")

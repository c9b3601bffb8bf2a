"""Daemons stop as a service manager expects."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.daemon.exit_codes import ExitCode
from tests.processes.harness import Fleet, spec


@pytest.mark.fault(
    "a service is stopped",
    "SIGTERM",
    "it drains, and ends with status 0; a second one ends it at once",
)
def test_term_drains_and_a_second_one_stops_at_once(tmp_path: Path) -> None:
    """systemd sends SIGTERM once; an impatient operator sends it again."""
    with Fleet(tmp_path) as fleet:
        master = fleet.start_master(spec())
        for name in ("alder", "birch"):
            fleet.join(name, command=())
        fleet.until(lambda s: s["counts"]["live"] == 2, "both are here")
        alder, birch = fleet.nodes["alder"], fleet.nodes["birch"]
        while not (fleet.peer("alder")["attached"] and fleet.peer("birch")["attached"]):
            assert alder.process.poll() is None
        alder.signal(signal.SIGTERM)
        assert alder.wait() == 0
        assert "leaving after the round in flight" in alder.log
        fleet.until(lambda s: s["counts"]["live"] == 1, "one has left")
        assert any("leaves: stopped by its owner" in e["text"] for e in fleet.master()["events"])
        master.signal(signal.SIGSTOP)  # nobody lets the other one go
        birch.signal(signal.SIGTERM)
        while "leaving after" not in birch.log:
            assert birch.process.poll() is None
        assert birch.process.poll() is None, "it drains"
        birch.signal(signal.SIGTERM)
        assert birch.wait() == ExitCode.INTERRUPTED, "without waiting for the master"
        master.signal(signal.SIGCONT)
        master.signal(signal.SIGTERM)
        assert master.wait() == 0

"""Daemons stop as a service manager expects."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from holdfast.daemon.peer.peer_options import PeerOptions
from holdfast.daemon.peer.run_peer import Peer
from holdfast.daemon.peer.trainer.supervisor import TrainerSupervisor
from holdfast.daemon.process.exit_codes import ExitCode
from holdfast.daemon.process.tasks import wait_for_signals
from holdfast.protocol.messages import FailureKind, Remedy, TrainerFailed
from tests.processes.harness import Fleet, spec


@pytest.mark.fault(
    "a service is stopped",
    "SIGTERM",
    "it drains, and ends with status 0; a second one ends it at once",
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_term_drains_and_a_second_one_stops_at_once(number: signal.Signals, tmp_path: Path) -> None:
    """systemd sends SIGTERM once, Ctrl+C is SIGINT; an impatient operator sends it again."""
    with Fleet(tmp_path) as fleet:
        master = fleet.start_master(spec())
        for name in ("alder", "birch"):
            fleet.join(name, command=())
        fleet.until(lambda s: s["counts"]["live"] == 2, "both are here")
        alder, birch = fleet.nodes["alder"], fleet.nodes["birch"]
        while not (fleet.peer("alder")["attached"] and fleet.peer("birch")["attached"]):
            assert alder.process.poll() is None
        alder.signal(number)
        assert alder.wait() == 0
        assert "leaving after the round in flight" in alder.log
        fleet.until(lambda s: s["counts"]["live"] == 1, "one has left")
        assert any("leaves: stopped by its owner" in e["text"] for e in fleet.master()["events"])
        master.signal(signal.SIGSTOP)  # nobody lets the other one go
        birch.signal(number)
        while "leaving after" not in birch.log:
            assert birch.process.poll() is None
        assert birch.process.poll() is None, "it drains"
        birch.signal(number)
        assert birch.wait() == ExitCode.INTERRUPTED, "without waiting for the master"
        assert "stopped without draining" in birch.log
        master.signal(signal.SIGCONT)
        master.signal(number)
        assert master.wait() == 0


@pytest.mark.parametrize(("nohup", "heard"), [(False, [1, 1, 2, 2]), (True, [0, 0, 1, 1])])
async def test_a_closed_terminal_ends_a_daemon_in_good_order(nohup: bool, heard: list[int]) -> None:
    calls: list[None] = []
    counts = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else lambda *_: None)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(wait_for_signals, lambda: calls.append(None))
            for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
                signal.raise_signal(number)
                await trio.testing.wait_all_tasks_blocked()
                counts.append(len(calls))
            nursery.cancel_scope.cancel()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert counts == heard


async def test_a_peer_whose_command_failed_for_good_leaves_with_the_run(tmp_path: Path) -> None:
    peer: Any = Peer(cast(PeerOptions, None), lambda _line: None)
    peer.service = SimpleNamespace(finished=trio.Event(), rounds_wanted=1)
    peer.service.finished.set()
    peer.supervisor = TrainerSupervisor(["true"], tmp_path / "sock", member="me")
    peer.supervisor.failed = TrainerFailed(FailureKind.CRASH, "status 1", Remedy.NONE, 5, 0.0)
    peer._leave = lambda _reason: trio.sleep(0)
    began_s = trio.current_time()
    await peer._see_out()
    assert trio.current_time() == began_s

"""A machine whose invite has to be approved by hand: it waits, is listed, and trains when it
may.
"""

from __future__ import annotations

import json

from holdfast.daemon.process.exit_codes import ExitCode
from tests.processes.harness import Fleet, spec


def test_machines_wait_until_they_are_approved_or_refused(fleet: Fleet) -> None:
    fleet.start_master(spec(min_members=1))
    told = json.loads(fleet.said("invite", "--approve", "--founder", "--uses", "2", "--json"))
    for name in ("alder", "birch"):
        fleet.invites[name] = told["invite"]
    fleet.join("alder")
    fleet.join("birch", command=())
    fleet.until(lambda s: len(s["pending"]) == 2, "both wait")
    assert fleet.said("invite", "--list").splitlines()[-1].split()[3] == "2", (
        "asking uses nothing up"
    )
    waiting = fleet.peer("birch")
    assert waiting["phase"] == "waiting for admission"
    assert f"`holdfast approve {waiting['peer'][:8]}`; waiting for that" in waiting["why"]
    lines = fleet.said("approve").splitlines()
    assert all("at 127.0.0.1 asks to join as contributor" in line for line in lines)
    assert "it calls itself 'birch'" in fleet.said("peers"), "and there"
    assert fleet.said("approve", "alder").endswith(" (alder)\n")
    assert fleet.said("approve", "birch", "--refuse", "--reason", "no").startswith("refused ")
    birch = fleet.nodes["birch"]
    assert birch.wait() == ExitCode.EVICTED
    fleet.until(lambda s: s["committed"] >= 1, "a round of the one that was let in")
    assert "has to approve this machine: `holdfast approve " in birch.log
    assert "refused by the run's operator: no" in birch.log, "it was never a member"
    assert fleet.master()["pending"] == []
    assert fleet.said("approve") == "no machine waits for approval\n"

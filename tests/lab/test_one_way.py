"""A real line that carries nothing in one direction: two peers without a link, and with one
again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import chaos_trainer
from benchmarks.grounds import Switch
from benchmarks.lab_run import LabRun
from holdfast.daemon.cli.fleet import Status
from tests import needs

pytestmark = pytest.mark.nightly  # namespaces; in virtual time: tests/swarm/test_one_way.py

SCRIPT = [str(Path(chaos_trainer.__file__)), "--step-s=0.2"]
SPEC = """
[run]
name = "one way"
[diloco]
sync_every = 4
[membership]
contributors = 3
min_members = 2
deadline_s = 5
"""
WAIT_S = 120.0
PEERS = ("a", "b", "c")


def together(status: Status) -> bool:
    """All are in sync, have their places, and links to each other."""
    members = status["members"]
    return (
        len(members) == len(PEERS)
        and all(member["in_sync"] for member in members)
        and status["places"]["taken"] == len(PEERS)
        and all(route["works"] for route in status["routes"])
    )


@pytest.mark.fault(
    "a line carries nothing in one direction for a while, between any two, the master too"
)
def test_two_that_are_apart_stay_members_and_have_a_link_again(tmp_path: Path) -> None:
    needs.need(needs.switch())
    with Switch(1 + len(PEERS)) as lab, LabRun(lab, tmp_path, SCRIPT) as run:
        run.start_master(SPEC)
        for host, name in enumerate(PEERS, 1):
            run.join_on(host, name, founder=host == 1)
        run.until(lambda s: together(s) and s["committed"] >= 2, "all take part", WAIT_S)
        lab.cut(2, 1)
        apart = run.until(
            lambda s: any(not route["works"] for route in s["routes"]), "they are apart", WAIT_S
        )
        target = apart["committed"] + 3
        run.until(
            lambda s: s["committed"] >= target and s["counts"]["contributed"] == 3, "rounds", WAIT_S
        )
        lab.heal(2, 1)
        healed = run.until(together, "they have a link again", WAIT_S)
        later = healed["committed"] + 3
        status = run.until(lambda s: s["committed"] >= later, "rounds", WAIT_S)
        assert not [event for event in status["events"] if event["kind"] == "leave"]
        assert status["counts"]["contributed"] == 3
        assert together(status)

"""What becomes of scripts that people of other tools reported: they train, or one sentence says why
not.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.processes.harness import Fleet, spec

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SCRIPTS = Path(__file__).with_name("reported_scripts.py")
ROUNDS = 3

# Those that cannot train, and what the peer says.
REFUSED = {
    "an_empty_environment": "which scripts must keep",
}
NAMES = re.findall(r"^def (\w+)\(\) -> Script:", SCRIPTS.read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", [each for each in NAMES if each not in ("linear", *REFUSED)])
def test_a_reported_script_trains_to_equal_bits(fleet: Fleet, name: str) -> None:
    fleet.start_master(spec(rounds=ROUNDS, sync_every=5))
    for peer in "ab":
        fleet.join(peer, command=(sys.executable, str(SCRIPTS), name), founder=peer == "a")
    fleet.check_exits(*"ab")
    ends = [re.findall(r"ends with (\w{64})", fleet.nodes[peer].log) for peer in "ab"]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 1
    assert fleet.master()["committed"] == ROUNDS


@pytest.mark.parametrize("name", REFUSED)
def test_a_reported_script_that_cannot_train_is_refused_by_name(fleet: Fleet, name: str) -> None:
    fleet.strict = False
    fleet.start_master(spec(rounds=ROUNDS))
    fleet.join("a", command=(sys.executable, str(SCRIPTS), name), founder=True)
    assert fleet.nodes["a"].wait(240) > 0
    assert REFUSED[name] in fleet.nodes["a"].log

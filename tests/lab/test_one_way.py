"""A real line that carries nothing in one direction: two peers without a link, and with one again."""

from __future__ import annotations

import pytest

from tests import needs
from tests.lab.telling import told

CUT = """
import tempfile
from pathlib import Path
from benchmarks.grounds import Switch
from benchmarks.lab_run import LabRun
from benchmarks.one_way import SCRIPT, whole
SPEC = '''
[run]
name = "one way"
[diloco]
sync_every = 4
[membership]
contributors = 3
min_members = 2
deadline_s = 5
'''
PEERS = ("a", "b", "c")
with (
    tempfile.TemporaryDirectory() as folder,
    Switch(4) as lab,
    LabRun(lab, Path(folder), SCRIPT) as run,
):
    run.start_master(SPEC)
    for host, name in enumerate(PEERS, 1):
        run.join(name, host, founder=host == 1)
    def together(status):
        return whole(status, len(PEERS))
    began = run.until(lambda s: together(s) and s["committed"] >= 2, "all take part", 120)
    lab.cut(2, 1)
    apart = run.until(lambda s: any(not route["works"] for route in s["routes"]), "they are apart", 60)
    target = apart["committed"] + 3
    run.until(lambda s: s["committed"] >= target and s["counts"]["contributed"] == 3, "rounds", 60)
    lab.heal(2, 1)
    healed = run.until(together, "they have a link again", 60)
    target = healed["committed"] + 3
    status = run.until(lambda s: s["committed"] >= target, "rounds", 60)
    print(json.dumps({
        "left": [e["text"] for e in status["events"] if e["kind"] == "leave"],
        "contributed": status["counts"]["contributed"],
        "together": together(status),
    }))
"""


@pytest.mark.fault(
    "a line carries nothing in one direction for a while, between any two, the master too"
)
@pytest.mark.timeout(600)
def test_two_that_are_apart_stay_members_and_have_a_link_again() -> None:
    needs.need(needs.switch())
    assert told(CUT, seconds=380) == {"left": [], "contributed": 3, "together": True}

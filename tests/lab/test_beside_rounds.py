"""The benchmark of copies beside rounds counts what rounds leave of the lines."""

from __future__ import annotations

import pytest

from tests.lab.telling import told

# Two donors that send 50 Mbit/s each and a newcomer that receives 30; rates of phases of some seconds.
LEFT = """
from benchmarks.beside_rounds import Look, left_by_rounds
from benchmarks.wan_lab import Host
DONOR, NEWCOMER = Host(up_mbit=50, down_mbit=50), Host(up_mbit=30, down_mbit=30)
looks = [Look(0.0, 0, 0, 0)]
for phase in sys.argv[1:]:
    seconds, round_mbit, copy_mbit = map(float, phase.split(","))
    for _ in range(int(10 * seconds)):
        last = looks[-1]
        up_bytes = last.up_bytes + int((round_mbit + copy_mbit) * 1e6 / 8 / 10)
        down_bytes = last.down_bytes + int(copy_mbit * 1e6 / 8 / 10)
        looks.append(Look(last.at_s + 0.1, up_bytes, down_bytes, 0))
print(json.dumps(left_by_rounds(looks, [Host(), DONOR, DONOR, NEWCOMER]) * 8 / 1e6))
"""


@pytest.mark.parametrize(
    ("phases", "left_mbit"),
    [
        (["10,0,5"], 300),  # the newcomer's own line
        (["10,90,5"], 100),  # the rest of both donors'
        (["10,100,0"], 0),
        (["10,103,0"], 0),  # what was queued before
        (["5,100,0", "5,0,20"], 150),  # what was left then cannot be used now
    ],
)
def test_rounds_leave_the_donors_rest_or_the_newcomers_line(
    phases: list[str], left_mbit: float
) -> None:
    assert told(LEFT, *phases) == pytest.approx(left_mbit, rel=0.05, abs=1)

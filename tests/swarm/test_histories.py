"""Several hundred short histories with faults at random instants, each from its own seed.

A failing one names its seed; one line runs it again, alone:

    python -c "from holdfast.daemon.simulation.histories import simulate; print(simulate(SEED))"
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from holdfast.daemon.simulation.histories import simulate

BLOCK = 10
BLOCKS = 30


@pytest.mark.parametrize("first", range(0, BLOCK * BLOCKS, BLOCK), ids=lambda n: f"seeds-{n}-")
def test_a_run_survives_faults_at_random_instants(first: int) -> None:
    for seed in range(first, first + BLOCK):
        history = simulate(seed)
        assert history.committed >= 4


def test_the_same_seed_gives_the_same_history_in_any_process() -> None:
    code = "from holdfast.daemon.simulation.histories import simulate\nfor s in range(5): print(simulate(s))"
    told = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert told[0].count("History(") == 5
    assert told[0] == told[1]

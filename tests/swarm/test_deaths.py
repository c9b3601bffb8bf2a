"""Histories with losses in the middle of reductions, each from its own seed; most must be repaired.

python -c "from holdfast.daemon.simulated_deaths import *; print(simulate_deaths(SEED))"
"""

from __future__ import annotations

import pytest

from holdfast.daemon.simulated_deaths import LOSSES, simulate_deaths

BLOCK = 4
BLOCKS = 6


@pytest.mark.timeout(240)
@pytest.mark.parametrize("first", range(0, BLOCK * BLOCKS, BLOCK), ids=lambda n: f"seeds-{n}-")
def test_a_loss_in_a_reduction_is_repaired(first: int) -> None:
    histories = [simulate_deaths(seed) for seed in range(first, first + BLOCK)]
    # Who is cut off from the master alone still gives and gets everything: often nothing is to do.
    losses = [
        repairs
        for history in histories
        for fault, repairs in history.faults
        if fault != "cut off from the master"
    ]
    assert 2 * sum(repairs > 0 for repairs in losses) > len(losses)
    assert sum(history.reruns for history in histories) <= LOSSES

"""Whole runs with faults, from fixed seeds, in blocks: see ``simulation``.

python -m holdfast.simulation --start SEED --seeds 1
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.swarm.simulation import FIXED, blocks, check_reruns, live_through


@pytest.mark.fault(
    "a contributor dies, at any phase of a round",
    "closed connection",
    "the spare steps in without a transfer, the round is repaired",
)
@pytest.mark.fault(
    "it dies at any instant of a reduction",
    "the same",
    "survivors hold the mean of exactly those whom the commit names, and so does what people are"
    " shown",
)
@pytest.mark.fault(
    "any of these and more, at any instant",
    "invariants after every event",
    "the run is whole again within a minute",
)
@blocks(FIXED)
def test_a_run_survives_faults_at_any_instant(seeds: Sequence[int]) -> None:
    check_reruns(seeds, live_through(seeds))

"""Whole runs with faults, from seeds: one of four files, see ``simulation``.

holdfast simulate --start SEED --seeds 1
"""

from __future__ import annotations

import pytest

from tests.swarm.simulation import blocks, live_through


@pytest.mark.timeout(300)
@blocks(0)
def test_a_run_survives_faults_at_any_instant(first: int) -> None:
    live_through(first)

"""Whole runs with faults, from seeds: one of four files, see ``simulation``.

holdfast simulate --start SEED --seeds 1
"""

from __future__ import annotations

from tests.swarm.simulation import shard

test_a_run_survives_faults_at_any_instant = shard(2)

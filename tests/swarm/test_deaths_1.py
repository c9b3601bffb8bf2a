"""Losses in the middle of reductions, from seeds: one of four files, see ``deaths``.

python -c "from holdfast.daemon.simulation.deaths import simulate_deaths; print(simulate_deaths(SEED))"
"""

from __future__ import annotations

from tests.swarm.deaths import shard

test_a_run_survives_losses_in_the_middle_of_reductions = shard(1)

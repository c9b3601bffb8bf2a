"""Error feedback in whole runs: the values that a codec drops arrive later, despite faults."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from numpy.typing import NDArray

from holdfast.membership.master.state.journal import JournalRecord, RoundCommitted
from holdfast.simulation.drifting_trainer import small_layout
from holdfast.simulation.swarm import Swarm
from tests.swarm.test_swarm import a_swarm

# The outer step adds the mean and nothing else: the state tells how much has arrived.
SPEC = """
[diloco]
sync_every = 4
outer_lr = 1.0
outer_momentum = 0.0
[membership]
contributors = 3
min_members = 2
deadline_s = 3
grace_s = 1
[reduce]
codec_up = "int8"
codec_down = "fp32"
feedback_decay = {feedback}
"""
COUNT = 300
LARGE, SMALL = 127.0, 0.3  # int8 has a step of 1 next to the large one, and the small one is lost


def delta(_peer: str, _round: int, count: int) -> NDArray[np.float32]:
    values = np.full(count, SMALL, np.float32)
    values[::256] = LARGE
    return values


async def moved(swarm: Swarm, names: str) -> tuple[int, NDArray[np.float64]]:
    """Return the number of committed rounds, and how far they moved the small values."""
    await swarm.come_to_rest(names)
    swarm.check_final(names)
    state = swarm.peers[names[0]].service.state
    assert state is not None
    start = np.arange(COUNT, dtype=np.float64)
    shared = swarm.peers[names[0]].trainer._shared
    assert shared is not None
    far = np.delete(start - shared.values(0), [0, 256])
    return state.heads()[0].version, far


@pytest.mark.parametrize("feedback", [True, False])
async def test_small_values_arrive_with_feedback_and_never_without(feedback: bool) -> None:
    toml = SPEC.format(feedback=float(feedback))
    async with a_swarm(toml=toml, layout=small_layout((COUNT,)), delta=delta) as swarm:
        await swarm.until(lambda: swarm.committed >= 20)
        rounds, far = await moved(swarm, "abc")
        if feedback:
            # No more than half a step is ever left; a float32 of 300 has 2e-5 to spare a round.
            assert np.abs(far - rounds * SMALL).max() < 0.51
        else:
            assert not far.any()


async def test_what_was_left_out_survives_the_masters_death() -> None:
    """The master dies between recording and announcing a commit; the Welcome announces it."""
    toml = SPEC.format(feedback=1.0)
    async with a_swarm(toml=toml, layout=small_layout((COUNT,)), delta=delta) as swarm:
        append = swarm.store.append
        deadly = {5, 6, 7, 8}  # in a row: what is forgotten each time adds up

        def append_and_die(record: JournalRecord) -> None:
            append(record)
            if isinstance(record, RoundCommitted) and swarm.committed in deadly:
                deadly.discard(swarm.committed)
                swarm.crash_master()

        swarm.store.append = append_and_die  # type: ignore[method-assign]
        while deadly:
            await swarm.until(lambda: swarm.master is None)
            await trio.sleep(1)
            await swarm.start_master()
        await swarm.until(lambda: swarm.committed >= 24)
        rounds, far = await moved(swarm, "abc")
        assert np.abs(far - rounds * SMALL).max() < 0.51

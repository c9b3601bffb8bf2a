"""A memory that differs shows in the status of a production master, and is healed by the rounds."""

from __future__ import annotations

import pytest

from holdfast.membership.master.status.copy_agreement import copy_agreement
from holdfast.membership.shared.run_status import CopyAgreement
from holdfast.simulation.swarm import Swarm
from tests.swarm.test_swarm import a_swarm, settled


def agreement(swarm: Swarm) -> CopyAgreement:
    assert swarm.master is not None
    return copy_agreement(swarm.coordinator, swarm.master.now())


@pytest.mark.fault(
    "a bit of a peer's memory falls over",
    "the digest that it reports of the next version",
    "named in the status; its copy is fetched again",
)
async def test_a_memory_that_differs_is_named_and_healed() -> None:
    async with a_swarm("abc") as swarm:
        await swarm.until(lambda: agreement(swarm).text.startswith("all 3 copies equal at version"))
        before = swarm.committed
        swarm.witness.excused.add(swarm.peers["b"].peer)
        state = swarm.peers["b"].service.state
        assert state is not None
        state.fragments[0].parts.values.view("uint8")[7] ^= 1
        await swarm.until(lambda: "; b is being healed" in agreement(swarm).text)
        told = agreement(swarm)
        assert told.text.startswith("2 of 3 copies equal at version ")
        assert "differs from the run's" in told.unequal[0].why
        await swarm.until(lambda: agreement(swarm).equal == 3)
        assert swarm.committed <= before + 3, "the next round has found it"
        swarm.witness.excused.clear()
        await settled(swarm, "abc")
        assert agreement(swarm).text == f"all 3 copies equal at version {swarm.committed}"

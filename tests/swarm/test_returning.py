"""All peers leave and return: the run continues from the newest saved state."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import trio

from holdfast.simulation.swarm import Swarm
from tests.plain import describe
from tests.swarm.test_swarm import a_swarm, settled


async def all_leave(swarm: Swarm, names: str, tmp_path: Path) -> dict[str, Path]:
    """Stop the run and all peers gracefully; return what each of them saved."""
    swarm.pause()
    await swarm.come_to_rest(names)
    disks = {}
    for name in names:
        disks[name] = tmp_path / name
        disks[name].mkdir()
        await swarm.peers[name].service.leave("it is late")
        swarm.keep(name, disks[name])
    await swarm.until(lambda: not any(sim.alive for sim in swarm.peers.values()))
    swarm.crash_master()
    return disks


@pytest.mark.fault(
    "everybody leaves and comes back",
    "heads and lineage in the `Hello`",
    "on from the newest state that was kept",
)
async def test_the_run_goes_on_with_what_was_kept_and_nothing_travels(tmp_path: Path) -> None:
    async with a_swarm("abc", "d") as swarm:
        disks = await all_leave(swarm, "abcd", tmp_path)
        committed, roots = swarm.committed, dict(swarm.witness.roots)
        await swarm.start_master()
        swarm.resume()
        for name in "abcd":
            swarm.restart(name, disk=disks[name])
        await settled(swarm, "abcd")
        assert swarm.committed >= committed + 2
        assert all(swarm.witness.roots[key] == root for key, root in roots.items())
        assert [sim.service.state_service.received_bytes for sim in swarm.peers.values()] == [0] * 4


@pytest.mark.fault("everybody leaves and comes back")
async def test_who_comes_first_with_an_old_state_does_not_make_it_the_runs(tmp_path: Path) -> None:
    async with a_swarm("abc") as swarm:
        old = tmp_path / "old"
        old.mkdir()
        swarm.keep("a", old)  # long ago
        await settled(swarm, "abc", more=5)
        disks = await all_leave(swarm, "abc", tmp_path)
        committed = swarm.committed
        await swarm.start_master()
        swarm.resume()
        swarm.restart("a", disk=old)
        await trio.sleep(15.0)
        assert swarm.committed == committed, "the run waits"
        why = describe(swarm.coordinator, trio.current_time())["why_waiting"]
        assert f"no connected peer holds version {committed}" in why
        swarm.restart("b", disk=disks["b"])
        swarm.restart("c", disk=disks["c"])
        await settled(swarm, "abc")
        assert swarm.peers["a"].service.state_service.received_bytes > 0


async def test_an_old_state_heals_by_what_differs(tmp_path: Path) -> None:
    async with a_swarm("abc") as swarm:
        swarm.keep("c", tmp_path)
        swarm.crash("c")
        await settled(swarm, "ab", more=3)
        swarm.resume()
        swarm.restart("c", disk=tmp_path)
        await settled(swarm, "abc")


@pytest.mark.fault(
    "a checkpoint is of another run, or its spec cuts in another way",
    "run id; lineage, layout and sizes",
    "refused, with the difference",
)
async def test_the_state_of_another_lineage_is_not_used(tmp_path: Path) -> None:
    async with a_swarm("abc") as swarm:
        swarm.keep("a", tmp_path)
    async with a_swarm("abc", seed=1) as swarm:
        (saved,) = tmp_path.iterdir()
        state_service = swarm.peers["c"].service.state_service
        swarm.crash("c")
        await trio.sleep(1.0)
        # The same run id, another founder's weights: as after the loss of the master's journal.
        returned = swarm.restart("c", disk=tmp_path).service
        manifest = returned.state_service.restored
        assert manifest is not None
        returned.replica.lineage = b"\x01" * 32
        returned.state_service.restored = attrs.evolve(manifest, lineage="01" * 32)
        await swarm.commit(within_s=60.0)
        # As the refusal says: c obeys the lost start of this term, and comes with the next.
        swarm.crash_master()
        await swarm.start_master()
        await settled(swarm, "abc")
        assert state_service is not swarm.peers["c"].service.state_service
        service = swarm.peers["c"].service
        assert service.state_service.restored is None
        assert "it began with other weights" in service.report.notices[0]
        assert saved.exists()

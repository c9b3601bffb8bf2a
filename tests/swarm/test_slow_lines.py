"""Newcomers over slow and fast lines, by the production master and peers."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import trio

from holdfast.checkpoint import blocks
from holdfast.simulation.drifting_trainer import small_layout
from holdfast.simulation.swarm import Swarm
from tests.plain import describe
from tests.swarm.test_swarm import a_swarm, spec

LAYOUT = small_layout((300_000,))
# Rounds so far apart that a line of 1 Mbit/s carries them, too.
SPEC = spec().replace("sync_every = 4", "sync_every = 2000")


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with mock.patch.object(blocks, "BLOCK_BYTES", 2**15):
        yield


async def joined(swarm: Swarm, name: str, bytes_per_s: float) -> tuple[int, int, int]:
    """Let a peer join over a line; return the bytes received, saved by compression, and sent."""
    for other in "ab":
        swarm.world.link(other, name, bytes_per_s=bytes_per_s)
    swarm.add_peer(name, founder=False)
    await swarm.until(lambda: swarm.in_sync(name))
    told = swarm.peers[name].service.training.progress()
    travelled = sum(swarm.world.sent_bytes[other, name] for other in swarm.peers)
    return told.state_received_bytes, told.state_saved_bytes, travelled


def shown(swarm: Swarm, name: str) -> tuple[int, int]:
    """Return the same from the master's status."""
    assert swarm.master is not None
    status = describe(swarm.master.coordinator, trio.current_time())
    (told,) = (row["bytes"] for row in status["members"] if row["name"] == name)
    return told["state_received"], told["state_saved"]


async def test_a_slow_line_gets_fewer_bytes_and_a_fast_one_gets_them_as_they_are() -> None:
    async with a_swarm("ab", toml=SPEC, layout=LAYOUT) as swarm:
        received, saved, travelled = await joined(swarm, "far", 2.5e5)
        assert received > 8 * 300_000, "values and momentum"
        assert 0.08 * received < saved < 0.17 * received
        assert travelled == pytest.approx(received - saved, rel=0.05)
        told = (received, saved)
        await swarm.until(lambda: shown(swarm, "far") == told, within_s=5)
        received, saved, travelled = await joined(swarm, "near", 1e9)
        assert (received > 8 * 300_000, saved) == (True, 0)
        assert travelled == pytest.approx(received, rel=0.05)

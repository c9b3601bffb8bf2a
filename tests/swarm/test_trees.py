"""Sites in whole runs: from the lines that members share to trees, and over the loss of a leader."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from holdfast.daemon.simulator import Swarm, small_layout
from holdfast.membership.rounds import Phase

SPEC = """
[run]
name = "trees"
[diloco]
sync_every = 4
[membership]
min_members = 4
deadline_s = 15
grace_s = 1
[reduce]
codec_up = "{codec}"
chunk_bytes = 65536
"""
LAB, HOMES = "abcd", "ef"


@asynccontextmanager
async def a_lab_and_two_homes(codec: str = "fp32", site: str = "lab") -> AsyncIterator[Swarm]:
    """Four machines share 4 MB/s, two have links of their own."""
    layout = small_layout((500_000,), counters=1)
    async with trio.open_nursery() as nursery:
        toml = SPEC.format(codec=codec)
        swarm = Swarm(nursery, toml, layout=layout, bytes_per_s=1e8, delay_s=0.005)
        swarm.world.share_line(LAB, up=4e6, down=2e7)
        for name in HOMES:
            swarm.world.share_line(name, up=4e6, down=2e7)
        await swarm.start_master()
        for name in LAB + HOMES:
            swarm.add_peer(name, site=site if name in LAB else "")
        yield swarm
        nursery.cancel_scope.cancel()


def committed_plans(swarm: Swarm) -> list[dict[str, Any]]:
    assert swarm.master is not None
    past = swarm.master.coordinator.status(trio.current_time())["past_rounds"]
    return [r["plan"] for r in past if r["outcome"] == "committed"]


@pytest.mark.parametrize("codec", ["fp32", "int8"])
async def test_a_lab_behind_one_line_crosses_it_once(codec: str) -> None:
    async with a_lab_and_two_homes(codec) as swarm:
        await swarm.until(lambda: swarm.committed >= 8)
        await swarm.come_to_rest(LAB + HOMES)
        plans = committed_plans(swarm)
        swarm.check_final(LAB + HOMES)
        for p in plans: print({k: round(v,2) if isinstance(v,float) else v for k,v in p.items() if k!="sites"})
        st=swarm.master.coordinator.status(trio.current_time())
        for m in st["members"]: print(m["name"], m["bandwidth"]["up_bytes_per_s"], m["bandwidth"]["down_bytes_per_s"])
        print(swarm.story())
    assert 0

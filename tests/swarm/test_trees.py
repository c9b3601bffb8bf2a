"""Sites in whole runs: detection of shared lines, trees, and the loss of a tree's leader."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from holdfast.membership.master.rounds.round import RoundPhase
from holdfast.simulation.drifting_trainer import small_layout
from holdfast.simulation.swarm import Swarm
from tests.plain import describe

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
    past = describe(swarm.master.coordinator, trio.current_time())["past_rounds"]
    return [r["plan"] for r in past if r["outcome"] == "committed"]


def peers_of(swarm: Swarm, names: str) -> set[str]:
    return {swarm.peers[name].peer for name in names}


@pytest.mark.parametrize("codec", ["fp32", "int8"])
async def test_a_lab_behind_one_line_crosses_it_once(codec: str) -> None:
    """The first round measures the lines; from then on trees are planned, and take what they say."""
    async with a_lab_and_two_homes(codec) as swarm:
        await swarm.until(lambda: swarm.committed >= 6)
        await swarm.come_to_rest(LAB + HOMES)
        plans = committed_plans(swarm)
        swarm.check_final(LAB + HOMES)
        lab = peers_of(swarm, LAB)
    first, *others = plans
    assert (first["tree"], first["sites"], first["tree_s"]) == (False, [], None)
    for plan in others:
        assert plan["tree"]
        assert [set(site) for site in plan["sites"]] == [lab]
        assert plan["bound_s"] <= plan["predicted_s"] <= 0.9 * plan["star_s"]
        assert plan["took_s"] == pytest.approx(plan["predicted_s"], rel=0.3)
        assert plan["took_s"] < 0.8 * first["took_s"]


async def test_without_a_site_everything_is_a_star() -> None:
    """Every peer has an address of its own."""
    async with a_lab_and_two_homes(site="") as swarm:
        await swarm.until(lambda: swarm.committed >= 4)
        plans = committed_plans(swarm)
    assert {plan["tree"] for plan in plans} == {False}
    assert {plan["star_s"] for plan in plans} == {None}


@pytest.mark.parametrize("codec", ["fp32", "int8"])
async def test_the_death_of_a_leader_costs_a_tree_and_no_round(codec: str) -> None:
    """The round runs again as a star; when the leader is back, so are the trees."""
    async with a_lab_and_two_homes(codec) as swarm:
        master = swarm.master
        assert master is not None
        round_table = master.coordinator.scheduler.round_table

        def amid_a_tree() -> bool:
            return any(
                round_.running().sites and trio.current_time() > round_.running().started_s + 0.1
                for round_ in round_table.reducing()
            )

        await swarm.until(amid_a_tree)
        (round_,) = round_table.reducing()
        swarm.crash("b")
        await swarm.until(lambda: round_.phase is RoundPhase.COMMITTED)
        assert swarm.peers["b"].peer not in round_.running().survivors()
        assert (round_.rerun_count, round_.repair_count) == (1, 0)
        assert round_.running().sites == ()
        events = describe(master.coordinator, trio.current_time())["events"]
        (said,) = [e["text"] for e in events if "starts over" in e["text"]]
        assert "with 5 contributors, as a star" in said
        assert "a tree cannot be repaired" in said
        swarm.restart("b")
        await swarm.until(lambda: swarm.in_sync("b") and amid_a_tree())
        await swarm.come_to_rest(LAB + HOMES)
        swarm.check_final(LAB + HOMES)
        assert round_table.abort_count == 0

"""Bandwidth, from the lines to the next plan: whole runs over unequal links in virtual time."""

from __future__ import annotations

import pytest
import trio

from holdfast.daemon.simulation.drifting_trainer import small_layout
from holdfast.daemon.simulation.swarm import Swarm
from holdfast.membership.master.rounds.attempt import Attempt
from holdfast.membership.planning.plan import PlanEstimate
from tests.plain import describe

SPEC = """
[run]
name = "planning"
[diloco]
sync_every = 4
[membership]
min_members = 4
deadline_s = 3
grace_s = 1
"""


def last_attempt(swarm: Swarm) -> Attempt:
    assert swarm.master is not None
    return swarm.master.coordinator.scheduler.round_table.past[-1].running()


async def test_who_is_seen_to_be_fast_owns_more_and_rounds_get_faster() -> None:
    """Links between slow peers carry 100 kB/s, those of the two fast ones ten times that.

    Every pair has a line of its own here, so a fast peer's rates add up.
    """
    layout = small_layout((30_000,), counters=0)
    fast, slow = "ab", "cd"
    async with trio.open_nursery() as nursery:
        swarm = Swarm(nursery, SPEC, layout=layout, bytes_per_s=1e5, delay_s=0.01, jitter_s=0.0)
        for one in fast:
            for other in fast + slow:
                if one != other:
                    swarm.world.link(one, other, bytes_per_s=1e6)
        await swarm.start_master()
        for name in fast + slow:
            swarm.add_peer(name)
        await swarm.until(lambda: swarm.committed >= 8)
        assert swarm.master is not None
        status = describe(swarm.master.coordinator, trio.current_time())
        past = [r["plan"] for r in status["past_rounds"] if r["outcome"] == "committed"]
        rates = {m["name"]: m["bandwidth"]["up_bytes_per_s"] for m in status["members"]}
        estimate: PlanEstimate = last_attempt(swarm).estimate
        nursery.cancel_scope.cancel()
    assert min(rates[name] for name in fast) > 2 * max(rates[name] for name in slow)
    assert past[0]["guessed_count"] == 4
    assert past[-1]["guessed_count"] == estimate.guessed_count == 0
    assert past[-1]["took_s"] < 0.8 * past[0]["took_s"]
    assert past[-1]["took_s"] == pytest.approx(past[-1]["predicted_s"], rel=1.0)
    assert past[-1]["bound_s"] <= past[-1]["predicted_s"] <= past[-1]["ring_s"]


async def test_idle_lines_are_probed_before_the_first_round_knows_nothing() -> None:
    """Four peers train for a while before the first round; its plan already knows who is slow.

    A probe sees one pair at a time, so a peer's links share its line here, as they do at home.
    """
    layout = small_layout((400_000,), counters=0)
    fast, slow = "ab", "cd"
    spec = SPEC.replace("sync_every = 4", "sync_every = 800")
    async with trio.open_nursery() as nursery:
        swarm = Swarm(nursery, spec, layout=layout, bytes_per_s=2e6, delay_s=0.01, jitter_s=0.0)
        for name in fast + slow:
            swarm.world.share_line([name], up=4e5 if name in slow else 2e6, down=2e6)
        await swarm.start_master()
        for name in fast + slow:
            swarm.add_peer(name)
        await swarm.until(lambda: swarm.committed >= 1)
        assert swarm.master is not None
        status = describe(swarm.master.coordinator, trio.current_time())
        first = next(r for r in status["past_rounds"] if r["outcome"] == "committed")
        nursery.cancel_scope.cancel()
    assert first["plan"]["guessed_count"] == 0
    assert first["plan"]["took_s"] == pytest.approx(first["plan"]["predicted_s"], rel=0.5)

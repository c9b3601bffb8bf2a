"""Bandwidth, from the lines to the next plan: whole runs over unequal links in virtual time."""

from __future__ import annotations

import pytest
import trio

from holdfast.membership.master.rounds.attempt import Attempt
from holdfast.membership.planning.plan import PlanEstimate
from holdfast.simulation.drifting_trainer import small_layout
from holdfast.simulation.swarm import Swarm
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
    return swarm.coordinator.scheduler.round_table.past[-1].running()


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
        status = describe(swarm.coordinator, trio.current_time())
        past = [r["plan"] for r in status["past_rounds"] if r["outcome"] == "committed"]
        rates = {m["name"]: m["bandwidth"]["up_bytes_per_s"] for m in status["members"]}
        estimate: PlanEstimate = last_attempt(swarm).estimate
        nursery.cancel_scope.cancel()
    assert min(rates[name] for name in fast) > 1.5 * max(rates[name] for name in slow)
    assert past[0]["guessed_count"] == 4
    assert past[-1]["guessed_count"] == estimate.guessed_count == 0
    assert past[-1]["took_s"] < 0.8 * past[0]["took_s"]
    assert past[0]["predicted_s"] is None, "nothing is known yet"
    # Lines of pairs are not what a plan reckons with.
    assert past[-1]["took_s"] == pytest.approx(past[-1]["predicted_s"], rel=1.0)
    assert estimate.predicted_s is not None
    assert estimate.bound_s <= estimate.predicted_s


@pytest.mark.parametrize(
    ("slow", "values"), [("", 400_000), ("", 8_000), ("cd", 400_000), ("cd", 12_000)]
)
async def test_rounds_take_what_was_predicted_once_the_lines_are_known(
    slow: str, values: int
) -> None:
    """The first round is planned for equal lines, and nothing is predicted for it."""
    names = "abcd"
    layout = small_layout((values,), counters=0)
    async with trio.open_nursery() as nursery:
        swarm = Swarm(nursery, SPEC, layout=layout, bytes_per_s=2e6, delay_s=0.02, jitter_s=0.0)
        for name in names:
            swarm.world.share_line([name], up=4e5 if name in slow else 2e6, down=2e6)
        await swarm.start_master()
        for name in names:
            swarm.add_peer(name)
        await swarm.until(lambda: swarm.committed >= 10)
        status = describe(swarm.coordinator, trio.current_time())
        past = [r["plan"] for r in status["past_rounds"] if r["outcome"] == "committed"]
        nursery.cancel_scope.cancel()
    assert past[0]["guessed_count"] == 4
    assert past[0]["predicted_s"] is None
    for plan in past[5:]:
        assert plan["took_s"] == pytest.approx(plan["predicted_s"], rel=0.25)

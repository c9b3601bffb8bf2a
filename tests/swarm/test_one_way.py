"""Recovery of the run after a line carried nothing in one direction for a while."""

from __future__ import annotations

import pytest
import trio

from holdfast.simulation.drifting_trainer import small_layout
from holdfast.simulation.swarm import Swarm
from tests.swarm.one_way import CASES, OneWay, live_through
from tests.swarm.test_routes import contributed, links, reach, routes, see
from tests.swarm.test_swarm import a_swarm, settled, spec

# Of the first ``CASES`` seeds, which are all pairs with all lengths: one of each length, with
# peers and the master at either end. At 42 and 70 a pair that was cut never had a link again.
SEEDS = [
    *(0, 35, 42, 56, 70),
    *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (7, 21, 49, 63, 77)),
]


@pytest.mark.fault(
    "a line carries nothing in one direction for a while, between any two, the master too",
    "the same; towards the master silence",
    "afterwards rounds are as fast as before and nobody is removed",
)
@pytest.mark.parametrize("seed", SEEDS)
def test_rounds_are_as_before_once_the_line_carries_both_ways(seed: int) -> None:
    case = OneWay.of(seed)
    removed = live_through(case)
    if "master" not in (case.source, case.target):
        assert removed == (0, 0), "both are well: only what lies between them is not"


def test_the_cases_are_all_pairs_and_all_lengths() -> None:
    cases = {
        (case.source, case.target, case.cut_s)
        for case in map(OneWay.of, range(1_000, 1_000 + CASES))
    }
    assert len(cases) == CASES


@pytest.mark.fault(
    "two peers cannot reach each other",
    "silent link, `LinkBroken`, `ReduceFailed`",
    "one of the two misses that round, both stay; plans do without the pair until it has a link"
    " again",
)
async def test_a_pair_without_a_link_costs_a_round_once_and_then_plans_do_without() -> None:
    layout = small_layout((20_000,))  # enough chunks for everybody to own one
    async with a_swarm("abcd", toml=spec(contributors=0), layout=layout) as swarm:
        swarm.world.partition("d", "a", one_way=True)
        await see(swarm, lambda: routes(swarm).get("ad", ("", True))[1] is False)
        await swarm.until(lambda: swarm.in_sync("a") and swarm.in_sync("d"))
        before_s, target = trio.current_time(), swarm.committed + 10
        await swarm.until(lambda: swarm.committed >= target)
        assert trio.current_time() - before_s < 10 * 0.5, "no round has waited for the two"
        assert contributed(swarm, "abcd")
        assert await owners_of_the_next_round(swarm) == {"b", "c"}
        swarm.world.heal("d", "a")
        await see(swarm, lambda: links(swarm, "a") == {"b", "c", "d"})
        await see(swarm, lambda: all(works for _route, works in routes(swarm).values()))
        assert await owners_of_the_next_round(swarm) == set("abcd")
        assert {sim.lives for sim in swarm.peers.values()} == {1}
        assert not [e for e in swarm.coordinator.context.events if e.kind.value == "leave"]
        await settled(swarm, "abcd")


async def owners_of_the_next_round(swarm: Swarm) -> set[str]:
    """Return the names of the chunk owners of a round that begins now."""
    names = {sim.peer: name for name, sim in swarm.peers.items()}
    round_table = swarm.coordinator.scheduler.round_table
    await swarm.commit(2)
    return {names[peer] for peer in round_table.past[-1].running().owners}


@pytest.mark.fault(
    "one of a pair without a link is removed and comes back",
    "its new session",
    "what was arranged is void at both ends, and arranged anew",
)
async def test_what_was_arranged_in_a_session_ends_with_it() -> None:
    """The master has arranged that the other one dials; it forgets that with the one that parts."""
    async with a_swarm("abc", toml=spec(contributors=0)) as swarm:
        members = swarm.coordinator.context.roster.by_number()
        first, later = members[0].name, members[-1].name
        pair = "".join(sorted((first, later)))
        swarm.world.refused.add((later, first))
        swarm.world.cut(first, later)
        await see(swarm, lambda: routes(swarm).get(pair, ("", False))[1])
        assert routes(swarm)[pair][0].startswith(f"direct, {first} ")
        swarm.world.refused.discard((later, first))
        swarm.world.partition(later, "master")
        await see(swarm, lambda: len(reach(swarm)) == 2)
        swarm.world.heal(later, "master")
        await swarm.until(lambda: links(swarm, later) == set("abc") - {later}, within_s=10)
        await swarm.until(lambda: contributed(swarm, "abc"))
        await settled(swarm, "abc")

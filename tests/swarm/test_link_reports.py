"""Members' reports about other members' connections, and the master's conclusions."""

from __future__ import annotations

import trio

from holdfast.protocol.messages import LinkBroken
from holdfast.simulation.scenario import MASTER
from holdfast.simulation.swarm import Swarm
from tests.swarm.test_swarm import a_swarm, settled


def lies(swarm: Swarm, liar: str) -> None:
    """Let a peer claim that its links to all others broke."""
    service = swarm.peers[liar].service
    for name, other in swarm.peers.items():
        if name != liar:
            service.session.tell(LinkBroken(other.peer))


def gone(swarm: Swarm) -> list[str]:
    return [member.name for member, _why in swarm.coordinator.context.departed]


async def test_one_members_word_does_not_end_the_session_of_who_comes_back() -> None:
    async with a_swarm("abcd") as swarm:
        lies(swarm, "d")
        await trio.sleep(0.1)
        swarm.world.cut("a", MASTER)
        lies(swarm, "d")
        await trio.sleep(1.0)
        assert gone(swarm) == []
        await settled(swarm, "abc", more=5)


async def test_of_two_who_are_killed_at_once_both_are_known_to_be_gone() -> None:
    """With one other peer left, that peer's report alone counts."""
    async with a_swarm("abc") as swarm:
        swarm.crash("a")
        swarm.crash("b")
        await trio.sleep(0.2)
        assert sorted(gone(swarm)) == ["a", "b"]


async def test_words_of_long_ago_do_not_end_a_session() -> None:
    async with a_swarm("abcd") as swarm:
        lies(swarm, "d")
        lies(swarm, "c")
        await trio.sleep(2.5)
        swarm.world.cut("a", MASTER)
        await trio.sleep(1.0)
        assert gone(swarm) == []


async def test_all_the_others_may_report_a_death_and_say_it_often() -> None:
    async with a_swarm("abcdefgh") as swarm:
        dead = swarm.peers["a"].peer
        swarm.crash("a")
        for name in "bcdefgh":
            for _time in range(500):
                swarm.peers[name].service.session.tell(LinkBroken(dead))
        await trio.sleep(1.0)
        assert gone(swarm) == ["a"]
        assert swarm.master is not None
        assert swarm.coordinator.routes.without(dead) == set()
        assert not any(each.slowed for each in swarm.master.sessions._sessions.values())
        await settled(swarm, "bcdefgh")

"""Runs with peers that cannot be dialled, and with pairs that cannot reach each other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import pytest
import trio

from holdfast.daemon.master import reachability
from holdfast.daemon.master.journal.journal_base import GrantRow
from holdfast.daemon.peer.peer_config import PeerConfig
from holdfast.daemon.peer.relay import RelayService
from holdfast.daemon.port_mapping.gateway import PortMapping
from holdfast.protocol.addresses import Address
from holdfast.protocol.messages import RelayOffer, Role
from holdfast.protocol.network.resumption import KEPT_MAX
from holdfast.protocol.trust.authority import Party
from holdfast.simulation.frozen_hosts import on_host
from holdfast.simulation.swarm import MASTER_ADDRESS, RUN_ID, Swarm
from tests.plain import describe
from tests.swarm.test_swarm import a_swarm, settled, spec


@asynccontextmanager
async def a_swarm_behind(
    hidden: str, names: str, toml: str | None = None, **options: Any
) -> AsyncIterator[Swarm]:
    """Start a swarm in which some peers cannot be dialled, and wait for the first commit."""
    async with trio.open_nursery() as nursery:
        swarm = Swarm(nursery, toml or spec(contributors=0), **options)
        await swarm.start_master()
        for name in hidden:
            swarm.world.unreachable.add(name)
        for name in names:
            swarm.add_peer(name)
        await swarm.until(
            lambda: swarm.committed >= 1 and all(swarm.in_sync(name) for name in names)
        )
        yield swarm
        nursery.cancel_scope.cancel()


def contributed(swarm: Swarm, names: str) -> bool:
    """Return whether the last round contains the updates of all named peers."""
    peers = {contributor.peer for contributor in swarm.witness.commits[-1].contributors}
    return peers == {swarm.peers[name].peer for name in names}


async def see(swarm: Swarm, condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Wait for a condition that only the master's status shows; it is slow, so poll it rarely."""
    with trio.fail_after(within_s):
        while swarm.master is None or not condition():
            await trio.sleep(0.2)


def links(swarm: Swarm, name: str) -> set[str]:
    by_peer = {sim.peer: other for other, sim in swarm.peers.items()}
    return {by_peer[peer] for peer in swarm.peers[name].service.hub.links}


def reach(swarm: Swarm) -> dict[str, str]:
    status = describe(swarm.coordinator, trio.current_time())
    return {member["name"]: member["reach"] for member in status["members"]}


@pytest.mark.fault(
    "a peer cannot be dialled, from behind a router",
    "the master dials it back",
    "it dials the others; `status` calls it outbound",
)
async def test_who_cannot_be_dialled_dials_and_takes_part() -> None:
    """The first two joined before the third: it would have dialled them."""
    async with a_swarm_behind("a", "abc") as swarm:
        await swarm.until(lambda: contributed(swarm, "abc"))
        assert reach(swarm) == {"a": "outbound", "b": "reachable", "c": "reachable"}
        assert links(swarm, "a") == {"b", "c"}
        await settled(swarm, "abc")


@pytest.mark.fault(
    "two peers cannot reach each other",
    "who should dial says so",
    "another route is arranged; meanwhile neither owns what the other needs",
)
async def test_two_that_cannot_be_dialled_train_with_one_that_can() -> None:
    """The two have no link to each other, so neither owns chunks that the other needs."""
    async with a_swarm_behind("ab", "abc") as swarm:
        await swarm.until(lambda: contributed(swarm, "abc"))
        assert links(swarm, "a") == links(swarm, "b") == {"c"}
        await settled(swarm, "abc", more=3)
        assert contributed(swarm, "abc")
        assert {sim.lives for sim in swarm.peers.values()} == {1}


@pytest.mark.fault(
    "no contributor can be reached by the others",
    "the same",
    "rounds are aborted, nobody is removed for it; tried again",
)
async def test_where_none_can_be_dialled_the_run_waits_and_goes_on_when_one_can() -> None:
    async with a_swarm("abc", toml=spec(contributors=0)) as swarm:
        for name in "abc":
            swarm.world.unreachable.add(name)
        swarm.crash_master()
        await swarm.start_master()
        for one, other in ("ab", "bc", "ac"):
            swarm.world.cut(one, other)
        await see(swarm, lambda: reach(swarm) == dict.fromkeys("abc", "outbound"))
        before = swarm.committed
        await trio.sleep(10)
        assert swarm.committed <= before + 1
        assert reach(swarm).keys() == set("abc"), "nobody is blamed for it"
        swarm.world.unreachable.discard("b")
        swarm.crash_master()
        await swarm.start_master()
        await swarm.until(lambda: contributed(swarm, "abc"), within_s=120)
        await settled(swarm, "abc")


@pytest.mark.fault("two peers cannot reach each other")
async def test_a_one_way_firewall_between_two_is_gone_round() -> None:
    """Nothing that ``c`` dials at ``b`` arrives; what ``b`` dials at ``c`` does."""
    async with a_swarm("abc", toml=spec(contributors=0)) as swarm:
        swarm.world.refused.add(("c", "b"))
        swarm.world.cut("b", "c")
        await swarm.until(lambda: links(swarm, "c") == {"a"})
        await swarm.commit(2)
        await swarm.until(lambda: links(swarm, "c") == {"a", "b"})
        await swarm.until(lambda: contributed(swarm, "abc"))
        assert {sim.lives for sim in swarm.peers.values()} == {1}
        await settled(swarm, "abc")


@pytest.mark.fault(
    "a member that only listens reaches nobody",
    "the same",
    "it is left out of rounds, nobody waits",
)
async def test_a_spare_that_reaches_nobody_stops_nobody() -> None:
    async with a_swarm("abc", "d") as swarm:
        for name in "abc":
            swarm.world.refused.add(("d", name))
            swarm.world.refused.add((name, "d"))
            swarm.world.cut("d", name)
        await swarm.commit(5, within_s=60)
        for name in "abc":
            swarm.world.refused.discard(("d", name))
            swarm.world.refused.discard((name, "d"))
        await swarm.until(lambda: swarm.in_sync("d"), within_s=120)
        await settled(swarm, "abcd")


@pytest.mark.fault("a peer cannot be dialled, from behind a router")
async def test_whoever_can_be_dialled_again_is_classed_so() -> None:
    with mock.patch.object(reachability, "RECLASS_S", 3.0):
        async with a_swarm_behind("c", "abc") as swarm:
            await swarm.come_to_rest("abc")
            assert reach(swarm)["c"] == "outbound"
            swarm.world.unreachable.discard("c")
            await trio.sleep(4)
            assert reach(swarm)["c"] == "reachable"
            swarm.resume()
            await settled(swarm, "abc")


# ---------------------------------------------------------------- relays


class RelayedSwarm(Swarm):
    """A swarm with machines that only forward for peers."""

    def __init__(self, nursery: trio.Nursery, toml: str, **options: Any) -> None:
        super().__init__(nursery, toml, **options)
        self.relays: dict[str, trio.CancelScope] = {}  # running relays, by name

    def add_relay(self, name: str, *, bytes_per_s: float = 1e7, quota_bytes: int = 0) -> None:
        """Start a relay."""
        peer = f"{self.rng.getrandbits(128):032x}"
        self.store.admit(peer, GrantRow(Role.RELAY, False, name))
        config = PeerConfig(
            me=peer,
            name=name,
            run_id=RUN_ID,
            masters=[MASTER_ADDRESS],
            bind=[Address(name, 29701)],
            incarnation=self.rng.getrandbits(60),
            patience_s=None,
            relay=RelayOffer(bytes_per_s, 8, quota_bytes, only=True),
        )
        relay = RelayService(config, self.world.host(name, peer, Party.PEER))
        scope = self.relays[name] = trio.CancelScope()

        async def run() -> None:
            with scope:
                await relay.run()

        with on_host(name):
            self.nursery.start_soon(run)

    def crash_relay(self, name: str) -> None:
        self.world.crash(name)
        self.relays.pop(name).cancel()


@asynccontextmanager
async def a_relayed_swarm(relays: str = "r", **options: Any) -> AsyncIterator[RelayedSwarm]:
    """None of the three can be dialled, so all their traffic goes by relay."""
    async with trio.open_nursery() as nursery:
        swarm = RelayedSwarm(nursery, spec(contributors=0, min_members=3), **options)
        await swarm.start_master()
        for relay in relays:
            swarm.add_relay(relay)
        for name in "abc":
            swarm.world.unreachable.add(name)
            swarm.add_peer(name)
        await swarm.until(lambda: swarm.committed >= 1 and contributed(swarm, "abc"))
        yield swarm
        nursery.cancel_scope.cancel()


def routes(swarm: Swarm) -> dict[str, tuple[str, bool]]:
    """Return each pair's route and whether it works, from the master's status."""
    status = describe(swarm.coordinator, trio.current_time())
    names = {member["peer"]: member["name"] for member in status["members"]}
    return {
        "".join(sorted(names[peer] for peer in row["peers"])): (row["route"], row["works"])
        for row in status["routes"]
    }


def relay_of(swarm: Swarm, pair: str) -> str:
    status = describe(swarm.coordinator, trio.current_time())
    names = {member["peer"]: member["name"] for member in status["members"]}
    for row in status["routes"]:
        if sorted(names[peer] for peer in row["peers"]) == sorted(pair):
            return str(names.get(row["relay"], ""))
    return ""


@pytest.mark.fault(
    "two peers that nobody can dial", "the view", "a relay forwards ciphertext between them"
)
async def test_three_that_nobody_can_dial_train_by_relay() -> None:
    async with a_relayed_swarm() as swarm:
        await see(
            swarm, lambda: routes(swarm) == dict.fromkeys(("ab", "ac", "bc"), ("relayed", True))
        )
        assert swarm.world.sent_bytes["a", "b"] == 0, "nothing goes there but by the relay"
        await settled(swarm, "abc")
        await trio.sleep(6)
        status = describe(swarm.coordinator, trio.current_time())
        (relay,) = [member["relay"] for member in status["members"] if member["relay"]]
        assert relay["pairs"] == 3
        assert relay["carried_bytes"] > 0


@pytest.mark.fault(
    "a relay dies", "its session with the master ends", "its pairs get another one, or wait for one"
)
async def test_a_relays_death_is_survived_by_another_one() -> None:
    async with a_relayed_swarm("rs") as swarm:
        await see(swarm, lambda: all(works for _route, works in routes(swarm).values()))
        lost = relay_of(swarm, "ab")
        (left,) = {"r", "s"} - {lost}
        swarm.crash_relay(lost)
        await see(swarm, lambda: [relay_of(swarm, p) for p in ("ab", "ac", "bc")] == [left] * 3)
        await see(swarm, lambda: all(works for _route, works in routes(swarm).values()))
        await swarm.until(lambda: contributed(swarm, "abc"))
        await settled(swarm, "abc", more=3)


@pytest.mark.fault("a relay dies")
async def test_when_the_only_relay_comes_back_the_run_goes_on() -> None:
    async with a_relayed_swarm() as swarm:
        swarm.crash_relay("r")
        await trio.sleep(8)
        before = swarm.committed
        swarm.add_relay("again")
        await swarm.until(lambda: swarm.committed >= before + 2, within_s=60)
        await swarm.until(lambda: contributed(swarm, "abc"), within_s=60)
        await settled(swarm, "abc")


async def test_a_master_that_starts_again_arranges_the_routes_again() -> None:
    async with a_relayed_swarm() as swarm:
        await see(swarm, lambda: len(routes(swarm)) == 3)
        swarm.crash_master()
        await swarm.start_master()
        await settled(swarm, "abc", more=3)
        assert contributed(swarm, "abc")


@pytest.mark.fault("a relay's quota is spent", "it says so, and hangs up", "another one is taken")
async def test_a_relay_whose_quota_is_spent_gives_way_to_another() -> None:
    async with a_relayed_swarm() as swarm:
        await see(swarm, lambda: all(works for _route, works in routes(swarm).values()))
        swarm.add_relay("small", quota_bytes=2_000, bytes_per_s=1e9)  # more to give: it comes first
        await see(swarm, lambda: "small" in reach(swarm))
        swarm.crash_relay("r")
        swarm.add_relay("large")
        await see(swarm, lambda: [relay_of(swarm, p) for p in ("ab", "ac", "bc")] == ["large"] * 3)
        await settled(swarm, "abc")


@pytest.mark.fault(
    "a peer that needs a relay can be dialled after all",
    "the master dials it back",
    "between two rounds its pairs go on without the relay",
)
async def test_a_relayed_pair_goes_direct_when_it_can() -> None:
    with mock.patch.object(reachability, "RECLASS_S", 3.0):
        async with a_relayed_swarm() as swarm:
            await see(swarm, lambda: all(works for _route, works in routes(swarm).values()))
            table = swarm.coordinator.scheduler.round_table
            before = table.repair_count, table.rerun_count, table.abort_count
            swarm.world.unreachable.discard("a")
            await see(swarm, lambda: reach(swarm)["a"] == "reachable")

            def direct() -> bool:
                found = routes(swarm)
                return all(found[p][0].startswith("direct") and found[p][1] for p in ("ab", "ac"))

            await see(swarm, direct)
            assert routes(swarm)["bc"] == ("relayed", True)
            assert (table.repair_count, table.rerun_count, table.abort_count) == before
            await settled(swarm, "abc", more=3)
            assert swarm.world.sent_bytes["b", "a"] > 0


async def test_a_member_whose_router_maps_a_port_tells_its_address_in_the_same_session() -> None:
    async with a_swarm("abc", toml=spec(contributors=0)) as swarm:
        member = swarm.coordinator.context.roster.members[swarm.peers["b"].peer]
        service = swarm.peers["b"].service
        service.ports.mappings = [PortMapping(Address("203.0.113.7", 40_000), 60.0, "PCP")]
        service.session.tell_addresses()
        await swarm.until(lambda: member.connection.addresses == ("b:29701", "203.0.113.7:40000"))
        target = swarm.committed + 2
        await swarm.until(lambda: swarm.committed >= target and contributed(swarm, "abc"))
        assert swarm.coordinator.context.roster.members[member.peer] is member
        await settled(swarm, "abc")


# ---------------------------------------------------------------- through both routers


@asynccontextmanager
async def a_swarm_behind_routers(keeps: str, draws: str = "") -> AsyncIterator[RelayedSwarm]:
    """Every peer is behind a router of its own; there is a relay."""
    async with trio.open_nursery() as nursery:
        swarm = RelayedSwarm(nursery, spec(contributors=0, min_members=len(keeps + draws)))
        await swarm.start_master()
        swarm.add_relay("r")
        for name in keeps + draws:
            swarm.world.nat(name, keeps_ports=name in keeps)
            swarm.add_peer(name)
        await swarm.until(lambda: swarm.committed >= 1 and contributed(swarm, keeps + draws))
        yield swarm
        nursery.cancel_scope.cancel()


@pytest.mark.fault(
    "they are behind routers that keep ports",
    "the port that the master sees",
    "both dial at once, no relay is needed",
)
async def test_two_behind_routers_that_keep_ports_meet_without_a_relay() -> None:
    async with a_swarm_behind_routers("ab", "c") as swarm:
        expected = {"ab": ("punched", True), "ac": ("relayed", True), "bc": ("relayed", True)}
        await see(swarm, lambda: routes(swarm) == expected)
        assert swarm.world.sent_bytes["a", "b"] > 0
        assert swarm.world.sent_bytes["a", "c"] == 0
        await settled(swarm, "abc", more=3)


@pytest.mark.fault("such a link breaks", "both ends notice", "they meet again at the same ports")
async def test_a_punched_link_that_breaks_is_punched_again() -> None:
    async with a_swarm_behind_routers("ab") as swarm:
        await see(swarm, lambda: routes(swarm) == {"ab": ("punched", True)})
        await swarm.come_to_rest("ab")
        swarm.world.cut("a", "b")
        await see(swarm, lambda: links(swarm, "a") == {"b"} and links(swarm, "b") == {"a"})
        assert routes(swarm) == {"ab": ("punched", True)}
        swarm.resume()
        await settled(swarm, "ab")


# ---------------------------------------------------------------- a control stream that breaks


@pytest.mark.fault(
    "the connection to the master breaks",
    "its end",
    "it is dialled again, the session goes on, no view changes",
)
async def test_a_dropped_control_stream_goes_on_without_a_view_change() -> None:
    async with a_swarm("abc", toml=spec(contributors=0)) as swarm:
        coordinator = swarm.coordinator
        view, before = coordinator.context.roster.view_number, links(swarm, "b")
        for _ in range(3):
            swarm.world.cut("b", "master")
            await trio.sleep(0.7)
        assert coordinator.context.roster.view_number == view
        assert links(swarm, "b") == before
        await swarm.commit(2)
        assert contributed(swarm, "abc")
        gone = [event for event in coordinator.context.events if event.kind.value == "leave"]
        assert not gone
        await settled(swarm, "abc")


async def test_a_peer_whose_network_is_away_for_a_moment_keeps_its_session() -> None:
    async with a_swarm("abc", toml=spec(contributors=0)) as swarm:
        view = swarm.coordinator.context.roster.view_number
        swarm.world.offline.add("b")
        swarm.world.cut("b", "master")
        await trio.sleep(1)  # several dials; the deadline is 3 s
        swarm.world.offline.discard("b")
        await trio.sleep(4)
        assert swarm.coordinator.context.roster.view_number == view
        await settled(swarm, "abc")


async def test_a_session_of_which_nothing_is_confirmed_ends_as_one_whose_master_is_gone() -> None:
    async with a_swarm("abc", toml=spec(contributors=0)) as swarm:
        service = swarm.peers["b"].service
        lifted = service.replica.trainer.extension_count
        for _ in range(KEPT_MAX + 1):
            service.session.tell(service.training.progress())
        await swarm.until(lambda: service.replica.trainer.extension_count > lifted)
        await swarm.until(lambda: service.session.connected and swarm.in_sync("b"))
        await settled(swarm, "abc")


@pytest.mark.fault("a peer dies", "its connection's end, and the others' word", "out after a trip")
async def test_whoever_dies_is_out_as_soon_as_the_others_say_so() -> None:
    async with a_swarm("abcd", toml=spec(contributors=0)) as swarm:
        swarm.crash("b")
        await trio.sleep(0.1)  # a few trips; the deadline is 3 s
        assert "b" not in reach(swarm)
        await settled(swarm, "acd")


@pytest.mark.fault(
    "it does not come back", "silence", "out by the deadline; it begins another session"
)
async def test_a_control_stream_that_does_not_come_back_is_out_by_the_deadline() -> None:
    async with a_swarm("abc", toml=spec(contributors=0)) as swarm:
        swarm.world.refused.add(("b", "master"))
        swarm.world.cut("b", "master")
        await trio.sleep(1)
        assert "b" in reach(swarm)
        await trio.sleep(3)
        assert "b" not in reach(swarm)
        swarm.world.refused.discard(("b", "master"))
        await swarm.until(lambda: swarm.in_sync("b") and contributed(swarm, "abc"))
        await settled(swarm, "abc")


@pytest.mark.fault(
    "a peer's address changes",
    "silence, then its new one",
    "the next view tells it, and others dial it there",
)
async def test_a_member_that_moves_is_dialled_where_it_is_now() -> None:
    """The later joiner dials: ``b`` moves, and ``c`` finds it again."""
    async with a_swarm("abc", toml=spec(contributors=0)) as swarm:
        view = swarm.coordinator.context.roster.view_number
        service = swarm.peers["b"].service
        swarm.world.moved["b"] = "elsewhere"
        for other in ("a", "c", "master"):
            swarm.world.cut("b", other)
        service.config.advertise = [Address("elsewhere", 29701)]
        await trio.sleep(0.3)
        await swarm.until(
            lambda: links(swarm, "c") == {"a", "b"} and links(swarm, "b") == {"a", "c"}
        )
        roster = swarm.coordinator.context.roster
        assert roster.view_number > view
        assert roster.members[swarm.peers["b"].peer].connection.addresses == ("elsewhere:29701",)
        target = swarm.committed + 2
        await swarm.until(lambda: swarm.committed >= target and contributed(swarm, "abc"))
        await settled(swarm, "abc")

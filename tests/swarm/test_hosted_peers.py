"""Peers of two hosts in whole runs in virtual time: kills and cuts between head and host.

Planted bugs, each of which must be found:

    told too early      ranks are told of a version before its boxes are at all hosts
    posts without parts the daemon is told of a post before a host's part is there
    old boxes           a host keeps its boxes over a start of the command
    no way back         a host that comes back does not take part again
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any, cast

import pytest
import trio

from holdfast.daemon.peer.hosts.head import Head
from holdfast.daemon.peer.trainer.host_places import HostPlaces, PresentHost
from holdfast.protocol import messages as m
from holdfast.simulation.hosted_trainer import HostedTrainer
from holdfast.simulation.swarm import Swarm
from holdfast.simulation.virtual_time import run_virtually
from holdfast.simulation.witness import ViolationError
from tests.planting import Bugs, Note, Patch
from tests.swarm.test_swarm import a_swarm, settled, spec

HOSTED = "c"
ROUNDS = 4
HARMS = 6
SEEDS_MAX = 30
AGAIN_S = 10.0  # for a command to start again
BACK_S = 60.0  # for all to be as before

BUGS = Bugs()
bug = BUGS.named


async def harm(swarm: Swarm, seed: int) -> None:
    """Do some harm to the peer of two hosts, at random moments."""
    chance = random.Random(seed)
    for _ in range(HARMS):
        await trio.sleep(chance.uniform(0, 2.0))
        peer = swarm.peers[HOSTED]
        trainer = cast("HostedTrainer", peer.trainer)
        match chance.choice(("host", "cut", "rank", "rank of the host", "head", "none")):
            case "host":
                trainer.crash_host()
            case "cut" if swarm.world.is_alive(trainer.further):
                swarm.world.cut(HOSTED, trainer.further)
            case "rank":
                trainer.crash()
            case "rank of the host":
                trainer.crash_host_command()
            case "head" if swarm.survives_without(HOSTED) and peer.alive:
                swarm.crash(HOSTED)
                await trio.sleep(chance.uniform(0, 1.0))
                swarm.restart(HOSTED)


async def live_through(seed: int) -> None:
    """Live through some harm, and come back to a run with both hosts.

    Raises:
      ViolationError: a rank or the daemon saw other bits than it should have.
      trio.TooSlowError: the peer or its host does not come back.
    """
    how: dict[str, Any] = {"toml": spec(fragments=2), "hosted": HOSTED, "seed": seed}
    async with a_swarm("ab" + HOSTED, **how) as swarm:
        await harm(swarm, seed)
        await swarm.until(lambda: both_hosts_train(swarm), within_s=BACK_S)
        await settled(swarm, "ab" + HOSTED, more=ROUNDS)
        # The command is started again at the same version.
        trainer = cast("HostedTrainer", swarm.peers[HOSTED].trainer)
        starts = trainer.starts
        trainer.crash()
        await swarm.until(lambda: trainer.starts > starts and swarm.in_sync(HOSTED))
        await trio.sleep(AGAIN_S)
        swarm.resume()
        await swarm.until(lambda: both_hosts_train(swarm), within_s=BACK_S)
        await settled(swarm, "ab" + HOSTED, more=ROUNDS)


def both_hosts_train(swarm: Swarm) -> bool:
    trainer = cast("HostedTrainer", swarm.peers[HOSTED].trainer)
    return len(trainer.places.used) == 1 and swarm.in_sync(HOSTED)


def survives(seed: int) -> None:
    run_virtually(partial(live_through, seed), seed=seed, seconds_max=4 * BACK_S)


@pytest.mark.fault(
    "a host of a peer of several, a process there, the head, or the line between them dies",
    "the link between head and host ends; a process's end is told",
    "the command is started again with what is left, and with the host once it is back",
)
@pytest.mark.parametrize("seed", range(4))
def test_a_peer_of_two_hosts_holds_the_same_bits(seed: int) -> None:
    survives(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 300, 20))
def test_the_same_with_many_seeds(seed: int) -> None:
    for each in range(seed, seed + 20):
        survives(each)


def processes(trainer: HostedTrainer) -> list[int]:
    """Return the connections of a further host that its head serves."""
    head = cast("Head", trainer.bridge.further)
    return [number for host in head._hosts.values() for number in host.processes]


async def test_a_sampler_on_a_further_host_draws_at_the_head() -> None:
    async with a_swarm("ab" + HOSTED, toml=spec(), hosted=HOSTED) as swarm:
        await swarm.until(lambda: both_hosts_train(swarm), within_s=BACK_S)
        trainer = cast("HostedTrainer", swarm.peers[HOSTED].trainer)
        assert trainer._host_command is not None
        bridge = trainer._host_command._ranks[0]._bridge
        sampler = bridge.connect()
        await sampler.send(m.DrawHello(m.VERSION_MAX, 0, 100))
        first = await sampler.receive_expected(m.Drawn)
        assert first.key
        assert not first.ranges
        await sampler.send(m.Draw(0, 4))
        drawn = await sampler.receive_expected(m.Drawn)
        assert 1 <= sum(each.stop - each.start for each in drawn.ranges) <= 4
        assert len(processes(trainer)) == 2, "a rank and the sampler"
        await sampler.aclose()
        await swarm.until(lambda: len(processes(trainer)) == 1)
        # One of another data set is refused, and its connection ended.
        other = bridge.connect()
        await other.send(m.DrawHello(m.VERSION_MAX, 0, 99))
        await other.receive_expected(m.Rejected)
        with pytest.raises(trio.EndOfChannel):
            await other.receive()


@bug("told too early", seed=0)
def _(patch: Patch) -> None:
    async def nothing(*_args: object) -> None:
        pass

    patch.setattr(Head, "_bring", nothing)


@bug("posts without parts", seed=0)
def _(patch: Patch) -> None:
    async def nothing(*_args: object) -> None:
        pass

    patch.setattr(Head, "_fetch_boxes", nothing)


@bug("old boxes", seed=0)
def _(patch: Patch) -> None:
    real = HostPlaces.start

    def lacking(self: HostPlaces, start: str) -> None:
        kept = [dict(host.versions) for host in self.used]
        real(self, start)
        for host, versions in zip(self.used, kept, strict=True):
            host.versions.update(versions)

    patch.setattr(HostPlaces, "start", lacking)


@bug("no way back", seed=0)
def _(patch: Patch) -> None:
    real = HostPlaces.came

    def lacking(self: HostPlaces, host: PresentHost) -> None:
        real(self, host)
        self._settled[host.peer] = 10**9

    patch.setattr(HostPlaces, "came", lacking)


def shows(seed: int) -> bool:
    found = False
    try:
        survives(seed)
    except* (ViolationError, trio.TooSlowError):
        found = True
    return found


@pytest.mark.planted
@pytest.mark.parametrize("name", BUGS)
def test_a_rule_that_is_taken_out_is_missed(
    name: str, monkeypatch: Patch, record_property: Note
) -> None:
    assert BUGS.is_found(name, monkeypatch, record_property, shows, range(SEEDS_MAX))


def test_every_rule_is_listed_above() -> None:
    assert BUGS.are_listed(__doc__)

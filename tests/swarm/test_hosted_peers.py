"""Peers of two hosts in whole runs in virtual time: kills and cuts between head and host."""

from __future__ import annotations

import os
import random
from typing import cast

import pytest
import trio

from holdfast.simulation.hosted_trainer import HostedTrainer
from holdfast.simulation.swarm import Swarm
from tests.swarm.test_swarm import a_swarm, settled, spec

HOSTED = "c"
ROUNDS = 12
SEEDS = range(*map(int, os.environ.get("HOSTED_SEEDS", "0 4").split()))
FAULTS = ("host", "cut", "rank", "head", "none")


async def harm(swarm: Swarm, seed: int) -> None:
    """Do some harm to the peer of two hosts, at random moments."""
    chance = random.Random(seed)
    for _ in range(6):
        await trio.sleep(chance.uniform(0, 2.0))
        peer = swarm.peers[HOSTED]
        trainer = cast("HostedTrainer", peer.trainer)
        match chance.choice(FAULTS):
            case "host":
                trainer.crash_host()
            case "cut" if swarm.world.is_alive(trainer.further):
                swarm.world.cut(HOSTED, trainer.further)
            case "rank":
                trainer.crash()
            case "head" if swarm.survives_without(HOSTED) and peer.alive:
                swarm.crash(HOSTED)
                await trio.sleep(chance.uniform(0, 1.0))
                swarm.restart(HOSTED)


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_peer_of_two_hosts_holds_the_same_bits(seed: int) -> None:
    async with a_swarm("ab" + HOSTED, toml=spec(fragments=2), hosted=HOSTED, seed=seed) as swarm:
        trainer = cast("HostedTrainer", swarm.peers[HOSTED].trainer)
        await swarm.until(lambda: len(trainer.places.used) == 1)
        await harm(swarm, seed)
        await swarm.until(lambda: swarm.in_sync(HOSTED))
        await settled(swarm, "ab" + HOSTED, more=ROUNDS)
        swarm.resume()
        # The further host takes part again, and rounds go on.
        trainer = cast("HostedTrainer", swarm.peers[HOSTED].trainer)
        await swarm.until(lambda: len(trainer.places.used) == 1)
        await settled(swarm, "ab" + HOSTED)

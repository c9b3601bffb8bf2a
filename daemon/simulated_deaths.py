"""Histories in which peers are lost in the middle of reductions, each from its own seed.

Links are slow, so a reduction is the longest part of a round, and every fault waits for one to run.
Contributions are powers of two, so every set of contributors has a mean of its own and the witness
can tell a wrong divisor from a right one.
"""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import trio
from attrs import define
from numpy.typing import NDArray

from ..membership.replica import Phase
from ..protocol.messages import Role
from ..protocol.virtual_time import run_virtually
from .simulator import QUIET_S, Swarm, ViolationError, make_peace, small_layout

NAMES = ("p0", "p1", "p2", "p3", "p4")
SPARE_NAME = "s0"
LOSSES = 3  # faults of one history

TOML = """
[run]
name = "deaths"
[diloco]
sync_every = 4
[membership]
contributors = 0
min_members = 3
deadline_s = 3
grace_s = 1
[reduce]
codec_up = "{codec}"
codec_down = "{codec}"
chunk_bytes = 4096
"""

FAULTS = (
    "crash",
    "crash",
    "two at once",
    "one after the other",
    "cut off from the master",
    "cut off from the others",
    "cut off from one",
    "freeze",
)


@define
class Deaths:
    """What one seed led to.

    Attributes:
      repairs: by fault: how many repairs the master made until the round was over.
    """

    seed: int
    faults: list[tuple[str, int]]
    committed: int
    reruns: int
    aborts: int
    trace: str

    @property
    def repaired(self) -> int:
        """Faults after which at least one repair was made."""
        return sum(repairs > 0 for _fault, repairs in self.faults)


def simulate_deaths(seed: int) -> Deaths:
    """``die_in_reductions`` in virtual time, from outside of trio; raises what it raises."""
    return run_virtually(partial(die_in_reductions, seed), seed=seed)


def power_of_two(peer: str, _round: int, count: int) -> NDArray[np.float32]:
    """The contribution of the n-th peer is 2 to the n, in every element."""
    return np.full(count, 2.0 ** (int(peer[:8], 16) - 1), np.float32)


async def die_in_reductions(seed: int) -> Deaths:
    """Five contributors and a spare; some are lost while they reduce; then peace.

    Raises:
      ViolationError: a promise was broken, or the run did not go on.
    """
    rng = random.Random(seed)
    faults: list[tuple[str, int]] = []
    async with trio.open_nursery() as nursery:
        swarm = Swarm(
            nursery,
            TOML.format(codec=rng.choice(["fp32", "fp32", "int8"])),
            seed=rng.getrandbits(32),
            layout=small_layout([rng.choice([6_000, 10_000])], rng.randint(0, 2)),
            step_s=0.5,
            delay_s=rng.choice([0.001, 0.02]),
            jitter_s=rng.choice([0.0, 0.01]),
            bytes_per_s=rng.choice([5e4, 1e5]),
            delta=power_of_two if rng.random() < 0.5 else None,
        )
        await swarm.start_master()
        for name in NAMES:
            swarm.add_peer(name)
        swarm.add_peer(SPARE_NAME, role=Role.SPARE)
        try:
            await swarm.until(
                lambda: swarm.committed >= 1 and all(swarm.in_sync(n) for n in NAMES),
                within_s=4 * QUIET_S,
            )
            for _ in range(LOSSES):
                fault = rng.choice(FAULTS)
                faults.append((fault, await _lose(swarm, rng, fault)))
            await make_peace(swarm)
        except trio.TooSlowError as error:
            raise ViolationError(f"seed {seed} after {faults}: {swarm.story()}") from error
        assert swarm.master is not None
        conductor = swarm.master.coordinator.conductor
        reruns, aborts = conductor.rerun_count, conductor.abort_count
        nursery.cancel_scope.cancel()
    trace = swarm.witness.trace.hexdigest()[:32]
    return Deaths(seed, faults, swarm.committed, reruns, aborts, trace)


async def _lose(swarm: Swarm, rng: random.Random, fault: str) -> int:
    """Let it happen in the middle of a reduction, wait for a commit, make it undone.

    Returns:
      Repairs that the master made meanwhile.
    """
    assert swarm.master is not None
    conductor = swarm.master.coordinator.conductor
    contributors = await _reduction(swarm)
    started_s = trio.current_time()
    before, target = conductor.repair_count, swarm.committed + 1
    names = rng.sample(contributors, 2)
    # The pairs' links are the bottleneck: each carries its share of contributions, then of results.
    size = sum(tensor.shape[0] for tensor in swarm.layout.tensors[:1]) * 4
    usual_s = 2 * size / len(contributors) / swarm.world.direction("p0", "p1").bytes_per_s
    await trio.sleep(rng.uniform(0, 1.1 * usual_s))
    if fault == "crash":
        swarm.crash(names[0])
    elif fault == "two at once":
        for name in names:
            swarm.crash(name)
    elif fault == "one after the other":
        swarm.crash(names[0])
        await trio.sleep(rng.uniform(0, usual_s))
        swarm.crash(names[1])
    elif fault == "cut off from the master":
        swarm.world.partition(names[0], "master")
    elif fault == "cut off from the others":
        for name in sorted(swarm.peers):
            if name != names[0]:
                swarm.world.partition(names[0], name)
    elif fault == "cut off from one":
        swarm.world.partition(names[0], names[1])
    elif fault == "freeze":
        swarm.world.freeze(names[0])
    await swarm.until(lambda: swarm.committed >= target, within_s=QUIET_S)
    await trio.sleep(rng.uniform(0, trio.current_time() - started_s))
    repairs = conductor.repair_count - before
    for name in sorted(swarm.peers):
        swarm.world.thaw(name)
    swarm.heal_all()
    for name in sorted(swarm.peers):
        if not swarm.peers[name].alive:
            swarm.restart(name)
    await swarm.until(
        lambda: all(swarm.peers[n].service.replica.contributing for n in NAMES),
        within_s=2 * QUIET_S,
    )
    return repairs


async def _reduction(swarm: Swarm) -> list[str]:
    """Wait until a reduction begins; returns the names of its contributors."""
    found: list[str] = []

    def begins() -> bool:
        found[:] = [
            name
            for name in NAMES
            for here in swarm.peers[name].service.replica.rounds.values()
            if here.phase is Phase.REDUCING and here.posted is not None
        ]
        return len(found) >= 4

    seen = swarm.committed  # not one that is half over already
    await swarm.until(lambda: swarm.committed > seen, within_s=QUIET_S)
    await swarm.until(begins, within_s=QUIET_S)
    return list(found)

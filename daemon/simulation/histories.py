"""Short runs with faults at random instants, each a function of its seed.

``simulate`` is the one line that reproduces one. The swarm that suffers is ``swarm``'s; what
befalls it, when, and the peace that must follow are decided here.
"""

from __future__ import annotations

import random
from functools import partial

import trio
from attrs import define

from ...protocol.messages import Role
from ...protocol.virtual_time import run_virtually
from .swarm import Swarm
from .trainer import small_layout
from .witness import ViolationError


def simulate(seed: int, *, fault_count: int = 6) -> History:
    """``live_through`` in virtual time, from outside of trio; raises what it raises."""

    return run_virtually(partial(live_through, seed, fault_count=fault_count), seed=seed)


FAULTS = (
    "crash",
    "crash",
    "restart",
    "restart",
    "trainer",
    "freeze",
    "thaw",
    "partition",
    "heal",
    "cut",
    "corrupt",
    "master",
    "join",
    "leave",
)
QUIET_S = 60.0  # after the last fault: by then a run must be whole again


@define
class History:
    """What one seed led to."""

    seed: int
    faults: list[str]
    events: int
    committed: int
    trace: str  # digest of all that the witness saw, with times


async def live_through(seed: int, *, fault_count: int = 6) -> History:
    """One run of three to five peers with faults at random instants; then peace.

    Raises:
      ViolationError: a promise was broken; or, once the faults are over, the run does not commit
        again, or a member does not come back in sync, within ``QUIET_S``.
    """
    rng = random.Random(seed)
    toml = HISTORY_TOML.format(
        contributors=rng.choice([0, 3]),
        codec=rng.choice(["fp32", "int8"]),
        fragments=rng.choice([1, 1, 2]),
    )
    layout = small_layout(
        [rng.choice([0, 1, 3, 700, 3_000]) for _ in range(rng.randint(2, 4))], rng.randint(0, 2)
    )
    faults: list[str] = []
    async with trio.open_nursery() as nursery:
        swarm = Swarm(
            nursery,
            toml,
            seed=rng.getrandbits(32),
            layout=layout,
            delay_s=rng.choice([0.001, 0.02, 0.08]),
            jitter_s=rng.choice([0.0, 0.01]),
            bytes_per_s=rng.choice([1e5, 1e6, 1e9]),
            apply_s=rng.choice([0.0, 0.02]),
        )
        await swarm.start_master()
        for index in range(rng.randint(3, 5)):
            swarm.add_peer(f"p{index}", role=Role.SPARE if index == 3 else Role.CONTRIBUTOR)
        try:
            await swarm.until(lambda: swarm.committed >= 1, within_s=QUIET_S)
            for _ in range(fault_count):
                await trio.sleep(rng.expovariate(1.5))
                faults.append(await _befall(swarm, rng, rng.choice(FAULTS)))
            await _make_peace(swarm)
        except trio.TooSlowError as error:
            raise ViolationError(f"seed {seed} after {faults}: {swarm.story()}") from error
        nursery.cancel_scope.cancel()
    witness = swarm.witness
    return History(seed, faults, witness.events, swarm.committed, witness.trace.hexdigest()[:32])


HISTORY_TOML = """
[run]
name = "history"
[diloco]
sync_every = 4
fragments = {fragments}
[membership]
contributors = {contributors}
min_members = 1
deadline_s = 3
grace_s = 1
[reduce]
codec_up = "{codec}"
codec_down = "{codec}"
"""


async def _befall(swarm: Swarm, rng: random.Random, kind: str) -> str:
    """Let one fault happen; returns what it was."""
    names = sorted(swarm.peers)
    alive = [name for name in names if swarm.peers[name].alive]
    dead = [name for name in names if not swarm.peers[name].alive and name not in swarm.left]
    name = rng.choice(alive) if alive else ""
    other = rng.choice([*names, "master"])
    if kind == "crash" and swarm.survives_without(name):
        swarm.crash(name)
    elif kind == "restart" and dead:
        name = rng.choice(dead)
        swarm.restart(name)
    elif kind == "trainer" and alive:
        swarm.peers[name].trainer.crash()
    elif kind == "freeze" and alive:
        swarm.world.freeze(name)
    elif kind == "thaw":
        for each in names:
            swarm.world.thaw(each)
    elif kind == "partition" and alive and other != name:
        swarm.world.partition(name, other)
        name = f"{name}-{other}"
    elif kind == "heal":
        swarm.heal_all()
    elif kind == "cut" and alive and other != name:
        swarm.world.cut(name, other)
        name = f"{name}-{other}"
    elif kind == "corrupt" and alive and other not in (name, "master"):
        swarm.world.corrupt_next_lane_frame(name, other)
        name = f"{name}-{other}"
    elif kind == "master":
        if swarm.master is not None:
            swarm.crash_master()
            await trio.sleep(rng.random() * 2)
        await swarm.start_master()
        name = ""
    elif kind == "join" and len(names) < 7:
        name = f"p{len(names)}"
        swarm.add_peer(name)
    elif kind == "leave" and len(alive) > 2 and swarm.survives_without(name):
        swarm.left.add(name)
        swarm.nursery.start_soon(swarm.peers[name].service.leave, "enough")
    else:
        return "nothing"
    return f"{trio.current_time():.2f}:{kind} {name}".strip()


async def _make_peace(swarm: Swarm) -> None:
    """End all faults, then demand that the run is whole again."""
    for name in sorted(swarm.peers):
        swarm.world.thaw(name)
    swarm.heal_all()
    for name in sorted(swarm.peers):
        if not swarm.peers[name].alive and name not in swarm.left:
            swarm.restart(name)
    target = swarm.committed + 3
    staying = [name for name in sorted(swarm.peers) if name not in swarm.left]
    await swarm.until(lambda: swarm.committed >= target, within_s=QUIET_S)
    assert swarm.master is not None
    await swarm.come_to_rest(staying, within_s=QUIET_S)
    swarm.check_final(staying)
    swarm.master.coordinator.validate()

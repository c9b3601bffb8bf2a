"""Recovery of a run from a line that carries nothing in one direction for a while.

    rounds, timed --cut one way--> no requirement --healed--> RECOVER_S --> rounds, timed again

There are four peers and a master. The ordered pair, the duration and the moment follow from the
seed, so that ``CASES`` consecutive seeds cover all pairs and durations. After the recovery, rounds
must be as fast as before and contain all peers, and no peer may be removed.
"""

from __future__ import annotations

import itertools
import statistics
from functools import partial
from random import Random

import trio
from attrs import frozen

from holdfast.membership.shared.event_kind import EventKind
from holdfast.simulation.drifting_trainer import small_layout
from holdfast.simulation.scenario import MASTER
from holdfast.simulation.scenario_run import format_state
from holdfast.simulation.swarm import Swarm
from holdfast.simulation.virtual_time import run_virtually
from holdfast.simulation.witness import ViolationError

PEERS = ("p0", "p1", "p2", "p3")
PAIRS = tuple(itertools.permutations((*PEERS, MASTER), 2))
CUTS_S = (3.0, 10.0, 25.0, 60.0)  # shorter than the deadline, about as long, and longer
CASES = len(PAIRS) * len(CUTS_S)
RECOVER_S = 30.0  # limit of the recovery, from the end of the cut
SLOWER_MAX = 1.1  # ratio of the round times after to before
ROUNDS_TIMED = 10  # the median counts
ROUNDS_FIRST = 5  # not timed: the lines' rates are not measured yet
FOUND_S = 60.0
ROUNDS_S = 120.0  # limit of the timed rounds; few runs need a quarter of it

TOML = """
[run]
name = "one way"
[diloco]
sync_every = 4
[membership]
contributors = 4
min_members = 2
deadline_s = 10
"""


@frozen
class OneWay:
    """A cut of one direction of a line.

    Attributes:
      source, target: hosts; nothing that the source sends reaches the target.
      after_s: delay from the timed rounds to the cut, random so that cuts hit all phases of a
        round.
    """

    seed: int
    source: str
    target: str
    cut_s: float
    after_s: float
    jitter_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, seed: int) -> OneWay:
        """Generate the case of a seed; a pure function."""
        rng = Random(f"one way {seed}")
        source, target = PAIRS[seed % len(PAIRS)]
        cut_s = CUTS_S[seed // len(PAIRS) % len(CUTS_S)]
        after_s, jitter_s = rng.uniform(0.0, 2.0), rng.choice([0.0, 0.005])
        return cls(seed, source, target, cut_s, after_s, jitter_s, rng.choice([2e4, 1e5, 1e6]))

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.source} to {self.target} for {self.cut_s:g} s"


def live_through(case: OneWay) -> tuple[int, int]:
    """Run a case in virtual time; to be called outside trio.

    Returns:
      How many peers were removed or lost during the cut, and in the ``RECOVER_S`` after it.

    Raises:
      BaseExceptionGroup: contains a ViolationError: the run did not recover.
    """
    return run_virtually(partial(_live, case), seed=case.seed)


async def _live(case: OneWay) -> tuple[int, int]:
    async with trio.open_nursery() as nursery:
        swarm = Swarm(
            nursery,
            TOML,
            seed=case.seed,
            layout=small_layout((3_000,)),
            step_s=0.25,
            jitter_s=case.jitter_s,
            bytes_per_s=case.bytes_per_s,
            strict=True,
        )
        try:
            removed = await _recover(swarm, case)
        except trio.TooSlowError as error:
            raise ViolationError(
                f"{case}: the run makes no progress: {format_state(swarm)}"
            ) from error
        finally:
            swarm.standstill.all_go_on()
        nursery.cancel_scope.cancel()
    return removed


async def _recover(swarm: Swarm, case: OneWay) -> tuple[int, int]:
    await swarm.start_master()
    for name in PEERS:
        swarm.add_peer(name)
    await swarm.when(lambda: swarm.committed >= ROUNDS_FIRST and _whole(swarm), within_s=FOUND_S)
    before_s = await _round_s(swarm)
    await trio.sleep(case.after_s)
    began_s = trio.current_time()
    swarm.world.partition(case.source, case.target, one_way=True)
    await trio.sleep(case.cut_s)
    swarm.world.heal(case.source, case.target)
    healed_s = trio.current_time()
    await trio.sleep(RECOVER_S)
    if not _whole(swarm):
        raise ViolationError(f"{case}: not all peers take part again: {format_state(swarm)}")
    after_s = await _round_s(swarm)
    if _removed(swarm, healed_s + RECOVER_S):
        raise ViolationError(f"{case}: another peer was removed: {format_state(swarm)}")
    if after_s > SLOWER_MAX * before_s:
        raise ViolationError(
            f"{case}: rounds take {after_s:.2f} s, before {before_s:.2f} s: {format_state(swarm)}"
        )
    in_cut = _removed(swarm, began_s) - _removed(swarm, healed_s)
    return in_cut, _removed(swarm, healed_s)


def _whole(swarm: Swarm) -> bool:
    """Return whether all peers are in sync, as the master sees it, and are in the last round."""
    in_sync = {each.peer for each in swarm.coordinator.context.roster if each.in_sync}
    added = {contributor.peer for contributor in swarm.witness.commits[-1].contributors}
    return in_sync == added == {sim.peer for sim in swarm.peers.values()}


async def _round_s(swarm: Swarm) -> float:
    """Measure the median time from one commit to the next."""
    times_s = []
    for _round in range(ROUNDS_TIMED + 1):
        target = swarm.committed + 1
        await swarm.when(lambda: swarm.committed >= target, within_s=ROUNDS_S)  # noqa: B023
        times_s.append(trio.current_time())
    return statistics.median(late - soon for soon, late in itertools.pairwise(times_s))


def _removed(swarm: Swarm, since_s: float) -> int:
    events = swarm.coordinator.context.events
    return sum(event.kind is EventKind.LEAVE and event.at_s > since_s for event in events)

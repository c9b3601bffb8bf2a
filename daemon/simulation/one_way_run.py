"""A line that carries nothing in one direction for a while, and how the run is afterwards.

    rounds, timed --cut one way--> whatever happens --healed--> RECOVER_S --> rounds, timed again

Four peers and a master; which of the ordered pairs, how long and when follows from the seed, so that
``CASES`` seeds in a row are all pairs and all lengths. Afterwards rounds must be as fast as before, with
everybody in them, and nobody may be removed any more.
"""

from __future__ import annotations

import itertools
import statistics
from functools import partial
from random import Random

import trio
from attrs import frozen

from ...membership.master.state.master_effects import EventKind
from .drifting_trainer import small_layout
from .scenario import MASTER
from .swarm import Swarm
from .virtual_time import run_virtually
from .witness import ViolationError

PEERS = ("p0", "p1", "p2", "p3")
PAIRS = tuple(itertools.permutations((*PEERS, MASTER), 2))
CUTS_S = (3.0, 10.0, 25.0, 60.0)  # less than the deadline, about as long, and longer
CASES = len(PAIRS) * len(CUTS_S)
RECOVER_S = 30.0  # from the cut's end until all must be as before
SLOWER_MAX = 1.1  # of the rounds after to those before
ROUNDS_TIMED = 10  # of which the median counts
ROUNDS_FIRST = 5  # not timed: what lines carry is not known yet
FOUND_S = 60.0
ROUNDS_S = 120.0  # for the rounds that are timed; hardly any run needs a quarter of it

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
    """What is cut, and when.

    Attributes:
      source, target: nothing that the one sends reaches the other.
      after_s: from the rounds that are timed to the cut, to meet all phases of a round.
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
        """The case of a seed; a pure function."""
        rng = Random(f"one way {seed}")
        source, target = PAIRS[seed % len(PAIRS)]
        cut_s = CUTS_S[seed // len(PAIRS) % len(CUTS_S)]
        after_s, jitter_s = rng.uniform(0.0, 2.0), rng.choice([0.0, 0.005])
        return cls(seed, source, target, cut_s, after_s, jitter_s, rng.choice([2e4, 1e5, 1e6]))

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.source} to {self.target} for {self.cut_s:g} s"


@frozen
class Recovery:
    """What came of a case.

    Attributes:
      before_s, after_s: from one commit to the next, the median.
      during_s: the same from the cut to its end; 0: there were none.
      removed: how often somebody was removed or lost before the cut's end, and until ``RECOVER_S``
        after it.
    """

    case: OneWay
    before_s: float
    during_s: float
    after_s: float
    removed: tuple[int, int]

    @property
    def slowdown(self) -> float:
        return self.after_s / self.before_s


def live_through(case: OneWay) -> Recovery:
    """Live through a case in virtual time, from outside of trio.

    Raises:
      ViolationError: the run is not as it was.
      BaseExceptionGroup: of that.
    """
    return run_virtually(partial(_live, case), seed=case.seed)


async def _live(case: OneWay) -> Recovery:
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
            recovery = await _recover(swarm, case)
        except trio.TooSlowError as error:
            raise ViolationError(f"{case}: it does not go on: {swarm.story()}") from error
        finally:
            swarm.standstill.all_go_on()
        nursery.cancel_scope.cancel()
    return recovery


async def _recover(swarm: Swarm, case: OneWay) -> Recovery:
    await swarm.start_master()
    for name in PEERS:
        swarm.add_peer(name)
    await swarm.when(lambda: swarm.committed >= ROUNDS_FIRST and _whole(swarm), within_s=FOUND_S)
    before_s = await _round_s(swarm)
    await trio.sleep(case.after_s)
    began_s, committed = trio.current_time(), swarm.committed
    swarm.world.partition(case.source, case.target, one_way=True)
    await trio.sleep(case.cut_s)
    swarm.world.heal(case.source, case.target)
    healed_s, during = trio.current_time(), swarm.committed - committed
    await trio.sleep(RECOVER_S)
    if not _whole(swarm):
        raise ViolationError(f"{case}: not everybody takes part again: {swarm.story()}")
    after_s = await _round_s(swarm)
    if _removed(swarm, healed_s + RECOVER_S):
        raise ViolationError(f"{case}: somebody was removed again: {swarm.story()}")
    if after_s > SLOWER_MAX * before_s:
        raise ViolationError(
            f"{case}: rounds take {after_s:.2f} s, before {before_s:.2f} s: {swarm.story()}"
        )
    in_cut = _removed(swarm, began_s) - _removed(swarm, healed_s)
    return Recovery(
        case,
        before_s,
        case.cut_s / during if during else 0.0,
        after_s,
        (in_cut, _removed(swarm, healed_s)),
    )


def _whole(swarm: Swarm) -> bool:
    """Everybody is in sync, as the master sees it, and has added to the last round."""
    assert swarm.master is not None
    in_sync = {each.peer for each in swarm.master.coordinator.context.roster if each.in_sync}
    added = {contributor.peer for contributor in swarm.witness.commits[-1].contributors}
    return in_sync == added == {sim.peer for sim in swarm.peers.values()}


async def _round_s(swarm: Swarm) -> float:
    """The median time from one commit to the next."""
    times_s = []
    for _round in range(ROUNDS_TIMED + 1):
        target = swarm.committed + 1
        await swarm.when(lambda: swarm.committed >= target, within_s=ROUNDS_S)  # noqa: B023
        times_s.append(trio.current_time())
    return statistics.median(late - soon for soon, late in itertools.pairwise(times_s))


def _removed(swarm: Swarm, since_s: float) -> int:
    assert swarm.master is not None
    events = swarm.master.coordinator.context.events
    return sum(event.kind is EventKind.LEAVE and event.at_s > since_s for event in events)

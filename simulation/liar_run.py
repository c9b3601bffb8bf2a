"""A run with one liar in it, until checks have made it harmless.

An owner or a contributor that lies is removed, a checker that lies checks no more. The others are honest and
there are no other faults; ``scenario_run`` shows that faults contradict no honest peer.
"""

from __future__ import annotations

from functools import partial

import trio
from attrs import evolve, frozen

from ..membership.master.rounds.audits import ALONE_MAX
from .lying_peers import Liar, Lie
from .scenario import Scenario
from .scenario_run import format_state, make_swarm, telling
from .swarm import Swarm
from .virtual_time import run_virtually
from .witness import Tell, ViolationError

PEERS = 4
TENSOR = 7_000  # values: seven chunks, so that every peer owns one
PATIENCE = 40  # limit, in multiples of the expected rounds; (1 - p) ** (40 / p) is e ** -40
ROUND_S_MAX = 30.0
FOUND_S = 60.0


@frozen
class FoundOut:
    """The end of a liar.

    Attributes:
      rounds: number of rounds in which it lied, with the last one, which was run again.
    """

    seed: int
    rounds: int
    events: int


def expected_rounds(lie: Lie, audit: float, chunks: int = 1) -> float:
    """Return about how many rounds with a lie are expected until the liar is found out.

    It takes two contradictions. Each lie of a checker or of a contributor is one; a false sum has to be
    checked first.
    """
    return ALONE_MAX / (1 - (1 - audit) ** chunks) if lie is Lie.OWNER else ALONE_MAX


def scenario_of(seed: int, audit: float) -> Scenario:
    """Return the scenario without the liar."""
    made = Scenario(seed=seed, peers=PEERS, min_members=2, tensors=(TENSOR,), step_s=0.05)
    return evolve(made, audit=audit, delay_s=0.001)


def live_with_a_liar(
    seed: int, lie: Lie, audit: float, chunks: int = 1, tell: Tell | None = None
) -> FoundOut:
    """Run a seed in virtual time; to be called outside trio.

    Raises:
      BaseExceptionGroup: contains a ViolationError: an honest peer was removed, or the liar was not
        found out within ``PATIENCE`` times the expected rounds.
    """
    history = partial(_live, scenario_of(seed, audit), Liar(lie, chunks), tell)
    return run_virtually(history, seed=seed)


async def _live(scenario: Scenario, liar: Liar, tell: Tell | None) -> FoundOut:
    name = scenario.names[-1]
    async with trio.open_nursery() as nursery:
        swarm = make_swarm(nursery, scenario, tell, delta=telling)
        swarm.witness.knows_contributions = False  # lies that no audit found are committed
        await swarm.start_master()
        for each in scenario.names:
            if each == name:
                swarm.liars[name] = liar
            swarm.add_peer(each)
        await swarm.when(lambda: len(liar.lied_in) >= 1, within_s=FOUND_S)
        found_out = partial(_found_out, swarm, name, liar)
        rounds_max = int(PATIENCE * expected_rounds(liar.lie, scenario.audit, liar.chunks)) + 1
        try:
            await swarm.when(
                lambda: found_out() or len(liar.lied_in) > rounds_max,
                within_s=rounds_max * ROUND_S_MAX,
            )
        except trio.TooSlowError:
            raise ViolationError(f"the run makes no progress: {format_state(swarm)}") from None
        if not found_out():
            raise ViolationError(
                f"the liar lied in {len(liar.lied_in)} rounds: {format_state(swarm)}"
            )
        lied_in = set(liar.lied_in)
        target = swarm.committed + 1
        await swarm.when(lambda: swarm.committed >= target, within_s=FOUND_S)  # the run continues
        outcome = FoundOut(scenario.seed, len(lied_in), swarm.witness.events)
        nursery.cancel_scope.cancel()
    return outcome


def _found_out(swarm: Swarm, name: str, liar: Liar) -> bool:
    assert swarm.master is not None
    coordinator, peer = swarm.master.coordinator, swarm.peers[name].peer
    if liar.lie is Lie.CHECKER:
        return peer in coordinator.scheduler.driver.audits.muzzled()
    return peer in coordinator.context.history.revoked

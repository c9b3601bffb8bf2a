"""A run of five members and a spare, one of which is hostile (see ``hostile_peer``).

The hostile one must not harm the others. After every decision of the master these are checked:

    evicted      no honest member is removed, loses its place or has its update refused
    out-voted    every root and every committed result equals that of the honest members
    starved      no honest contributor, nor the spare, misses ``STARVED_ROUNDS`` commits in a row
    stopped      every next round is committed within ``ROUND_S_MAX``
"""

from __future__ import annotations

from functools import partial
from random import Random

import trio
from attrs import define, evolve, field

from ..membership.master.state.journal import (
    JournalRecord,
    PeerRevoked,
    PlaceVacated,
    RootKnown,
    RoundCommitted,
)
from ..membership.master.state.master_effects import (
    AnnounceEvent,
    DropPeer,
    Effect,
    EventKind,
    RecordDurably,
)
from ..protocol.messages import Commit, Role
from .hostile_peer import Falsehood, Hostile
from .scenario import DEADLINE_S, SPARE, Scenario
from .scenario_run import RunOutcome, format_state, make_swarm, telling
from .swarm import Swarm
from .virtual_time import run_virtually
from .witness import Tell, ViolationError

PEERS = 5
TENSOR = 6_000  # values: six chunks, so that each of the five owns one
ROUNDS = 10  # commits that the honest members must reach
FOUND_S = 60.0
# A lie may cost a round's first attempts (``link_deadline_s`` each), or abort it and delay the next.
ROUND_S_MAX = 8 * DEADLINE_S
# A single false accusation may exclude an honest peer once; then plans keep the pair apart.
STARVED_ROUNDS = 4
AUDIT = 0.2  # in a quarter of the runs


@define
class _HonestPeersCheck:
    """A check of the master's decisions about the honest peers."""

    swarm: Swarm
    hostile: str  # peer id
    missed: dict[str, int] = field(factory=dict)  # by honest peer: commits in a row without it
    active: bool = False

    def check(self, effects: list[Effect]) -> None:
        if not self.active:
            return
        for effect in effects:
            match effect:
                case DropPeer(peer=peer) if peer != self.hostile:
                    raise self._violation(f"{peer[:8]} is honest and was removed: {effect.reason}")
                case RecordDurably(record=record):
                    self._record(record)
                case AnnounceEvent(event=event) if event.kind is EventKind.BAD:
                    if event.peer != self.hostile:
                        raise self._violation(f"bad event about an honest peer: {event.text}")

    def _record(self, record: JournalRecord) -> None:
        match record:
            case PlaceVacated(peer=peer) | PeerRevoked(peer=peer) if peer != self.hostile:
                raise self._violation(f"{peer[:8]} is honest and lost its place")
            case RootKnown(head=head):
                known = self.swarm.witness.roots.get((head.fragment, head.version))
                if known is not None and known[0] != head.root:
                    raise self._violation(f"a lie became the root of version {head.version}")
            case RoundCommitted(commit=commit):
                self._committed(commit)

    def _committed(self, commit: Commit) -> None:
        assert self.swarm.master is not None
        coordinator = self.swarm.master.coordinator
        round_ = coordinator.scheduler.round_table.committed(commit.round)
        assert round_ is not None
        contributors = {contributor.peer for contributor in commit.contributors}
        receivers = set(round_.running().receivers)
        for name, sim in self.swarm.peers.items():
            if sim.peer == self.hostile:
                continue
            takes_part = sim.peer in (receivers if name == SPARE else contributors)
            self.missed[name] = 0 if takes_part else self.missed.get(name, 0) + 1
            if self.missed[name] >= STARVED_ROUNDS:
                raise self._violation(
                    f"{name} was left out of {self.missed[name]} commits in a row"
                )

    def _violation(self, what: str) -> ViolationError:
        """Return a violation, and end the check: the run's shutdown affects all peers."""
        self.active = False
        return ViolationError(what)


def live_with_hostile(seed: int, tell: Tell | None = None) -> RunOutcome:
    """Run a seed in virtual time; to be called outside trio.

    Raises:
      BaseExceptionGroup: contains a ViolationError: an honest peer was harmed, or the run stopped
        making progress.
    """
    return run_virtually(partial(_live, seed, tell), seed=seed)


async def _live(seed: int, tell: Tell | None) -> RunOutcome:
    rng = Random(f"harassed {seed}")
    made = Scenario(seed=seed, peers=PEERS, min_members=2, tensors=(TENSOR,), step_s=0.1)
    scenario = evolve(made, audit=AUDIT if rng.random() < 0.25 else 0.0, delay_s=0.005)
    name, hostile = rng.choice([*scenario.names, SPARE]), Hostile.of(seed)
    async with trio.open_nursery() as nursery:
        swarm = make_swarm(nursery, scenario, tell, delta=telling, strict=False)
        # A peer that falsely claims to hold a result is asked to send it: all get the same wrong values.
        swarm.witness.knows_contributions = Falsehood.HELD not in hostile.kinds
        await swarm.start_master()
        assert swarm.master is not None
        honest = [each for each in [*scenario.names, SPARE] if each != name]
        members = swarm.master.coordinator.context.roster
        for each in [*honest, name]:
            if each == name:
                # The first peer supplies the initial weights, which cannot be checked: it must be honest.
                await swarm.when(lambda: len(members) > 0, within_s=FOUND_S)
                swarm.liars[name] = hostile
            swarm.add_peer(each, role=Role.SPARE if each == SPARE else Role.CONTRIBUTOR)
        check = _HonestPeersCheck(swarm, swarm.peers[name].peer)
        watch = swarm.master.watch

        def watch_and_check(effects: list[Effect]) -> None:
            watch(effects)
            check.check(effects)

        swarm.master.watch = watch_and_check
        nursery.start_soon(_bring_back, swarm, name)
        try:
            await swarm.when(lambda: _all_in(swarm, honest), within_s=FOUND_S)
            check.active = True
            for _round in range(ROUNDS):
                target = swarm.committed + 1
                await swarm.when(lambda: swarm.committed >= target, within_s=ROUND_S_MAX)  # noqa: B023
        except trio.TooSlowError:
            raise ViolationError(f"the run makes no progress: {format_state(swarm)}") from None
        check.active = False
        nursery.cancel_scope.cancel()
    lies = [f"{name} {kind.value}" for kind in sorted(hostile.kinds, key=lambda k: k.name)]
    return RunOutcome.of(seed, [*lies, f"{hostile.lie_count} lies"], swarm)


def _all_in(swarm: Swarm, honest: list[str]) -> bool:
    assert swarm.master is not None
    context = swarm.master.coordinator.context
    for name in honest:
        member = context.roster.get(swarm.peers[name].peer)
        if member is None or not member.in_sync:
            return False
        if name != SPARE and member.peer not in context.history.places:
            return False
    return True


async def _bring_back(swarm: Swarm, name: str) -> None:
    """Restart the hostile peer whenever it was removed."""
    while True:
        await trio.sleep(1.0)
        if not swarm.peers[name].alive:
            swarm.restart(name)

"""A run of five members and a spare, one of which is hostile (see ``hostile_peer``); the others must not suffer.

What is checked, after every decision of the master:

    evicted      no honest member is sent away, loses its place or has its update refused
    out-voted    every root and every committed result is what the honest hold
    starved      no honest contributor is left out of ``STARVED_ROUNDS`` commits in a row, nor the spare
    stopped      a round is committed within ``ROUND_S_MAX``, again and again
"""

from __future__ import annotations

from functools import partial
from random import Random

import trio
from attrs import define, evolve, field

from ...membership.master.state.journal import (
    JournalRecord,
    PeerQuarantined,
    PlaceVacated,
    RootKnown,
    RoundCommitted,
)
from ...membership.master.state.master_effects import (
    AnnounceEvent,
    DropPeer,
    Effect,
    EventKind,
    RecordDurably,
)
from ...protocol.messages import Commit, Role
from .drifting_trainer import small_layout
from .hostile_peer import Falsehood, Hostile
from .scenario import DEADLINE_S, MASTER, SPARE, Scenario
from .scenario_run import RunOutcome, telling
from .swarm import Swarm
from .virtual_time import run_virtually
from .witness import Tell, ViolationError

PEERS = 5
TENSOR = 6_000  # values: six chunks, so that each of the five owns one
ROUNDS = 10  # commits that the others must see while they are lied about
FOUND_S = 60.0
# A lie may cost a round its first attempts (``link_deadline_s`` each), or an abort and the wait for the next.
ROUND_S_MAX = 8 * DEADLINE_S
STARVED_ROUNDS = (
    4  # a lone accuser leaves out who honestly says it, once; then plans avoid the pair
)
AUDIT = 0.2  # in every fourth run


@define
class _Judge:
    """Looks at what the master decides about the honest."""

    swarm: Swarm
    hostile: str  # peer id
    missed: dict[str, int] = field(factory=dict)  # by honest peer: commits in a row without it
    began: bool = False

    def look(self, effects: list[Effect]) -> None:
        if not self.began:
            return
        for effect in effects:
            match effect:
                case DropPeer(peer=peer) if peer != self.hostile:
                    raise self._violation(
                        f"{peer[:8]} is honest and was sent away: {effect.reason}"
                    )
                case RecordDurably(record=record):
                    self._record(record)
                case AnnounceEvent(event=event) if event.kind is EventKind.BAD:
                    if event.peer != self.hostile:
                        raise self._violation(f"said of somebody honest: {event.text}")

    def _record(self, record: JournalRecord) -> None:
        match record:
            case PlaceVacated(peer=peer) | PeerQuarantined(peer=peer) if peer != self.hostile:
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
        """What befalls the others while the run is ended counts for nothing."""
        self.began = False
        return ViolationError(what)


def live_with_hostile(seed: int, tell: Tell | None = None) -> RunOutcome:
    """Live through it in virtual time, from outside of trio.

    Raises:
      BaseExceptionGroup: of ViolationError: somebody honest suffers, or the run does not go on.
    """
    return run_virtually(partial(_live, seed, tell), seed=seed)


async def _live(seed: int, tell: Tell | None) -> RunOutcome:
    rng = Random(f"harassed {seed}")
    made = Scenario(seed=seed, peers=PEERS, min_members=2, tensors=(TENSOR,), step_s=0.1)
    scenario = evolve(made, audit=AUDIT if rng.random() < 0.25 else 0.0, delay_s=0.005)
    name, hostile = rng.choice([*scenario.names, SPARE]), Hostile.of(seed)
    async with trio.open_nursery() as nursery:
        swarm = Swarm(
            nursery,
            scenario.toml,
            seed=seed,
            layout=small_layout(scenario.tensors, 0),
            step_s=scenario.step_s,
            delay_s=scenario.delay_s,
            bytes_per_s=scenario.bytes_per_s,
            delta=telling,
        )
        swarm.witness.tell = tell
        # Who says that it holds what it does not is asked to spread it: the same values to all, but wrong.
        swarm.witness.knows_contributions = Falsehood.HELD not in hostile.kinds
        await swarm.start_master()
        assert swarm.master is not None
        honest = [each for each in [*scenario.names, SPARE] if each != name]
        members = swarm.master.coordinator.context.roster
        for each in [*honest, name]:
            swarm.world.link(MASTER, each, bytes_per_s=1e7)
            if each == name:
                # The first to come founds the run: nobody else can say what its weights are to be.
                await swarm.when(lambda: len(members) > 0, within_s=FOUND_S)
                swarm.liars[name] = hostile
            swarm.add_peer(each, role=Role.SPARE if each == SPARE else Role.CONTRIBUTOR)
        judge = _Judge(swarm, swarm.peers[name].peer)
        watch = swarm.master.watch

        def look(effects: list[Effect]) -> None:
            watch(effects)
            judge.look(effects)

        swarm.master.watch = look
        nursery.start_soon(_bring_back, swarm, name)
        try:
            await swarm.when(lambda: _all_in(swarm, honest), within_s=FOUND_S)
            judge.began = True
            for _round in range(ROUNDS):
                target = swarm.committed + 1
                await swarm.when(lambda: swarm.committed >= target, within_s=ROUND_S_MAX)  # noqa: B023
        except trio.TooSlowError:
            raise ViolationError(f"it does not go on: {swarm.story()}") from None
        judge.began = False
        nursery.cancel_scope.cancel()
    lies = [f"{name} {kind.value}" for kind in sorted(hostile.kinds, key=lambda k: k.name)]
    return RunOutcome.of(seed, [*lies, f"{hostile.told} lies"], swarm)


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
    """Whenever it was sent away for good, it comes again."""
    while True:
        await trio.sleep(1.0)
        if not swarm.peers[name].alive:
            swarm.restart(name)

"""Runs beside an adversary, which must not harm the other peers.

A peer that lies about sums (see ``lying_peers``) must be found out: an owner or a contributor is
removed, a checker checks no more.

Beside a hostile peer (see ``hostile_peer``) rounds must be committed, each in time, and after every
decision of the master these are checked:

    evicted      no honest member is removed, loses its place or has its update refused
    out-voted    every root and every committed result equals that of the honest members
    slandered    no honest member's updates are called odd for ``ODD_ROUNDS_MAX`` rounds in a row
    starved      no honest contributor, nor the spare, misses ``STARVED_ROUNDS`` commits in a row
"""

from __future__ import annotations

from functools import partial

import trio
from attrs import define, field

from ..membership.master.state.journal import (
    JournalRecord,
    PeerRevoked,
    PlaceVacated,
    RootKnown,
    RoundCommitted,
)
from ..membership.master.state.master_effects import AnnounceEvent, DropPeer, Effect, RecordDurably
from ..membership.shared.event_kind import EventKind
from ..protocol.messages import Commit
from .hostile_peer import Falsehood, Hostile, HostilePeer
from .lying_peers import Corrupts, Liar, Lie, LyingPeer
from .scenario import DEADLINE_S, FOUND_S, SPARE, Adversary, Scenario
from .swarm import Swarm
from .witness import ViolationError

HOSTILE_ROUNDS = 10  # commits that honest members must reach beside a hostile peer
# A lie may cost a round's first attempts (``link_deadline_s`` each), or abort it and delay the
# next.
HOSTILE_ROUND_S_MAX = 8 * DEADLINE_S
PATIENCE = 40  # limit, in multiples of the rounds until a liar is expected to be found out
LIAR_ROUND_S_MAX = 30.0
# A single false accusation may exclude an honest peer once; then plans keep the pair apart.
STARVED_ROUNDS = 4
ODD_ROUNDS_MAX = 3  # then ten would follow


async def endure(swarm: Swarm, scenario: Scenario, adversary: Adversary) -> list[str]:
    """Run beside an adversary.

    Returns:
      what it did.
    """
    if isinstance(adversary, Liar):
        await _find_out(swarm, scenario, adversary)
    else:
        await _withstand(swarm, scenario, adversary)
    return [*adversary.causes, f"{swarm.liars[adversary.name].lie_count} lies"]


async def _begin(swarm: Swarm, scenario: Scenario, name: str, liar: Corrupts) -> None:
    """Start the master and all peers.

    The adversary comes last: the first peer supplies the initial weights, which cannot be checked.
    """
    await swarm.start_master()
    members = swarm.coordinator.context.roster
    for each in scenario.first_peers:
        if each != name:
            swarm.add_first(each)
    await swarm.when(lambda: len(members) > 0, within_s=FOUND_S)
    swarm.liars[name] = liar
    swarm.add_first(name)


async def _find_out(swarm: Swarm, scenario: Scenario, adversary: Liar) -> None:
    """Run until checks have made a liar harmless, and for one more commit."""
    swarm.witness.knows_contributions = False  # lies that no check found are committed
    liar = LyingPeer(adversary.lie)
    await _begin(swarm, scenario, adversary.name, liar)
    await swarm.when(lambda: liar.lied_in, within_s=FOUND_S)
    lies_max = int(PATIENCE * adversary.expected_rounds(scenario.audit)) + 1
    harmless = partial(_is_harmless, swarm, adversary)
    await swarm.when(
        lambda: harmless() or liar.lie_count > lies_max, within_s=lies_max * LIAR_ROUND_S_MAX
    )
    if not harmless():
        raise ViolationError(f"the liar lied in {liar.lie_count} rounds")
    await swarm.commit(within_s=FOUND_S)


def _is_harmless(swarm: Swarm, adversary: Liar) -> bool:
    coordinator, peer = swarm.coordinator, swarm.peers[adversary.name].peer
    if adversary.lie is Lie.CHECKER:
        return peer in coordinator.scheduler.driver.audits.distrusted()
    return peer in coordinator.context.history.members.revoked


async def _withstand(swarm: Swarm, scenario: Scenario, adversary: Hostile) -> None:
    """Run beside a hostile peer for some commits."""
    # A peer that falsely claims to hold a result is asked to send it: all get the same wrong
    # values.
    swarm.witness.knows_contributions = Falsehood.HELD not in adversary.kinds
    await _begin(swarm, scenario, adversary.name, HostilePeer(adversary))
    assert swarm.master is not None
    check = HonestPeersCheck(swarm, swarm.peers[adversary.name].peer)
    watch = swarm.master.watch

    def watch_and_check(effects: list[Effect]) -> None:
        watch(effects)
        check.check(effects)

    swarm.master.watch = watch_and_check
    swarm.nursery.start_soon(_bring_back, swarm, adversary.name)
    await swarm.when(check.all_in, within_s=FOUND_S)
    check.active = True
    for _round in range(HOSTILE_ROUNDS):
        await swarm.commit(within_s=HOSTILE_ROUND_S_MAX)
    check.active = False
    records = swarm.coordinator.scheduler.driver.contribution_checks.history.records
    for peer, record in records.items():
        if peer != check.hostile and max(record.odd_rounds.values()) >= ODD_ROUNDS_MAX:
            raise ViolationError(f"{peer[:8]} is honest and called odd: {record}")


async def _bring_back(swarm: Swarm, name: str) -> None:
    """Restart the adversary whenever it was removed."""
    while True:
        await trio.sleep(1.0)
        if not swarm.peers[name].alive:
            swarm.restart(name)


@define
class HonestPeersCheck:
    """A check of the master's decisions about the honest peers."""

    swarm: Swarm
    hostile: str  # peer id
    missed: dict[str, int] = field(factory=dict)  # by honest peer: commits in a row without it
    active: bool = False

    def all_in(self) -> bool:
        """Return whether all honest peers are in sync and the contributors have places."""
        context = self.swarm.coordinator.context
        for name, sim in self.swarm.peers.items():
            member = context.roster.get(sim.peer)
            if sim.peer == self.hostile:
                continue
            if member is None or not member.in_sync:
                return False
            if name != SPARE and member.peer not in context.history.members.places:
                return False
        return True

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
        round_ = self.swarm.coordinator.scheduler.round_table.committed(commit.round)
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

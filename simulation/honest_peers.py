"""Checks of a run with an adversary (see ``hostile_peer``): it must not harm the other peers.

After every decision of the master these are checked:

    evicted      no honest member is removed, loses its place or has its update refused
    out-voted    every root and every committed result equals that of the honest members
    starved      no honest contributor, nor the spare, misses ``STARVED_ROUNDS`` commits in a row
"""

from __future__ import annotations

from attrs import define, field

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
from ..protocol.messages import Commit
from .scenario import SPARE
from .swarm import Swarm
from .witness import ViolationError

# A single false accusation may exclude an honest peer once; then plans keep the pair apart.
STARVED_ROUNDS = 4


@define
class HonestPeersCheck:
    """A check of the master's decisions about the honest peers."""

    swarm: Swarm
    hostile: str  # peer id
    missed: dict[str, int] = field(factory=dict)  # by honest peer: commits in a row without it
    active: bool = False

    def all_in(self) -> bool:
        """Return whether all honest peers are in sync and the contributors have places."""
        assert self.swarm.master is not None
        context = self.swarm.master.coordinator.context
        for name, sim in self.swarm.peers.items():
            member = context.roster.get(sim.peer)
            if sim.peer == self.hostile:
                continue
            if member is None or not member.in_sync:
                return False
            if name != SPARE and member.peer not in context.history.places:
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

"""The production master and peers, observed by the witness, and a disk that can fail."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import trio
from attrs import define, field

from ..checkpoint.checkpoint_store import CheckpointStore
from ..collectives.arithmetic import ChunkLayout
from ..daemon.master.journal.journal_base import JournalAwayError
from ..daemon.master.journal.journal_store import JournalStore
from ..daemon.master.master_service import MasterService
from ..daemon.peer.checkpointer import Checkpointer
from ..daemon.peer.master_session import Handlers, SessionEnded
from ..daemon.peer.peer_service import PeerService
from ..membership.master.rounds.audits import CONTRADICTED, Auditing
from ..membership.master.state.journal import JournalRecord, PeerRevoked, PlaceTaken, RoundCommitted
from ..membership.master.state.master_effects import DropPeer, Effect, RecordDurably, SendMessage
from ..membership.peer.local_round import RoundState
from ..membership.peer.peer_effects import PeerEffect, TellMaster
from ..protocol import messages as m
from ..protocol.errors import HoldfastError
from .drifting_trainer import SimTrainer
from .memory_network import MemoryNetwork
from .witness import ViolationError, Witness


class WitnessedStore(JournalStore):
    """A journal in memory whose records the witness sees.

    Attributes:
      full: the disk is full: nothing can be written.
      slow_s: duration of writing a record.
      wall_clock_ahead_s: offset of the wall clock that dates the records.
    """

    def __init__(self, witness: Witness) -> None:
        self.full = False
        self.slow_s = 0.0
        self.wall_clock_ahead_s = 0.0
        super().__init__(":memory:", now=lambda: self.wall_clock_ahead_s)
        self._witness = witness

    def append(self, record: JournalRecord) -> None:
        if self.full:
            raise JournalAwayError("database or disk is full")
        self._witness.saw_record(record)
        super().append(record)


class WitnessedMaster(MasterService):
    """A master whose every decision the witness sees."""

    store: WitnessedStore
    witness: Witness
    watch: Callable[[list[Effect]], None]  # after each decision

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._pinned: set[tuple[str, m.FragmentHead, str]] = set()  # donor, version, receiver
        self._ordered: set[tuple[int, int]] = set()  # rounds, attempts; later ones end a transfer

    def decide(self, decision: Callable[[float], list[Effect]], *, sooner: bool = True) -> None:
        decided: list[Effect] = []

        def seen(now_s: float) -> list[Effect]:
            decided.extend(decision(now_s))
            return decided

        super().decide(seen, sooner=sooner)
        for effect in decided:
            if isinstance(effect, SendMessage):
                self._check_copies(effect.peer, effect.message)
        self.watch(decided)

    def _check_copies(self, peer: str, message: m.Message) -> None:
        """Check that donors pin a version first, and that no copy is overtaken by a reduction."""
        match message:
            case m.Donate():
                self._pinned.add((peer, message.head, message.receiver))
            case m.Reduce():
                self._ordered.add((message.round, message.attempt))
            case m.SyncFragment(head=head):
                if not all((donor, head, peer) in self._pinned for donor in message.donors):
                    raise ViolationError(f"{peer[:8]} fetches {head} before it is pinned")
                if peer not in self.coordinator.context.roster:
                    return  # it was removed since
                for round_ in self.coordinator.scheduler.round_table.reducing():
                    attempt = round_.running()
                    missed = round_.fragment == head.fragment and peer not in attempt.reached()
                    if missed and (round_.number, attempt.number) in self._ordered:
                        raise ViolationError(
                            f"{peer[:8]} fetches {head} beside round {round_.number} without it"
                        )

    async def _append(self, record: JournalRecord) -> None:
        # Half before, half after: a crash may happen when the record is on disk but not yet
        # announced.
        await trio.sleep(self.store.slow_s / 2)
        await super()._append(record)
        await trio.sleep(self.store.slow_s / 2)


class SlowCheckpointer(Checkpointer):
    """A checkpointer that simulates the disk's duration in virtual time."""

    turn_bytes = 1  # a piece at a time
    turn_s: float = 0.0

    async def _between_turns(self) -> None:
        await trio.sleep(self.turn_s)


class WitnessedPeer(PeerService):
    """A peer whose every applied and fetched version the witness sees."""

    witness: Witness
    checkpointer: SlowCheckpointer
    apply_s: float = 0.0  # simulated duration of an outer step; computing takes no virtual time
    changed: Callable[[], None] | None = None

    def make_checkpointer(self, place: CheckpointStore | None) -> SlowCheckpointer:
        return SlowCheckpointer(
            self.context, self.state_service, place, wall_clock=trio.current_time
        )

    def handlers(self) -> Handlers:
        table = super().handlers()
        return {kind: partial(self._hear, handler) for kind, handler in table.items()}

    def _hear(self, handler: Callable[[Any], None], message: m.Message | SessionEnded) -> None:
        if fault := self._contradiction(message):
            raise ViolationError(f"{self.config.me[:8]} was sent {message}: {fault}")
        if isinstance(message, m.Welcome):
            self.witness.saw_term(self.config.me, self.config.incarnation, message.term)
        handler(message)

    def _contradiction(self, message: m.Message | SessionEnded) -> str:
        """Return the reason why an honest peer cannot be sent a message, or an empty string."""
        replica = self.replica
        match message:
            case m.Welcome():
                for commit in message.committed:
                    here = replica.rounds.get(commit.round)
                    if here is None or here.digest not in (b"", commit.digest):
                        return "it holds another result"
            case m.View():
                if replica.view is not None and message.number < replica.view.number:
                    return f"its view is {replica.view.number}"
            case m.Donate(head=head):
                held = replica.fragments[head.fragment].version
                if held not in (head.version, head.version - 1):
                    return f"it holds version {held}"
        return ""

    def perform(self, todo: list[PeerEffect]) -> None:
        for effect in todo:
            if isinstance(effect, TellMaster) and isinstance(effect.message, m.Applied | m.Synced):
                self.witness.saw_root(self.config.me, effect.message.head)
        super().perform(todo)
        if self.changed is not None:
            self.changed()

    async def _apply(self, commit: m.Commit) -> None:
        result, order = self.reducer.result(commit.round), self.replica.rounds[commit.round].order
        assert order is not None
        if result.manifest != commit.manifest:
            raise ViolationError(f"round {commit.round}: {self.config.me[:8]} has another manifest")
        layout = ChunkLayout.of(order.plan, self.state_service.size(commit.fragment))
        ends = [0, *(cut.values.stop for cut in layout.cuts)]
        self.witness.saw_mean(self.config.me, commit, result.values, ends)
        await trio.sleep(self.apply_s)
        await super()._apply(commit)


@define(eq=False)
class SimPeer:
    """One life of a virtual machine: its host, its trainer and its daemon."""

    name: str
    peer: str
    network: MemoryNetwork
    trainer: SimTrainer
    service: WitnessedPeer
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    alive: bool = True
    ended: HoldfastError | None = None
    lives: int = 1

    @property
    def holds_everything(self) -> bool:
        """True if the peer has a copy of each fragment and fetches none."""
        fragments = self.service.replica.fragments
        return bool(fragments) and all(
            here.version is not None and here.fetching is None for here in fragments
        )


def keeps_state(sim: SimPeer, witness: Witness, master: WitnessedMaster | None) -> bool:
    """Return whether a peer holds every committed version, or the previous one and the next's
    result.

    Args:
      master: the live master, or None.
    """
    if not (sim.alive and sim.holds_everything):
        return False
    commits, versions = list(witness.commits), dict(witness.versions)
    if master is not None:
        history = master.coordinator.context.history
        commits += history.commits.values()
        versions |= enumerate(history.versions)  # before their records are written
    decided = {commit.round: commit.digest for commit in commits}
    results = {
        (here.fragment, here.version)
        for here in sim.service.replica.rounds.values()
        # A peer that a repair has left out holds another result.
        if here.phase in (RoundState.REDUCED, RoundState.APPLYING)
        and here.digest == decided.get(here.round)
    }
    for head in sim.service.replica.heads():
        committed = versions.get(head.fragment, 0)
        step_away = (head.fragment, head.version) in results
        if head.version != committed and not (head.version == committed - 1 and step_away):
            return False
    return True


def check_honesty(effects: list[Effect], audits: Auditing, liars: Collection[str]) -> None:
    """Raise ViolationError if checks harm an honest peer, or messages cost any its place."""
    if audits.contradictions and not liars:
        raise ViolationError(f"nobody lies: {audits.contradictions[0]}")
    for effect in effects:
        match effect:
            case RecordDurably(record=PeerRevoked(peer=peer, reason=reason)) if peer not in liars:
                if CONTRADICTED in reason:  # else the operator has removed it
                    raise ViolationError(f"{peer[:8]} is honest: {reason}")
            case SendMessage(message=m.Reduce() as order):
                _check_owners(order, audits)
            case DropPeer(code=m.RefusalCode.PROTOCOL):
                raise ViolationError(f"{effect.peer[:8]} was dropped: {effect.reason}")


def _check_owners(order: m.Reduce, audits: Auditing) -> None:
    """Raise ViolationError if a round that is run again has a suspect as chunk owner."""
    contradicted = [each for each in audits.contradictions if each.round == order.round]
    suspects = {peer for each in contradicted for peer in each.suspects}
    if suspects.issuperset(each.peer for each in order.contributors):
        return  # nobody else is left to own them
    for run in order.plan.owners:
        if run.peer in suspects:
            raise ViolationError(f"{run.peer[:8]} owns chunks again in round {order.round}")


def promoted(effects: list[Effect]) -> list[str]:
    """Return who got a place, except before a commit: it need not have that commit's result."""
    peers: list[str] = []
    for record in [effect.record for effect in effects if isinstance(effect, RecordDurably)]:
        if isinstance(record, PlaceTaken):
            peers.append(record.peer)
        elif isinstance(record, RoundCommitted):
            peers.clear()
    return peers

"""The production master and peers, observed by the witness, and a disk that can fail."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import trio
from attrs import define, field

from ..daemon.master.journal.journal_base import JournalAwayError
from ..daemon.master.journal.journal_store import JournalStore
from ..daemon.master.master_service import MasterService
from ..daemon.peer.checkpointer import Checkpointer
from ..daemon.peer.peer_service import PeerFactories, PeerService
from ..membership.master.rounds.audits import CONTRADICTED, Auditing
from ..membership.master.state.journal import JournalRecord, PeerRevoked, PlaceTaken
from ..membership.master.state.master_effects import DropPeer, Effect, RecordDurably, SendMessage
from ..membership.peer.peer_effects import PeerEffect, TellMaster
from ..protocol.errors import HoldfastError
from ..protocol.messages import Applied, Commit, Reduce, RefusalCode, Synced, Welcome
from .drifting_trainer import SimTrainer
from .lying_peers import Corrupts
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

    def decide(self, decision: Callable[[float], list[Effect]], *, sooner: bool = True) -> None:
        decided: list[Effect] = []

        def seen(now_s: float) -> list[Effect]:
            decided.extend(decision(now_s))
            return decided

        super().decide(seen, sooner=sooner)
        self.watch(decided)

    async def _append(self, record: JournalRecord) -> None:
        # Half before, half after: a crash may happen when the record is on disk but not yet announced.
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

    def __init__(self, *args: Any, liar: Corrupts | None = None, **options: Any) -> None:
        checkpointer = partial(SlowCheckpointer, wall_clock=trio.current_time)
        factories = PeerFactories(checkpointer=checkpointer)
        if liar is not None:
            factories = liar.corrupt(self, factories)
        super().__init__(*args, factories=factories, **options)

    def _welcome(self, message: Welcome) -> None:
        self.witness.saw_term(self.config.me, self.config.incarnation, message.term)
        super()._welcome(message)

    def _perform(self, todo: list[PeerEffect]) -> None:
        for effect in todo:
            if isinstance(effect, TellMaster) and isinstance(effect.message, Applied | Synced):
                self.witness.saw_root(self.config.me, effect.message.head)
        super()._perform(todo)
        if self.changed is not None:
            self.changed()

    async def _apply(self, commit: Commit) -> None:
        result, order = self.reducer.result(commit.round), self.replica.rounds[commit.round].order
        assert order is not None
        if result.manifest != commit.manifest:
            raise ViolationError(f"round {commit.round}: {self.config.me[:8]} has another manifest")
        self.witness.saw_mean(self.config.me, commit, result.values, order.plan.chunk_elements)
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


def check_honesty(effects: list[Effect], audits: Auditing, liars: Collection[str]) -> None:
    """Raise ViolationError if checks harm an honest peer, or any peer is dropped for its messages."""
    if audits.contradictions and not liars:
        raise ViolationError(f"nobody lies: {audits.contradictions[0]}")
    for effect in effects:
        match effect:
            case RecordDurably(record=PeerRevoked(peer=peer, reason=reason)) if peer not in liars:
                if CONTRADICTED in reason:  # else the operator has removed it
                    raise ViolationError(f"{peer[:8]} is honest: {reason}")
            case SendMessage(message=Reduce() as order):
                _check_owners(order, audits)
            case DropPeer(code=RefusalCode.PROTOCOL):
                raise ViolationError(f"{effect.peer[:8]} was dropped: {effect.reason}")


def _check_owners(order: Reduce, audits: Auditing) -> None:
    """Raise ViolationError if suspects of a contradiction own chunks when the round is run again."""
    contradicted = [each for each in audits.contradictions if each.round == order.round]
    suspects = {peer for each in contradicted for peer in each.suspects}
    if suspects.issuperset(each.peer for each in order.contributors):
        return  # nobody else is left to own them
    for run in order.plan.owners:
        if run.peer in suspects:
            raise ViolationError(f"{run.peer[:8]} owns chunks again in round {order.round}")


def promoted(effects: list[Effect]) -> list[str]:
    """Return the peers that were given a place."""
    return [
        effect.record.peer
        for effect in effects
        if isinstance(effect, RecordDurably) and isinstance(effect.record, PlaceTaken)
    ]

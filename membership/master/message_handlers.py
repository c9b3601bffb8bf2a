"""Members' messages, by kind, and the rule that each of them goes to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from attrs import define, evolve, field

from ...protocol import messages as m
from ..shared.event_kind import EventKind
from . import trainers
from .adoption import Adoption
from .departures import Departures
from .hello_checks import layout_refusal
from .leases import Leases
from .places import Founding
from .removal import Removal
from .rounds.round_scheduler import RoundScheduler
from .routes.routes import Routes
from .state.context import Context, quoted
from .state.roster import Member
from .sync.state_sync import ROOT_BYTES, StateSync


@define(eq=False)
class MessageHandlers:
    """Hands each message to its handler, which only notes what the message says."""

    context: Context
    scheduler: RoundScheduler
    state_sync: StateSync
    routes: Routes
    adoption: Adoption
    founding: Founding
    departures: Departures
    removal: Removal
    leases: Leases
    # The handler of each kind of message that a member may send.
    table: dict[type[m.Message], Callable[[Member, Any], None]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        driver = self.scheduler.driver
        self.table = {
            m.Progress: self._on_progress,
            m.TrainerAttached: self._on_trainer_attached,
            m.TrainerLost: self._on_trainer_lost,
            m.TrainerFailed: partial(trainers.failed, self.context),
            m.WeightsSupplied: self.founding.supplied,
            m.Ready: self.scheduler.ready,
            m.LeasesWanted: self.leases.wanted,
            m.LeasesHeld: self.leases.claimed,
            m.NotReady: self.scheduler.not_ready,
            m.Reduced: self._on_reduced,
            m.Held: driver.repairer.held,
            m.Diagnosis: driver.inquirer.diagnosed,
            m.ReduceFailed: self._on_reduce_failed,
            m.Audited: driver.audits.audited,
            m.Measured: self.scheduler.measured,
            m.LinkBroken: self.routes.broken,
            m.RouteWanted: self.routes.wanted,
            m.RouteWorks: self.routes.works,
            m.Relayed: self.routes.relayed,
            m.Applied: self._on_applied,
            m.Synced: self._on_synced,
            m.SyncFailed: self.state_sync.failed,
            m.Leaving: self.departures.leave,
        }

    def handle(self, member: Member, message: m.Message) -> None:
        """Note what a message says; evict a member that sent a kind that only masters send."""
        handler = self.table.get(type(message))
        if handler is None:
            what = f"it sent {type(message).__name__}, which peers never send"
            self.removal.violation(member, what)
        else:
            handler(member, message)

    def _on_progress(self, member: Member, message: m.Progress) -> None:
        before = member.progress
        metrics = [*message.metrics.items(), *member.measured.items()][-m.METRICS_MAX :]
        member.progress = evolve(message, metrics=dict(metrics))
        self.context.totals.progress(member, message)
        received = before is None or message.bulk_received_bytes > before.bulk_received_bytes
        if received or (before and message.bulk_sent_bytes > before.bulk_sent_bytes):
            self.scheduler.driver.moved(member)
        state = before is None or message.state_received_bytes > before.state_received_bytes
        if received or state:
            self.state_sync.moved(member, state=state)

    def _on_trainer_attached(self, member: Member, message: m.TrainerAttached) -> None:
        refused = layout_refusal(self.context, message.layout)
        if refused is not None:
            self.removal.evict(member.peer, *refused)
            return
        if not member.trainer.running:  # peers repeat the message after a reconnect
            self.context.announce_peer(EventKind.ROLE, member.peer, "has a trainer")
        member.trainer.start(message.layout)

    def _on_trainer_lost(self, member: Member, message: m.TrainerLost) -> None:
        member.trainer.stop(self.context.now_s)
        self.scheduler.trainer_lost(member)
        self.founding.withdraw(member.peer)
        what = f"has lost its trainer: {quoted(message.reason)}"
        if self.context.history.finished:
            what = "has no trainer any more: the run is finished"
        self.context.announce_peer(EventKind.ROLE, member.peer, what)

    def _on_reduced(self, member: Member, message: m.Reduced) -> None:
        if not self.adoption.hears(member, message):
            self.scheduler.driver.reduced(member, message)

    def _on_reduce_failed(self, member: Member, message: m.ReduceFailed) -> None:
        if not self.adoption.hears(member, message):
            self.scheduler.driver.reduce_failed(member, message)

    def _on_applied(self, member: Member, message: m.Applied) -> None:
        if self._known_head(member, message.head):
            self.state_sync.report(member, message.head)

    def _on_synced(self, member: Member, message: m.Synced) -> None:
        if self._known_head(member, message.head):
            self.state_sync.synced(member, message)

    def _known_head(self, member: Member, head: m.FragmentHead) -> bool:
        """Return whether the run has had this version; else evict the member or note its claim."""
        history = self.context.history
        valid = head.fragment < history.fragment_count and len(head.root) == ROOT_BYTES
        if valid and head.version <= history.versions[head.fragment]:
            return True
        # Commits were lost or undone: it may be of another branch.
        if valid and history.rewinds.branch > 0:
            self.state_sync.beyond(member, head)
            return False
        what = f"it reports version {head.version} of fragment {head.fragment}"
        self.removal.violation(member, what)
        return False

"""The peer service: one machine's part in the run.

``membership.peer.replica.Replica`` decides what happens when; the parts, which ``wiring`` connects,
do the work. Here are the tasks, and the two tables: which part handles a message of the master
(``handlers``), and which one carries out an effect of the rules (``perform``).

    run                              one nursery; a bug in any task ends the process
     ├── network.serve               connections of other members: links, lanes, reachability tests
     ├── hub.run                     one link per other member
     ├── trainer.run                 connections of the local trainer
     ├── data.run                    leases on the trainer's samples
     ├── report_progress             once a second, the trainer's progress
     ├── keep_session                keeps the session with the master
     ├── serve        (per order)    a reduction; repaired over losses, it ends with its round
     ├── apply        (per commit)   outer step in a thread; never cancelled half-way
     ├── fetch        (per fragment) copies a version from donors
     ├── await_last_weights          at the run's end, if its last weights are not here
     └── write        (if due)       a checkpoint, in pieces

All of this is plain (not async) code on one event loop, so each event is handled completely before
the next one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from ... import __version__
from ...checkpoint.checkpoint_store import CheckpointStore
from ...checkpoint.shared_state import SharedState
from ...collectives.links.link_parts import LaneRules
from ...membership.peer import peer_effects as effects
from ...membership.peer.peer_effects import PeerEffect
from ...membership.peer.replica import Replica
from ...membership.spec.spec import RunSpec
from ...protocol import messages as m
from ...protocol.addresses import Address
from ...protocol.errors import NO_LAST_WEIGHTS, EvictedError
from ...protocol.network.interface import Channel, Network
from ...protocol.trust.authority import Party
from ..advertised_hosts import DIALABLE_MAX, dialable
from .master_session import Handlers, SessionEnded
from .peer_config import PeerConfig, PeerContext
from .trainer.port import TrainerPort
from .wiring import WiredPeer

log = logging.getLogger("holdfast.peer")

M = TypeVar("M", bound=m.Message)

PROGRESS_S = 1.0
# From one report of progress to the next, per member of the run: with 500 members each reports
# every five seconds, so that the master hears no more than some hundred reports a second.
PROGRESS_PER_MEMBER_S = 0.01
# After the run's end, for the master to order a copy of weights that are not here.
LAST_WEIGHTS_S = 10.0


class PeerService(WiredPeer):
    """One peer of a run, on any ``Network`` with any ``TrainerPort``.

    Args:
      checkpoints: where checkpoints are written; None: nowhere.

    Attributes:
      finished: set when the run is over, and its last weights are here or will not come.
    """

    def __init__(
        self,
        config: PeerConfig,
        network: Network,
        trainer: TrainerPort,
        *,
        checkpoints: CheckpointStore | None = None,
    ) -> None:
        context = PeerContext(
            config,
            network,
            trainer,
            Replica(config.me),
            start=self.start,
            tell=lambda message: self.session.tell(message),
            perform=self.perform,
        )
        super().__init__(context, self.hello, checkpoints)
        self.session.handlers |= self.handlers()
        self.finished = trio.Event()
        self._awaits_weights = False  # the run is over, and its last weights are not here
        self._refusal: EvictedError | None = None
        self._stop = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._progress_sent: m.Progress | None = None
        self._session_begins = True  # the next view is the first one of a session
        self._view_term = 0  # of the master whose view came last

    @property
    def spec(self) -> RunSpec | None:
        return self.context.spec.known

    @property
    def state(self) -> SharedState | None:
        return self.state_service.known_state

    @property
    def rounds_wanted(self) -> int:
        """The rounds after which the run is finished; 0: no end, or not known yet."""
        return 0 if self.context.spec.known is None else self.context.spec.known.run.rounds

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Take part until the run is finished, or this peer is released or refused for good.

        Raises:
          EvictedError: the master refuses this peer and coming back would not help.
          UserError: the address cannot be bound, or no master was found for ``patience_s``.
        """
        with self._stop:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self.bound = await nursery.start(self._serve)
                nursery.start_soon(self.hub.run)
                nursery.start_soon(self.context.trainer.run, self.training)
                nursery.start_soon(self.data.run)
                nursery.start_soon(self._report_progress)
                nursery.start_soon(self._keep_session)
                if self.config.map_ports:
                    nursery.start_soon(self.ports.run)
                if self.relay is not None:
                    nursery.start_soon(self.relay.report)
        if self._refusal is not None:
            raise self._refusal

    def start(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(function, *args)

    async def _serve(
        self, task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        await self.context.network.serve(
            self.config.bind,
            self._on_channel,
            self.hub.handle_lane,
            on_relay=None if self.relay is None else self.relay.desk.handle,
            task_status=task_status,
        )

    def stop(self) -> None:
        """End ``run`` at once, without a drain (see ``leave``)."""
        self._stop.cancel()

    async def leave(self, reason: str) -> None:
        await self.drain(reason)
        self.stop()

    async def drain(self, reason: str) -> None:
        """Finish the round in flight and wait for the master's release; the trainer stays."""
        session, spec = self.session, self.context.spec.known
        session.leaving = True
        deadline_s = spec.membership.deadline_s if spec is not None else 15.0
        with trio.move_on_after(2 * deadline_s):
            if session.connected:
                session.tell(self.training.progress())
                session.tell(m.Leaving(reason))
                await session.released.wait()

    async def _keep_session(self) -> None:
        try:
            await self.session.keep()
        except EvictedError as error:
            self._refusal = error
            self.stop()

    async def _on_channel(self, channel: Channel) -> None:
        if channel.party is Party.PEER:
            await self.hub.handle_channel(channel)
        # The master only tests that this peer can be reached, and sends nothing.

    async def _report_progress(self) -> None:
        sent_s = -math.inf
        while True:
            await trio.sleep(PROGRESS_S)
            self.training.check_alive()
            progress = self.training.progress()
            members = () if self.replica.view is None else self.replica.view.members
            due = trio.current_time() >= sent_s + progress_every_s(len(members))
            due |= bool(progress.copies)  # by which the master sees that they go on
            if due and progress != self._progress_sent and self.session.connected:
                sent_s, self._progress_sent = trio.current_time(), progress
                self.session.tell(progress)

    # ------------------------------------------------------------ the master's messages

    def _addresses(self, master_host: str) -> tuple[str, ...]:
        """Return where other machines may dial this one, the addresses of its own network first."""
        own = dialable(self.bound, self.config.advertise, master_host)
        mapped = tuple(str(each) for each in self.ports.addresses if str(each) not in own)
        return (own[: DIALABLE_MAX - len(mapped)] + mapped)[:DIALABLE_MAX]

    def hello(self, master_host: str, local_port: int) -> m.Hello:
        config, replica = self.config, self.replica
        return m.Hello(
            m.VERSION_MIN,
            m.VERSION_MAX,
            config.run_id,
            config.name,
            self._addresses(master_host),
            config.incarnation,
            self.training.layout,
            replica.heads(),
            replica.lineage,
            replica.undecided(),
            config.upload_bytes_per_s or 0.0,
            config.download_bytes_per_s or 0.0,
            replica.term,
            replica.nonce,
            tuple(m.KeptState(each.manifest.fragment_heads()) for each in self.state_service.kept),
            __version__,
            config.relay,
            local_port,
        )

    def handlers(self) -> Handlers:
        """Return the table of the master's messages: which part handles each type."""
        replica, by_rules = self.replica, self._by_rules
        course = replica.course
        table: Handlers = {
            # the session
            m.Welcome: self._welcome,
            SessionEnded: self._session_ended,
            m.Heartbeat: self._heartbeat,
            # the run
            m.View: self._view,
            m.NewSpec: self._new_spec,
            m.Notice: self._notice,
            m.Finish: by_rules(replica.finish),
            # rounds
            m.Open: by_rules(course.open),
            m.Reduce: by_rules(course.reduce),
            m.Flush: by_rules(course.flush),
            m.Diagnose: self.reducer.diagnose,
            m.Repair: by_rules(course.repair),
            m.Commit: by_rules(course.commit),
            m.Abort: by_rules(course.abort),
            m.AuditOrder: self.reducer.audit,
            # copies of the state
            m.SyncFragment: by_rules(replica.sync),
            m.Donate: self.state_service.pin,
            m.Release: self._release,
            # the trainer
            m.SupplyWeights: lambda _message: self.training.supply_weights(),
            m.Leased: self.data.leased,
            # links
            m.Route: self._route,
        }
        if self.relay is not None:
            table |= self.relay.handlers()
        return table

    def _by_rules(self, decide: Callable[[M], list[PeerEffect]]) -> Callable[[M], None]:
        return lambda message: self.perform(decide(message))

    def _welcome(self, message: m.Welcome) -> None:
        spec = self.context.spec.take(message.spec_toml)
        self._progress_sent = None
        reduce = spec.reduce
        self.hub.configure(
            rules=LaneRules(reduce.lanes, reduce.lanes_max, reduce.congestion),
            silence_s=spec.link_silence_s,
            donor_share=spec.sync.donor_share,
        )
        report = self.report
        report.number, report.phase = message.number, "in the run"
        report.why = "" if message.lineage else "waiting for the run's initial weights"
        self.state_service.check_restored(message.layout, message.lineage)
        if message.layout is not None:
            self._use_layout(message.layout)
        diloco = spec.diloco
        self.perform(self.replica.welcome(message, diloco.sync_every, diloco.fragments))
        if self.relay is not None:
            self.relay.welcome()
        if self.training.layout is not None:
            self.session.tell(m.TrainerAttached(self.training.layout))
        elif self.training.failed is not None:
            self.session.tell(self.training.failed)
        self.data.session_begins()

    def _session_ended(self, _event: SessionEnded) -> None:
        self._session_begins = True
        self.perform(self.replica.trainer.extend_limit())
        self.start(self._bound_extension, self.replica.trainer.extension_count)

    async def _bound_extension(self, extension: int) -> None:
        """Limit the trainer's steps without a master, once a deadline has passed."""
        await trio.sleep(self.context.spec.value.membership.deadline_s)
        self.perform(self.replica.trainer.bound_extension(extension))

    def _heartbeat(self, message: m.Heartbeat) -> None:
        self.report.left_s = message.left_s

    def _view(self, message: m.View) -> None:
        same = self.replica.term == self._view_term
        first, self._session_begins = self._session_begins, False
        self._view_term = self.replica.term
        self.hub.set_members(message.members, back=first and same, new_master=not same)
        if any(each.peer == self.config.me and not each.reachable for each in message.members):
            self.ports.need()
        self.perform(self.replica.take_view(message))
        if self.replica.trainer.in_sync:
            self.state_service.forget_kept()
        self.checkpointer.check()

    def _new_spec(self, message: m.NewSpec) -> None:
        self.context.spec.take(message.spec_toml)
        self.perform(self.replica.trainer.set_total_steps(message.total_steps))

    def _notice(self, message: m.Notice) -> None:
        log.warning("notice from the master: %s", message.text)
        self.report.notices.append(message.text)

    def _release(self, message: m.Release) -> None:
        if message.receiver == self.config.me:
            self.perform(self.replica.stop_copy(message))
        else:
            self.state_service.unpin(message)

    def _route(self, message: m.Route) -> None:
        self.hub.set_route(message)
        if message.kind is not m.RouteKind.DIRECT:
            self.ports.need()

    def _use_layout(self, layout: m.ModelLayout) -> None:
        if self.state_service.use_layout(layout):
            self.training.admit()

    # ------------------------------------------------------------ effects

    def perform(self, todo: list[PeerEffect]) -> None:
        """Carry out the replica's effects, in order; nothing in here waits."""
        for effect in todo:
            match effect:
                case effects.TellMaster(message):
                    self.session.tell(message)
                case effects.TellTrainer(message):
                    self.context.trainer.tell(message)
                case effects.ReloadTrainer(step, limit, spoilt):
                    self.context.trainer.tell(m.Load(step, limit, self.finished.is_set(), spoilt))
                case effects.StartReduction(order, contribute):
                    self.reducer.start(order, contribute=contribute)
                case effects.FlushReduction(order):
                    self.reducer.flush(order)
                case effects.RepairReduction(order):
                    self.reducer.repair(order)
                case effects.StopReduction(number):
                    self.reducer.stop(number)
                case effects.ApplyRound(commit):
                    self.start(self._apply, commit)
                case effects.StoreResult(number):
                    self.reducer.store(number)
                case effects.DropRound(number):
                    self.reducer.drop(number)
                case effects.FetchFragment(order):
                    self.reducer.forget_residual(order.head.fragment)
                    self.state_service.fetch(order)
                case effects.StopFetch(fragment):
                    self.state_service.stop_fetch(fragment)
                case effects.DiscardState():
                    layout = self.state_service.discard()
                    self.reducer.forget_residuals()
                    self.training.reject("the run's state was replaced; start the script again")
                    if layout is not None:
                        self._use_layout(layout)
        if self.replica.trainer.finished:
            self._finish_if_done()

    async def _apply(self, commit: m.Commit) -> None:
        await self.reducer.apply(commit)
        if self.report.phase == "in the run":
            self.report.why = ""  # a peer that supplied the initial weights waited for them
        self.checkpointer.check()

    def _finish_if_done(self) -> None:
        if not self.replica.trainer.finished or self.finished.is_set():
            return
        if any(here.commit is not None for here in self.replica.rounds.values()):
            return  # committed rounds are still being applied
        if not self.replica.behind:
            self._finish()
        elif not self._awaits_weights:
            self._awaits_weights = True
            self.report.why = "the run is over; a copy of its last weights is on its way"
            self.start(self._await_last_weights)

    async def _await_last_weights(self) -> None:
        """Let the master bring this peer in sync, which lacks the run's last weights."""
        await trio.sleep(LAST_WEIGHTS_S)
        while self.replica.fetching:
            await trio.sleep(PROGRESS_S)
        if not self.finished.is_set():
            self.training.reject(NO_LAST_WEIGHTS)
            self._finish()

    def _finish(self) -> None:
        self.report.phase, self.report.why = "finished", ""
        self.context.trainer.tell(m.Finished())
        self.session.finished = True
        self.finished.set()


def progress_every_s(member_count: int) -> float:
    """Return the seconds from one report of progress to the next in a run of so many members."""
    return max(PROGRESS_S, PROGRESS_PER_MEMBER_S * member_count)

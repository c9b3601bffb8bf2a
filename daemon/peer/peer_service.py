"""The peer service: one machine's part in the run.

``membership.peer.replica.Replica`` decides what happens when; this service carries out its effects.
Its parts do the work:

    MasterSession   the connection to the master (``master_session``)
    LinkHub         the links to the other members (``collectives.links.hub``)
    StateService    the shared state in memory, fetched and served (``state_service``)
    Checkpointer    the shared state on disk (``checkpointer``)
    Reducer         rounds: reductions, repairs, outer steps (``reducer``)
    TrainerService  the local trainer (``trainer_service``)
    DataService     leases on the trainer's samples (``data_service``)

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

A part tells the replica what happened, the replica decides, ``_perform`` carries out. All of this
is plain (not async) code on one event loop, so each event is handled completely before the next
one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence

import trio
from attrs import frozen

from ... import __version__
from ...checkpoint.checkpoint_store import CheckpointStore
from ...checkpoint.shared_state import SharedState
from ...collectives.links.hub import LinkHub
from ...collectives.links.link_parts import LaneRules
from ...collectives.links.rates.rate_limiter import RateLimiter
from ...collectives.reduction import Reduction
from ...membership.peer import peer_effects
from ...membership.peer.peer_effects import PeerEffect
from ...membership.peer.replica import Replica
from ...membership.spec.spec import RunSpec
from ...protocol.addresses import Address
from ...protocol.errors import NO_LAST_WEIGHTS, EvictedError
from ...protocol.messages import (
    VERSION_MAX,
    VERSION_MIN,
    AuditOrder,
    Commit,
    Diagnose,
    Donate,
    Finished,
    Flush,
    Hello,
    KeptState,
    Leased,
    Leaving,
    Load,
    Message,
    ModelLayout,
    NewSpec,
    Notice,
    Progress,
    RelayPair,
    Release,
    Repair,
    Route,
    RouteKind,
    StopRelayingPair,
    SupplyWeights,
    TrainerAttached,
    View,
    Welcome,
)
from ...protocol.network.interface import Channel, Network
from ...protocol.trust.authority import Party
from ..advertised_hosts import DIALABLE_MAX, dialable
from ..port_mapping.gateway_search import find_gateways
from ..port_mapping.port_mapper import PortMapper
from .checkpointer import Checkpointer
from .data_service import DataService
from .master_session import MasterSession, SessionEnded
from .peer_config import CurrentSpec, PeerConfig, PeerReport
from .reducer import Reducer
from .relay.relay_service import RelayWork, make_forwarder
from .state_service import StateService
from .trainer.port import TrainerPort
from .trainer_service import TrainerService

log = logging.getLogger("holdfast.peer")

PROGRESS_S = 1.0
# From one report of progress to the next, per member of the run: with 500 members each reports
# every five seconds, so that the master hears no more than some hundred reports a second.
PROGRESS_PER_MEMBER_S = 0.01
# After the run's end, for the master to order a copy of weights that are not here.
LAST_WEIGHTS_S = 10.0


@frozen
class PeerFactories:
    """Makers of the parts; the simulator replaces some of them."""

    session: Callable[..., MasterSession] = MasterSession
    checkpointer: Callable[..., Checkpointer] = Checkpointer
    reduction: Callable[..., Reduction] = Reduction


class PeerService:
    """One peer of a run, on any ``Network`` with any ``TrainerPort``.

    Args:
      checkpoints: where checkpoints are written; None: nowhere.
    """

    def __init__(
        self,
        config: PeerConfig,
        network: Network,
        trainer: TrainerPort,
        *,
        checkpoints: CheckpointStore | None = None,
        factories: PeerFactories | None = None,
    ) -> None:
        factories = factories or PeerFactories()
        start, perform = self._start, self._perform
        self.config = config
        self.network = network
        self.replica = replica = Replica(config.me)
        self.report = report = PeerReport()
        self._trainer = trainer
        self._spec = spec = CurrentSpec()
        self.session = factories.session(
            config,
            network,
            report,
            spec,
            hello=self._hello,
            obeys=replica.obeys,
            handle=self._hear,
        )
        tell = self.session.tell
        self.hub = hub = LinkHub(
            network,
            config.me,
            on_message=lambda peer, message: self.state_service.on_link_message(peer, message),
            tell_master=tell,
            upload=_cap(config.upload_bytes_per_s),
            download=_cap(config.download_bytes_per_s),
        )
        self.state_service = StateService(
            config,
            network,
            hub,
            trainer,
            replica,
            report,
            spec,
            start=start,
            tell=tell,
            perform=perform,
        )
        self.reducer = Reducer(
            config,
            network,
            hub,
            spec,
            self.state_service,
            replica,
            start=start,
            tell=tell,
            perform=perform,
            make_reduction=factories.reduction,
        )
        self.data = DataService(config.run_id, trainer, replica, spec, tell=tell, perform=perform)
        self.training = TrainerService(
            network,
            hub,
            trainer,
            replica,
            report,
            spec,
            self.state_service,
            self.data,
            local_checkpoint=config.local_checkpoint,
            residual_of=self.reducer.residual_of,
            forget_residuals=self.reducer.forget_residuals,
            start=start,
            tell=tell,
            perform=perform,
        )
        self.checkpointer = factories.checkpointer(
            config,
            network,
            trainer,
            replica,
            report,
            spec,
            self.state_service,
            checkpoints,
            start=start,
        )
        self.relay: RelayWork | None = None
        if config.relay is not None:
            self.relay = RelayWork(make_forwarder(config.relay, network, spec), tell)
        self.ports = PortMapper(lambda: find_gateways(self._bound), self.session.tell_addresses)
        self.number = 0
        self.finished = trio.Event()
        self._bound: Sequence[Address] = ()
        self._awaits_weights = False  # the run is over, and its last weights are not here
        self._refusal: EvictedError | None = None
        self._stop = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._progress_sent: Progress | None = None
        self._session_begins = True  # the next view is the first one of a session
        self._view_term = 0  # of the master whose view came last

    @property
    def spec(self) -> RunSpec | None:
        """The run's spec; None until the first session."""
        return self._spec.known

    @property
    def state(self) -> SharedState | None:
        return self.state_service.known_state

    @property
    def rounds_wanted(self) -> int:
        """The rounds after which the run is finished; 0: it has no end, or that is not known
        yet.
        """
        return 0 if self._spec.known is None else self._spec.known.run.rounds

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
                self._bound = await nursery.start(self._serve)
                nursery.start_soon(self.hub.run)
                nursery.start_soon(self._trainer.run, self.training)
                nursery.start_soon(self.data.run)
                nursery.start_soon(self._report_progress)
                nursery.start_soon(self._keep_session)
                if self.config.map_ports:
                    nursery.start_soon(self.ports.run)
                if self.relay is not None:
                    nursery.start_soon(self.relay.report)
        if self._refusal is not None:
            raise self._refusal

    def _start(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run a task until the service ends."""
        assert self._nursery is not None
        self._nursery.start_soon(function, *args)

    async def _serve(
        self, task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        await self.network.serve(
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
        """Drain, then end ``run``."""
        await self.drain(reason)
        self.stop()

    async def drain(self, reason: str) -> None:
        """Finish the round in flight and wait for the master's release; the trainer stays
        attached.
        """
        session, spec = self.session, self._spec.known
        session.leaving = True
        deadline_s = spec.membership.deadline_s if spec is not None else 15.0
        with trio.move_on_after(2 * deadline_s):
            if session.connected:
                session.tell(self.training.progress())
                session.tell(Leaving(reason))
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
        """Return where other machines may dial this one: neighbours first, who need not go by the
        router.
        """
        own = dialable(self._bound, self.config.advertise, master_host)
        mapped = tuple(str(each) for each in self.ports.addresses if str(each) not in own)
        return (own[: DIALABLE_MAX - len(mapped)] + mapped)[:DIALABLE_MAX]

    def _hello(self, master_host: str, local_port: int) -> Hello:
        config, replica = self.config, self.replica
        return Hello(
            VERSION_MIN,
            VERSION_MAX,
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
            tuple(KeptState(each.manifest.fragment_heads()) for each in self.state_service.kept),
            __version__,
            config.relay,
            local_port,
        )

    def _welcome(self, message: Welcome) -> None:
        self.number = message.number
        self._progress_sent = None
        spec = self._spec.value
        reduce = spec.reduce
        self.hub.configure(
            rules=LaneRules(reduce.lanes, reduce.lanes_max, reduce.congestion),
            silence_s=spec.link_silence_s,
            donor_share=spec.sync.donor_share,
        )
        self.report.phase = "in the run"
        self.report.why = "" if message.lineage else "waiting for the run's initial weights"
        self.state_service.check_restored(message.layout, message.lineage)
        if message.layout is not None:
            self._use_layout(message.layout)
        diloco = spec.diloco
        self._perform(self.replica.welcome(message, diloco.sync_every, diloco.fragments))
        if self.relay is not None:
            self.relay.welcome()
        if self.training.layout is not None:
            self.session.tell(TrainerAttached(self.training.layout))
        elif self.training.failed is not None:
            self.session.tell(self.training.failed)
        self.data.session_begins()

    async def _bound_extension(self, extension: int) -> None:
        """Limit the trainer's steps without a master, once a deadline has passed."""
        await trio.sleep(self._spec.value.membership.deadline_s)
        self._perform(self.replica.trainer.bound_extension(extension))

    def _hear(self, message: Message | SessionEnded) -> None:
        match message:
            case SessionEnded():
                self._session_begins = True
                self._perform(self.replica.trainer.extend_limit())
                self._start(self._bound_extension, self.replica.trainer.extension_count)
            case Welcome():
                self._welcome(message)
            case View():
                same = self.replica.term == self._view_term
                first, self._session_begins = self._session_begins, False
                self._view_term = self.replica.term
                self.hub.set_members(message.members, back=first and same, new_master=not same)
                if any(m.peer == self.config.me and not m.reachable for m in message.members):
                    self.ports.need()
                self._perform(self.replica.receive(message))
                if self.replica.trainer.in_sync:
                    self.state_service.clear_partial()
                self.checkpointer.check()
            case SupplyWeights():
                self.training.supply_weights()
            case AuditOrder():
                self.reducer.audit(message)
            case Leased():
                self.data.leased(message)
            case Route():
                self.hub.set_route(message)
                if message.kind is not RouteKind.DIRECT:
                    self.ports.need()
            case RelayPair() | StopRelayingPair() if self.relay is not None:
                self.relay.hear(message)
            case NewSpec():
                self._spec.known = RunSpec.parse(message.spec_toml)
                self._perform(self.replica.trainer.set_total_steps(message.total_steps))
            case Notice():
                log.warning("notice from the master: %s", message.text)
                self.report.notices.append(message.text)
            case _:
                self._perform(self.replica.receive(message))

    def _use_layout(self, layout: ModelLayout) -> None:
        if self.state_service.use_layout(layout):
            self.training.admit()

    # ------------------------------------------------------------ effects

    def _perform(self, todo: list[PeerEffect]) -> None:
        """Carry out the replica's effects, in order; nothing in here waits."""
        trainer = self._trainer
        for effect in todo:
            match effect:
                case peer_effects.TellMaster(message=message):
                    self.session.tell(message)
                case peer_effects.TellTrainer(message=message):
                    trainer.tell(message)
                case peer_effects.ReloadTrainer(step=step, step_limit=limit, spoilt=spoilt):
                    trainer.tell(Load(step, limit, self.finished.is_set(), spoilt))
                case peer_effects.StartReduction(order=order, contribute=contribute):
                    self.reducer.start(order, contribute=contribute)
                case peer_effects.FlushReduction(order=Flush() as order):
                    self.reducer.flush(order)
                case peer_effects.DiagnoseReduction(order=Diagnose() as order):
                    self.reducer.diagnose(order)
                case peer_effects.RepairReduction(order=Repair() as order):
                    self.reducer.repair(order)
                case peer_effects.StopReduction(round=round_id):
                    self.reducer.stop(round_id)
                case peer_effects.ApplyRound(commit=commit):
                    self._start(self._apply, commit)
                case peer_effects.StoreResult(round=round_id):
                    self.reducer.store(round_id)
                case peer_effects.DropRound(round=round_id):
                    self.reducer.drop(round_id)
                case peer_effects.FetchFragment(order=order):
                    self.reducer.forget_residual(order.head.fragment)
                    self.state_service.fetch(order)
                case peer_effects.StopFetch(fragment=fragment):
                    self.state_service.stop_fetch(fragment)
                case peer_effects.PinFragment(order=Donate() as order):
                    self.state_service.pin(order)
                case peer_effects.UnpinFragment(order=Release() as order):
                    self.state_service.unpin(order)
                case peer_effects.DiscardState():
                    layout = self.state_service.discard()
                    self.reducer.forget_residuals()
                    self.training.reject("the run's state was replaced; start the script again")
                    if layout is not None:
                        self._use_layout(layout)
        if self.replica.trainer.finished:
            self._finish_if_done()

    async def _apply(self, commit: Commit) -> None:
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
            self._start(self._await_last_weights)

    async def _await_last_weights(self) -> None:
        """Let the master bring this peer in sync, which has no result of the last round or was
        still copying.
        """
        await trio.sleep(LAST_WEIGHTS_S)
        while self.replica.fetching:
            await trio.sleep(PROGRESS_S)
        if not self.finished.is_set():
            self.training.reject(NO_LAST_WEIGHTS)
            self._finish()

    def _finish(self) -> None:
        self.report.phase, self.report.why = "finished", ""
        self._trainer.tell(Finished())
        self.session.finished = True
        self.finished.set()


def progress_every_s(member_count: int) -> float:
    """Return the seconds from one report of progress to the next in a run of so many members."""
    return max(PROGRESS_S, PROGRESS_PER_MEMBER_S * member_count)


def _cap(bytes_per_s: float | None) -> RateLimiter | None:
    return None if bytes_per_s is None else RateLimiter(bytes_per_s)

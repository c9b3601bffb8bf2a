"""The peer service: one volunteer machine's part of the run.

It owns the shared state in memory, the links to the other members, the session with the master
and the conversation with the local trainer. What may happen when is decided by
``membership.replica.Replica``; this module only carries out its deeds.

    run                              one nursery; a bug in any task ends the process
     ├── network.serve               others dial us: links, lanes, the master's reachability probe
     ├── hub.run                     one link per other member
     ├── trainer.run                 the local trainer comes, posts, goes
     ├── report_progress             once a second, what the trainer does
     ├── keep_session                dials the master again and again
     │    └── session                Hello, Welcome, then: read, write, heartbeat
     ├── reduce       (per attempt)  cancelled by the next attempt, an abort or a new session
     ├── apply        (per commit)   outer step in a thread; never cancelled half-way
     └── fetch        (per fragment) copies a version from donors

The replica and all dictionaries below are touched only by plain (not async) methods of this class,
so every stimulus is handled whole before the next one.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import numpy as np
import trio
from attrs import define, field

from ..checkpoint.state import SharedState
from ..checkpoint.transfer import Donor, FetchFailedError, Joiner
from ..collectives.allreduce import ReduceResult, Reduction
from ..collectives.compression import parse_codec
from ..collectives.encoded_input import EncodedInput
from ..collectives.feedback import Residual
from ..collectives.hub import LinkHub
from ..collectives.limiter import UploadLimiter
from ..collectives.meter import Measurements
from ..diloco.outer import outer_step
from ..membership import replica as deeds
from ..membership.replica import Deed, Replica
from ..membership.roster import layout_difference
from ..membership.spec import RunSpec
from ..protocol.addresses import Address
from ..protocol.arena import LOSS_SLOT, STEP_SLOT, TOKENS_SLOT, Arena, Values
from ..protocol.errors import (
    BadContributionError,
    EvictedError,
    PeerLostError,
    RemoteProtocolError,
    StateMismatchError,
    UserError,
)
from ..protocol.messages import (
    TEXT_CHARS_MAX,
    VERSION_MAX,
    VERSION_MIN,
    ArenaOpened,
    BlocksRefused,
    BlocksRequest,
    Commit,
    Donate,
    Finished,
    Found,
    Founded,
    FragmentHead,
    FragmentSize,
    Heartbeat,
    Hello,
    Index,
    IndexRequest,
    InitialPosted,
    Layout,
    Leaving,
    LinkLoad,
    Load,
    Measured,
    Message,
    Metrics,
    Posted,
    PostInitial,
    Progress,
    Reduce,
    RefusalCode,
    Refused,
    Rejected,
    Release,
    Released,
    Renew,
    Renewed,
    SyncFragment,
    Told,
    TrainerAttached,
    TrainerLost,
    View,
    Welcome,
)
from ..protocol.network import Channel, Network, Party
from ..protocol.stream import MessageStream
from .exit_codes import ExitCode
from .hosts import dialable
from .layout import fragments_of, sizes_of
from .trainer_port import TrainerPort

log = logging.getLogger("holdfast.peer")

OUTBOX_COUNT_MAX = 4_096  # messages to the master that wait to be written; more: the session ends
DIAL_S = 10.0  # one attempt to reach the master, TLS handshake included
BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 5.0
PROGRESS_S = 1.0
PACE_S = 10.0  # tokens/s is the mean over so long
NORM_CHUNK_COUNT = 1 << 18  # elements squared at a time in float64

# After these there is no point in coming back by ourselves.
FINAL_CODES = {
    RefusalCode.VERSION,
    RefusalCode.TOKEN,
    RefusalCode.RUN,
    RefusalCode.LAYOUT,
    RefusalCode.KICKED,
    RefusalCode.FULL,
    RefusalCode.FINISHED,
    RefusalCode.LEFT,
    RefusalCode.UNREACHABLE,
}


# How a session ends when it is nobody's decision.
SESSION_ERRORS = (
    RemoteProtocolError,
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.EndOfChannel,
    trio.TooSlowError,
)


@define
class PeerConfig:
    """What a peer is told by its command line and its certificate."""

    me: str
    name: str
    run_id: str
    masters: Sequence[Address]
    bind: Sequence[Address]
    advertise: Sequence[Address] = ()  # port 0: the bound one; empty: guessed from ``bind``
    incarnation: int = 0
    upload_bytes_per_s: float | None = None
    patience_s: float | None = 120.0  # without any master for so long: give up; None: never


@define
class PeerReport:
    """What the status page shows of this peer."""

    phase: str = "starting"
    why: str = ""
    told: list[str] = field(factory=list)


class PeerService:
    """One peer of a run, on any ``Network`` with any ``TrainerPort``."""

    def __init__(
        self,
        config: PeerConfig,
        network: Network,
        trainer: TrainerPort,
        *,
        renew: Callable[[], bytes] | None = None,
        renewed: Callable[[bytes], None] | None = None,
        renew_every_s: float = 6 * 3600.0,
    ) -> None:
        self.config = config
        self.network = network
        self.trainer = trainer
        self.replica = Replica(config.me)
        cap = config.upload_bytes_per_s
        self.hub = LinkHub(
            network,
            config.me,
            on_message=self._on_link_message,
            limiter=None if cap is None else UploadLimiter(cap),
        )
        self.report = PeerReport()
        self.spec: RunSpec | None = None
        self.layout: Layout | None = None  # the run's
        self.trainer_layout: Layout | None = None
        self.state: SharedState | None = None
        self.posted: Arena | None = None
        self.number = 0
        self.finished = trio.Event()
        self._renew, self._renewed, self._renew_every_s = renew, renewed, renew_every_s
        self._donor: Donor | None = None
        self._joiner: Joiner | None = None
        self._donor_scope = trio.CancelScope()
        self._inputs: dict[int, EncodedInput] = {}
        self._residuals: dict[int, Residual] = {}  # by fragment, if there is error feedback
        self._nursery: trio.Nursery | None = None
        self._outbox: trio.MemorySendChannel[Message] | None = None
        self._bound: Sequence[Address] = ()
        self._reductions: dict[int, trio.CancelScope] = {}
        self._fetches: dict[int, trio.CancelScope] = {}
        self._results: dict[int, ReduceResult] = {}
        self._metrics: dict[str, float] = {}
        self._state_received_bytes = 0
        self._founding = False
        self._released = trio.Event()
        self._leaving = False
        self._over: EvictedError | None = None
        self._stop = trio.CancelScope()
        self._progress_sent: Progress | None = None
        self._pace: deque[tuple[float, int]] = deque()  # (time, tokens) of late, oldest first

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Take part until the run is finished, we were released, or were sent away for good.

        Raises:
          EvictedError: the master refuses this peer and coming back would not help.
          UserError: the address cannot be bound, or no master was found for ``patience_s``.
        """
        with self._stop:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._bound = await nursery.start(
                    self.network.serve, self.config.bind, self._on_channel, self.hub.handle_lane
                )
                nursery.start_soon(self.hub.run)
                nursery.start_soon(self._run_trainer)
                nursery.start_soon(self._report_progress)
                nursery.start_soon(self._keep_session)
        if self._over is not None:
            raise self._over

    def stop(self) -> None:
        """End ``run`` at once (not a drain: see ``leave``)."""
        self._stop.cancel()

    async def leave(self, reason: str) -> None:
        """Drain, then end ``run``."""
        await self.drain(reason)
        self.stop()

    async def drain(self, reason: str) -> None:
        """Finish the round in flight and let the master know; the trainer stays attached."""
        self._leaving = True
        deadline_s = self.spec.membership.deadline_s if self.spec is not None else 15.0
        with trio.move_on_after(2 * deadline_s):
            if self._outbox is not None:
                self._tell_master(self.progress())  # the last word on what was done here
                self._tell_master(Leaving(reason))
                await self._released.wait()

    def _end_for_good(self, error: EvictedError) -> None:
        self._over = error
        self.stop()

    async def _run_trainer(self) -> None:
        await self.trainer.run(self)

    async def _on_channel(self, channel: Channel) -> None:
        if channel.party is Party.PEER:
            await self.hub.handle_channel(channel)
        # The master dials us only to see whether it can: nothing more to say.

    # ------------------------------------------------------------ the session with the master

    async def _keep_session(self) -> None:
        backoff_s = BACKOFF_FIRST_S
        began = last_contact = trio.current_time()
        failure = ""
        while True:
            for address in self.config.masters:
                try:
                    with trio.fail_after(DIAL_S):
                        channel = await self.network.dial(address, party=Party.MASTER)
                except (OSError, trio.TooSlowError, RemoteProtocolError) as error:
                    failure = str(error) or "it does not answer in time"
                    self.report.phase = "looking for the master"
                    self.report.why = f"{address}: {failure}"
                    continue
                try:
                    began = trio.current_time()
                    await self._session(channel)
                except EvictedError as error:
                    code = RefusalCode(error.code)
                    if (code is RefusalCode.LEFT and self._leaving) or (
                        code is RefusalCode.FINISHED and self.finished.is_set()
                    ):
                        self._released.set()  # nothing is amiss; whoever drains ends ``run``
                        return
                    log.info("the master sent us away: %s", error.reason)
                    self.report.why = error.reason
                    if code in FINAL_CODES or self._leaving:
                        self._end_for_good(error)
                        return
                except SESSION_ERRORS as error:
                    log.info("no session with the master: %r", error)
                finally:
                    self._outbox = None
                    with trio.CancelScope(shield=True) as scope:
                        scope.deadline = trio.current_time() + 1
                        await trio.aclose_forcefully(channel.stream)
                if self._released.is_set():
                    return
                last_contact = trio.current_time()
                if last_contact - began > BACKOFF_MAX_S:
                    backoff_s = BACKOFF_FIRST_S
            patience_s = self.config.patience_s
            if patience_s is not None and trio.current_time() - last_contact > patience_s:
                raise no_master(self.config.masters, failure)
            await trio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def _session(self, channel: Channel) -> None:
        stream = MessageStream(channel.stream)
        advertised = dialable(self._bound, self.config.advertise)
        hello = Hello(
            VERSION_MIN,
            VERSION_MAX,
            self.config.run_id,
            self.config.name,
            advertised,
            self.config.incarnation,
            self.trainer_layout,
            self.replica.heads(),
            self.replica.lineage,
            self.replica.undecided(),
            self.config.upload_bytes_per_s or 0.0,
        )
        await stream.send(hello)
        with trio.fail_after(3 * DIAL_S):  # the master dials us back before it answers
            first = await stream.receive()
        if isinstance(first, Refused):
            raise EvictedError(first.code.value, first.reason)
        if not isinstance(first, Welcome):
            raise RemoteProtocolError(f"{type(first).__name__} instead of Welcome")
        if first.term < self.replica.term:
            raise RemoteProtocolError("a master of an older term answered")
        outbox, queue = trio.open_memory_channel[Message](OUTBOX_COUNT_MAX)
        self._outbox = outbox
        self._progress_sent = None
        self._welcome(first)
        ended: Exception | None = None  # the writer may end the session before the reader does
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write, stream, queue, nursery.cancel_scope)
            nursery.start_soon(self._beat)
            nursery.start_soon(self._renew_certificate)
            ended = await self._read(stream)
            nursery.cancel_scope.cancel()
        if isinstance(ended, EvictedError):
            raise ended
        log.info("the session with the master ended: %s", ended or "its connection broke")

    async def _read(self, stream: MessageStream) -> Exception:
        """Obey the master until the session ends; returns why it did."""
        assert self.spec is not None
        try:
            while True:
                with trio.fail_after(self.spec.membership.deadline_s):
                    message = await stream.receive()
                if isinstance(message, Refused):
                    return EvictedError(message.code.value, message.reason)
                self._hear(message)
        except SESSION_ERRORS as error:
            return error

    async def _write(
        self,
        stream: MessageStream,
        queue: trio.MemoryReceiveChannel[Message],
        session: trio.CancelScope,
    ) -> None:
        with suppress(*SESSION_ERRORS):  # the reader will say more, if there is more to say
            async for message in queue:
                await stream.send(message)
        session.cancel()

    async def _beat(self) -> None:
        assert self.spec is not None
        sequence = 0
        while True:
            self._tell_master(Heartbeat(sequence))
            sequence += 1
            await trio.sleep(self.spec.heartbeat_s)

    async def _renew_certificate(self) -> None:
        if self._renew is None:
            return
        while True:
            await trio.sleep(self._renew_every_s)
            self._tell_master(Renew(self._renew()))

    def _tell_master(self, message: Message) -> None:
        if self._outbox is None:
            return  # the next Hello says where we are
        try:
            self._outbox.send_nowait(message)
        except trio.WouldBlock:
            log.warning("the master does not read: dropping the session")
            self._outbox.close()
            self._outbox = None
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._outbox = None

    # ------------------------------------------------------------ what the master says

    def _welcome(self, message: Welcome) -> None:
        self.number = message.number
        self.spec = RunSpec.parse(message.spec_toml)
        replica = self.replica
        replica.sync_every = self.spec.diloco.sync_every
        self.hub.silence_s = self.spec.link_deadline_s
        self.report.phase = "in the run"
        self.report.why = "" if message.lineage else "waiting for the run's first weights"
        if message.layout is not None:
            self._use_layout(message.layout)
        for commit in message.committed:
            self._settle_residual(commit)
        self._perform(replica.welcome(message, self.spec.diloco.fragments))
        if self.trainer_layout is not None:
            self._tell_master(TrainerAttached(self.trainer_layout))

    def _hear(self, message: Message) -> None:
        match message:
            case Welcome():
                self._welcome(message)
            case View():
                self.hub.set_members(message.members)
                self._perform(self.replica.receive(message))
            case Found():
                self._found()
            case Told():
                log.warning("the master says: %s", message.text)
                self.report.told = [*self.report.told[-19:], message.text]
            case Released():
                self._released.set()
            case Renewed():
                if self._renewed is not None:
                    self._renewed(message.certificate_pem)
            case Heartbeat():
                pass
            case _:
                if isinstance(message, Commit):
                    self._settle_residual(message)
                self._perform(self.replica.receive(message))

    def _finish_if_done(self) -> None:
        if not self.replica.finished or self.finished.is_set():
            return
        if any(here.commit is not None for here in self.replica.rounds.values()):
            return  # committed rounds are still being applied
        self.report.phase = "finished"
        self.trainer.tell(Finished())
        self.finished.set()

    # ------------------------------------------------------------ deeds

    def _perform(self, todo: list[Deed]) -> None:
        """Carry out the machine's deeds, in order; nothing in here waits."""
        for deed in todo:
            match deed:
                case deeds.TellMaster(message=message):
                    self._tell_master(message)
                case deeds.TellTrainer(message=message):
                    self.trainer.tell(message)
                case deeds.ReloadTrainer(step=step, hold_step=hold_step):
                    self.trainer.tell(Load(step, hold_step, self.replica.finished))
                case deeds.StartReduction(order=order, contribute=contribute):
                    scope = self._reductions[order.round] = trio.CancelScope()
                    self._start(self._reduce, order, contribute, scope)
                case deeds.StopReduction(round=round_id):
                    self._cancel(self._reductions, round_id)
                    self.hub.stop_trailing(round_id)
                case deeds.ApplyRound(commit=commit):
                    self._start(self._apply, commit)
                case deeds.DropRound(round=round_id):
                    self._results.pop(round_id, None)
                    self._inputs.pop(round_id, None)
                case deeds.FetchFragment(order=order):
                    scope = self._fetches[order.head.fragment] = trio.CancelScope()
                    self._start(self._fetch, order, scope)
                case deeds.StopFetch(fragment=fragment):
                    self._cancel(self._fetches, fragment)
                case deeds.PinFragment(order=Donate() as order):
                    self._pin(order)
                case deeds.UnpinFragment(order=Release() as order):
                    if self.state is not None:
                        self.state.release(order.fragment, order.version, order.receiver)
                case deeds.DiscardState():
                    self._discard_state()
        if self.replica.finished:
            self._finish_if_done()

    def _start(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(function, *args)

    @staticmethod
    def _cancel(scopes: dict[int, trio.CancelScope], key: int) -> None:
        scope = scopes.pop(key, None)
        if scope is not None:
            scope.cancel()

    def _pin(self, order: Donate) -> None:
        head = order.head
        if self.state is not None:
            self.state.pin(head.fragment, head.version, order.receiver)

    # ------------------------------------------------------------ rounds

    def _size(self, fragment: int) -> FragmentSize:
        assert self.state is not None
        return self.state.sizes[fragment]

    async def _reduce(self, order: Reduce, contribute: bool, scope: trio.CancelScope) -> None:
        assert self.posted is not None
        fragment = order.fragment
        kept = self._inputs.get(order.round)
        fresh = contribute and kept is None
        with scope:
            try:
                reduction = Reduction(
                    order,
                    self.config.me,
                    self._size(fragment),
                    self.hub,
                    self.network,
                    self.posted.values(fragment) if fresh else None,
                    self.posted.counters(fragment) if fresh else None,
                    encoded_input=kept if contribute else None,
                    residual=self._residual(order) if fresh else None,
                )
                if reduction.encoded_input is not None:
                    self._inputs[order.round] = reduction.encoded_input
                self.hub.take_measurements()  # of before; a failed attempt's say nothing
                result = await reduction.run()
            except PeerLostError as error:
                self._reduction_failed(order, (error.peer,), False, error.reason)
            except BadContributionError as error:
                self._reduction_failed(order, (error.peer,), True, error.reason)
            except RemoteProtocolError as error:
                self._reduction_failed(order, (), False, str(error))
            else:
                if self._reductions.get(order.round) is scope:
                    del self._reductions[order.round]
                    self._results[order.round] = result
                    self._tell_master(measured(self.hub.take_measurements()))
                    self._perform(
                        self.replica.reduction_done(order.round, order.attempt, result.digest)
                    )

    def _residual(self, order: Reduce) -> Residual | None:
        assert self.spec is not None
        codec, _zstd = parse_codec(self.spec.reduce.codec_up)
        if not (codec.lossy and self.spec.reduce.error_feedback):
            return None
        if order.fragment not in self._residuals:
            count = self._size(order.fragment).value_count
            self._residuals[order.fragment] = Residual(count)
        return self._residuals[order.fragment]

    def _settle_residual(self, commit: Commit) -> None:
        """What was left out of a contribution counts once the contribution does."""
        kept = self._inputs.get(commit.round)
        if kept is not None and any(c.peer == self.config.me for c in commit.contributors):
            kept.settle()

    def _reduction_failed(
        self, order: Reduce, accused: tuple[str, ...], bad: bool, reason: str
    ) -> None:
        log.info("round %d attempt %d fails here: %s", order.round, order.attempt, reason)
        self._perform(
            self.replica.reduction_failed(order.round, order.attempt, accused, bad, reason)
        )

    async def _apply(self, commit: Commit) -> None:
        assert self.state is not None
        assert self.spec is not None
        state, spec, result = self.state, self.spec, self._results[commit.round]

        def step(values: Values, momentum: Values, mean: Values) -> None:
            outer_step(
                values,
                momentum,
                mean,
                lr=spec.diloco.outer_lr,
                mu=spec.diloco.outer_momentum,
                nesterov=spec.diloco.nesterov,
            )

        def work() -> FragmentHead:
            return state.apply(
                commit.fragment, commit.version + 1, result.values, result.counters, step
            )

        head = await self.network.run_sync(work)
        self._perform(self.replica.applied(commit.round, head))

    # ------------------------------------------------------------ state

    def _use_layout(self, layout: Layout) -> None:
        """The run's tensors are known: make room for the shared state."""
        if self.layout == layout and self.state is not None:
            return
        assert self.spec is not None
        self.layout = layout
        sizes = sizes_of(fragments_of(layout, self.spec.diloco.fragments))
        shared, self.posted = self.trainer.open_arenas(sizes)
        self.state = SharedState(sizes, shared, self.config.run_id)
        self._donor_scope.cancel()
        self._donor_scope = trio.CancelScope()
        self._donor = Donor(self.state, self.hub, self.network)
        self._joiner = Joiner(self.state, self.hub, self.network)
        self._start(self._donate, self._donor, self._donor_scope)
        if self.trainer_layout is not None:
            self._admit_trainer()

    def _discard_state(self) -> None:
        log.warning("our state belongs to another lineage than the run's: discarded")
        layout, self.layout, self.state, self.posted = self.layout, None, None, None
        self._residuals.clear()
        if self.trainer_layout is not None:
            self.trainer_layout = None  # it works on memory that is no longer the run's
            self.trainer.tell(Rejected("the run's state was replaced; start the script again"))
        if layout is not None:
            self._use_layout(layout)

    async def _donate(self, donor: Donor, scope: trio.CancelScope) -> None:
        with scope:
            await donor.run()

    async def _on_link_message(self, peer: str, message: Message) -> None:
        """A member says something on a link's control stream: state transfer, both sides of it."""
        if isinstance(message, IndexRequest | BlocksRequest):
            if self._donor is not None:
                self._donor.receive(peer, message)
        elif isinstance(message, Index | BlocksRefused):
            if self._joiner is not None:
                self._joiner.receive(peer, message)
        else:
            raise RemoteProtocolError(f"{type(message).__name__} on a link")

    def _found(self) -> None:
        """The run is empty and ours are its first weights."""
        if self.trainer_layout is None:
            return
        self._founding = True
        self._use_layout(self.trainer_layout)
        self.trainer.tell(PostInitial())

    async def _take_initial(self) -> None:
        assert self.state is not None
        assert self.posted is not None
        assert self.layout is not None
        state, posted, layout = self.state, self.posted, self.layout

        def work() -> None:
            for fragment in range(len(state.sizes)):
                state.load_initial(fragment, posted.values(fragment), posted.counters(fragment))

        await self.network.run_sync(work)
        heads = state.heads()
        lineage = state.lineage()
        self.replica.founded(lineage, heads)
        self._tell_master(Founded(layout, state.sizes, heads, lineage))

    async def _fetch(self, order: SyncFragment, scope: trio.CancelScope) -> None:
        assert self._joiner is not None
        joiner = self._joiner
        self.report.phase = f"fetching fragment {order.head.fragment}"

        def progress(done_count: int, all_count: int) -> None:
            self.report.why = f"{done_count} of {all_count} blocks"

        with scope:
            try:
                got = await joiner.fetch(order, progress)
            except (PeerLostError, StateMismatchError) as error:
                self._fetches.pop(order.head.fragment, None)
                bad = error.bad_donors if isinstance(error, FetchFailedError) else ()
                self._perform(self.replica.fetch_failed(order.head, bad, str(error)))
            else:
                self._fetches.pop(order.head.fragment, None)
                self._state_received_bytes += got.received_bytes
                self.report.phase, self.report.why = "in the run", ""
                self._perform(self.replica.fetched(order.head, got.received_bytes))

    # ------------------------------------------------------------ the trainer

    def trainer_came(self, layout: Layout) -> None:
        """TrainerEvents: a script attached."""
        self.trainer_layout = layout
        self._tell_master(TrainerAttached(layout))
        if self.layout is not None:
            self._admit_trainer()

    def _admit_trainer(self) -> None:
        assert self.layout is not None
        assert self.trainer_layout is not None
        assert self.spec is not None
        assert self.state is not None
        if self.trainer_layout != self.layout:
            difference = layout_difference(self.layout, self.trainer_layout)
            self.trainer.tell(
                Rejected(f"its tensors are not the run's: {difference}"[:TEXT_CHARS_MAX])
            )
            return
        fragments = fragments_of(self.layout, self.spec.diloco.fragments)
        self.trainer.tell(
            ArenaOpened(
                tuple(f.tensors for f in fragments),
                self.state.sizes,
                self.spec.diloco.overlap,
                self.spec.diloco.merge,
            )
        )
        self._perform(self.replica.trainer_came())

    def trainer_said(self, message: Message) -> None:
        """TrainerEvents: something from the script."""
        match message:
            case Posted():
                self._start(self._check_posted, message)
            case InitialPosted():
                if self._founding:
                    self._founding = False
                    self._start(self._take_initial)
            case Metrics():
                self._metrics.update(message.values)
            case _:
                log.warning("unexpected %s from the trainer", type(message).__name__)

    def trainer_went(self, reason: str) -> None:
        """TrainerEvents: the script is gone (it may come back)."""
        self.trainer_layout = None
        self._tell_master(TrainerLost(reason))
        self._perform(self.replica.trainer_lost())

    async def _check_posted(self, message: Posted) -> None:
        """Measure the pseudo-gradient's norm; refuse what is not finite before anyone sees it."""
        if self.posted is None or not 0 <= message.fragment < len(self.posted.sizes):
            return
        values = self.posted.values(message.fragment)
        norm = await self.network.run_sync(lambda: l2_norm(values))
        if math.isfinite(norm):
            self._perform(self.replica.posted(message, norm, ""))
            return
        reason = "the pseudo-gradient is not finite (NaN or infinity)"
        self.report.told = [*self.report.told[-19:], f"round {message.round}: {reason}"]
        log.warning("round %d: %s", message.round, reason)
        self._perform(self.replica.posted(message, None, reason))

    # ------------------------------------------------------------ progress

    def progress(self) -> Progress:
        """What the trainer does right now, as the master and the status page see it."""
        step = tokens = 0
        loss = None
        if self.posted is not None:
            step = int(self.posted.slots[STEP_SLOT])
            tokens = int(self.posted.slots[TOKENS_SLOT])
            value = float(self.posted.loss[0])
            loss = value if int(self.posted.slots[LOSS_SLOT]) and math.isfinite(value) else None
        now = trio.current_time()
        self._pace.append((now, tokens))
        while now - self._pace[0][0] > PACE_S:
            self._pace.popleft()
        then, tokens_then = self._pace[0]
        rate = max(0.0, (tokens - tokens_then) / (now - then)) if now > then else 0.0
        return Progress(
            step,
            tokens,
            rate,
            loss,
            self.report.phase,
            self.hub.sent_bytes,
            self.hub.received_bytes,
            self._state_received_bytes,
            dict(self._metrics),
        )

    async def _report_progress(self) -> None:
        while True:
            await trio.sleep(PROGRESS_S)
            progress = self.progress()
            if progress != self._progress_sent and self._outbox is not None:
                self._progress_sent = progress
                self._tell_master(progress)


def no_master(addresses: Sequence[Address], failure: str) -> UserError:
    return UserError(
        f"no master of this run at {', '.join(map(str, addresses))}: {failure}",
        exit_code=ExitCode.UNREACHABLE,
        hint="is `holdfast master` running, and is its port open from here?",
    )


def measured(measurements: Measurements) -> Measured:
    """What the hub saw, as the master hears it."""
    return Measured(
        sent_bytes=measurements.sent.carried_bytes,
        sending_s=measurements.sent.busy_s,
        received_bytes=measurements.received.carried_bytes,
        receiving_s=measurements.received.busy_s,
        links=tuple(
            LinkLoad(peer, reading.carried_bytes, reading.busy_s)
            for peer, reading in measurements.sent_to.items()
        ),
    )


def l2_norm(values: Values) -> float:
    """Euclidean norm, summed in float64; not finite when any element is not."""
    total = 0.0
    for start in range(0, len(values), NORM_CHUNK_COUNT):
        part = values[start : start + NORM_CHUNK_COUNT].astype(np.float64)
        total += float(np.dot(part, part))
    return math.sqrt(total) if math.isfinite(total) else math.inf

"""The master service: it carries out the decisions of ``membership.Coordinator``. It handles no
tensor bytes.

Decisions are made synchronously when a message arrives; their effects are queued. A
``RecordDurably`` is fsynced before the effects behind it in the queue, so nothing leaves this
process that a restart could forget. While a record cannot be written (the disk is full), nothing
behind it goes out. Heartbeats do, so the members stay and train on.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio

from ... import __version__
from ...membership.master.coordinator import Coordinator
from ...membership.master.state.context import Context
from ...membership.master.state.journal import JournalRecord
from ...membership.master.state.master_effects import (
    AnnounceEvent,
    Decision,
    DropPeer,
    Effect,
    Event,
    RecordDurably,
    SendMessage,
    StandDown,
)
from ...membership.planning.predict import memory_bytes
from ...protocol import messages as m
from ...protocol.addresses import Address
from ...protocol.errors import RemoteProtocolError, UserError
from ...protocol.machine_check import Checkups
from ...protocol.network.interface import Channel, Network
from ...protocol.text import plain
from ...protocol.trust.authority import Authority, Party, holder_of, load_certificate
from ...protocol.wakeups import Pulse
from ..process.exit_codes import ExitCode
from ..process.memory_check import fragment_bytes
from .admission import Admission, check_token
from .journal.journal_base import FencedError, Journal
from .journal.journal_writer import JournalWriter
from .other_masters import OtherMasters
from .peer_greeting import PeerGreeting
from .peer_sessions import PeerSession, PeerSessions
from .reachability import ReachabilityCheck

log = logging.getLogger("holdfast.master")

TICK_S_MIN = 0.005  # the shortest wait for the coordinator's next deadline
RECORDED_S = 5.0  # for an operator's command; after that the answer is that it is not on disk yet
# Of a crowd, per peer, from the first message to the conclusions: a quarter of a second for 500.
# Conclusions look at every member, so this bounds what they take of the processor.
CROWD_WAIT_S = 500e-6
LEASE_OVER = "this master's lease of the journal is over"
SIGNS_OF_LIFE = (m.Heartbeat, m.Progress, m.Measured)  # no decision follows from these


class MasterService:
    """The coordinator of a run, on any ``Network``.

    Args:
      probe: dial peers back; otherwise all of them count as reachable.
      clock: the time of decisions, without the waits for the journal; it may run ahead of trio's.
      may_decide: says whether this master still holds a shared journal; None: it is its own.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store: Journal,
        network: Network,
        bind: Sequence[Address],
        *,
        authority: Authority | None = None,
        probe: bool = True,
        clock: Callable[[], float] = trio.current_time,
        may_decide: Callable[[], bool] | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.store = store
        self.network = network
        self.bind = bind
        self.bound: Sequence[Address] = ()
        self._authority = authority
        self._probe = probe
        self._clock = clock
        self._may_decide = may_decide
        self._began_s: float | None = None  # serving, by the clock of decisions
        self._deadline_changed = Pulse()
        self._noted = trio.Event()  # a message came from which nothing was concluded yet
        self._superseded = trio.Event()
        self._journal = JournalWriter(
            self._append,
            self._note,
            self._deadline_changed.notify_all,
            self._superseded,
            store.remedy,
        )
        needs = partial(_needs_of, coordinator.context)
        checkups = Checkups(network, partial(check_token, store), needs)
        self.admission = Admission(
            coordinator,
            store,
            network,
            self.decide,
            self.recorded,
            checkups,
        )
        self._reachability = ReachabilityCheck(network, self._member_addresses, self._classed)
        greeting = PeerGreeting(
            coordinator,
            store,
            self.admission,
            self._journal,
            authority=authority,
            reachability=self._reachability if probe else None,
        )
        self.sessions = PeerSessions(
            coordinator,
            greeting,
            decide=self.decide,
            handle=self._handle,
            noted=self._note_for_crowd,
            resumed=self._reachability.look_soon,
            now=self.now,
            superseded=self._superseded,
        )
        self.effects = EffectQueue(self.sessions, self._journal.write, self._superseded)
        self._other_masters = OtherMasters(coordinator, network, self.decide, lambda: self.bound)

    async def run(
        self, *, task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until cancelled; raise UserError for a damaged journal or another master."""
        self._began_s = self.now()
        async with trio.open_nursery() as nursery:
            self.bound = await nursery.start(self.network.serve, self.bind, self._on_channel, None)
            nursery.start_soon(self.effects.run)
            nursery.start_soon(self._keep_time)
            nursery.start_soon(self._settle_crowd)
            nursery.start_soon(self.sessions.beat)
            if self._probe:
                nursery.start_soon(self._reachability.run)
            nursery.start_soon(self._other_masters.run)
            nursery.start_soon(self._end_if_superseded)
            task_status.started(self.bound)

    async def _on_channel(self, channel: Channel) -> None:
        if channel.party is Party.NEWCOMER:
            if self._authority is not None:
                await self.admission.enrol(channel, self._authority)
        elif channel.party is Party.PEER:
            await self.sessions.serve(channel)
        elif channel.party is Party.MASTER:
            await self._other_masters.answer(channel)

    def why_stuck(self) -> str:
        """Return why no decision leaves this process, or an empty string."""
        return self._journal.why_stuck()

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Call this with every event once what led to it is on disk."""
        self.effects.subscribe(listener)

    # ------------------------------------------------------------ decisions

    def now(self) -> float:
        """Return the clock of decisions, which stands still while a record takes long to write."""
        return self._clock() - self._journal.waited_s

    def cut_off_s(self) -> float:
        """Return for how long no member was heard of since this master began; 0 if none is due."""
        context = self.coordinator.context
        history, began_s = context.history, self._began_s
        if began_s is None or history.finished or not history.members.able():
            return 0.0
        return context.detector.all_silent_s(self.now(), began_s)

    @property
    def has_members(self) -> bool:
        """Members have attached to it, and not all were removed since."""
        return bool(self.coordinator.context.detector.watched())

    @property
    def waited_s(self) -> float:
        return self._journal.waited_s

    def decide(self, decision: Decision, *, sooner: bool = True) -> None:
        """Let the coordinator decide something now; the effects are carried out in order.

        Signs of life make no deadline come ``sooner``, and the search for the next one takes time.
        """
        if self._may_decide is not None and not self._may_decide():
            self.stand_down(LEASE_OVER)
            return
        effects = decision(self.now())
        if any(isinstance(effect, StandDown) for effect in effects):
            self.stand_down(self.coordinator.succession.superseded)
            return
        self.effects.add(effects)
        if sooner:
            self._deadline_changed.notify_all()

    async def see_through(self, decision: Decision) -> None:
        """Make a decision; return when it is on disk and the peers concerned were told."""
        self.decide(decision)
        await self.recorded()

    async def recorded(self) -> None:
        """Wait until all decisions are on disk and the peers concerned were told.

        Raises:
          UserError: that takes too long. It may still happen later.
        """
        with trio.move_on_after(RECORDED_S):
            await self.effects.drained()
            return
        why = self.why_stuck() or "the run obeys another master now"
        raise UserError(
            f"decided, but not on the master's disk within {RECORDED_S:g} s: {why}",
            hint="it is lost if the master ends before that; look with `holdfast status`",
        )

    async def _append(self, record: JournalRecord) -> None:
        try:
            await self.network.run_sync(lambda: self.store.append(record))
        except FencedError as error:
            self.stand_down(str(error))
            raise

    def stand_down(self, reason: str) -> None:
        """Decide nothing any more: another master holds the journal, or may take it."""
        if not self._superseded.is_set():
            self.coordinator.succession.superseded = reason
            self.effects.clear()  # the other master decides what is not on disk yet
            self._superseded.set()

    def _note(self, text: str) -> None:
        self.decide(partial(self.coordinator.note, text))

    # ------------------------------------------------------------ messages of peers

    def _handle(self, peer: str, message: m.Message) -> None:
        """Let the coordinator decide what follows from a message; in a crowd, from many at once."""
        if isinstance(message, m.Renew):
            self._renew(peer, message)
            return
        decisive = not isinstance(message, SIGNS_OF_LIFE)
        alone = not self.sessions.crowded
        self.decide(
            partial(self.coordinator.receive, peer, message, settle=alone),
            sooner=decisive and alone,
        )
        if decisive and not alone:
            self._note_for_crowd()

    def _note_for_crowd(self) -> None:
        self._noted.set()

    async def _settle_crowd(self) -> None:
        """Draw conclusions shortly after the first message that was only noted."""
        while True:
            await self._noted.wait()
            self._noted = trio.Event()
            await trio.sleep(CROWD_WAIT_S * len(self.sessions))
            self.decide(self.coordinator.settle)

    def _renew(self, peer: str, message: m.Renew) -> None:
        grant = self.store.grant(peer)
        out = self.coordinator.context.history.members.is_out(peer)
        if self._authority is None or grant is None or out:
            return
        try:
            certificate = self._authority.issue(message.request_pem, grant.name, Party.PEER)
            if holder_of(load_certificate(certificate)).peer != peer:
                raise RemoteProtocolError("the request is for another key than the peer's")
        except RemoteProtocolError as error:
            log.warning("peer %s asks for a bad certificate: %s", peer[:8], error)
            return
        self.sessions.tell(peer, m.Renewed(certificate))

    # ------------------------------------------------------------ time

    async def _keep_time(self) -> None:
        while True:
            deadline = self.coordinator.next_deadline_s()
            left_s = max(deadline - self.now(), TICK_S_MIN)
            if self._journal.stops_clock:
                left_s = math.inf
            with trio.move_on_after(left_s):
                await self._deadline_changed.wait()
                continue
            if self._journal.stops_clock:
                continue
            if self.now() - deadline > self.coordinator.context.spec.heartbeat_s:
                self.decide(self.coordinator.overslept)
            self.decide(self.coordinator.tick)

    async def _end_if_superseded(self) -> None:
        """Raises UserError when another master is obeyed."""
        await self._superseded.wait()
        reason = self.coordinator.succession.superseded
        log.error("%s", reason)
        await self.sessions.dismiss_all(m.Refused(m.RefusalCode.SUPERSEDED, plain(reason)))
        raise UserError(
            f"{reason}; this one must not go on",
            exit_code=ExitCode.SUPERSEDED,
            hint="leave it stopped. Its folder is out of date: to make this machine the standby, "
            "copy the other master's state here (`holdfast backup`)",
        )

    # ------------------------------------------------------------ reachability

    def _member_addresses(self) -> list[tuple[str, tuple[str, ...]]]:
        roster = self.coordinator.context.roster
        return [(member.peer, member.connection.addresses) for member in roster.by_number()]

    def _classed(self, peer: str, reachable: bool) -> None:
        self.decide(partial(self.coordinator.classed, peer, reachable))


def _needs_of(context: Context) -> m.CheckAnswer:
    """Return what a member of this run needs on its machine, beside the script's own."""
    sizes, spec = context.history.sizes, context.spec
    needed = memory_bytes(spec, sum(size.value_count for size in sizes))
    return m.CheckAnswer(
        now_s=0.0,
        host="",
        faults=(),
        member_count=len(context.roster),
        lanes_max=spec.reduce.lanes_max,
        memory_bytes=round(needed) if sizes else 0,
        checkpoint_bytes=sum(map(fragment_bytes, sizes)),
        checkpoint_count=spec.checkpoint.keep_count,
        software=__version__,
    )


# ---------------------------------------------------------------- the effects of decisions


class EffectQueue:
    """Perform effects: records on disk before the messages that follow; none once superseded."""

    def __init__(
        self,
        sessions: PeerSessions,
        write: Callable[[JournalRecord], Awaitable[None]],
        superseded: trio.Event,
    ) -> None:
        self._sessions = sessions
        self._write = write
        self._superseded = superseded
        self._listeners: list[Callable[[Event], None]] = []
        # Each with the session that it is for. A trio.Event is set when its turn comes.
        self._queue: deque[tuple[Effect | trio.Event, PeerSession | None]] = deque()
        self._work = Pulse()

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Call this with every event once the records before it are on disk."""
        self._listeners.append(listener)

    def add(self, effects: list[Effect]) -> None:
        """Append effects for the sessions of now: a peer may be back on another one later."""
        for effect in effects:
            self._queue.append((effect, self._sessions.addressee(effect)))
        self._work.notify_all()

    def clear(self) -> None:
        self._queue.clear()

    async def drained(self) -> None:
        reached = trio.Event()
        self._queue.append((reached, None))
        self._work.notify_all()
        await reached.wait()

    async def run(self) -> None:
        while True:
            while self._queue and not self._superseded.is_set():
                effect, session = self._queue.popleft()
                match effect:
                    case RecordDurably(record=record):
                        await self._write(record)
                    case SendMessage(message=message) if session is not None:
                        self._sessions.send(session, message)
                    case DropPeer(code=code, reason=reason) if session is not None:
                        self._sessions.dismiss(session, m.Refused(code, reason))
                    case AnnounceEvent(event=event):
                        self._announce(event)
                    case trio.Event():
                        effect.set()
            await self._work.wait()

    def _announce(self, event: Event) -> None:
        kind = event.kind.value
        log.info("%s: %s", kind, event.text, extra={"kind": kind, "peer": event.peer})
        for listener in self._listeners:
            listener(event)

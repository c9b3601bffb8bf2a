"""The master service: carries out what ``membership.Coordinator`` decides. No tensor bytes.

    run                        one nursery; a bug in any task ends the process
     ├── network.serve
     │    └── _on_channel      one per connection; its peer's faults end only it
     │         ├── gate.enrol  a newcomer gets a certificate, then reconnects with it
     │         └── _serve_peer read; beside it ``_write`` (outbox -> stream)
     ├── _carry_out            the only task that performs effects, in the order decided
     ├── _keep_time            wakes the coordinator at its next deadline
     ├── _judge               of a peer that is accused: does the proof hold?
     ├── _settle_crowd         with many peers: conclusions from many messages at once
     ├── _beat                 a heartbeat to everybody
     ├── dial_back.run         looks again who can be dialled
     ├── _watch_others         asks other masters of the run which term they serve
     └── _end_if_superseded    ends the service when another master is obeyed

Decisions are made at once, synchronously, when a message arrives; their effects are queued. A
``RecordDurably`` is fsynced before the effects behind it in the queue, so nothing leaves this process
that a restart could forget; whom they are for is settled with the decision, for a peer may be back on
another connection by the time they go out. While a record cannot be written (the disk is full), it is tried again
and again and nothing behind it goes out; heartbeats do, so the members stay and train on. The clock of
decisions stands still meanwhile: nobody is late with an answer to what was not sent.
"""

from __future__ import annotations

import logging
import math
import secrets
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import trio
from attrs import define, field

from ...membership.master.coordinator import Coordinator, Grant
from ...membership.master.state.journal import JournalRecord
from ...membership.master.state.master_effects import (
    AnnounceEvent,
    CheckProof,
    DropPeer,
    Effect,
    Event,
    RecordDurably,
    SendMessage,
    StandDown,
)
from ...membership.master.state.views import ViewWriter
from ...protocol.addresses import Address, host_of, port_of
from ...protocol.connection_phases import CLAIM, GREETING, MEMBER
from ...protocol.enrolment import Refusal
from ...protocol.errors import HoldfastError, RemoteProtocolError, UserError
from ...protocol.machine_check import Checkups
from ...protocol.message_quota import Quotas
from ...protocol.messages import (
    BlocksVerified,
    CheckpointTold,
    Heartbeat,
    Hello,
    LinkBroken,
    Measured,
    Message,
    Progress,
    RefusalCode,
    Refused,
    Renew,
    Renewed,
    Resume,
    Resumed,
    TermClaim,
    Verified,
    View,
    Welcome,
)
from ...protocol.network.interface import Channel, Network
from ...protocol.network.resumption import Conversation
from ...protocol.network.stream import MessageStream
from ...protocol.text import plain
from ...protocol.trust.authority import Authority, Party, holder_of, load_certificate
from ...protocol.trust.notary import Notary
from ..exit_codes import ExitCode
from ..memory_check import needs_of
from .admission import Admission, look_at
from .checkpoint_requests import CheckpointAsker
from .journal_store import JournalStore
from .proof_check import fault_proven
from .reachability import ReachabilityCheck
from .state_verifier import StateVerifier

log = logging.getLogger("holdfast.master")

STREAM_ENDS = (trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel)

OUTBOX_COUNT_MAX = 4_096  # messages that wait for one peer; more: it does not read, it is dropped
HELLO_S = 10.0  # from the connection to its first message
GREETINGS_MAX = 4  # of one key, that have not led to a session yet; more are closed unheard
TICK_S_MIN = 0.005  # the coordinator's deadlines are not chased closer than this
WRITE_RETRY_S = 0.5  # after the first failure to write a record; doubling
WRITE_RETRY_S_MAX = 10.0  # so long does a run stand still, at most, after there is room again
WRITE_SLOW_S = 2.0  # a record that takes longer is why the run waits
RECORDED_S = 5.0  # an owner's command; after that it is answered that it is not on disk yet
CLAIM_DEADLINES = 3  # between two looks at the other masters
CLAIM_S = 10.0  # for one of these conversations
CLOSE_S = 2.0  # for the last words to a peer that is dropped
CROWD_MIN = 64  # peers; with fewer, conclusions are drawn from each message by itself
CROWD_WAIT_S = 50e-6  # a peer, from the first message noted to the conclusions: 50 ms for 1,000
BROKEN_S = 2.0  # after links to a member broke its own connection's end means that it is gone
BROKEN_WORDS_MIN = 2  # members whose links to it broke; one alone may say what it likes
CONNECTION_LOST = ("the connection was closed", "the connection broke")
# A record that is on disk within this stops no clock: deadlines have room for it.
WRITE_USUAL_S = 1.0
SIGNS_OF_LIFE = (Heartbeat, Progress, Measured)  # from these no decision follows


@define(eq=False)
class PeerSession:
    """One peer's connection."""

    peer: str
    stream: MessageStream
    message_queue: trio.MemorySendChannel[Message]
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    reading: trio.CancelScope = field(factory=trio.CancelScope)
    crash_report: Refused | None = None
    incarnation: int = 0
    conversation: Conversation = field(factory=Conversation)
    away: bool = False  # its connection broke; it may come back and go on
    slowed: bool = False  # it said more than its quota, and that was noted
    # By member: when it said that its link to it broke.
    broken: dict[str, float] = field(factory=dict)
    replaces: PeerSession | None = None  # until it is decided which of the two goes
    welcomed: bool = False  # until then no heartbeat
    view: View | None = None  # told last; the next one goes out as its difference


class MasterService:
    """The coordinator of a run, on any ``Network``.

    Args:
      notary: checks seals; None: one that knows peers by their keys.
      probe: dial peers back; False: take all of them for reachable.
      clock: decisions are made by it, less the time in which they waited for the journal. It may
        leap ahead of trio's.

    Attributes:
      announced: called with every event, when what led to it is on disk.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store: JournalStore,
        network: Network,
        bind: Sequence[Address],
        *,
        authority: Authority | None = None,
        notary: Notary | None = None,
        probe: bool = True,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self.coordinator = coordinator
        coordinator.routes.secret = secrets.token_bytes(32)
        self.store = store
        self.network = network
        self.bind = bind
        self.authority = authority
        self.bound: Sequence[Address] = ()
        self.sessions: dict[str, PeerSession] = {}
        self._notary = notary or Notary(coordinator.context.run_id)
        self._greetings: Counter[str] = Counter()  # by peer: connections without a session
        self._quotas = Quotas()
        self._probe = probe
        self._clock = clock
        self.announced: Callable[[Event], None] = lambda _event: None
        self._views = ViewWriter()
        # With the connection that each is for; an event: so far all is carried out.
        self._effects: deque[tuple[Effect | trio.Event, PeerSession | None]] = deque()
        self._work = trio.Event()
        self._time = trio.Event()
        self._noted = trio.Event()  # something was said from which nothing was concluded yet
        self._nursery: trio.Nursery | None = None
        self._write_since_s: float | None = None  # the record that is being written
        self._written_s = 0.0  # what all records before it have taken
        self._write_fault = ""
        self._superseded = trio.Event()
        self._reachability = ReachabilityCheck(network, self._whereabouts, self._class)
        checkups = Checkups(
            network, partial(look_at, store), partial(needs_of, coordinator.context)
        )
        self.gate = Admission(coordinator, store, network, self.decide, checkups)
        self.verifier = StateVerifier(coordinator.context, self._attached, self._tell)
        self.checkpoint_asker = CheckpointAsker(
            coordinator.context,
            self._tell,
            lambda peer, text: self.decide(partial(self.coordinator.note, text, peer=peer)),
        )

    async def run(
        self, *, task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until cancelled; reports the bound addresses when it listens."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.bound = await nursery.start(self.network.serve, self.bind, self._on_channel, None)
            nursery.start_soon(self._carry_out)
            nursery.start_soon(self._keep_time)
            nursery.start_soon(self._settle_crowd)
            nursery.start_soon(self._beat)
            if self._probe:
                nursery.start_soon(self._reachability.run)
            nursery.start_soon(self._watch_others)
            nursery.start_soon(self._end_if_superseded)
            task_status.started(self.bound)

    # ------------------------------------------------------------ deciding

    def now(self) -> float:
        """The clock of decisions. It stands still while a record takes long to be written: whatever
        is decided then goes out after it, and members cannot answer what they have not been told."""
        return self._clock() - self.waited_s

    @property
    def waited_s(self) -> float:
        """How long decisions have waited for the journal, all in all."""
        since_s = self._write_since_s
        late_s = 0.0 if since_s is None else trio.current_time() - since_s - WRITE_USUAL_S
        return self._written_s + max(0.0, late_s)

    def _stands_still(self) -> bool:
        """Whether the clock of decisions does."""
        since_s = self._write_since_s
        return since_s is not None and trio.current_time() - since_s >= WRITE_USUAL_S

    def decide(self, decision: Callable[[float], list[Effect]], *, sooner: bool = True) -> None:
        """Let the coordinator decide something now; its effects are carried out in order.

        Args:
          sooner: its next deadline may be an earlier one after this. Signs of life only put
            deadlines off; looking for the next one costs time that grows with the members.
        """
        effects = decision(self.now())
        if any(isinstance(effect, StandDown) for effect in effects):
            self._effects.clear()  # what is not on disk yet is decided by the other one
            self._superseded.set()
            return
        for effect in effects:
            self._effects.append((effect, self._whom(effect)))
        self._work.set()
        if sooner:
            self._time.set()

    def _whom(self, effect: Effect) -> PeerSession | None:
        """The connection that an effect is for. Whoever is dropped is not in ``sessions`` any more."""
        match effect:
            case SendMessage(peer=peer):
                return self.sessions.get(peer)
            case DropPeer(peer=peer, previous=True):
                newcomer = self.sessions[peer]
                old, newcomer.replaces = newcomer.replaces, None
                return old
            case DropPeer(peer=peer):
                session = self.sessions.pop(peer, None)
                if session is not None and session.replaces is not None:
                    self.sessions[peer] = session.replaces  # the newcomer was refused
                return session
            case _:
                return None

    async def see_through(self, decision: Callable[[float], list[Effect]]) -> None:
        """As ``decide``; on return it is on disk, and whoever has to know was told.

        Raises:
          UserError: it takes long; it may yet come to that.
        """
        self.decide(decision)
        reached = trio.Event()
        self._effects.append((reached, None))
        self._work.set()
        with trio.move_on_after(RECORDED_S):
            await reached.wait()
            return
        why = self.why_stuck() or "this master is not the run's any more"
        raise UserError(
            f"decided, but not on the master's disk within {RECORDED_S:g} s: {why}",
            hint="it is lost if the master ends before that; look with `holdfast status`",
        )

    def _hear(self, peer: str, message: Message) -> None:
        """Let the coordinator decide what follows from a message; in a crowd, from many at once."""
        decisive = not isinstance(message, SIGNS_OF_LIFE)
        alone = len(self.sessions) < CROWD_MIN
        self.decide(
            partial(self.coordinator.receive, peer, message, settle=alone),
            sooner=decisive and alone,
        )
        if decisive and not alone:
            self._noted.set()

    async def _settle_crowd(self) -> None:
        """Draw conclusions a little after the first message that was only noted."""
        while True:
            await self._noted.wait()
            self._noted = trio.Event()
            await trio.sleep(CROWD_WAIT_S * len(self.sessions))
            self.decide(self.coordinator.settle)

    async def _carry_out(self) -> None:
        while True:
            while self._effects and not self._superseded.is_set():
                effect, session = self._effects.popleft()
                match effect:
                    case RecordDurably(record=record):
                        await self._journal(record)
                    case SendMessage(message=message) if session is not None:
                        self._send(session, message)
                    case DropPeer(code=code, reason=reason) if session is not None:
                        self._dismiss(session, Refused(code, reason))
                    case AnnounceEvent(event=event):
                        log.info(
                            "%s: %s",
                            event.kind.value,
                            event.text,
                            extra={"kind": event.kind.value, "peer": event.peer},
                        )
                        self.announced(event)
                    case CheckProof():
                        assert self._nursery is not None
                        self._nursery.start_soon(self._judge, effect)
                    case trio.Event():
                        effect.set()
            self._work = trio.Event()
            await self._work.wait()

    async def _judge(self, case: CheckProof) -> None:
        fault = await self.network.run_sync(partial(fault_proven, case, self._notary))
        self.decide(partial(self.coordinator.proof_checked, case, fault))

    async def _journal(self, record: JournalRecord) -> None:
        wait_s = WRITE_RETRY_S
        self._write_since_s = trio.current_time()
        while not self._superseded.is_set():
            try:
                await self._append(record)
                break
            except sqlite3.OperationalError as error:
                if not self._write_fault:
                    self._write_fault = str(error)
                    log.error("%s", self.why_stuck())
                    self.decide(partial(self.coordinator.note, self.why_stuck()))
                self._write_fault = str(error)
            except sqlite3.DatabaseError as error:
                # Not a matter of waiting. A restart cuts what is damaged and settles the rest.
                raise UserError(
                    f"the journal cannot be written: {error}",
                    hint="start the master again: it looks the journal over; peers wait for it",
                ) from error
            await trio.sleep(wait_s)
            wait_s = min(2 * wait_s, WRITE_RETRY_S_MAX)
        stood_still = self._stands_still()
        self._written_s, self._write_since_s = self.waited_s, None
        if stood_still:
            self._time.set()
        if self._write_fault:
            self._write_fault = ""
            self.decide(partial(self.coordinator.note, "the journal can be written again"))

    async def _append(self, record: JournalRecord) -> None:
        """Make a record durable."""
        await self.network.run_sync(lambda: self.store.append(record))

    def why_stuck(self) -> str:
        """Why no decision leaves this process; empty: they do."""
        if self._write_fault:
            return (
                f"the journal cannot be written: {self._write_fault}; peers train on, nothing is "
                "committed; free some space on its disk and the run goes on"
            )
        if self._write_since_s is not None:
            taken_s = trio.current_time() - self._write_since_s
            if taken_s > WRITE_SLOW_S:
                return f"the journal's disk is slow: a record takes {taken_s:.0f} s so far"
        return ""

    def _send(self, session: PeerSession, message: Message) -> None:
        if isinstance(message, Welcome):
            session.welcomed = True
        if isinstance(message, View):
            before, session.view = session.view, message
            if before is not None:
                message = self._views.difference(before, message)
        if not session.conversation.sends(message):
            log.warning("peer %s confirms nothing: dropped", session.peer[:8])
            session.scope.cancel()
        if session.away:
            return
        try:
            session.message_queue.send_nowait(message)
        except trio.WouldBlock:
            log.warning("peer %s does not read: dropped", session.peer[:8])
            session.scope.cancel()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # its session is ending; detach follows

    def _dismiss(self, session: PeerSession, crash_report: Refused) -> None:
        """Let what is queued go out, within ``CLOSE_S``; then the last words, then the end."""
        session.crash_report = crash_report
        session.message_queue.close()
        session.reading.cancel()
        session.scope.deadline = trio.current_time() + CLOSE_S

    async def _keep_time(self) -> None:
        while True:
            self._time = trio.Event()
            deadline = self.coordinator.next_deadline_s()
            left_s = max(deadline - self.now(), TICK_S_MIN)
            if self._stands_still():
                left_s = math.inf
            with trio.move_on_after(left_s):
                await self._time.wait()
                continue
            if self._stands_still():
                continue
            if self.now() - deadline > self.coordinator.context.spec.heartbeat_s:
                self.decide(self.coordinator.overslept)
            self.decide(self.coordinator.tick)

    async def _beat(self) -> None:
        sequence = 0
        while True:
            await trio.sleep(self.coordinator.context.spec.heartbeat_s)
            sequence += 1
            for session in self.sessions.values():
                if session.welcomed:
                    self._send(session, Heartbeat(sequence, session.conversation.received))

    def _attached(self, peer: str) -> bool:
        return peer in self.sessions

    def _tell(self, peer: str, message: Message) -> None:
        """What no decision stands behind."""
        if (session := self.sessions.get(peer)) is not None:
            self._send(session, message)

    # ------------------------------------------------------------ other masters

    async def _end_if_superseded(self) -> None:
        """Raises UserError when another master is obeyed."""
        await self._superseded.wait()
        reason = self.coordinator.succession.superseded
        log.error("%s", reason)
        for session in list(self.sessions.values()):
            self._dismiss(session, Refused(RefusalCode.SUPERSEDED, plain(reason)))
        await trio.sleep(CLOSE_S)
        raise UserError(
            f"{reason}; this one must not go on",
            exit_code=ExitCode.SUPERSEDED,
            hint="leave it stopped. Its folder is out of date: to make this machine the standby, "
            "copy the other master's state here (`holdfast backup`)",
        )

    async def _watch_others(self) -> None:
        """Ask who serves at the run's other addresses; the lower of two masters gives way."""
        while True:
            for text in self.coordinator.context.history.masters:
                address = Address.parse(text)
                if address not in self.bound:
                    await self._compare(address)
            await trio.sleep(CLAIM_DEADLINES * self.coordinator.context.spec.membership.deadline_s)

    async def _compare(self, address: Address) -> None:
        with suppress(OSError, HoldfastError, trio.TooSlowError, *STREAM_ENDS):
            with trio.fail_after(CLAIM_S):
                channel = await self.network.dial(address, party=Party.MASTER)
                try:
                    stream = MessageStream(channel.stream, CLAIM)
                    await stream.send(self._claim())
                    self._hear_claim(await stream.receive_expected(TermClaim), str(address))
                finally:
                    await trio.aclose_forcefully(channel.stream)

    async def _answer_claim(self, channel: Channel) -> None:
        stream = MessageStream(channel.stream, CLAIM)
        with trio.move_on_after(CLAIM_S):
            claim = await stream.receive_expected(TermClaim)
            await stream.send_final(self._claim())
            self._hear_claim(claim, channel.remote_address)

    def _claim(self) -> TermClaim:
        context = self.coordinator.context
        return TermClaim(context.run_id, context.term, context.history.nonce)

    def _hear_claim(self, claim: TermClaim, where: str) -> None:
        if claim.run_id == self.coordinator.context.run_id:
            who = f"the master at {where}"
            self.decide(partial(self.coordinator.met, claim.term, claim.nonce, who))

    # ------------------------------------------------------------ connections

    async def _on_channel(self, channel: Channel) -> None:
        if channel.party is Party.NEWCOMER:
            if self.authority is not None:
                await self.gate.enrol(channel, self.authority)
        elif channel.party is Party.PEER:
            await self._serve_peer(channel)
        elif channel.party is Party.MASTER:
            await self._answer_claim(channel)

    async def _serve_peer(self, channel: Channel) -> None:
        peer = channel.peer
        if self._greetings[peer] >= GREETINGS_MAX:
            log.debug("peer %s greets too often at once", peer[:8])
            return
        quota = self._quotas.of(peer, trio.current_time())
        stream = MessageStream(channel.stream, GREETING, quota)
        self._greetings[peer] += 1
        try:
            greeted = await self._greet(channel, stream)
        except Refusal as refusal:
            log.info("refused %s: %s", peer[:8], refusal.reason)
            await stream.send_final(Refused(refusal.code, refusal.reason))
            return
        finally:
            self._greetings[peer] -= 1
            if not self._greetings[peer]:
                del self._greetings[peer]
        if greeted is None or self._superseded.is_set():
            return
        if isinstance(greeted, Resume):
            await self._resume(channel, stream, greeted)
            return
        hello, grant, reachable = greeted
        message_queue, queue = trio.open_memory_channel[Message](OUTBOX_COUNT_MAX)
        session = PeerSession(peer, stream, message_queue, replaces=self.sessions.get(peer))
        session.incarnation = hello.incarnation
        self.sessions[peer] = session
        self.decide(
            partial(
                self.coordinator.attach,
                peer,
                hello,
                grant,
                host=host_of(channel.remote_address),
                port=port_of(channel.remote_address),
                reachable=reachable,
            )
        )
        await self._hold(session, queue)

    async def _greet(
        self, channel: Channel, stream: MessageStream
    ) -> tuple[Hello, Grant, bool] | Resume | None:
        """Hear a peer's first message; None: it said nothing.

        Returns:
          Its ``Hello``, what it was let in for and whether it can be dialled; or its ``Resume``.

        Raises:
          Refusal: it may not.
        """
        with trio.move_on_after(HELLO_S) as in_time:
            hello = await stream.receive_expected(Hello, Resume)
            stream.phase = MEMBER
        if in_time.cancelled_caught:
            return None
        if isinstance(hello, Resume):
            return hello  # only a session that was let in can go on
        if self._write_fault:  # its effects would only queue up behind the record
            raise Refusal(RefusalCode.BUSY, self.why_stuck())
        grant = self.store.grant(channel.peer)
        self.gate.check_not_shut_out(channel.peer)
        if grant is None:
            raise Refusal(RefusalCode.TOKEN, "this identity was never admitted to the run")
        if not self._knows_term(hello):
            raise Refusal(RefusalCode.PROTOCOL, f"this run has had no master of term {hello.term}")
        reachable = not self._probe or await self._reachability.reachable(
            channel.peer, hello.addresses, host_of(channel.remote_address)
        )
        return hello, Grant(grant.role, grant.founder, grant.invite), reachable

    def _knows_term(self, hello: Hello) -> bool:
        """No member can end a master by naming a later one that there never was."""
        context = self.coordinator.context
        past = (hello.term, hello.nonce) == (context.term, context.history.nonce)
        past |= hello.term < context.term
        return past or self.authority is None or self.authority.vouches(hello.term, hello.nonce)

    async def _resume(self, channel: Channel, stream: MessageStream, resume: Resume) -> None:
        """Go on with a session over a new connection; nothing of the run notices."""
        session, context = self.sessions.get(channel.peer), self.coordinator.context
        theirs = (resume.run_id, resume.term, resume.nonce)
        if (
            session is None
            or not session.welcomed
            or session.crash_report is not None
            or session.incarnation != resume.incarnation
            or theirs != (context.run_id, context.term, context.history.nonce)
            or self._superseded.is_set()
        ):
            await stream.send_final(Refused(RefusalCode.RESUME, "that session is over"))
            return
        session.conversation.confirm(resume.received)
        session.scope.cancel()  # of the connection before, if that is still there
        message_queue, queue = trio.open_memory_channel[Message](OUTBOX_COUNT_MAX)
        message_queue.send_nowait(Resumed(session.conversation.received))
        for message in session.conversation.missing():
            message_queue.send_nowait(message)
        session.stream, session.message_queue, session.away = stream, message_queue, False
        session.broken.clear()
        session.scope, session.reading = trio.CancelScope(), trio.CancelScope()
        self.decide(
            partial(
                self.coordinator.moved,
                channel.peer,
                resume.addresses,
                host=host_of(channel.remote_address),
                port=port_of(channel.remote_address)
                * (port_of(channel.remote_address) == resume.local_port),
            )
        )
        self._reachability.look_soon()
        await self._hold(session, queue)

    def _may_come_back(self, session: PeerSession) -> bool:
        """Whether others still have links to a peer whose connection broke.

        Who was killed has lost those too, and they say so: two of them, for one alone may lie, or if
        there are no two that could say it, all. Words of long ago do not count.
        """
        routes, since_s = self.coordinator.routes, self.now() - BROKEN_S
        if not session.away:
            session.broken = {p: at_s for p, at_s in session.broken.items() if at_s >= since_s}
        said = session.broken.keys()
        able = {
            peer
            for peer, other in self.sessions.items()
            if other is not session
            and not other.away
            and (peer in said or routes.linked(session.peer, peer))
        }
        enough = min(BROKEN_WORDS_MIN, len(able))
        return session.welcomed and bool(able) and len(said & able) < enough

    def _link_broken(self, member: str, peer: str) -> None:
        """A member's link to this one broke: it may not be expected back."""
        session = self.sessions.get(peer)
        if session is not None and peer != member and self.sessions.get(member) is not None:
            session.broken[member] = self.now()
            self._give_up_away()

    def _give_up_away(self) -> None:
        """End the sessions of those that are gone, by what is known now."""
        for session in [each for each in self.sessions.values() if each.away]:
            if self.sessions.get(session.peer) is session and not self._may_come_back(session):
                self._detach(session, "its connections broke")

    def _detach(self, session: PeerSession, reason: str) -> None:
        del self.sessions[session.peer]
        self.decide(lambda now_s: self.coordinator.detach(session.peer, reason, now_s))

    async def _hold(self, session: PeerSession, queue: trio.MemoryReceiveChannel[Message]) -> None:
        """Read and write until the stream ends or we end it; then the peer is detached."""
        reason = "it was dropped"
        stream = session.stream
        try:
            with session.scope as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write, stream, queue, scope)
                    with session.reading:
                        reason = await self._read(session)
                    if session.crash_report is None:
                        nursery.cancel_scope.cancel()
                    else:
                        self._dismiss(session, session.crash_report)
        finally:
            if session.stream is stream and self.sessions.get(session.peer) is session:
                if reason in CONNECTION_LOST and self._may_come_back(session):
                    session.away = True  # silence ends it in the end
                    log.info("peer %s: %s; it may come back", session.peer[:8], reason)
                else:
                    self._detach(session, reason)
                self._give_up_away()  # of fewer others, fewer can say that somebody is gone
            if session.stream is stream:
                await self._part(session)

    async def _part(self, session: PeerSession) -> None:
        """Say why it ends, if the peer takes it in time."""
        if session.crash_report is not None:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
                await session.stream.send_final(session.crash_report)

    async def _read(self, session: PeerSession) -> str:
        """Hand the peer's messages to the coordinator; returns why there are no more."""
        stream = session.stream
        try:
            while True:
                message = await stream.receive()
                if stream.slowed and not session.slowed:
                    self._note_slowed(session)
                session.conversation.hears(message)
                if self.sessions.get(session.peer) is not session:
                    continue  # it goes as soon as it may be told
                if isinstance(message, LinkBroken):
                    self._link_broken(session.peer, message.peer)
                if isinstance(message, Renew):
                    self._renew(session, message)
                    continue
                if isinstance(message, Verified | BlocksVerified):  # nothing follows from it
                    self.verifier.hear(session.peer, message)
                    continue
                if isinstance(message, CheckpointTold):
                    self.checkpoint_asker.hear(session.peer, message)
                    continue
                self._hear(session.peer, message)
        except RemoteProtocolError as error:
            log.warning("peer %s broke the protocol: %s", session.peer[:8], error)
            session.crash_report = Refused(RefusalCode.PROTOCOL, plain(str(error)))
            return f"it broke the protocol: {error}"
        except trio.EndOfChannel:
            return CONNECTION_LOST[0]
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            return CONNECTION_LOST[1]

    def _note_slowed(self, session: PeerSession) -> None:
        session.slowed = True
        why = f"peer {session.peer[:8]} says more than its quota: it is heard more slowly"
        log.warning("%s", why)
        self.decide(partial(self.coordinator.note, why, peer=session.peer))

    async def _write(
        self,
        stream: MessageStream,
        queue: trio.MemoryReceiveChannel[Message],
        scope: trio.CancelScope,
    ) -> None:
        try:
            async for message in queue:
                await stream.send(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass  # the reader says why
        scope.cancel()

    def _renew(self, session: PeerSession, message: Renew) -> None:
        peer = session.peer
        grant = self.store.grant(peer)
        out = self.coordinator.context.history.is_out(peer)
        if self.authority is None or grant is None or out:
            return
        try:
            certificate = self.authority.issue(message.request_pem, grant.name, Party.PEER)
            if holder_of(load_certificate(certificate)).peer != peer:
                raise RemoteProtocolError("the request is for another key than the peer's")
        except RemoteProtocolError as error:
            log.warning("peer %s asks for a bad certificate: %s", peer[:8], error)
            return
        self._send(session, Renewed(certificate))

    def _whereabouts(self) -> list[tuple[str, tuple[str, ...]]]:
        roster = self.coordinator.context.roster
        return [(member.peer, member.addresses) for member in roster.by_number()]

    def _class(self, peer: str, reachable: bool) -> None:
        self.decide(partial(self.coordinator.classed, peer, reachable))

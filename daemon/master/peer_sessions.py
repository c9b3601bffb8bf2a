"""The sessions of peers: one each, over one connection after the other.

    serve ── greet ── attach, or resume ── _hold ── read until its end ──► detach, or wait
                                            └── _write: message queue ──► stream

A session outlives its connection if the peer's links to other members still stand: it may come back
within the deadline and go on where it was, and the run does not notice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import islice

import trio
from attrs import define, field

from ...membership.master.coordinator import Coordinator
from ...membership.master.state.master_effects import Decide, DropPeer, Effect, SendMessage
from ...membership.master.status.headline import left_s
from ...membership.master.status.why_waiting import WaitReasons
from ...protocol import messages as m
from ...protocol.addresses import host_of, port_of
from ...protocol.errors import RemoteProtocolError
from ...protocol.network.interface import Channel
from ...protocol.network.resumption import Conversation
from ...protocol.network.stream import MessageStream
from ...protocol.packed_orders import Heard, OrderWriter
from ...protocol.text import plain
from .peer_greeting import GreetedPeer, PeerGreeting

log = logging.getLogger("holdfast.master")

MESSAGE_QUEUE_COUNT_MAX = 4_096  # messages that wait for one peer; with more it is dropped
CLOSE_S = 2.0  # for the last messages to a peer that is dropped
BROKEN_S = 2.0  # after links to a member broke, the end of its own connection is its death
BROKEN_REPORTS_MIN = 2  # members that must report a broken link; a single one may lie
CROWD_MIN = 64  # members; fewer, and conclusions are drawn from each message by itself
CONNECTION_LOST = ("the connection was closed", "the connection broke")


@define(eq=False)
class PeerSession:
    """One peer's session."""

    peer: str
    stream: MessageStream
    message_queue: trio.MemorySendChannel[m.Message]
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    reading: trio.CancelScope = field(factory=trio.CancelScope)
    farewell: m.Refused | None = None
    incarnation: int = 0
    conversation: Conversation = field(factory=Conversation)
    away: bool = False  # its connection broke; it may come back and go on
    slowed: bool = False  # it has exceeded its quota, and that was noted
    # By member: when it reported that its link to this peer broke.
    broken: dict[str, float] = field(factory=dict)
    replaces: PeerSession | None = None  # until it is decided which of the two ends
    welcomed: bool = False  # no heartbeat is sent before
    heard: Heard = field(factory=Heard)


class PeerSessions:
    """The sessions of a master, by peer.

    Args:
      noted: called when a crowd's master has noted what nothing was concluded from yet.
      resumed: called after a peer has come back over another connection.
      superseded: set when another master is obeyed; no session begins after that.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        greeting: PeerGreeting,
        *,
        decide: Decide,
        handle: Callable[[str, m.Message], None],
        noted: Callable[[], None],
        resumed: Callable[[], None],
        now: Callable[[], float],
        superseded: trio.Event,
    ) -> None:
        self._coordinator = coordinator
        self._greeting = greeting
        self._decide = decide
        self._handle = handle
        self._noted = noted
        self._resumed = resumed
        self._now = now
        self._superseded = superseded
        self._sessions: dict[str, PeerSession] = {}
        self._orders = OrderWriter()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def crowded(self) -> bool:
        """There are so many members that conclusions are drawn from many messages at once."""
        return len(self._sessions) >= CROWD_MIN

    # ------------------------------------------------------------ sending

    def addressee(self, effect: Effect) -> PeerSession | None:
        """Return the session that an effect is for; remove it if its peer is dropped."""
        match effect:
            case SendMessage(peer=peer):
                return self._sessions.get(peer)
            case DropPeer(peer=peer, previous=True):
                newcomer = self._sessions[peer]
                old, newcomer.replaces = newcomer.replaces, None
                return old
            case DropPeer(peer=peer):
                session = self._sessions.pop(peer, None)
                if session is not None and session.replaces is not None:
                    self._sessions[peer] = session.replaces  # the newcomer was refused
                return session
            case _:
                return None

    def tell(self, peer: str, message: m.Message) -> None:
        """Send a message that follows from no decision to a peer, if it is connected."""
        if (session := self._sessions.get(peer)) is not None:
            self.send(session, message)

    def send(self, session: PeerSession, message: m.Message) -> None:
        """Queue a message for a peer; drop the peer if it does not read or confirm."""
        if isinstance(message, m.Welcome):
            session.welcomed = True
        message, session.heard = self._orders.pack(message, session.heard)
        if not session.conversation.sends(message):
            log.warning("peer %s confirms no message: dropped", session.peer[:8])
            session.scope.cancel()
        if session.away:
            return
        try:
            session.message_queue.send_nowait(message)
        except trio.WouldBlock:
            log.warning("peer %s does not read: dropped", session.peer[:8])
            session.scope.cancel()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # its session is ending and will be detached

    def dismiss(self, session: PeerSession, farewell: m.Refused) -> None:
        """End a session: what is queued is sent first, for ``CLOSE_S`` at most, then the reason."""
        session.farewell = farewell
        session.message_queue.close()
        session.reading.cancel()
        session.scope.deadline = trio.current_time() + CLOSE_S

    async def dismiss_all(self, farewell: m.Refused) -> None:
        """End all sessions, and wait until their reasons are sent."""
        for session in list(self._sessions.values()):
            self.dismiss(session, farewell)
        await trio.sleep(CLOSE_S)

    async def beat(self) -> None:
        while True:
            await trio.sleep(self._coordinator.context.spec.heartbeat_s)
            state, _why = WaitReasons(self._coordinator, self._now()).of_run()
            until_end_s = left_s(self._coordinator, state) or 0.0
            for session in self._sessions.values():
                if session.welcomed:
                    received = session.conversation.received
                    self.send(session, m.Heartbeat(received, until_end_s))

    # ------------------------------------------------------------ connections

    async def serve(self, channel: Channel) -> None:
        greeted = await self._greeting.greet(channel)
        if greeted is None or self._superseded.is_set():
            return
        stream, newcomer = greeted
        if isinstance(newcomer, m.Resume):
            await self._resume(channel, stream, newcomer)
        else:
            await self._attach(channel, stream, newcomer)

    async def _attach(self, channel: Channel, stream: MessageStream, greeted: GreetedPeer) -> None:
        peer = channel.peer
        message_queue, queue = trio.open_memory_channel[m.Message](MESSAGE_QUEUE_COUNT_MAX)
        session = PeerSession(peer, stream, message_queue, replaces=self._sessions.get(peer))
        session.incarnation = greeted.hello.incarnation
        self._sessions[peer] = session
        self._decide(
            partial(
                self._coordinator.attach,
                peer,
                greeted.hello,
                greeted.grant,
                host=host_of(channel.remote_address),
                port=port_of(channel.remote_address),
                reachable=greeted.reachable,
                settle=not self.crowded,
            )
        )
        if self.crowded:
            self._noted()
        await self._hold(session, queue)

    async def _resume(self, channel: Channel, stream: MessageStream, resume: m.Resume) -> None:
        """Continue a session over a new connection; the run does not notice."""
        session, context = self._sessions.get(channel.peer), self._coordinator.context
        theirs = (resume.run_id, resume.term, resume.nonce)
        if (
            session is None
            or not session.welcomed
            or session.farewell is not None
            or session.incarnation != resume.incarnation
            or theirs != (context.run_id, context.term, context.history.masters.nonce)
        ):
            await stream.send_final(m.Refused(m.RefusalCode.RESUME, "that session is over"))
            return
        session.conversation.confirm(resume.received)
        session.scope.cancel()  # of the previous connection, if it still stands
        message_queue, queue = trio.open_memory_channel[m.Message](MESSAGE_QUEUE_COUNT_MAX)
        message_queue.send_nowait(m.Resumed(session.conversation.received))
        for message in session.conversation.missing():
            message_queue.send_nowait(message)
        session.stream, session.message_queue, session.away = stream, message_queue, False
        session.broken.clear()
        session.scope, session.reading = trio.CancelScope(), trio.CancelScope()
        port = port_of(channel.remote_address)
        self._decide(
            partial(
                self._coordinator.moved,
                channel.peer,
                resume.addresses,
                host=host_of(channel.remote_address),
                port=port * (port == resume.local_port),
            )
        )
        self._resumed()
        await self._hold(session, queue)

    async def _hold(
        self, session: PeerSession, queue: trio.MemoryReceiveChannel[m.Message]
    ) -> None:
        """Read and write until the stream ends or is ended; then detach the peer."""
        reason = "it was dropped"
        stream = session.stream
        try:
            with session.scope as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_write, stream, queue, scope)
                    with session.reading:
                        reason = await self._read(session)
                    if session.farewell is None:
                        nursery.cancel_scope.cancel()
                    else:
                        self.dismiss(session, session.farewell)
        finally:
            if session.stream is stream and self._sessions.get(session.peer) is session:
                if reason in CONNECTION_LOST and self._may_come_back(session):
                    session.away = True  # if it stays silent, its deadline ends it
                    log.info("peer %s: %s; it may come back", session.peer[:8], reason)
                else:
                    self._detach(session, reason)
                for other in list(self._sessions.values()):
                    self._give_up(other)  # with fewer members, fewer reports are enough
            if session.stream is stream and session.farewell is not None:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_S):
                    await stream.send_final(session.farewell)

    async def _read(self, session: PeerSession) -> str:
        """Handle the peer's messages; return why there are no more."""
        stream = session.stream
        try:
            while True:
                message = await stream.receive()
                if stream.slowed and not session.slowed:
                    session.slowed = True
                    why = (
                        f"peer {session.peer[:8]} exceeds its message quota: its messages are read "
                        "more slowly"
                    )
                    log.warning("%s", why)
                    self._decide(partial(self._coordinator.note, why, peer=session.peer))
                session.conversation.hears(message)
                if self._sessions.get(session.peer) is not session:
                    continue  # it was dropped, and will be told so
                if isinstance(message, m.LinkBroken):
                    self._link_broken(session.peer, message.peer)
                self._handle(session.peer, message)
        except RemoteProtocolError as error:
            log.warning("peer %s broke the protocol: %s", session.peer[:8], error)
            session.farewell = m.Refused(m.RefusalCode.PROTOCOL, plain(str(error)))
            return f"it broke the protocol: {error}"
        except trio.EndOfChannel:
            return CONNECTION_LOST[0]
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            return CONNECTION_LOST[1]

    # ------------------------------------------------------------ lost connections

    def _may_come_back(self, session: PeerSession) -> bool:
        """Return whether a peer whose connection broke may still be alive.

        A killed peer has lost its links too, and the members at their other ends report that. Two
        reports are needed, because a single member may lie; if fewer than two members have a link,
        all of them must report. Old reports do not count.
        """
        since_s = self._now() - BROKEN_S
        if not session.away:
            session.broken = {p: at_s for p, at_s in session.broken.items() if at_s >= since_s}
        if not session.welcomed:
            return False
        reports = sum(self._could_tell(session, peer) for peer in session.broken)
        if reports >= BROKEN_REPORTS_MIN:
            return False
        able = (peer for peer in self._sessions if self._could_tell(session, peer))
        return reports < sum(1 for _ in islice(able, BROKEN_REPORTS_MIN))

    def _could_tell(self, session: PeerSession, peer: str) -> bool:
        """Return whether a member is here whose link to that of the session would break with it."""
        other = self._sessions.get(peer)
        if other is None or other is session or other.away:
            return False
        return peer in session.broken or self._coordinator.routes.linked(session.peer, peer)

    def _link_broken(self, member: str, peer: str) -> None:
        session = self._sessions.get(peer)
        if session is not None and peer != member and self._sessions.get(member) is not None:
            session.broken[member] = self._now()
            self._give_up(session)

    def _give_up(self, session: PeerSession) -> None:
        if not session.away or self._sessions.get(session.peer) is not session:
            return
        if not self._may_come_back(session):
            self._detach(session, "its connections broke")

    def _detach(self, session: PeerSession, reason: str) -> None:
        crowded = self.crowded  # many may be lost at once
        del self._sessions[session.peer]
        self._decide(
            lambda now_s: self._coordinator.detach(session.peer, reason, now_s, settle=not crowded)
        )
        if crowded:
            self._noted()


async def _write(
    stream: MessageStream, queue: trio.MemoryReceiveChannel[m.Message], scope: trio.CancelScope
) -> None:
    try:
        async for message in queue:
            await stream.send(message)
    except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
        pass  # the reader knows the reason
    scope.cancel()

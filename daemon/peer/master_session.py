"""A peer's session with the master, over one connection after the other.

    keep
     └── converse       one connection: Hello, Welcome (or Resume, Resumed), then
          ├── write     message queue -> stream
          ├── beat
          ├── renew     the certificate, in time
          └── read      stream -> ``handlers``; its end is the session's

A broken connection is dialled again at once, and the session is resumed where it stopped. If that
does not succeed within ``RESUME_S``, the session is over: queued messages are dropped, and the next
``Hello`` reports what the peer holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio
from attrs import frozen

from ...protocol import messages as m
from ...protocol.addresses import Address, host_of
from ...protocol.errors import (
    WRONG_CLOCK_HINT,
    EvictedError,
    RemoteProtocolError,
    WrongClockError,
)
from ...protocol.network.interface import Channel, Network
from ...protocol.network.resumption import Conversation
from ...protocol.network.stream import MessageStream
from ...protocol.packed_orders import OrderReader
from .master_search import (
    BACKOFF_FIRST_S,
    IS_IT_THERE,
    WELCOME_S,
    MasterSearch,
    no_master,
    why_not,
)
from .peer_config import CurrentSpec, PeerConfig, PeerReport

log = logging.getLogger("holdfast.peer")

QUEUE_COUNT_MAX = 4_096  # messages to the master that wait to be written; more: the session ends
RENEW_EVERY_S = 6 * 3600.0  # a certificate lasts a day
RESUME_PAUSE_S = 0.05  # between two connections of a session
RESUME_S = 3.0  # to reach the master again and resume; then the trainer is told that it is away
# Share of the deadline: a master that is silent for longer is dialled again, since this machine's
# address may have changed. The rest of the deadline is left for that, before the master declares
# this peer dead.
SILENCE_SHARE = 0.6
# Two heartbeats: of several masters another one may lead the run by now.
SILENCE_SHARE_OF_SEVERAL = 0.4
BACKOFF_MAX_S = 2.0  # short: after a master restart, rounds wait for the last contributor

# After these refusals the peer does not come back by itself.
FINAL_CODES = {
    m.RefusalCode.VERSION,
    m.RefusalCode.TOKEN,
    m.RefusalCode.RUN,
    m.RefusalCode.LAYOUT,
    m.RefusalCode.COPY,
    m.RefusalCode.KICKED,
    m.RefusalCode.FULL,
    m.RefusalCode.FINISHED,
    m.RefusalCode.LEFT,
}

# These refusals concern the master, not this peer: dial another address, or dial later.
PASSING_CODES = {m.RefusalCode.SUPERSEDED, m.RefusalCode.BUSY}

# Errors of a connection that broke.
SESSION_ERRORS = (
    RemoteProtocolError,
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.EndOfChannel,
    trio.TooSlowError,
)


@frozen
class SessionEnded:
    """The session is over and cannot be resumed."""


Handlers = dict[type[m.Message | SessionEnded], Callable[[Any], None]]


class MasterSession:
    """The connection of a peer to its run's master, kept up until the peer leaves.

    Args:
      spec: is known once the first ``Welcome`` is handled.
      hello: returns the greeting for a master at a host, from a local port.
      obeys: returns whether this peer may obey the master of a term and nonce.

    Attributes:
      handlers: what handles each type of the master's messages, and the end of a session that had a
        ``Welcome``; messages of other types are ignored.
      released: set when the master lets this peer go, or refuses it after it asked to leave.
      leaving: this peer wants to leave.
      finished: the run is over, and the session may end.
    """

    def __init__(
        self,
        config: PeerConfig,
        network: Network,
        report: PeerReport,
        spec: CurrentSpec,
        *,
        hello: Callable[[str, int], m.Hello],
        obeys: Callable[[int, bytes], bool],
    ) -> None:
        self.released = trio.Event()
        self.leaving = False
        self.finished = False
        self._config = config
        self._report = report
        self._spec = spec
        self._hello = hello
        self._obeys = obeys
        self.search = MasterSearch(config, network, report)
        self.handlers: Handlers = {
            m.Masters: self.search.learn,
            m.Renewed: self._take_certificate,
            m.Released: lambda _message: self.released.set(),
        }
        self._last: Address | None = None  # of the last session
        self._message_queue: trio.MemorySendChannel[m.Message] | None = None
        self._conversation: Conversation | None = None  # while one can be resumed
        self._with: tuple[int, bytes] = (0, b"")  # term and nonce of its master
        self._orders = OrderReader()

    @property
    def _silence_share(self) -> float:
        return SILENCE_SHARE_OF_SEVERAL if len(self.search.masters) > 1 else SILENCE_SHARE

    @property
    def connected(self) -> bool:
        return self._message_queue is not None

    def tell(self, message: m.Message) -> None:
        """Send a message to the master, in order; without a session it is dropped."""
        if self._conversation is not None and not self._conversation.sends(message):
            self._hang_up("the master confirms nothing")
        if self._message_queue is None:
            return
        try:
            self._message_queue.send_nowait(message)
        except trio.WouldBlock:
            self._hang_up("the master does not read")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._message_queue = None

    def tell_addresses(self) -> None:
        """Tell the master where this peer can be dialled now, over a new connection."""
        if self._message_queue is not None:
            self._message_queue.close()
            self._message_queue = None

    def _hang_up(self, why: str) -> None:
        """End the connection, if there is one, by closing the writer's queue."""
        if self._message_queue is not None:
            log.warning("%s: dropping the session", why)
            self.tell_addresses()

    # ------------------------------------------------------------ sessions

    async def keep(self) -> None:
        """Keep a session with the master until it releases this peer.

        Raises:
          EvictedError: the master refuses this peer and coming back would not help.
          UserError: no master was found for ``patience_s``.
        """
        backoff_s = BACKOFF_FIRST_S
        last_contact_s = trio.current_time()
        failure, clock_logged = "", False
        while True:
            hint = IS_IT_THERE

            def failed(error: Exception) -> None:
                nonlocal failure, hint
                if isinstance(error, WrongClockError):
                    failure, hint = why_not(error), WRONG_CLOCK_HINT
                elif hint == IS_IT_THERE:  # else another address gave a better reason
                    failure = why_not(error)

            # The master of the last session comes last: it may be frozen, and another one lead the
            # run.
            untried = sorted(self.search.answering(), key=lambda each: each == self._last)
            while untried:
                reached = await self.search.first(untried, failed)
                if reached is None:
                    break
                address, channel = reached
                clock_logged, self._last = False, address
                began_s = trio.current_time()
                await self._hold(address, channel)
                while self._conversation is not None:
                    address = self._last = await self._go_on(address)
                if self.released.is_set():
                    return
                last_contact_s = trio.current_time()
                if last_contact_s - began_s > BACKOFF_MAX_S:
                    backoff_s = BACKOFF_FIRST_S
                    break  # the order is from before that session: its own master comes last now
            patience_s = self._config.patience_s
            if patience_s is not None and trio.current_time() - last_contact_s > patience_s:
                raise no_master(self.search.masters, failure, hint)
            if hint == WRONG_CLOCK_HINT and not clock_logged:
                log.warning("%s: %s", failure, hint)  # the clock may yet be set, as after a boot
                clock_logged = True
            await trio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def _go_on(self, address: Address) -> Address:
        """Resume the session over a new connection, or end it; return the address that is used from
        now on.

        Another master that answers before this one leads the run by now: a session with it begins.
        """
        deadline_s = self._spec.value.membership.deadline_s
        reached = None
        with trio.move_on_after(max(RESUME_S, (1 - self._silence_share) * deadline_s)):
            reached = await self.search.reach(
                [address, *(each for each in self.search.answering() if each != address)]
            )
        if reached is None:
            self._end()
            return address
        where, channel = reached
        if where != address:
            self._end()
        await self._hold(where, channel)
        await trio.sleep(RESUME_PAUSE_S)
        return where

    def _handle(self, message: m.Message | SessionEnded) -> None:
        handler = self.handlers.get(type(message))
        if handler is not None:
            handler(message)

    def _end(self) -> None:
        self._message_queue = None
        if self._conversation is not None:
            self._conversation = None
            self._handle(SessionEnded())

    async def _hold(self, address: Address, channel: Channel) -> None:
        """Use a connection until it ends; raises EvictedError if the refusal is final."""
        try:
            await self._converse(address, channel)
        except EvictedError as error:
            self._end()
            code = m.RefusalCode(error.code)
            if (code is m.RefusalCode.LEFT and self.leaving) or (
                code is m.RefusalCode.FINISHED and self.finished
            ):
                self.released.set()  # as expected; ``drain`` ends the service
                return
            log.info("the master refused this peer: %s", error.reason)
            self._report.why = error.reason
            if code not in PASSING_CODES if self.leaving else code in FINAL_CODES:
                raise
        except SESSION_ERRORS as error:
            log.info("no session with the master: %r", error)
            self._end()
        finally:
            self._message_queue = None
            with trio.CancelScope(shield=True) as scope:
                scope.deadline = trio.current_time() + 1
                await trio.aclose_forcefully(channel.stream)

    # ------------------------------------------------------------ one connection

    async def _converse(self, address: Address, channel: Channel) -> None:
        stream = MessageStream(channel.stream)
        hello = self._hello(host_of(channel.remote_address), channel.local_port)
        if self._conversation is not None:
            usable = not self._conversation.broken
            if usable and await self._resume(stream, hello, self._conversation):
                await self._hold_on(stream, self._conversation)
            else:
                self._end()
            return
        await stream.send(hello)
        try:
            with trio.fail_after(WELCOME_S):
                first = await stream.receive()
        except trio.TooSlowError:
            self.search.was_silent(address)
            raise
        if isinstance(first, m.Refused):
            raise EvictedError(first.code.value, first.reason)
        if not isinstance(first, m.Welcome):
            raise RemoteProtocolError(f"{type(first).__name__} instead of Welcome")
        if not self._obeys(first.term, first.nonce):
            why = f"this peer obeys a newer master of the run; term {first.term} is over"
            await stream.send_final(m.Refused(m.RefusalCode.SUPERSEDED, why))
            raise RemoteProtocolError(f"the master at {channel.remote_address} is not the run's")
        self.search.learn(first)
        conversation = self._conversation = Conversation()
        conversation.hears(first)
        self._with = first.term, first.nonce
        self._orders = OrderReader()
        self._message_queue, queue = trio.open_memory_channel[m.Message](QUEUE_COUNT_MAX)
        self._handle(first)
        await self._hold_on(stream, conversation, queue)

    async def _resume(
        self, stream: MessageStream, hello: m.Hello, conversation: Conversation
    ) -> bool:
        term, nonce = self._with
        await stream.send(
            m.Resume(
                hello.run_id,
                hello.incarnation,
                term,
                nonce,
                conversation.received,
                hello.addresses,
                hello.local_port,
            )
        )
        with trio.fail_after(RESUME_S):
            answer = await stream.receive()
        if not isinstance(answer, m.Resumed):
            return False
        conversation.confirm(answer.received)
        return True

    async def _hold_on(
        self,
        stream: MessageStream,
        conversation: Conversation,
        queue: trio.MemoryReceiveChannel[m.Message] | None = None,
    ) -> None:
        """Exchange messages until the connection ends; after a mere break the session can be
        resumed.

        Args:
          queue: of messages to the master; None: a new one, which begins with the unconfirmed
            messages.
        """
        spec = self._spec.value
        if queue is None:
            self._message_queue, queue = trio.open_memory_channel[m.Message](QUEUE_COUNT_MAX)
            for message in conversation.missing():
                self._message_queue.send_nowait(message)
        ended: Exception | None = None  # the writer may end the session before the reader does
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stream, queue, nursery.cancel_scope)
                nursery.start_soon(self._beat, spec.heartbeat_s)
                nursery.start_soon(self._renew_certificate)
                ended = await self._read(stream, conversation, spec.membership.deadline_s)
                nursery.cancel_scope.cancel()
        except BaseException:
            self._end()
            raise
        self._message_queue = None
        if isinstance(ended, EvictedError):
            raise ended
        if conversation.broken or isinstance(ended, RemoteProtocolError) or self.released.is_set():
            self._end()
        log.info("the session with the master ended: %s", ended or "its connection broke")

    def _take_certificate(self, message: m.Renewed) -> None:
        if self._config.credentials is not None:
            self._config.credentials.replace_certificate(message.certificate_pem)

    async def _read(
        self, stream: MessageStream, conversation: Conversation, deadline_s: float
    ) -> Exception:
        """Handle the master's messages until the connection ends and return its error."""
        try:
            silence_s = self._silence_share * deadline_s
            with trio.fail_after(silence_s) as silence:
                while True:
                    message = await stream.receive()
                    if isinstance(message, m.Refused):
                        return EvictedError(message.code.value, message.reason)
                    conversation.hears(message)
                    self._handle(self._orders.unpack(message))
                    silence.deadline = trio.current_time() + silence_s
        except SESSION_ERRORS as error:
            return error

    async def _write(
        self,
        stream: MessageStream,
        queue: trio.MemoryReceiveChannel[m.Message],
        session: trio.CancelScope,
    ) -> None:
        with suppress(*SESSION_ERRORS):  # the reader reports the reason
            async for message in queue:
                await stream.send(message)
        session.cancel()

    async def _beat(self, every_s: float) -> None:
        while True:
            received = 0 if self._conversation is None else self._conversation.received
            self.tell(m.Heartbeat(received))
            await trio.sleep(every_s)

    async def _renew_certificate(self) -> None:
        credentials = self._config.credentials
        if credentials is None:
            return
        while True:
            await trio.sleep(RENEW_EVERY_S)
            self.tell(m.Renew(credentials.identity.request_pem(self._config.name)))

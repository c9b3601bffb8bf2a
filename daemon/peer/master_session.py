"""A peer's session with the master: dialled again and again, until the run lets the peer go.

    keep
     └── converse       one connection: Hello, Welcome (or Resume, Resumed), then
          ├── write     outbox -> stream
          ├── beat
          ├── renew     the certificate, in time
          └── read      stream -> ``hear``; its end is the session's

What is said is for ``hear`` to decide; only the session's own end is decided here. A connection that
breaks is dialled again at once, and the session goes on where it was: nobody notices. If that is not
to be had within ``RESUME_S`` the session is over, what cannot be sent is dropped, and the next ``Hello``
tells what the peer holds.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

import trio

from ...membership.master.state.views import changed_view
from ...membership.spec.spec import RunSpec
from ...protocol.addresses import Address, host_of
from ...protocol.errors import (
    WRONG_CLOCK_HINT,
    EvictedError,
    RemoteProtocolError,
    UserError,
    WrongClockError,
    cause_of,
)
from ...protocol.messages import (
    MASTERS_MAX,
    Heartbeat,
    Hello,
    Message,
    RefusalCode,
    Refused,
    Renew,
    Resume,
    Resumed,
    View,
    ViewChange,
    Welcome,
)
from ...protocol.network.interface import Channel, Network
from ...protocol.network.resumption import Conversation
from ...protocol.network.stream import MessageStream
from ...protocol.trust.authority import Party
from ..advertised_hosts import doubt_of_loopback
from ..exit_codes import ExitCode
from .peer_parts import PeerConfig, PeerReport

log = logging.getLogger("holdfast.peer")

OUTBOX_COUNT_MAX = 4_096  # messages to the master that wait to be written; more: the session ends
DIAL_S = 10.0  # one attempt to reach the master, TLS handshake included
ADDRESSES_MAX = 2 * MASTERS_MAX  # of masters that are dialled: the invite's and those learned
BACKOFF_FIRST_S = 0.2
RESUME_PAUSE_S = 0.05  # between two connections of a session
RESUME_S = 3.0  # to reach the master again and go on; then trainers are told that it is away
# Of the deadline: a master silent for so long is dialled again, from whatever address we have by now;
# the rest is left for that, before it takes us for dead.
SILENCE_SHARE = 0.6
BACKOFF_MAX_S = 2.0  # a run whose master is back waits for the last of its contributors

# After these there is no point in coming back by ourselves.
FINAL_CODES = {
    RefusalCode.VERSION,
    RefusalCode.TOKEN,
    RefusalCode.RUN,
    RefusalCode.LAYOUT,
    RefusalCode.KICKED,
    RefusalCode.QUARANTINED,
    RefusalCode.FULL,
    RefusalCode.FINISHED,
    RefusalCode.LEFT,
}

# These say something about the master, not about us: another address, or later.
PASSING_CODES = {RefusalCode.SUPERSEDED, RefusalCode.BUSY}

IS_IT_THERE = "is `holdfast master` running, and is its port open from here?"

DIAL_ERRORS = (OSError, trio.TooSlowError, RemoteProtocolError)

# No address, no route, no device.
OFFLINE = (errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)

# How a session ends when it is nobody's decision.
SESSION_ERRORS = (
    RemoteProtocolError,
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.EndOfChannel,
    trio.TooSlowError,
)


class MasterSession:
    """Keeps a peer connected to its run's master.

    Args:
      hello: what to begin with now, to a master at this host, from this port of ours.
      welcome: called with each ``Welcome``; returns the run's spec.
      hear: called with every other message of the master.
      lost: called when a session that had a ``Welcome`` is over.
      obeys: whether the master of this term and nonce may be obeyed.
      renew: makes a certificate request; None: the certificate is never renewed.

    Attributes:
      released: the master has let us go, or sent us away after we had asked for that.
      leaving: we want to go.
      finished: the run is over, and so may the session be.
    """

    def __init__(
        self,
        config: PeerConfig,
        network: Network,
        report: PeerReport,
        *,
        hello: Callable[[str, int], Hello],
        welcome: Callable[[Welcome], RunSpec],
        hear: Callable[[Message], None],
        lost: Callable[[], None],
        obeys: Callable[[int, bytes], bool],
        renew: Callable[[], bytes] | None,
        renew_every_s: float,
    ) -> None:
        self.released = trio.Event()
        self.leaving = False
        self.finished = False
        self._config = config
        self._network = network
        self._report = report
        self._hello = hello
        self._welcome = welcome
        self._hear = hear
        self._lost = lost
        self._obeys = obeys
        self._masters = list(config.masters)
        self._renew = renew
        self._renew_every_s = renew_every_s
        self._message_queue: trio.MemorySendChannel[Message] | None = None
        self._conversation: Conversation | None = None  # while there is one that may go on
        self._with: tuple[int, bytes] = (0, b"")  # term and nonce of the master that it is with
        self._spec: RunSpec | None = None
        self._view: View | None = None  # told last in it

    @property
    def connected(self) -> bool:
        return self._message_queue is not None

    def tell(self, message: Message) -> None:
        """Send to the master, in order; dropped without a session."""
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

    def _hang_up(self, why: str) -> None:
        """End the connection, if there is one: who writes to it finds nothing more to write."""
        if self._message_queue is not None:
            log.warning("%s: dropping the session", why)
            self._message_queue.close()
            self._message_queue = None

    # ------------------------------------------------------------ one session after the other

    async def keep(self) -> None:
        """Stay in touch until the master has released us.

        Raises:
          EvictedError: the master refuses this peer and coming back would not help.
          UserError: no master was found for ``patience_s``.
        """
        backoff_s = BACKOFF_FIRST_S
        last_contact_s = trio.current_time()
        failure, clock_told = "", False
        while True:
            hint = IS_IT_THERE
            for address in list(self._masters):
                try:
                    channel = await self._dial(address)
                except DIAL_ERRORS as error:
                    if isinstance(error, WrongClockError):
                        failure, hint = why_not(error), WRONG_CLOCK_HINT
                    elif hint == IS_IT_THERE:  # else another address has said more
                        failure = why_not(error)
                    continue
                clock_told = False
                began_s = trio.current_time()
                await self._hold(channel)
                while self._conversation is not None:
                    await self._go_on(address)
                if self.released.is_set():
                    return
                last_contact_s = trio.current_time()
                if last_contact_s - began_s > BACKOFF_MAX_S:
                    backoff_s = BACKOFF_FIRST_S
            patience_s = self._config.patience_s
            if patience_s is not None and trio.current_time() - last_contact_s > patience_s:
                raise no_master(self._masters, failure, hint)
            if hint == WRONG_CLOCK_HINT and not clock_told:
                log.warning("%s: %s", failure, hint)  # it may be set meanwhile, as after a boot
                clock_told = True
            await trio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def _dial(self, address: Address) -> Channel:
        """Raises: ``DIAL_ERRORS``."""
        try:
            with trio.fail_after(DIAL_S):
                return await self._network.dial(address, party=Party.MASTER)
        except DIAL_ERRORS as error:
            self._report.phase = "looking for the master"
            self._report.why = f"{address}: {why_not(error)}"
            raise

    async def _go_on(self, address: Address) -> None:
        """The connection broke: go on over another one, or end the session."""
        assert self._spec is not None
        deadline_s = self._spec.membership.deadline_s
        channel = None
        with trio.move_on_after(max(RESUME_S, (1 - SILENCE_SHARE) * deadline_s)):
            channel = await self._dial_until(address)
        if channel is None:
            self._end()
            return
        await self._hold(channel)
        await trio.sleep(RESUME_PAUSE_S)

    async def _dial_until(self, address: Address) -> Channel | None:
        """Dial again while our own network is away; None: there is one, and no master there."""
        while True:
            try:
                return await self._dial(address)
            except RemoteProtocolError:
                return None
            except (OSError, trio.TooSlowError) as error:
                if not is_offline(error):
                    return None
            await trio.sleep(BACKOFF_FIRST_S)

    def _end(self) -> None:
        """The session is over."""
        self._message_queue = None
        if self._conversation is not None:
            self._conversation = None
            self._lost()

    async def _hold(self, channel: Channel) -> None:
        """One session, to its end; raises EvictedError if there should be no other."""
        try:
            await self._converse(channel)
        except EvictedError as error:
            self._end()
            code = RefusalCode(error.code)
            if (code is RefusalCode.LEFT and self.leaving) or (
                code is RefusalCode.FINISHED and self.finished
            ):
                self.released.set()  # nothing is amiss; whoever drains ends the service
                return
            log.info("the master sent us away: %s", error.reason)
            self._report.why = error.reason
            if self._is_final(code):
                raise
        except SESSION_ERRORS as error:
            log.info("no session with the master: %r", error)
            self._end()
        finally:
            self._message_queue = None
            with trio.CancelScope(shield=True) as scope:
                scope.deadline = trio.current_time() + 1
                await trio.aclose_forcefully(channel.stream)

    def _is_final(self, code: RefusalCode) -> bool:
        if self.leaving:
            return code not in PASSING_CODES
        return code in FINAL_CODES

    # ------------------------------------------------------------ one session

    async def _converse(self, channel: Channel) -> None:
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
        with trio.fail_after(3 * DIAL_S):  # the master dials us back before it answers
            first = await stream.receive()
        if isinstance(first, Refused):
            raise EvictedError(first.code.value, first.reason)
        if not isinstance(first, Welcome):
            raise RemoteProtocolError(f"{type(first).__name__} instead of Welcome")
        if not self._obeys(first.term, first.nonce):
            why = f"this peer obeys a newer master of the run; term {first.term} is over"
            await stream.send_final(Refused(RefusalCode.SUPERSEDED, why))
            raise RemoteProtocolError(f"the master at {channel.remote_address} is not the run's")
        self._learn(first.masters)
        conversation = self._conversation = Conversation()
        conversation.hears(first)
        self._with, self._view = (first.term, first.nonce), None
        self._message_queue, queue = trio.open_memory_channel[Message](OUTBOX_COUNT_MAX)
        self._spec = self._welcome(first)
        await self._hold_on(stream, conversation, queue)

    async def _resume(
        self, stream: MessageStream, hello: Hello, conversation: Conversation
    ) -> bool:
        """Whether the master goes on with the session."""
        term, nonce = self._with
        await stream.send(
            Resume(
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
        if not isinstance(answer, Resumed):
            return False
        conversation.confirm(answer.received)
        return True

    async def _hold_on(
        self,
        stream: MessageStream,
        conversation: Conversation,
        queue: trio.MemoryReceiveChannel[Message] | None = None,
    ) -> None:
        """Talk until the connection ends; if it only broke, the conversation is left open.

        Args:
          queue: of the outbox; None: what the master has not got goes first.
        """
        spec = self._spec
        assert spec is not None
        if queue is None:
            self._message_queue, queue = trio.open_memory_channel[Message](OUTBOX_COUNT_MAX)
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
        hopeless = conversation.broken or isinstance(ended, RemoteProtocolError)
        if hopeless or self.released.is_set():
            self._end()
        log.info("the session with the master ended: %s", ended or "its connection broke")

    def _learn(self, masters: Sequence[str]) -> None:
        """Where else the run's master may be from now on, after what our invite says."""
        for text in masters:
            with suppress(UserError):
                address = Address.parse(text)
                if address not in self._masters and len(self._masters) < ADDRESSES_MAX:
                    self._masters.append(address)

    async def _read(
        self, stream: MessageStream, conversation: Conversation, deadline_s: float
    ) -> Exception:
        """Obey the master until the connection ends; returns why it did."""
        try:
            with trio.fail_after(SILENCE_SHARE * deadline_s) as silence:
                while True:
                    message = await stream.receive()
                    if isinstance(message, Refused):
                        return EvictedError(message.code.value, message.reason)
                    conversation.hears(message)
                    if isinstance(message, ViewChange):
                        message = changed_view(self._view, message)
                    if isinstance(message, View):
                        self._view = message
                    if isinstance(message, Welcome):
                        self._welcome(message)  # the run was founded meanwhile
                    else:
                        self._hear(message)
                    silence.deadline = trio.current_time() + SILENCE_SHARE * deadline_s
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

    async def _beat(self, every_s: float) -> None:
        sequence = 0
        while True:
            received = 0 if self._conversation is None else self._conversation.received
            self.tell(Heartbeat(sequence, received))
            sequence += 1
            await trio.sleep(every_s)

    async def _renew_certificate(self) -> None:
        if self._renew is None:
            return
        while True:
            await trio.sleep(self._renew_every_s)
            self.tell(Renew(self._renew()))


def is_offline(error: Exception) -> bool:
    """Whether a dial failed because this machine has no network, which says nothing of the other."""
    cause = cause_of(error)
    number = cause.errno if isinstance(cause, OSError) else None
    return number in OFFLINE or isinstance(cause, socket.gaierror)


def why_not(error: Exception) -> str:
    """Of ``DIAL_ERRORS``, for people."""
    return str(error) or "it does not answer in time"


def no_master(addresses: Sequence[Address], failure: str, hint: str = IS_IT_THERE) -> UserError:
    return UserError(
        f"no master of this run at {', '.join(map(str, addresses))}: {failure}",
        exit_code=ExitCode.UNREACHABLE,
        hint=(doubt_of_loopback(addresses) if hint == IS_IT_THERE else "") or hint,
    )

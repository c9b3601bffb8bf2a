"""The first message of a peer's connection: it is heard, checked, and admitted or refused."""

from __future__ import annotations

import logging
from collections import Counter

import trio
from attrs import frozen

from ...membership.master.coordinator import Coordinator, Grant
from ...protocol.addresses import host_of
from ...protocol.connection_phases import GREETING, MEMBER
from ...protocol.enrolment import Refusal
from ...protocol.message_quota import Quotas
from ...protocol.messages import Hello, RefusalCode, Refused, Resume
from ...protocol.network.interface import Channel
from ...protocol.network.stream import MessageStream
from ...protocol.trust.authority import Authority
from .admission import Admission
from .journal.journal_base import Journal
from .journal.journal_writer import JournalWriter
from .reachability import ReachabilityCheck

log = logging.getLogger("holdfast.master")

HELLO_S = 10.0  # from the connection to its first message
GREETINGS_MAX = 4  # connections of one key without a session; more are closed unheard


@frozen
class GreetedPeer:
    """A peer that may attach; if it is ``reachable``, other peers can dial it."""

    hello: Hello
    grant: Grant
    reachable: bool


class PeerGreeting:
    """Greet peers.

    Args:
      authority: has issued the members' certificates; without one, any term is believed.
      reachability: dials peers back; without it, all of them count as reachable.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store: Journal,
        admission: Admission,
        journal: JournalWriter,
        *,
        authority: Authority | None,
        reachability: ReachabilityCheck | None,
    ) -> None:
        self._context = coordinator.context
        self._store = store
        self._admission = admission
        self._authority = authority
        self._reachability = reachability
        self._journal = journal
        self._quotas = Quotas()
        self._greetings: Counter[str] = Counter()  # by peer: connections without a session

    async def greet(self, channel: Channel) -> tuple[MessageStream, GreetedPeer | Resume] | None:
        """Hear a peer's first message; tell it if it is refused.

        Returns:
          Its stream, and the peer or its request to go on; None if the connection is to be closed.
        """
        peer = channel.peer
        if self._greetings[peer] >= GREETINGS_MAX:
            log.debug("peer %s greets too often at once", peer[:8])
            return None
        quota = self._quotas.of(peer, trio.current_time())
        stream = MessageStream(channel.stream, GREETING, quota)
        self._greetings[peer] += 1
        try:
            greeted = await self._hear(channel, stream)
        except Refusal as refusal:
            log.info("refused %s: %s", peer[:8], refusal.reason)
            await stream.send_final(Refused(refusal.code, refusal.reason))
            return None
        finally:
            self._greetings[peer] -= 1
            if not self._greetings[peer]:
                del self._greetings[peer]
        return None if greeted is None else (stream, greeted)

    async def _hear(self, channel: Channel, stream: MessageStream) -> GreetedPeer | Resume | None:
        """Return None if the peer is silent for ``HELLO_S``; raise Refusal if it may not attach."""
        with trio.move_on_after(HELLO_S) as in_time:
            hello = await stream.receive_expected(Hello, Resume)
            stream.phase = MEMBER
        if in_time.cancelled_caught:
            return None
        if isinstance(hello, Resume):
            return hello  # only a session that was admitted can go on
        if self._journal.fault:  # the effects would only queue up behind the record
            raise Refusal(RefusalCode.BUSY, self._journal.why_stuck())
        grant = self._store.grant(channel.peer)
        self._admission.check_not_shut_out(channel.peer)
        if grant is None:
            raise Refusal(RefusalCode.TOKEN, "this identity was never admitted to the run")
        if not self._knows_term(hello):
            raise Refusal(RefusalCode.PROTOCOL, f"this run has had no master of term {hello.term}")
        reachable = self._reachability is None or await self._reachability.reachable(
            channel.peer, hello.addresses, host_of(channel.remote_address)
        )
        return GreetedPeer(hello, Grant(grant.role, grant.founder, grant.invite), reachable)

    def _knows_term(self, hello: Hello) -> bool:
        """Return whether the peer's term existed: no member may end a master by inventing one."""
        context = self._context
        past = (hello.term, hello.nonce) == (context.term, context.history.masters.nonce)
        past |= hello.term < context.term
        return past or self._authority is None or self._authority.vouches(hello.term, hello.nonce)

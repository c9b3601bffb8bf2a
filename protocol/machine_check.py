"""The machine check: the master tests a newcomer's machine from outside, before it joins. The head
of a peer of several hosts does the same for a further host.

    newcomer                                        master
       │ EnrolHello, EnrolAuthority (see ``enrolment``)
       │ CheckRequest(token, addresses, nonce) ──────► │   Check the token; it is not used up
       │ ◄───────────────── one connection per port    │   Read the nonce there
       │ ◄───────────────────────────── CheckAnswer    │   clock, reachability, resources needed
       │ ProbeBytes ... ProbeBytes(last) ────────────► │   64 KiB, timed by the receiver
       │ ◄──── ProbeBytesCounted, ProbeBytes(last) ... │   64 KiB back; then four times as much, and
       │                                               │   so on until a transfer takes long enough

Nothing is admitted, journaled or kept. A newcomer that asks has an invite; even so, the master does
little for it, and for few newcomers at a time. The master dials only the address that the
connection comes from, at the ports that the newcomer names. It answers only whether the nonce came
back, and takes as long for a closed port as for a filtered one. So an invite cannot be used to scan
other machines, or to resolve names, from the master's network.
"""

from __future__ import annotations

import hmac
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import trio
from attrs import define, evolve, field, frozen

from . import messages as m
from .addresses import Address
from .connection_phases import ADMITTING
from .enrolment import Refusal, meet_master, newcomers_channel
from .errors import EvictedError, RemoteProtocolError, UserError
from .network.interface import Network
from .network.stream import MessageStream, receive_exactly
from .trust.authority import Party
from .trust.invite import Invite

CHECKS_MAX = 16  # at a time; a further newcomer is told to try again
CHECKS_PER_INVITE_MAX = 4
DIAL_BACK_S = 5.0  # limit for the nonce to come back; a negative answer always takes this long
CHECKED_PORTS_MAX = 2  # ports dialled per newcomer: it listens on one, or two are forwarded to it
JUNK_BYTES_FIRST = 64 * 2**10  # each way; then four times as much
JUNK_BYTES_LAST = 4 * 2**20
TIMED_S_MIN = 0.5  # a transfer that takes this long is a good measurement, and the last one
NONCE_BYTES = 32


@frozen
class ProbeRates:
    """The measured rates of a line; infinite where a transfer took no measurable time."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    junk_bytes: int  # sent and received for the measurement
    round_trip_s: float


@frozen
class MachineCheckReport:
    """The result of a machine check.

    Attributes:
      clock_ahead_s: seconds by which this machine's clock is ahead of the master's; wrong by half a
        round trip at most.
    """

    answer: m.CheckAnswer
    clock_ahead_s: float
    rates: ProbeRates


# ---------------------------------------------------------------- the newcomer


async def ask_master(
    address: Address,
    invite: Invite,
    advertised: Sequence[str],
    nonce: bytes,
    giver: Party = Party.MASTER,
) -> MachineCheckReport:
    """Ask the run's master for a check of this machine.

    Args:
      advertised: addresses that the master dials back; a listener there must send ``nonce``.
      giver: what the other end is; a peer: the head of a peer of several hosts.

    Raises:
      EvictedError: the master refuses; the text gives the reason.
      OSError: nothing answers there, or it hangs up.
      RemoteProtocolError: it is not the run's master, or does not support checks.
      UserError: this machine's clock is wrong.
    """
    try:
        async with newcomers_channel(address) as channel:
            messages = MessageStream(channel.stream, ADMITTING)
            before_s = trio.current_time()
            await meet_master(messages, channel, invite, giver)
            round_trip_s = trio.current_time() - before_s
            request = m.CheckRequest(
                invite.token, tuple(advertised[: m.CHECKED_ADDRESSES_MAX]), nonce
            )
            await messages.send(request)
            answer = await messages.receive_expected(m.CheckAnswer, m.Refused)
            now_s = time.time()
            if isinstance(answer, m.Refused):
                raise EvictedError(answer.code.value, answer.reason)
            ahead_s = now_s - round_trip_s / 2 - answer.now_s
            return MachineCheckReport(answer, ahead_s, await _time_line(messages, round_trip_s))
    except (trio.BrokenResourceError, trio.EndOfChannel) as error:
        raise OSError(f"{address} hung up: {error}") from error


async def _time_line(messages: MessageStream, round_trip_s: float) -> ProbeRates:
    size_bytes, junk_bytes = JUNK_BYTES_FIRST, 0
    while True:
        await _send_junk(messages, size_bytes)
        up = await messages.receive_expected(m.ProbeBytesCounted)
        down = await _count_junk(messages)
        junk_bytes += 2 * size_bytes
        slow = max(up.took_s, down.took_s) >= TIMED_S_MIN
        if slow or size_bytes >= JUNK_BYTES_LAST:
            return ProbeRates(_rate(up), _rate(down), junk_bytes, round_trip_s)
        size_bytes *= 4


def _rate(counted: m.ProbeBytesCounted) -> float:
    """Return bytes per second. The first message starts the clock, so its bytes do not count."""
    if counted.took_s <= 0 or counted.count_bytes <= m.JUNK_BYTES_MAX:
        return math.inf
    return (counted.count_bytes - m.JUNK_BYTES_MAX) / counted.took_s


# ---------------------------------------------------------------- the master


@define(eq=False)
class Checkups:
    """The master's side of machine checks.

    Args:
      look_at_token: raises ``Refusal`` unless the token is valid.
      needs: returns an answer with the resources that a member needs; the rest is filled in here.
    """

    _network: Network
    _look_at_token: Callable[[str], Awaitable[None]]
    _needs: Callable[[], m.CheckAnswer]
    _running: Counter[str] = field(factory=Counter, init=False)  # by token

    async def answer(self, messages: MessageStream, request: m.CheckRequest, host: str) -> None:
        """Check the newcomer's machine and answer it.

        Raises:
          Refusal: the token is not valid, or too many checks run; what ``MessageStream`` raises.
        """
        token, running = request.token, self._running
        await self._look_at_token(token)
        if running.total() >= CHECKS_MAX or running[token] >= CHECKS_PER_INVITE_MAX:
            raise Refusal(
                m.RefusalCode.BUSY, "the master is checking other machines; try again in a minute"
            )
        running[token] += 1
        try:
            faults = await self._reachability(request, host)
            await messages.send(evolve(self._needs(), now_s=time.time(), host=host, faults=faults))
            size_bytes = JUNK_BYTES_FIRST
            while size_bytes <= JUNK_BYTES_LAST:  # the newcomer hangs up when it knows enough
                await messages.send(await _count_junk(messages))
                await _send_junk(messages, size_bytes)
                size_bytes *= 4
        finally:
            running -= Counter([token])

    async def _reachability(self, request: m.CheckRequest, host: str) -> tuple[str, ...]:
        """Return for each address why its port at ``host`` is not reached, or an empty text."""
        ports = [_port_of(text) for text in request.addresses]
        named = dict.fromkeys(port for port in ports if port and host)
        dialled = list(named)[:CHECKED_PORTS_MAX]
        reached: set[int] = set()

        async def look(port: int) -> None:
            if await self._is_reached(Address(host, port), request.nonce):
                reached.add(port)

        async with trio.open_nursery() as nursery:
            for port in dialled:
                nursery.start_soon(look, port)
        return tuple(
            ""
            if port in reached
            else f"this machine did not answer at {Address(host, port)}"
            if port in dialled
            else f"not checked: at most {CHECKED_PORTS_MAX} ports are"
            for port in ports
        )

    async def _is_reached(self, address: Address, nonce: bytes) -> bool:
        """Return whether the nonce comes from there. A False always takes ``DIAL_BACK_S``."""
        with trio.move_on_after(DIAL_BACK_S):
            with suppress(OSError, trio.BrokenResourceError, RemoteProtocolError):
                async with await self._network.dial_lane(address) as stream:
                    received = await receive_exactly(stream, len(nonce))
                if hmac.compare_digest(received, nonce):
                    return True
            await trio.sleep_forever()
        return False


def _port_of(text: str) -> int:
    """Return an address's port, or 0 if the text is not an address."""
    try:
        return Address.parse(text).port
    except UserError:
        return 0


# ---------------------------------------------------------------- both


async def _send_junk(messages: MessageStream, size_bytes: int) -> None:
    junk = bytes(m.JUNK_BYTES_MAX)
    for left_bytes in range(size_bytes - m.JUNK_BYTES_MAX, -1, -m.JUNK_BYTES_MAX):
        await messages.send(m.ProbeBytes(junk, last=left_bytes == 0))


async def _count_junk(messages: MessageStream) -> m.ProbeBytesCounted:
    """Receive one transfer, and return its bytes and the seconds since its first message.

    Raises:
      RemoteProtocolError: more bytes came than agreed.
    """
    began_s, count_bytes = None, 0
    while True:
        junk = await messages.receive_expected(m.ProbeBytes)
        now_s = trio.current_time()
        began_s = now_s if began_s is None else began_s
        count_bytes += len(junk.data)
        if junk.last:
            return m.ProbeBytesCounted(count_bytes, now_s - began_s)
        if count_bytes > JUNK_BYTES_LAST:
            raise RemoteProtocolError("more junk than was agreed")

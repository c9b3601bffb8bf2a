"""The real network: TCP, TLS 1.3 for control streams, plain lanes, threads for heavy work.

    serve                one nursery
    ├── _accept          one per bound socket; survives a lack of file descriptors
    └── _greet           one per connection: reads the first byte within a deadline, then runs
        └── handler      on_channel (after the TLS handshake), on_lane or on_relay

Until a connection is identified as part of the run it holds one of a limited number of slots, and
only for some seconds; a newcomer holds a slot of another kind for as long as it stays. Connections
from an address with many failed ones are closed unread: see ``accept_limits``.
"""

from __future__ import annotations

import datetime
import errno
import gc
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import TypeVar

import trio
from attrs import frozen
from cryptography import x509

from ..addresses import Address
from ..errors import RemoteProtocolError, UserError, WrongClockError
from ..trust.authority import Party, holder_of
from ..trust.credentials import Credentials
from . import lane, relay_ticket
from .accept_limits import AcceptLimits, AcceptSlot, AddressGroup, address_group
from .hole_ports import SocketHole, share_port
from .host_lookup import given_by
from .interface import Channel, ChannelHandler, Hole, LaneFacts, LaneHandler
from .socket_options import (
    choose_congestion,
    congestion_of,
    keep_alive,
    retry_soon,
    shortest_round_trip_s,
)
from .stream import CONNECTION_ENDS, run_handler

T = TypeVar("T")

TLS_FIRST_BYTE = 0x16  # a handshake record; a ClientHello cannot start otherwise
FIRST_BYTE_S = 2.0  # the dialer speaks first: a round trip and a lost packet
GREETING_S = 10.0  # for the first byte and the TLS handshake: three round trips and slow hashing
# trio.SSLStream is part of a reference cycle of some 48 KiB, of which the garbage collector counts
# only a dozen small objects. So it is run after this many TLS connections.
TLS_UNCOLLECTED_MAX = 64
BACKLOG_COUNT_MAX = 1_024  # connections that the kernel queues
CAPACITY_PAUSE_S = 0.1  # when the process has no file descriptor left for another connection
OUT_OF_TIME = (9, 10)  # OpenSSL's codes: a certificate is not valid yet, or has expired
TAKEN_EXIT_CODE = 4
SAME_PORT_ATTEMPTS_MAX = 10  # to find one free port for IPv4 and IPv6

# What an end without TLS's own is to OpenSSL; the second one in Python 3.11.2, as Debian 12 has it.
HUNG_UP = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
_CAPACITY_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

_log = logging.getLogger(__name__)


def _remote_address(stream: trio.SocketStream) -> Address | None:
    """Return the address of a connection's other end; None if the connection is closed."""
    try:
        return Address(*stream.socket.getpeername()[:2])
    except OSError:
        return None


@frozen
class _Handlers:
    """The handlers of accepted connections, by kind. Without a handler they are refused."""

    on_channel: ChannelHandler
    on_lane: LaneHandler | None
    on_relay: LaneHandler | None


class SocketNetwork:
    """``network.Network`` over TCP.

    Args:
      credentials: this node's; a renewed certificate in them is used from the next connection on.
      newcomers: accept clients without a certificate, as ``Party.NEWCOMER`` (the master does).
      greeting_s: limit for a connection to identify itself.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        newcomers: bool = False,
        greeting_s: float = GREETING_S,
    ) -> None:
        self._credentials = credentials
        self._newcomers = newcomers
        self._greeting_s = greeting_s
        self._limits = AcceptLimits()
        self._unproven: dict[trio.abc.Stream, AcceptSlot] = {}  # accepted lanes that hold a slot
        self._uncollected = 0  # accepted TLS connections since garbage was last collected

    # ------------------------------------------------------------ accepting

    async def serve(
        self,
        bind: Sequence[Address],
        on_channel: ChannelHandler,
        on_lane: LaneHandler | None,
        *,
        on_relay: LaneHandler | None = None,
        task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See ``network.Network.serve``. Addresses with port 0 get one free port in common."""
        handlers = _Handlers(on_channel, on_lane, on_relay)
        listeners = await bind_all(bind)
        try:
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, nursery, handlers)
                bound = [listener.socket.getsockname()[:2] for listener in listeners]
                task_status.started([Address(host, port) for host, port in bound])
        finally:
            for listener in listeners:
                listener.socket.close()

    async def _accept(
        self,
        listener: trio.SocketListener,
        nursery: trio.Nursery,
        handlers: _Handlers,
    ) -> None:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _CAPACITY_ERRNOS:
                    raise
                _log.warning("cannot take another connection: %s", error)
                await trio.sleep(CAPACITY_PAUSE_S)
                continue
            keep_alive(stream.socket)
            retry_soon(stream.socket)
            nursery.start_soon(self._greet, stream, handlers)

    async def _greet(self, stream: trio.SocketStream, handlers: _Handlers) -> None:
        address = _remote_address(stream)
        remote = "a closed connection" if address is None else str(address)
        group = address_group(remote if address is None else address.host)
        limits = self._limits
        if not limits.admits(group):
            await trio.aclose_forcefully(stream)  # unread, and without an answer
            return
        with limits.unidentified.slot(group, known=limits.is_known(group)) as slot:
            if slot is None:
                await trio.aclose_forcefully(stream)
                return
            with slot.scope:
                await self._sort(stream, handlers, remote, slot)
            if slot.gave_way:
                limits.charge(group)

    async def welcome(
        self,
        stream: trio.abc.Stream,
        on_channel: ChannelHandler,
        on_lane: LaneHandler,
        name: str,
    ) -> None:
        assert isinstance(stream, trio.SocketStream)
        await self._sort(stream, _Handlers(on_channel, on_lane, None), name, None)

    async def _sort(
        self,
        stream: trio.SocketStream,
        handlers: _Handlers,
        remote: str,
        slot: AcceptSlot | None,
    ) -> None:
        """Tell a connection's kind by its first byte, and run its handler.

        Args:
          slot: held until the connection is identified; None: the master arranged the connection.
        """
        handler = channel = None
        group = None if slot is None else slot.group
        try:
            with trio.fail_after(self._greeting_s):
                with trio.fail_after(self._greeting_s if slot is None else FIRST_BYTE_S):
                    first = await stream.socket.recv(1, socket.MSG_PEEK)
                if slot is not None:
                    slot.silent = False
                if first == bytes([TLS_FIRST_BYTE]):
                    channel = await self._shake_hands(stream, remote)
                elif first == bytes([lane.MAGIC]):
                    handler = handlers.on_lane
                elif first == bytes([relay_ticket.MAGIC]):
                    handler = handlers.on_relay
                if channel is None and handler is None:
                    raise RemoteProtocolError(f"it starts with {first!r}")
        except CONNECTION_ENDS as error:
            _log.debug("connection from %s refused: %s", remote, error)
            self._charge(group)
            await trio.aclose_forcefully(stream)
            return
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        if slot is not None:
            slot.release()
        if handler is not None:
            await self._keep_plain(stream, group, remote, handler)
        elif channel is not None and channel.party is Party.NEWCOMER:
            await self._keep_newcomer(channel, group, handlers)
        elif channel is not None:
            if group is not None:
                self._limits.add_member(group)
            await run_handler(handlers.on_channel, channel, channel.stream, remote)

    def _charge(self, group: AddressGroup | None) -> None:
        if group is not None:
            self._limits.charge(group)

    async def _keep_newcomer(
        self, channel: Channel, group: AddressGroup | None, handlers: _Handlers
    ) -> None:
        """Run a newcomer's handler, holding a slot for newcomers to its end."""
        if group is None:  # no route is arranged for a newcomer
            await trio.aclose_forcefully(channel.stream)
            return
        self._charge(group)  # also if it succeeds: enrolments are rare
        with self._limits.newcomers.slot(group, known=self._limits.is_known(group)) as slot:
            if slot is None:
                await trio.aclose_forcefully(channel.stream)
                return
            slot.silent = False
            with slot.scope:
                where = channel.remote_address
                await run_handler(handlers.on_channel, channel, channel.stream, where)

    async def _keep_plain(
        self,
        stream: trio.SocketStream,
        group: AddressGroup | None,
        remote: str,
        handler: LaneHandler,
    ) -> None:
        """Run the handler of a lane or a relayed stream, holding a slot until it is identified."""
        if group is None:
            await run_handler(handler, stream, stream, remote)
            return
        with self._limits.lanes.slot(group, known=self._limits.is_known(group)) as slot:
            if slot is None:
                await trio.aclose_forcefully(stream)
                return
            slot.silent = False
            self._unproven[stream] = slot
            try:
                with slot.scope:
                    await run_handler(handler, stream, stream, remote)
            finally:
                if self._unproven.pop(stream, None) is not None:
                    self._charge(group)

    async def _shake_hands(self, stream: trio.SocketStream, remote: str) -> Channel:
        self._uncollected += 1
        if self._uncollected >= TLS_UNCOLLECTED_MAX:
            self._uncollected = 0
            gc.collect()
        context = self._credentials.ssl_server_context(self._newcomers)
        tls = trio.SSLStream(stream, context, server_side=True)
        await tls.do_handshake()
        return self._channel(tls, remote)

    def _channel(self, tls: trio.SSLStream[trio.SocketStream], remote: str) -> Channel:
        """Make the channel of a finished handshake from the other end's certificate."""
        der: bytes | None = tls.getpeercert(binary_form=True)
        if not der:
            return Channel(tls, Party.NEWCOMER, "", b"", remote)
        port = int(tls.transport_stream.socket.getsockname()[1])
        holder = holder_of(x509.load_der_x509_certificate(der))
        if holder.run_id != self._credentials.run_id:
            raise RemoteProtocolError(f"{remote} belongs to another run")
        return Channel(tls, holder.party, holder.peer, der, remote, port)

    # ------------------------------------------------------------ dialling

    async def dial(self, address: Address, *, party: Party, peer: str | None = None) -> Channel:
        """See ``network.Network.dial``.

        TLS 1.3 lets the dialer finish first: if the other side refuses this node's certificate, the
        first receive raises ``trio.BrokenResourceError``.
        """
        giver = None if party is Party.MASTER else peer or address.host
        stream = await open_tcp(address, giver)
        return await self.dial_over(stream, party=party, peer=peer, name=str(address))

    async def dial_over(
        self, stream: trio.abc.Stream, *, party: Party, peer: str | None, name: str
    ) -> Channel:
        assert isinstance(stream, trio.SocketStream)
        try:
            share_port(stream.socket)
            tls = trio.SSLStream(stream, self._credentials.ssl_client_context())
            await handshake(tls, name)
            channel = self._channel(tls, name)
            if channel.party is not party or peer not in (None, channel.peer):
                wanted = party.value if peer is None else f"{party.value} {peer[:8]}"
                found = f"{channel.party.value} {channel.peer[:8]}"
                raise RemoteProtocolError(f"{name} is {found}, not {wanted}")
            return channel
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise

    async def open_hole(self, towards: Address, port: int = 0) -> Hole:
        return await SocketHole.open(towards, port)

    async def dial_lane(self, address: Address) -> trio.abc.Stream:
        return await open_tcp(address, address.host)

    dial_relay = dial_lane  # only their first bytes differ

    def prepare_lane(self, stream: trio.abc.Stream, congestion: str) -> LaneFacts:
        assert isinstance(stream, trio.SocketStream)
        if (slot := self._unproven.pop(stream, None)) is not None:
            slot.release()
        choose_congestion(stream.socket, congestion)
        return LaneFacts(congestion_of(stream.socket), shortest_round_trip_s(stream.socket))

    async def run_sync(
        self, function: Callable[[], T], limiter: trio.CapacityLimiter | None = None
    ) -> T:
        """Run a function in a thread. Once begun it runs to its end, even if cancelled."""
        return await trio.to_thread.run_sync(function, limiter=limiter)


async def open_tcp(address: Address, giver: str | None = None) -> trio.SocketStream:
    """Connect to an address, over IPv6 or IPv4 (happy eyeballs).

    Args:
      giver: the member that gave the host name, see ``host_lookup``; None: this node's operator.

    Raises:
      OSError: no answer there, for whatever reason, or not a valid name.
    """
    try:
        with given_by(giver):
            stream = await trio.open_tcp_stream(address.host, address.port)
        keep_alive(stream.socket)
        retry_soon(stream.socket)
        return stream
    except (UnicodeError, OverflowError) as error:
        raise OSError(errno.EINVAL, f"{address} cannot be an address: {error}") from None


async def handshake(tls: trio.SSLStream[trio.SocketStream], address: Address | str) -> None:
    """Do the dialer's TLS handshake, with errors that tell what to do.

    Raises:
      OSError: the other side hung up.
      RemoteProtocolError: it has no TLS 1.3, or shows no certificate of this run.
      WrongClockError: its certificate is of this run, but not valid now.
    """
    try:
        await tls.do_handshake()
    except trio.BrokenResourceError as error:
        cause = error.__cause__
        if isinstance(cause, ssl.SSLCertVerificationError):
            if cause.verify_code in OUT_OF_TIME:
                now = datetime.datetime.now(datetime.UTC)
                raise WrongClockError(
                    f"by this machine's clock it is {now:%Y-%m-%d %H:%M} UTC, and at {address} a "
                    f"certificate of the run is not valid then: {cause.verify_message}"
                ) from None
            reason = f"{address} shows no valid certificate of this run: {cause.verify_message}"
            raise RemoteProtocolError(reason) from None
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, HUNG_UP):
            raise RemoteProtocolError(f"{address} refuses TLS 1.3: {cause.reason}") from None
        raise OSError(errno.ECONNRESET, f"{address} hung up: {cause or error}") from None


async def bind_all(bind: Sequence[Address]) -> list[trio.SocketListener]:
    for attempt in range(SAME_PORT_ATTEMPTS_MAX):
        listeners: list[trio.SocketListener] = []
        free_port = 0  # of the first address with port 0; the others must get the same
        try:
            for address in bind:
                port = address.port or free_port
                listeners += await _bind(address, port)
                if not address.port:
                    free_port = listeners[-1].socket.getsockname()[1]
            return listeners
        except OSError as error:
            for listener in listeners:
                listener.socket.close()
            guessed = address.port == 0 and free_port != 0
            if error.errno == errno.EADDRINUSE:
                if guessed and attempt < SAME_PORT_ATTEMPTS_MAX - 1:
                    continue
                raise UserError(
                    f"port {port} on {address.host} is taken",
                    exit_code=TAKEN_EXIT_CODE,
                    hint="another holdfast may be running on this machine; choose another port",
                ) from None
            raise UserError(
                f"cannot listen on {address}: {error.strerror or error}",
                exit_code=TAKEN_EXIT_CODE,
            ) from None
    raise AssertionError("unreachable")


async def _bind(address: Address, port: int) -> list[trio.SocketListener]:
    host = address.host
    try:
        listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG_COUNT_MAX)
        ports = {listener.socket.getsockname()[1] for listener in listeners}
        if len(ports) > 1:  # a name with several addresses got a free port for each
            for listener in listeners:
                listener.socket.close()
            port = min(ports)
            listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG_COUNT_MAX)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"not a host name: {error}") from None
    return listeners

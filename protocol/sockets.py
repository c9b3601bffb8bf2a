"""The real network: TCP, TLS 1.3 for control streams, plain lanes, threads for heavy work.

    serve                one nursery
    ├── _accept          one per bound socket; runs out of file descriptors without dying of it
    └── _greet           one per connection: looks at the first byte within a deadline, then
        └── handler      on_channel (after the TLS handshake) or on_lane

Until a connection has shown that it belongs to the run it holds one of a limited number of places,
in all and per address, and only for some seconds; so does a newcomer for as long as it stays.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import trio
from cryptography import x509

from . import lane
from .addresses import Address
from .authority import holder_of
from .credentials import Credentials
from .errors import RemoteProtocolError, UserError
from .network import Channel, ChannelHandler, LaneFacts, LaneHandler, Party
from .stream import CONNECTION_ENDS, run_handler

T = TypeVar("T")

TLS_FIRST_BYTE = 0x16  # a handshake record; a ClientHello cannot start otherwise
GREETING_S = 10.0  # for the first byte and the TLS handshake: three round trips and slow hashing
STRANGERS_MAX = 256  # connections that have not shown who they are; more are closed at once
STRANGERS_PER_ADDRESS_MAX = 32  # of them from one address: a few machines behind one NAT
BACKLOG_COUNT_MAX = 1_024  # connections that the kernel keeps for us
CAPACITY_PAUSE_S = 0.1  # when the process has no file descriptor left for another connection
TAKEN_EXIT_CODE = 4
SAME_PORT_ATTEMPTS_MAX = 10  # to find one free port for IPv4 and IPv6

CONGESTION_NAME_BYTES = 16  # as the kernel has them
MIN_RTT_OFFSET = 148  # of tcpi_min_rtt in Linux's struct tcp_info

_CAPACITY_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

_log = logging.getLogger(__name__)


def _name_of(sockaddr: object) -> str:
    if isinstance(sockaddr, tuple) and len(sockaddr) >= 2:
        host, port = str(sockaddr[0]), int(sockaddr[1])
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return str(sockaddr)


def _remote_sockaddr(stream: trio.SocketStream) -> object:
    try:
        return stream.socket.getpeername()
    except OSError:
        return "somebody who left"


class _Strangers:
    """Counts the connections that have not shown who they are."""

    def __init__(self) -> None:
        self._total = 0
        self._by_host: Counter[str] = Counter()

    @contextmanager
    def place(self, host: str) -> Iterator[Callable[[], None] | None]:
        """Take a place; gives its release (callable once or more), or None if there is none."""
        if self._total >= STRANGERS_MAX or self._by_host[host] >= STRANGERS_PER_ADDRESS_MAX:
            yield None
            return
        self._total += 1
        self._by_host[host] += 1
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._total -= 1
                self._by_host[host] -= 1
                if not self._by_host[host]:
                    del self._by_host[host]

        try:
            yield release
        finally:
            release()


class SocketNetwork:
    """``network.Network`` over TCP.

    Args:
      credentials: ours; a renewed certificate in them is used from the next connection on.
      newcomers: let in clients without a certificate, as ``Party.NEWCOMER`` (the master does).
      greeting_s: for a connection to show who it is.
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
        self._strangers = _Strangers()

    # ------------------------------------------------------------ accepting

    async def serve(
        self,
        bind: Sequence[Address],
        on_channel: ChannelHandler,
        on_lane: LaneHandler | None,
        *,
        task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See ``network.Network.serve``. Addresses with port 0 get one free port in common."""
        listeners = await bind_all(bind)
        try:
            async with trio.open_nursery() as nursery:
                for listener in listeners:
                    nursery.start_soon(self._accept, listener, nursery, on_channel, on_lane)
                task_status.started([_bound_address(listener) for listener in listeners])
        finally:
            for listener in listeners:
                listener.socket.close()

    async def _accept(
        self,
        listener: trio.SocketListener,
        nursery: trio.Nursery,
        on_channel: ChannelHandler,
        on_lane: LaneHandler | None,
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
            nursery.start_soon(self._greet, stream, on_channel, on_lane)

    async def _greet(
        self,
        stream: trio.SocketStream,
        on_channel: ChannelHandler,
        on_lane: LaneHandler | None,
    ) -> None:
        sockaddr = _remote_sockaddr(stream)
        remote = _name_of(sockaddr)
        host = str(sockaddr[0]) if isinstance(sockaddr, tuple) else remote
        with self._strangers.place(host) as release:
            try:
                if release is None:
                    raise RemoteProtocolError("too many connections that show nothing")
                with trio.fail_after(self._greeting_s):
                    first = await stream.socket.recv(1, socket.MSG_PEEK)
                    channel = None
                    if first == bytes([TLS_FIRST_BYTE]):
                        channel = await self._shake_hands(stream, remote)
                    elif first != bytes([lane.MAGIC]) or on_lane is None:
                        raise RemoteProtocolError(f"starts with {first!r}")
            except CONNECTION_ENDS as error:
                _log.debug("connection from %s refused: %s", remote, error)
                await trio.aclose_forcefully(stream)
                return
            except BaseException:
                await trio.aclose_forcefully(stream)
                raise
            if channel is None:
                assert on_lane is not None
                release()  # a lane's preamble has a deadline of its own, and names its link
                await run_handler(on_lane, stream, stream, remote)
            else:
                if channel.party is not Party.NEWCOMER:
                    release()
                await run_handler(on_channel, channel, channel.stream, remote)

    async def _shake_hands(self, stream: trio.SocketStream, remote: str) -> Channel:
        context = self._credentials.ssl_server_context(self._newcomers)
        tls = trio.SSLStream(stream, context, server_side=True)
        await tls.do_handshake()
        return self._channel(tls, remote)

    def _channel(self, tls: trio.SSLStream[trio.SocketStream], remote: str) -> Channel:
        """Who is at the other end of a finished handshake."""
        der: bytes | None = tls.getpeercert(binary_form=True)
        if not der:
            return Channel(tls, Party.NEWCOMER, "", b"", remote)
        holder = holder_of(x509.load_der_x509_certificate(der))
        if holder.run_id != self._credentials.run_id:
            raise RemoteProtocolError(f"{remote} belongs to another run")
        return Channel(tls, holder.party, holder.peer, der, remote)

    # ------------------------------------------------------------ dialling

    async def dial(self, address: Address, *, party: Party, peer: str | None = None) -> Channel:
        """See ``network.Network.dial``.

        TLS 1.3 lets the dialer finish first: a certificate of ours that the other side refuses
        shows as ``trio.BrokenResourceError`` at the first receive.
        """
        stream = await open_tcp(address)
        try:
            tls = trio.SSLStream(stream, self._credentials.ssl_client_context())
            await handshake(tls, address)
            channel = self._channel(tls, str(address))
            if channel.party is not party or peer not in (None, channel.peer):
                wanted = party.value if peer is None else f"{party.value} {peer[:8]}"
                found = f"{channel.party.value} {channel.peer[:8]}"
                raise RemoteProtocolError(f"{address} is {found}, not {wanted}")
            return channel
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise

    async def dial_lane(self, address: Address) -> trio.abc.Stream:
        """See ``network.Network.dial_lane``."""
        return await open_tcp(address)

    def prepare_lane(self, stream: trio.abc.Stream, congestion: str) -> LaneFacts:
        """See ``network.Network.prepare_lane``."""
        assert isinstance(stream, trio.SocketStream)
        choose_congestion(stream.socket, congestion)
        return LaneFacts(congestion_of(stream.socket), shortest_round_trip_s(stream.socket))

    async def run_sync(self, function: Callable[[], T]) -> T:
        """Run it in a thread. Once begun it runs to its end, whatever is cancelled."""
        return await trio.to_thread.run_sync(function)


def choose_congestion(sock: trio.socket.SocketType, name: str) -> None:
    """Use this congestion control, if the kernel has it and lets us; else what it uses anyway."""
    if name and hasattr(socket, "TCP_CONGESTION"):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())


def congestion_of(sock: trio.socket.SocketType) -> str:
    """The congestion control of what is sent; empty where the kernel does not say."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return ""
    try:
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_NAME_BYTES)
    except OSError:
        return ""
    return name.partition(b"\0")[0].decode("ascii", "replace")


def shortest_round_trip_s(sock: trio.socket.SocketType) -> float:
    """The shortest that the kernel saw on this connection; infinite where it does not say."""
    if not hasattr(socket, "TCP_INFO"):
        return math.inf
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, MIN_RTT_OFFSET + 4)
    except OSError:
        return math.inf
    if len(info) < MIN_RTT_OFFSET + 4:
        return math.inf
    microseconds = int.from_bytes(info[MIN_RTT_OFFSET:], sys.byteorder)
    return math.inf if microseconds == 2**32 - 1 else microseconds / 1e6


async def open_tcp(address: Address) -> trio.SocketStream:
    """Connect to whatever the name stands for, IPv6 and IPv4 (happy eyeballs).

    Raises:
      OSError: every way of not answering, also a name that cannot be one.
    """
    try:
        return await trio.open_tcp_stream(address.host, address.port)
    except (UnicodeError, OverflowError) as error:
        raise OSError(errno.EINVAL, f"{address} cannot be an address: {error}") from None


async def handshake(tls: trio.SSLStream[trio.SocketStream], address: Address) -> None:
    """The dialer's TLS handshake, with errors that say what to do.

    Raises:
      OSError: the other side hung up.
      RemoteProtocolError: it speaks no TLS 1.3, or shows no certificate of this run.
    """
    try:
        await tls.do_handshake()
    except trio.BrokenResourceError as error:
        cause = error.__cause__
        if isinstance(cause, ssl.SSLCertVerificationError):
            reason = f"{address} shows no valid certificate of this run: {cause.verify_message}"
            raise RemoteProtocolError(reason) from None
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
            raise RemoteProtocolError(f"{address} refuses TLS 1.3: {cause.reason}") from None
        raise OSError(errno.ECONNRESET, f"{address} hung up: {cause or error}") from None


def _bound_address(listener: trio.SocketListener) -> Address:
    host, port = listener.socket.getsockname()[:2]
    return Address(host, port)


async def bind_all(bind: Sequence[Address]) -> list[trio.SocketListener]:
    for attempt in range(SAME_PORT_ATTEMPTS_MAX):
        listeners: list[trio.SocketListener] = []
        free_port = 0  # what the first address with port 0 got; the others want the same
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
                    hint="another holdfast may run here; choose another port",
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

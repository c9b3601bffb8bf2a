"""A network without sockets: virtual hosts and lines on trio's clock, deterministic for a seed.

The production master and peers run on it unchanged, in one process, in virtual time:

    MemoryWorld ── hosts ── MemoryNetwork (one per host; implements ``network.Network``)
         └── MemoryLines    delay, rate, separations, shared lines, corrupted bytes

To the faults of ``memory_lines`` it adds those that break streams:

    cut         the streams of a pair break at both ends
    crash       the streams of a host break at the other ends, and part of its last bytes is lost

There are no certificates: the world knows the identity of every host.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import TypeVar

import trio
from attrs import define, field

from ..protocol.addresses import Address
from ..protocol.errors import LocalProtocolError, RemoteProtocolError, UserError
from ..protocol.network.interface import Channel, ChannelHandler, Hole, LaneFacts, LaneHandler
from ..protocol.network.stream import run_handler
from ..protocol.trust.authority import Party
from .memory_lines import MemoryLines
from .memory_streams import FIRST_FREE_PORT, Accepted, DialKind, Host, MemoryStream, Pipe

T = TypeVar("T")

BACKLOG_COUNT_MAX = 1_024  # connections waiting to be accepted; more are refused
INTRODUCTION = b"\x16"  # followed by a peer id; stands for the TLS handshake over a relay or a hole
PEER_ID_BYTES = 32
TAKEN_EXIT_CODE = 4


@define(eq=False, slots=False)
class MemoryWorld(MemoryLines):
    """All virtual hosts and how they reach each other; see ``MemoryLines`` for the lines.

    Attributes:
      unreachable: hosts to which dials fail, as behind a NAT; they can still dial out.
      refused: (source, target) of dials that fail, as at a firewall that is open one way.
      offline: hosts without their own network: all their dials fail.
      moved: addresses of hosts that have another one than their name; dials to the name fail.
    """

    _hosts: dict[str, Host] = field(factory=dict, init=False)
    unreachable: set[str] = field(factory=set, init=False)
    refused: set[tuple[str, str]] = field(factory=set, init=False)
    offline: set[str] = field(factory=set, init=False)
    moved: dict[str, str] = field(factory=dict, init=False)
    _nats: dict[str, bool] = field(factory=dict, init=False)  # True: the router keeps ports
    # Dials from holes, by (host, outside port, target host, target port).
    _dialling: dict[tuple[str, int, str, int], trio.MemorySendChannel[MemoryStream]] = field(
        factory=dict, init=False
    )
    _change: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot, init=False)

    def host(self, name: str, peer_id: str, party: Party = Party.PEER) -> MemoryNetwork:
        """Start a new host, or a crashed host's next life."""
        old = self._hosts.get(name)
        if old is not None and old.alive:
            raise LocalProtocolError(f"the host {name} is alive already")
        host = Host(name, peer_id, party)
        self._hosts[name] = host
        return MemoryNetwork(self, host)

    def is_alive(self, name: str) -> bool:
        """Return whether a host of this name was started and has not crashed since."""
        host = self._hosts.get(name)
        return host is not None and host.alive

    def host_of(self, peer: str) -> Host:
        """Return the living host of a peer.

        Raises:
          RemoteProtocolError: there is none.
        """
        for host in self._hosts.values():
            if host.alive and host.peer == peer:
                return host
        raise RemoteProtocolError(f"no host has the identity {peer[:8]}")

    def wake(self) -> None:
        self._change.unpark_all()
        for host in self._hosts.values():
            for stream in host.streams:
                stream.wake()

    # ------------------------------------------------------------ reachability

    def nat(self, name: str, *, keeps_ports: bool) -> None:
        """Put a host behind a NAT router: it cannot be dialled, and its outside ports matter.

        Args:
          keeps_ports: the router uses a host's local port as the outside port.
        """
        self.unreachable.add(name)
        self._nats[name] = keeps_ports

    def new_port(self, host: Host) -> int:
        """Return a local port for a dial, or 0 for a host that is not behind a NAT."""
        if host.name not in self._nats:
            return 0
        host.next_port += 1
        return host.next_port

    def port_outside(self, host: Host, port: int) -> int:
        """Return the outside port of a host's local port."""
        return port if self._nats.get(host.name, True) else port + 10_000

    # ------------------------------------------------------------ broken streams

    def cut(self, a: str, b: str) -> None:
        """Break every stream between two hosts; both may dial again at once."""
        for near, far in ((a, b), (b, a)):  # both directions: one end may be closed already
            for stream in list(self._hosts[near].streams):
                if stream.other == far:
                    stream.cut()

    def crash(self, name: str) -> None:
        """End a host's life: its streams break at the other ends, its listeners close.

        The caller must cancel its tasks; until then its streams raise ``trio.BrokenResourceError``
        and its dials OSError. Call ``host`` for the next life.
        """
        host = self._hosts[name]
        host.alive = False
        host.listeners.clear()
        self._frozen.discard(name)  # the kernel of a stopped process closes its sockets too
        for stream in list(host.streams):
            stream.crash()
        host.streams.clear()
        self.wake()

    # ------------------------------------------------------------ dialling

    async def connect(
        self, host: Host, address: Address, kind: DialKind
    ) -> tuple[MemoryStream, Host]:
        """Dial a host, which takes a round trip, and hangs while the pair is separated.

        Raises:
          OSError: the host cannot be reached, or refuses.
        """
        await trio.lowlevel.checkpoint()
        name = next((n for n, at in self.moved.items() if at == address.host), address.host)
        link = self.direction(host.name, name)
        await trio.sleep(2 * link.delay_s)
        while self.held(host.name, name) or self.held(name, host.name):
            await self._change.park()
        target = self._hosts.get(name)
        if not host.alive:
            raise OSError(errno.ENETDOWN, "this host crashed")
        if host.name in self.offline:
            raise OSError(errno.ENETUNREACH, "network is unreachable")
        shut = name in self.unreachable or (host.name, name) in self.refused
        shut |= self.moved.get(name, address.host) != address.host
        if target is None or not target.alive or shut:
            raise OSError(errno.EHOSTUNREACH, f"no route to {address}")
        listener = target.listeners.get(address.port)
        if listener is None:
            raise OSError(errno.ECONNREFUSED, f"{address} refused the connection")
        there = Pipe(self, host, target, kind is DialKind.LANE)
        back = Pipe(self, target, host, kind is DialKind.LANE)
        stream = MemoryStream(self, host, there, back)
        accepted = MemoryStream(self, target, back, there)
        stream.port = accepted.far_port = self.new_port(host)
        try:
            listener.send_nowait((accepted, host, kind))
        except (trio.WouldBlock, trio.BrokenResourceError):
            raise OSError(errno.ECONNREFUSED, f"{address} refused the connection") from None
        return stream, target

    async def meet(self, host: Host, port: int, address: Address) -> MemoryStream:
        """Dial from a hole until the other end dials this host from that address."""
        mine = (host.name, self.port_outside(host, port), address.host, address.port)
        theirs = (address.host, address.port, host.name, port)
        await trio.sleep(self.direction(host.name, address.host).delay_s)
        other = self._hosts.get(address.host)
        waiting = self._dialling.get(theirs)
        keeps = mine[1] == port
        if waiting is not None and other is not None and other.alive and keeps:
            there, back = Pipe(self, host, other, False), Pipe(self, other, host, False)
            waiting.send_nowait(MemoryStream(self, other, back, there))
            return MemoryStream(self, host, there, back)
        send, receive = trio.open_memory_channel[MemoryStream](1)
        if keeps:
            self._dialling[mine] = send
        try:
            return await receive.receive()
        finally:
            if self._dialling.get(mine) is send:
                del self._dialling[mine]


class _MemoryHole:
    """``network.Hole``."""

    def __init__(self, world: MemoryWorld, host: Host, port: int) -> None:
        self.port = port
        self._world = world
        self._host = host

    async def connect(self, address: Address) -> trio.abc.Stream:
        return await self._world.meet(self._host, self.port, address)

    def close(self) -> None:
        pass


class MemoryNetwork:
    """``network.Network`` for one host of a ``MemoryWorld``."""

    def __init__(self, world: MemoryWorld, host: Host) -> None:
        self._world = world
        self._host = host

    @property
    def name(self) -> str:
        return self._host.name

    async def serve(
        self,
        bind: Sequence[Address],
        on_channel: ChannelHandler,
        on_lane: LaneHandler | None,
        *,
        on_relay: LaneHandler | None = None,
        task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See ``network.Network.serve``; the host's name or any address may be bound."""
        send, receive = trio.open_memory_channel[Accepted](BACKLOG_COUNT_MAX)
        host = self._host
        ports: list[int] = []
        try:
            for address in bind:
                port = address.port
                while address.port == 0 and (port == 0 or port in host.listeners):
                    port = max(port + 1, FIRST_FREE_PORT)
                if host.listeners.setdefault(port, send) is not send:
                    raise UserError(f"port {port} is taken", exit_code=TAKEN_EXIT_CODE)
                ports.append(port)
            async with trio.open_nursery() as nursery:
                task_status.started([Address(host.name, port) for port in ports])
                handlers = {DialKind.LANE: on_lane, DialKind.RELAY: on_relay}
                async for stream, dialer, kind in receive:
                    handler = handlers.get(kind)
                    nursery.start_soon(self._handle, stream, dialer, kind, on_channel, handler)
        finally:
            for port in ports:
                if host.listeners.get(port) is send:
                    del host.listeners[port]
            while receive.statistics().current_buffer_used:
                receive.receive_nowait()[0].cut()  # a kernel resets what was not accepted

    async def _handle(
        self,
        stream: MemoryStream,
        dialer: Host,
        kind: DialKind,
        on_channel: ChannelHandler,
        handler: LaneHandler | None,
    ) -> None:
        if kind is DialKind.CONTROL:
            port = self._world.port_outside(dialer, stream.far_port)
            channel = Channel(stream, dialer.party, dialer.peer, b"", f"{dialer.name}:{port}")
            await run_handler(on_channel, channel, stream, dialer.name)
        elif handler is not None:
            await run_handler(handler, stream, stream, dialer.name)
        else:
            await stream.aclose()

    async def dial(self, address: Address, *, party: Party, peer: str | None = None) -> Channel:
        stream, target = await self._world.connect(self._host, address, DialKind.CONTROL)
        if target.party is not party or peer not in (None, target.peer):
            await stream.aclose()
            raise RemoteProtocolError(f"{address} is not the expected {party.value}")
        return Channel(stream, target.party, target.peer, b"", str(address), stream.port)

    async def dial_lane(self, address: Address) -> trio.abc.Stream:
        stream, _target = await self._world.connect(self._host, address, DialKind.LANE)
        return stream

    async def open_hole(self, towards: Address, port: int = 0) -> Hole:
        del towards
        return _MemoryHole(self._world, self._host, port or self._world.new_port(self._host))

    async def dial_relay(self, address: Address) -> trio.abc.Stream:
        stream, _target = await self._world.connect(self._host, address, DialKind.RELAY)
        return stream

    async def dial_over(
        self, stream: trio.abc.Stream, *, party: Party, peer: str, name: str
    ) -> Channel:
        """See ``network.Network.dial_over``; both ends name themselves and are trusted."""
        assert isinstance(stream, MemoryStream)
        try:
            await stream.send_all(INTRODUCTION + self._host.peer.encode())
            found = await self._introduction(stream)
            if (found.party, found.peer) != (party, peer):
                raise RemoteProtocolError(f"{name} is not the expected {party.value}")
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return Channel(stream, party, peer, b"", name)

    async def welcome(
        self,
        stream: trio.abc.Stream,
        on_channel: ChannelHandler,
        on_lane: LaneHandler,
        name: str,
    ) -> None:
        assert isinstance(stream, MemoryStream)
        try:
            first = await stream.receive_some(1)
            stream.unread(first)
            if first != INTRODUCTION:
                await run_handler(on_lane, stream, stream, name)
                return
            found = await self._introduction(stream)
            await stream.send_all(INTRODUCTION + self._host.peer.encode())
        except (OSError, RemoteProtocolError, trio.BrokenResourceError):
            await trio.aclose_forcefully(stream)
            return
        channel = Channel(stream, found.party, found.peer, b"", name)
        await run_handler(on_channel, channel, stream, name)

    async def _introduction(self, stream: MemoryStream) -> Host:
        data = b""
        while len(data) < len(INTRODUCTION) + PEER_ID_BYTES:
            more = await stream.receive_some(len(INTRODUCTION) + PEER_ID_BYTES - len(data))
            if not more:
                raise OSError(errno.ECONNRESET, "the other side closed the stream")
            data += more
        return self._world.host_of(data[len(INTRODUCTION) :].decode())

    def prepare_lane(self, stream: trio.abc.Stream, congestion: str) -> LaneFacts:
        """See ``network.Network.prepare_lane``; there is no congestion control, only delay."""
        assert isinstance(stream, MemoryStream)
        return LaneFacts("", stream.round_trip_s)

    async def run_sync(
        self, function: Callable[[], T], limiter: trio.CapacityLimiter | None = None
    ) -> T:
        """Run a function at once, without a thread: threads do not work in virtual time."""
        await trio.lowlevel.checkpoint()
        return function()

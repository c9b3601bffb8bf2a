"""A network without sockets: virtual hosts and links on trio's clock, faults from one seed.

The production master and peers run on it unchanged, in one process, in virtual time:

    MemoryWorld ── hosts ── MemoryNetwork (one per host; implements ``network.Network``)
         │
         └── links: delay, rate, and who can reach whom at this moment; lines that hosts share

A stream is two pipes. Bytes pass a pipe in order: the sender waits for room in the pipe's buffer
and for its turn on the link (streams of one pair take turns, a segment at a time), then the segment
is under way for the link's delay. A fault never touches the code under test; it changes what its
streams do, as the real fault would:

    partition   bytes are held, in one direction or both, nothing breaks; dials hang
    freeze      the same for all that one host sends and receives
    cut         the streams of a pair break at both ends
    crash       the streams of a host break at the others, a part of its last bytes is lost
    corrupt     a bit of a lane's record is flipped; a control stream breaks, as TLS would have it

Certificates do not exist here: the world says who is who.
"""

from __future__ import annotations

import enum
import errno
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import trio
from attrs import define, field, frozen

from ...protocol.addresses import Address
from ...protocol.errors import LocalProtocolError, RemoteProtocolError, UserError
from ...protocol.network.interface import Channel, ChannelHandler, Hole, LaneFacts, LaneHandler
from ...protocol.network.lane import HEADER_BYTES, PREAMBLE_BYTES
from ...protocol.network.stream import run_handler
from ...protocol.trust.authority import Party
from .virtual_time import Alarm

T = TypeVar("T")

SEGMENT_BYTES = 65_536  # what one stream puts on a link before the next one's turn
BUFFER_BYTES = 4 * 2**20  # in a pipe; a sender waits beyond it, as behind a full socket buffer
RECEIVE_BYTES = 65_536  # when the caller does not say how much
AHEAD_S = 0.001  # of a control stream: its sender goes on so long before its bytes are on their way
BACKLOG_COUNT_MAX = 1_024  # connections that wait for a server; more are refused
FIRST_FREE_PORT = 40_000
INTRODUCTION = b"\x16"  # then a peer id: what stands for a TLS handshake over an arranged route
PEER_ID_BYTES = 32
TAKEN_EXIT_CODE = 4

Filter = Callable[["Sent"], bytes]


@frozen
class Sent:
    """One ``send_all`` on its way, as a test's filter sees it."""

    source: str
    target: str
    lane: bool
    data: bytes


@define(eq=False)
class _Link:
    """One direction between two hosts; shared by all their streams."""

    delay_s: float
    bytes_per_s: float
    jitter_s: float
    window_bytes: float = math.inf  # that one stream may have under way, in whole segments
    free_s: float = 0.0  # when all that was put on it so far has left


@define(eq=False)
class _Line:
    """One direction between some hosts and all others; shared by all streams that cross it."""

    hosts: frozenset[str]
    bytes_per_s: float
    free_s: float = 0.0


def _leaves_s(way: _Link | _Line, ready_s: float, count_bytes: int) -> float:
    """When bytes that are ready at some time have left, after all that came before them."""
    if way.bytes_per_s == math.inf:
        return ready_s
    way.free_s = max(way.free_s, ready_s) + count_bytes / way.bytes_per_s
    return way.free_s


class _Kind(enum.Enum):
    """What a stream was dialled for; real ones show it by their first byte."""

    CONTROL = enum.auto()
    LANE = enum.auto()
    RELAY = enum.auto()


_Accepted = tuple["MemoryStream", "_Host", _Kind]  # our end, who dialled, and what for


@define(eq=False)
class _Host:
    """One life of a host: a crash ends it, ``MemoryWorld.host`` begins the next."""

    name: str
    peer: str
    party: Party
    alive: bool = True
    listeners: dict[int, trio.MemorySendChannel[_Accepted]] = field(factory=dict)
    streams: dict[MemoryStream, None] = field(factory=dict)  # in order of their beginning
    next_port: int = FIRST_FREE_PORT  # of what it dials, if that means anything


class _Pipe:
    """One direction of a stream."""

    def __init__(self, world: MemoryWorld, source: _Host, target: _Host, lane: bool) -> None:
        self._world = world
        self.source = source
        self.target = target
        self.lane = lane
        self._segments: deque[tuple[float, bytes]] = deque()  # when it arrives, what
        self._buffered_bytes = 0
        self._end_s = math.inf  # when the reader learns that no more comes
        self._end_is_reset = False
        self._gone_s = math.inf  # when the writer learns that nobody reads
        self._writer_closed = False
        self._reader_closed = False
        self._departure = Alarm()  # of the segment that is being sent
        self._room = Alarm()
        self._news = Alarm()  # for the reader

    def wake(self) -> None:
        self._room.ring()
        self._news.ring()

    def _held(self) -> bool:
        return self._world.held(self.source.name, self.target.name)

    def _news_held(self) -> bool:
        """That nobody reads any more comes back the other way."""
        return self._world.held(self.target.name, self.source.name)

    # ------------------------------------------------------------ the writer's end

    def check_writable(self) -> None:
        if not self.source.alive:
            raise trio.BrokenResourceError("this host crashed")
        if self._writer_closed:
            raise trio.ClosedResourceError("this side closed the stream")
        if (
            self._gone_s < math.inf
            and trio.current_time() >= self._gone_s
            and not self._news_held()
        ):
            raise trio.BrokenResourceError("the other side is gone")

    async def wait_room(self) -> bool:
        """Whether it had to wait."""
        self.check_writable()
        waited = False
        while self._buffered_bytes >= min(self._world.buffer_bytes, self.link.window_bytes):
            await self._room.wait(math.inf if self._news_held() else self._gone_s)
            self.check_writable()
            waited = True
        return waited

    @property
    def link(self) -> _Link:
        return self._world.direction(self.source.name, self.target.name)

    async def transmit(self, data: bytes) -> bool:
        """Put a segment on its way, in its turn; whether that had to wait."""
        link = self.link
        now_s = leaves_s = trio.current_time()
        ahead_s = 0.0 if self.lane else AHEAD_S
        waited = False
        lines = self._world.lines_between(self.source.name, self.target.name)
        ways: list[_Link | _Line] = [link, *lines]
        for way in ways:
            leaves_s = _leaves_s(way, leaves_s, len(data))
            if leaves_s > now_s + ahead_s:
                await self._departure.wait(leaves_s)
                self.check_writable()
                now_s, waited = trio.current_time(), True
        if self._gone_s < math.inf:
            return waited  # lost on the way: the news of it is still under way to us
        jitter_s = self._world.rng.uniform(0.0, link.jitter_s) if link.jitter_s else 0.0
        # A segment that jitter lets arrive before an earlier one waits for it in the queue.
        self._segments.append((leaves_s + link.delay_s + jitter_s, data))
        self._buffered_bytes += len(data)
        if not self._held():
            self._news.bring_forward(self._segments[0][0])
        return waited

    def end(self, *, reset: bool) -> None:
        """No more comes: the writer closed, or was cut off."""
        self._writer_closed = self._writer_closed or not reset
        if self._end_s == math.inf:
            link = self._world.direction(self.source.name, self.target.name)
            self._end_s = trio.current_time() + link.delay_s
            self._end_is_reset = reset
        self.wake()

    def lose_tail(self) -> None:
        """Forget a random part of what was not read yet: it had not left the sender."""
        keep_bytes = self._world.rng.randint(0, self._buffered_bytes)
        kept: deque[tuple[float, bytes]] = deque()
        for arrival_s, data in self._segments:
            if keep_bytes <= 0:
                break
            kept.append((arrival_s, data[:keep_bytes]))
            keep_bytes -= len(data)
        self._segments = kept
        self._buffered_bytes = sum(len(data) for _, data in kept)

    # ------------------------------------------------------------ the reader's end

    async def receive(self, max_bytes: int) -> bytes:
        waited = False
        while (wake_s := self._next_news_s()) > trio.current_time():
            await self._news.wait(wake_s)
            waited = True
        if not waited:
            await trio.lowlevel.checkpoint()
        self._check_readable()
        if self._segments:
            return self._take(max_bytes)
        if self._end_is_reset:
            raise trio.BrokenResourceError("the connection was reset")
        return b""

    def _check_readable(self) -> None:
        if not self.target.alive:
            raise trio.BrokenResourceError("this host crashed")
        if self._reader_closed:
            raise trio.ClosedResourceError("this side closed the stream")

    def _next_news_s(self) -> float:
        """When there is something to read, or to raise: as of now; the past if there is."""
        if not self.target.alive or self._reader_closed:
            return -math.inf
        if self._held():
            return math.inf
        return self._segments[0][0] if self._segments else self._end_s

    def _take(self, max_bytes: int) -> bytes:
        arrival_s, data = self._segments.popleft()
        taken, rest = data[:max_bytes], data[max_bytes:]
        if rest:
            self._segments.appendleft((arrival_s, rest))
        self._buffered_bytes -= len(taken)
        self._room.ring()
        return taken

    def unread(self, data: bytes) -> None:
        if data:
            self._segments.appendleft((trio.current_time(), data))
            self._buffered_bytes += len(data)

    def stop_reading(self) -> None:
        """The reader closed; the writer learns it a delay later."""
        link = self._world.direction(self.target.name, self.source.name)
        self._reader_closed = True
        self._segments.clear()
        self.lose_reader(link.delay_s)

    def lose_reader(self, after_s: float) -> None:
        """Whatever is sent from now on is lost; the writer learns it after this time."""
        self._gone_s = min(self._gone_s, trio.current_time() + after_s)
        self.wake()


class _OneAtATime:
    """Entered by the task that does something which no other may do meanwhile."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._busy = False

    def __enter__(self) -> None:
        if self._busy:
            raise trio.BusyResourceError(f"another task is {self._doing} on this stream")
        self._busy = True

    def __exit__(self, *_: object) -> None:
        self._busy = False


class MemoryStream(trio.abc.HalfCloseableStream):
    """One end of a connection between two virtual hosts."""

    def __init__(self, world: MemoryWorld, host: _Host, outward: _Pipe, inward: _Pipe) -> None:
        self._world = world
        self._host = host
        self._outward = outward
        self._inward = inward
        self._only_sender = _OneAtATime("sending")
        self._only_receiver = _OneAtATime("receiving")
        self._closed = False
        self.port = self.far_port = 0  # of this end, if it dialled; of the other one
        host.streams[self] = None

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._only_sender:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._outward.check_writable()
            if self._world.is_torn(self._outward):
                self.cut()
            content = self._world.pass_filter(self._outward, bytes(data))
            waited = False
            for start in range(0, len(content), SEGMENT_BYTES):
                waited |= await self._outward.wait_room()
                waited |= await self._outward.transmit(content[start : start + SEGMENT_BYTES])
            if not waited:
                await trio.lowlevel.cancel_shielded_checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        with self._only_sender:
            await trio.lowlevel.checkpoint()
            await self._outward.wait_room()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is None:
            max_bytes = RECEIVE_BYTES
        if not isinstance(max_bytes, int):
            raise TypeError("max_bytes must be an integer")
        if max_bytes < 1:
            raise ValueError("max_bytes must be at least 1")
        with self._only_receiver:
            return await self._inward.receive(max_bytes)

    async def send_eof(self) -> None:
        with self._only_sender:
            self._outward.end(reset=False)
            await trio.lowlevel.checkpoint()

    def unread(self, data: bytes) -> None:
        """Put back what was received last."""
        self._inward.unread(data)

    @property
    def round_trip_s(self) -> float:
        """As long as nothing else is on the way."""
        there, back = self._outward.link, self._inward.link
        return there.delay_s + back.delay_s

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._outward.end(reset=False)
            self._inward.stop_reading()
            self._host.streams.pop(self, None)
        await trio.lowlevel.checkpoint()

    def crash(self) -> None:
        """This end's host is no more; the other end learns it a delay later."""
        self._outward.lose_tail()
        self._outward.end(reset=True)
        self._inward.stop_reading()

    def cut(self) -> None:
        """Both ends lose the connection; what is under way still arrives."""
        for pipe in (self._outward, self._inward):
            pipe.end(reset=True)
            pipe.lose_reader(0.0)

    def wake(self) -> None:
        """Look again: a fault began or ended."""
        self._outward.wake()
        self._inward.wake()

    @property
    def other(self) -> str:
        """The name of the host at the other end."""
        return self._outward.target.name


class MemoryWorld:
    """All virtual hosts and links, and the faults that befall them.

    Args:
      rng: decides what the seed decides: lost tails, corrupted bytes, jitter.
      delay_s: one way, of links that ``link`` did not set.
      bytes_per_s: each way, shared by the pair's streams.
      jitter_s: up to this much is added to each segment's delay.
      buffer_bytes: of each pipe.

    Attributes:
      filter: sees every ``send_all`` and returns what is really sent (``b""``: dropped); tests set
        it to lose or change bytes.
      sent_bytes: by (source, target), all that ``send_all`` was given.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        delay_s: float = 0.01,
        bytes_per_s: float = math.inf,
        jitter_s: float = 0.0,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.rng = rng
        self.buffer_bytes = buffer_bytes
        self.filter: Filter | None = None
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        self._default = (delay_s, bytes_per_s, jitter_s)
        self._hosts: dict[str, _Host] = {}
        self._links: dict[tuple[str, str], _Link] = {}
        self._lines: list[tuple[_Line, _Line]] = []  # out of their hosts, and in
        self._partitions: set[tuple[str, str]] = set()  # from, to
        self._frozen: set[str] = set()
        self._unreachable: set[str] = set()
        self._refused: set[tuple[str, str]] = set()  # from, to
        self._offline: set[str] = set()
        self._moved: dict[str, str] = {}  # hosts that have other addresses than their names
        self._nats: dict[str, bool] = {}  # behind a router: whether it keeps ports
        # Holes in which somebody dials: whence and whither, and where its stream is put.
        self._dialling: dict[tuple[str, int, str, int], trio.MemorySendChannel[MemoryStream]] = {}
        self._corruptions: Counter[tuple[str, str]] = Counter()
        self._tears: Counter[tuple[str, str]] = Counter()
        self._change = trio.lowlevel.ParkingLot()  # dials wait here for a fault to end

    def host(self, name: str, peer_id: str, party: Party = Party.PEER) -> MemoryNetwork:
        """A new host, or a crashed one's next life."""
        old = self._hosts.get(name)
        if old is not None and old.alive:
            raise LocalProtocolError(f"the host {name} is alive already")
        host = _Host(name, peer_id, party)
        self._hosts[name] = host
        return MemoryNetwork(self, host)

    def link(
        self,
        a: str,
        b: str,
        *,
        delay_s: float | None = None,
        bytes_per_s: float | None = None,
        jitter_s: float | None = None,
        window_bytes: float | None = None,
    ) -> None:
        """Set both directions of a pair; what is not given stays. Takes effect at once.

        Args:
          window_bytes: what one stream may have under way: less than delay times rate lets several
            streams carry more than one.
        """
        for source, target in ((a, b), (b, a)):
            link = self.direction(source, target)
            link.delay_s = link.delay_s if delay_s is None else delay_s
            link.bytes_per_s = link.bytes_per_s if bytes_per_s is None else bytes_per_s
            link.jitter_s = link.jitter_s if jitter_s is None else jitter_s
            link.window_bytes = link.window_bytes if window_bytes is None else window_bytes

    def share_line(self, hosts: Iterable[str], *, up: float, down: float) -> None:
        """These hosts reach all others over one line: so many bytes per second out, and in."""
        behind = frozenset(hosts)
        self._lines.append((_Line(behind, up), _Line(behind, down)))

    def lines_between(self, source: str, target: str) -> list[_Line]:
        """The shared lines that a segment crosses."""
        crossed = []
        for out, into in self._lines:
            if (source in out.hosts) != (target in out.hosts):
                crossed.append(out if source in out.hosts else into)
        return crossed

    def direction(self, source: str, target: str) -> _Link:
        """The link from one host to another; made when it is first asked for."""
        link = self._links.get((source, target))
        if link is None:
            delay_s, bytes_per_s, jitter_s = self._default
            if source == target:
                delay_s, bytes_per_s, jitter_s = 0.0, math.inf, 0.0
            link = self._links[source, target] = _Link(delay_s, bytes_per_s, jitter_s)
        return link

    def host_of(self, peer: str) -> _Host:
        """The living host of a peer; raises RemoteProtocolError: there is none."""
        for host in self._hosts.values():
            if host.alive and host.peer == peer:
                return host
        raise RemoteProtocolError(f"nobody is {peer[:8]}")

    def held(self, source: str, target: str) -> bool:
        """Whether bytes between these hosts stand still at this moment."""
        return (
            source in self._frozen or target in self._frozen or (source, target) in self._partitions
        )

    # ------------------------------------------------------------ faults

    def partition(self, a: str, b: str, *, one_way: bool = False) -> None:
        """Hold all bytes between two hosts, or only those from ``a`` to ``b``.

        Nothing breaks; new dials hang, since they need an answer.
        """
        self._partitions.add((a, b))
        if not one_way:
            self._partitions.add((b, a))

    def heal(self, a: str, b: str) -> None:
        """End a partition, of whatever kind; what was held is delivered."""
        self._partitions -= {(a, b), (b, a)}
        self._wake()

    def freeze(self, name: str) -> None:
        """Nothing comes to this host or from it; its own tasks go on, so stop them if it matters."""
        self._frozen.add(name)

    def thaw(self, name: str) -> None:
        self._frozen.discard(name)
        self._wake()

    def unreachable(self, name: str, *, unreachable: bool = True) -> None:
        """Dials to this host fail, as behind a NAT; it can dial out."""
        if unreachable:
            self._unreachable.add(name)
        else:
            self._unreachable.discard(name)

    def move(self, name: str, address: str) -> None:
        """From now on a host is dialled there, and nobody answers at its name."""
        self._moved[name] = address

    def nat(self, name: str, *, keeps_ports: bool) -> None:
        """Put a host behind a router: nobody can dial it, and its ports mean something."""
        self.unreachable(name)
        self._nats[name] = keeps_ports

    def new_port(self, host: _Host) -> int:
        """A local port of what a host dials; 0: nobody asks for it."""
        if host.name not in self._nats:
            return 0
        host.next_port += 1
        return host.next_port

    def port_outside(self, host: _Host, port: int) -> int:
        """That port, as others see it."""
        return port if self._nats.get(host.name, True) else port + 10_000

    async def meet(self, host: _Host, port: int, address: Address) -> MemoryStream:
        """Dial from a hole until the other end dials us from there."""
        mine = (host.name, self.port_outside(host, port), address.host, address.port)
        theirs = (address.host, address.port, host.name, port)
        await trio.sleep(self.direction(host.name, address.host).delay_s)
        other = self._hosts.get(address.host)
        waiting = self._dialling.get(theirs)
        keeps = mine[1] == port
        if waiting is not None and other is not None and other.alive and keeps:
            there, back = _Pipe(self, host, other, False), _Pipe(self, other, host, False)
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

    def refuse_dials(self, source: str, target: str, *, refuse: bool = True) -> None:
        """Dials from one host to another fail, as behind a firewall that is open one way."""
        if refuse:
            self._refused.add((source, target))
        else:
            self._refused.discard((source, target))

    def go_offline(self, name: str, *, offline: bool = True) -> None:
        """A host's own network is away: it can dial nobody."""
        if offline:
            self._offline.add(name)
        else:
            self._offline.discard(name)

    def cut(self, a: str, b: str) -> None:
        """Break every stream between two hosts; both may dial again at once."""
        for near, far in ((a, b), (b, a)):  # both: one end may be closed already
            for stream in list(self._hosts[near].streams):
                if stream.other == far:
                    stream.cut()

    def crash(self, name: str) -> None:
        """End a host's life: its streams break at the others, its listeners are gone.

        Its tasks must be cancelled by whoever runs them; until then its streams raise
        ``trio.BrokenResourceError`` and its dials OSError. Call ``host`` for the next life.
        """
        host = self._hosts[name]
        host.alive = False
        host.listeners.clear()
        self._frozen.discard(name)  # the kernel of a stopped process closes its sockets too
        for stream in list(host.streams):
            stream.crash()
        host.streams.clear()
        self._wake()

    def corrupt_next_lane_frame(self, a: str, b: str) -> None:
        """Flip one bit in the ciphertext of the next record that ``a`` sends to ``b``."""
        self._corruptions[a, b] += 1

    def corrupt_next_control_message(self, a: str, b: str) -> None:
        """Break the control stream over which ``a`` next sends to ``b``, at that moment.

        That is what a wrong bit in it comes to: TLS lets no changed byte through.
        """
        self._tears[a, b] += 1

    # ------------------------------------------------------------ for streams and networks

    def is_torn(self, pipe: _Pipe) -> bool:
        """Whether this stream breaks with what is sent now."""
        pair = pipe.source.name, pipe.target.name
        if pipe.lane or not self._tears[pair]:
            return False
        self._tears[pair] -= 1
        return True

    def pass_filter(self, pipe: _Pipe, data: bytes) -> bytes:
        """What really goes onto the link."""
        source, target = pipe.source.name, pipe.target.name
        self.sent_bytes[source, target] += len(data)
        if pipe.lane and self._corruptions[source, target] and len(data) > PREAMBLE_BYTES:
            self._corruptions[source, target] -= 1
            changed = bytearray(data)
            at = self.rng.randrange(min(HEADER_BYTES, len(data) - 1), len(data))
            changed[at] ^= 1 << self.rng.randrange(8)
            data = bytes(changed)
        if self.filter is not None:
            data = self.filter(Sent(source, target, pipe.lane, data))
        return data

    async def connect(
        self, host: _Host, address: Address, kind: _Kind
    ) -> tuple[MemoryStream, _Host]:
        """Dial: a round trip, then a stream, or OSError; hangs while the pair is held."""
        await trio.lowlevel.checkpoint()
        name = next((n for n, at in self._moved.items() if at == address.host), address.host)
        link = self.direction(host.name, name)
        await trio.sleep(2 * link.delay_s)
        while self.held(host.name, name) or self.held(name, host.name):
            await self._change.park()
        target = self._hosts.get(name)
        if not host.alive:
            raise OSError(errno.ENETDOWN, "this host crashed")
        if host.name in self._offline:
            raise OSError(errno.ENETUNREACH, "network is unreachable")
        shut = name in self._unreachable or (host.name, name) in self._refused
        shut |= self._moved.get(name, address.host) != address.host
        if target is None or not target.alive or shut:
            raise OSError(errno.EHOSTUNREACH, f"no route to {address}")
        listener = target.listeners.get(address.port)
        if listener is None:
            raise OSError(errno.ECONNREFUSED, f"{address} refused the connection")
        there = _Pipe(self, host, target, kind is _Kind.LANE)
        back = _Pipe(self, target, host, kind is _Kind.LANE)
        stream = MemoryStream(self, host, there, back)
        accepted = MemoryStream(self, target, back, there)
        stream.port = accepted.far_port = self.new_port(host)
        try:
            listener.send_nowait((accepted, host, kind))
        except (trio.WouldBlock, trio.BrokenResourceError):
            raise OSError(errno.ECONNREFUSED, f"{address} refused the connection") from None
        return stream, target

    def _wake(self) -> None:
        self._change.unpark_all()
        for host in self._hosts.values():
            for stream in host.streams:
                stream.wake()


class _MemoryHole:
    """``network.Hole``."""

    def __init__(self, world: MemoryWorld, host: _Host, port: int) -> None:
        self.port = port
        self._world = world
        self._host = host

    async def connect(self, address: Address) -> trio.abc.Stream:
        return await self._world.meet(self._host, self.port, address)

    def close(self) -> None:
        pass


class MemoryNetwork:
    """``network.Network`` for one host of a ``MemoryWorld``."""

    def __init__(self, world: MemoryWorld, host: _Host) -> None:
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
        send, receive = trio.open_memory_channel[_Accepted](BACKLOG_COUNT_MAX)
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
                handlers = {_Kind.LANE: on_lane, _Kind.RELAY: on_relay}
                async for stream, dialer, kind in receive:
                    handler = handlers.get(kind)
                    nursery.start_soon(self._handle, stream, dialer, kind, on_channel, handler)
        finally:
            for port in ports:
                if host.listeners.get(port) is send:
                    del host.listeners[port]
            while receive.statistics().current_buffer_used:
                receive.receive_nowait()[0].cut()  # the kernel resets what nobody accepted

    async def _handle(
        self,
        stream: MemoryStream,
        dialer: _Host,
        kind: _Kind,
        on_channel: ChannelHandler,
        handler: LaneHandler | None,
    ) -> None:
        if kind is _Kind.CONTROL:
            port = self._world.port_outside(dialer, stream.far_port)
            channel = Channel(stream, dialer.party, dialer.peer, b"", f"{dialer.name}:{port}")
            await run_handler(on_channel, channel, stream, dialer.name)
        elif handler is not None:
            await run_handler(handler, stream, stream, dialer.name)
        else:
            await stream.aclose()

    async def dial(self, address: Address, *, party: Party, peer: str | None = None) -> Channel:
        """See ``network.Network.dial``."""
        stream, target = await self._world.connect(self._host, address, _Kind.CONTROL)
        if target.party is not party or peer not in (None, target.peer):
            await stream.aclose()
            raise RemoteProtocolError(f"{address} is not the {party.value} that we look for")
        return Channel(stream, target.party, target.peer, b"", str(address), stream.port)

    async def dial_lane(self, address: Address) -> trio.abc.Stream:
        """See ``network.Network.dial_lane``."""
        stream, _target = await self._world.connect(self._host, address, _Kind.LANE)
        return stream

    async def open_hole(self, towards: Address, port: int = 0) -> Hole:
        """See ``network.Network.open_hole``."""
        del towards
        return _MemoryHole(self._world, self._host, port or self._world.new_port(self._host))

    async def dial_relay(self, address: Address) -> trio.abc.Stream:
        """See ``network.Network.dial_relay``."""
        stream, _target = await self._world.connect(self._host, address, _Kind.RELAY)
        return stream

    async def dial_over(
        self, stream: trio.abc.Stream, *, party: Party, peer: str, name: str
    ) -> Channel:
        """See ``network.Network.dial_over``; both ends say who they are, and are believed."""
        assert isinstance(stream, MemoryStream)
        try:
            await stream.send_all(INTRODUCTION + self._host.peer.encode())
            found = await self._introduction(stream)
            if (found.party, found.peer) != (party, peer):
                raise RemoteProtocolError(f"{name} is not the {party.value} that we look for")
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
        """See ``network.Network.welcome``."""
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

    async def _introduction(self, stream: MemoryStream) -> _Host:
        said = b""
        while len(said) < len(INTRODUCTION) + PEER_ID_BYTES:
            more = await stream.receive_some(len(INTRODUCTION) + PEER_ID_BYTES - len(said))
            if not more:
                raise OSError(errno.ECONNRESET, "it hung up")
            said += more
        return self._world.host_of(said[len(INTRODUCTION) :].decode())

    def proven(self, stream: trio.abc.Stream) -> None:
        """See ``network.Network.proven``; nobody counts strangers here."""

    def prepare_lane(self, stream: trio.abc.Stream, congestion: str) -> LaneFacts:
        """See ``network.Network.prepare_lane``; there is no congestion, but delay."""
        assert isinstance(stream, MemoryStream)
        return LaneFacts("", stream.round_trip_s)

    async def run_sync(
        self, function: Callable[[], T], limiter: trio.CapacityLimiter | None = None
    ) -> T:
        """Run it here and now: no threads where time is virtual."""
        await trio.lowlevel.checkpoint()
        return function()

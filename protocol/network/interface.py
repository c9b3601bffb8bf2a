"""``Network``: everything that waits for another machine, or for a thread, goes through it.

Two implementations exist from the start: ``sockets.SocketNetwork`` (TCP, TLS 1.3, threads) and
``memory.MemoryNetwork`` (virtual links on trio's virtual clock, no threads), so that the production
master and peers run unchanged in both. Time itself is trio's: ``trio.current_time()``.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import trio
from attrs import frozen

from ..addresses import Address
from ..trust.authority import Party

T = TypeVar("T")


@frozen
class Channel:
    """A byte stream whose other end is authenticated; one per control stream.

    Attributes:
      stream: reliable, ordered, private bytes.
      party: who is there.
      peer: the peer id behind the other end's key; empty for a newcomer.
      certificate_der: its certificate; empty for a newcomer and in memory.
      remote_address: "host:port" as seen from here, for people.
      local_port: of this end; 0: it has none that means anything.
    """

    stream: trio.abc.Stream
    party: Party
    peer: str
    certificate_der: bytes
    remote_address: str
    local_port: int = 0


@frozen
class LaneFacts:
    """What is known about a lane's path when it is open.

    Attributes:
      congestion: the kernel's congestion control for what we send; empty: there is none.
      round_trip_s: the shortest that was seen; infinite: unknown.
    """

    congestion: str = ""
    round_trip_s: float = math.inf


ChannelHandler = Callable[[Channel], Awaitable[None]]
LaneHandler = Callable[[trio.abc.Stream], Awaitable[None]]


class Hole(Protocol):
    """A local port that is held for streams which both ends dial at once, through their routers."""

    port: int

    async def connect(self, address: Address) -> trio.abc.Stream:
        """Dial until the other end, which dials us from there, is met; the caller bounds the time.

        Raises:
          OSError: there is no way there at all, or the port cannot be used.
        """
        ...

    def close(self) -> None:
        """Give the port back; what was connected stays."""
        ...


class Network(Protocol):
    """How a node reaches others. All addresses are ``addresses.Address``."""

    async def serve(
        self,
        bind: Sequence[Address],
        on_channel: ChannelHandler,
        on_lane: LaneHandler | None,
        *,
        on_relay: LaneHandler | None = None,
        task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept until cancelled; handlers run one task per connection.

        One port takes both kinds: a TLS ClientHello starts with byte 0x16, a lane with
        ``lane.MAGIC``. ``task_status`` reports the addresses really bound (port 0 resolved). A
        handler's ``HoldfastError`` or broken stream ends only its connection; any other exception
        propagates. ``on_lane`` None: lanes are refused (the master has none); likewise ``on_relay``,
        for connections that begin with ``relaying.MAGIC``.

        Raises:
          UserError: the address cannot be bound.
        """
        ...

    async def dial(self, address: Address, *, party: Party, peer: str | None = None) -> Channel:
        """Open an authenticated stream; the caller bounds the time with a cancel scope.

        Raises:
          OSError: nobody answers there (every way of not answering).
          RemoteProtocolError: who answers is not ``party`` (and ``peer``) of this run.
        """
        ...

    async def dial_lane(self, address: Address) -> trio.abc.Stream:
        """Open a plain byte stream for a lane; ``lane`` adds the encryption. Raises OSError."""
        ...

    def proven(self, stream: trio.abc.Stream) -> None:
        """An accepted lane, or stream to be relayed, has shown that it may be here: it is no
        stranger's any more. ``prepare_lane`` says so, too.
        """
        ...

    async def dial_relay(self, address: Address) -> trio.abc.Stream:
        """Open a plain byte stream to a relay; ``relay_ticket`` is what is said on it. Raises OSError."""
        ...

    async def open_hole(self, towards: Address, port: int = 0) -> Hole:
        """Hold a local port: any free one, or the one that a dialled stream of ours has.

        Raises OSError: it cannot be had.
        """
        ...

    async def dial_over(
        self, stream: trio.abc.Stream, *, party: Party, peer: str, name: str
    ) -> Channel:
        """As ``dial``, over a stream of an arranged route. ``name``: for people. Closes it on failure."""
        ...

    async def welcome(
        self,
        stream: trio.abc.Stream,
        on_channel: ChannelHandler,
        on_lane: LaneHandler,
        name: str,
    ) -> None:
        """Treat a stream of an arranged route as one that was accepted, to its end."""
        ...

    def prepare_lane(self, stream: trio.abc.Stream, congestion: str) -> LaneFacts:
        """Have a lane's stream, dialled or accepted, use this congestion control if there is it.

        To be called when an accepted lane has shown its link's keys: until then it is a stranger's.
        """
        ...

    async def run_sync(
        self, function: Callable[[], T], limiter: trio.CapacityLimiter | None = None
    ) -> T:
        """Run CPU or disk work off the event loop (a thread); inline where time is virtual.

        Not cancellable: the function always runs to its end.

        Args:
          limiter: of the threads; None: trio's, which the journal and the state need. Whatever
            outsiders can ask for at will brings its own.
        """
        ...

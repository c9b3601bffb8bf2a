"""``Network``: every wait for another machine, or for a thread, goes through this interface.

It has two implementations: ``sockets.SocketNetwork`` (TCP, TLS 1.3, threads) and the simulation's
``MemoryNetwork`` (virtual links on trio's virtual clock, no threads). The production master and
peers run unchanged in both. Time is trio's: ``trio.current_time()``.
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
      party: the role of the other end.
      peer: the other end's peer id, by its key; empty for a newcomer.
      certificate_der: its certificate; empty for a newcomer and in the simulation.
      remote_address: "host:port" as seen from here, for people.
      local_port: of this end; 0: not known.
    """

    stream: trio.abc.Stream
    party: Party
    peer: str
    certificate_der: bytes
    remote_address: str
    local_port: int = 0


@frozen
class LaneFacts:
    """The properties of an open lane's path.

    Attributes:
      congestion: the kernel's congestion control for sending; empty: not known.
      round_trip_s: the shortest round trip seen; infinite: not known.
    """

    congestion: str = ""
    round_trip_s: float = math.inf


ChannelHandler = Callable[[Channel], Awaitable[None]]
LaneHandler = Callable[[trio.abc.Stream], Awaitable[None]]


class Hole(Protocol):
    """A reserved local port for streams that both ends dial at once, through their routers."""

    port: int

    async def connect(self, address: Address) -> trio.abc.Stream:
        """Dial until the connection meets that of the other end; the caller bounds the time.

        Raises:
          OSError: the address is not reachable at all, or the port cannot be used.
        """
        ...

    def close(self) -> None:
        """Release the port; connected streams stay."""
        ...


class Network(Protocol):
    """A node's connections to other nodes, and its threads."""

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
        propagates. Without ``on_lane``, lanes are refused (the master has none); likewise without
        ``on_relay`` connections that begin with ``relay_ticket.MAGIC``.

        Raises:
          UserError: the address cannot be bound.
        """
        ...

    async def dial(self, address: Address, *, party: Party, peer: str | None = None) -> Channel:
        """Open an authenticated stream; the caller bounds the time with a cancel scope.

        Raises:
          OSError: no answer there, for whatever reason.
          RemoteProtocolError: the other end is not ``party`` (and ``peer``) of this run.
        """
        ...

    async def dial_lane(self, address: Address) -> trio.abc.Stream:
        """Open a plain byte stream for a lane; ``lane`` adds the encryption. Raises OSError."""
        ...

    async def dial_relay(self, address: Address) -> trio.abc.Stream:
        """Open a byte stream to a relay; ``relay_ticket`` has its first bytes. Raises OSError."""
        ...

    async def open_hole(self, towards: Address, port: int = 0) -> Hole:
        """Reserve a local port: any free one, or that of a stream which this node has dialled.

        Raises OSError: the port cannot be used.
        """
        ...

    async def dial_over(
        self, stream: trio.abc.Stream, *, party: Party, peer: str, name: str
    ) -> Channel:
        """Open an authenticated stream as ``dial`` does, over a stream of an arranged route.

        Closes the stream on failure. ``name`` stands in texts for people.
        """
        ...

    async def welcome(
        self,
        stream: trio.abc.Stream,
        on_channel: ChannelHandler,
        on_lane: LaneHandler,
        name: str,
    ) -> None:
        """Serve a stream of an arranged route as an accepted one, to its end."""
        ...

    def prepare_lane(self, stream: trio.abc.Stream, congestion: str) -> LaneFacts:
        """Make a lane's stream use this congestion control if the kernel has it.

        Also for a stream to be relayed. Call it once an accepted one has shown its link's keys or
        its ticket: until then it is unidentified, and holds a slot of ``accept_limits``.
        """
        ...

    async def run_sync(
        self, function: Callable[[], T], limiter: trio.CapacityLimiter | None = None
    ) -> T:
        """Run CPU or disk work off the event loop (a thread); inline where time is virtual.

        Not cancellable: the function always runs to its end.

        Args:
          limiter: of the threads; None: trio's, which the journal and the state need. Work that
            outsiders can request at will must bring its own.
        """
        ...

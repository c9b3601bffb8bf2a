"""``Network``: everything that waits for another machine, or for a thread, goes through it.

Two implementations exist from the start: ``sockets.SocketNetwork`` (TCP, TLS 1.3, threads) and
``memory.MemoryNetwork`` (virtual links on trio's virtual clock, no threads), so that the production
master and peers run unchanged in both. Time itself is trio's: ``trio.current_time()``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import trio
from attrs import frozen

from .addresses import Address

T = TypeVar("T")


class Party(enum.Enum):
    """What the certificate at the other end says."""

    MASTER = "master"
    PEER = "peer"
    NEWCOMER = "newcomer"  # no certificate: may enrol, nothing else


@frozen
class Channel:
    """A byte stream whose other end is authenticated; one per control stream.

    Attributes:
      stream: reliable, ordered, private bytes.
      party: who is there.
      peer: the peer id behind the other end's key; empty for a newcomer.
      certificate_der: its certificate; empty for a newcomer and in memory.
      remote_address: "host:port" as seen from here, for people.
    """

    stream: trio.abc.Stream
    party: Party
    peer: str
    certificate_der: bytes
    remote_address: str


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


class Network(Protocol):
    """How a node reaches others. All addresses are ``addresses.Address``."""

    async def serve(
        self,
        bind: Sequence[Address],
        on_channel: ChannelHandler,
        on_lane: LaneHandler | None,
        *,
        task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept until cancelled; handlers run one task per connection.

        One port takes both kinds: a TLS ClientHello starts with byte 0x16, a lane with
        ``lane.MAGIC``. ``task_status`` reports the addresses really bound (port 0 resolved). A
        handler's ``HoldfastError`` or broken stream ends only its connection; any other exception
        propagates. ``on_lane`` None: lanes are refused (the master has none).

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

    def prepare_lane(self, stream: trio.abc.Stream, congestion: str) -> LaneFacts:
        """Have a lane's stream, dialled or accepted, use this congestion control if there is it."""
        ...

    async def run_sync(self, function: Callable[[], T]) -> T:
        """Run CPU or disk work off the event loop (a thread); inline where time is virtual.

        Not cancellable: the function always runs to its end.
        """
        ...

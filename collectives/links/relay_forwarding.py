"""A relay: forwards bytes between two members that cannot reach each other.

It forwards only for connections that show a ticket of which the master has told it; what it
forwards is ciphertext to it. One end of each pair parks connections, the other end calls. A call is
joined to a parked connection, and from then on both are one stream.

    handle           one per connection, in the tasks of ``Network.serve``
     ├── park        waits until a call takes it, then for that call's end
     └── call        takes a parked one, forwards both ways until both have ended
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio
from attrs import define, field

from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import LANES_OPEN_MAX, Relayed, RelayOffer, RelayPair
from ...protocol.network.relay_ticket import PAIRED, RelayRole, receive_preamble
from ...protocol.wakeups import Pulse
from .rates.rate_limiter import RateLimiter

PREAMBLE_S = 10.0  # for a connection to show its ticket
CALL_S = 10.0  # for a call to find a parked connection
PARKED_MAX = 4  # of a pair; the oldest ones above that are closed
STREAMS_MAX = LANES_OPEN_MAX + 2  # of a pair: the lanes of a link, a control stream, its successor
COPY_BYTES = 65_536  # at once

STREAM_ENDS = (trio.BrokenResourceError, trio.ClosedResourceError)


@define(eq=False)
class _Parked:
    stream: trio.abc.Stream
    over: trio.Event = field(factory=trio.Event)


@define(eq=False)
class _Route:
    """The connections of one ticket."""

    peers: tuple[str, ...]
    parked: deque[_Parked] = field(factory=deque)
    came: Pulse = field(factory=Pulse)  # when a connection parks, or the route ends
    streams: int = 0
    calls: dict[trio.CancelScope, None] = field(factory=dict)  # calls that are forwarded, or wait

    @property
    def used(self) -> bool:
        return bool(self.parked or self.calls)


class RelayForwarder:
    """See the top of this file. ``offer`` bounds what it does.

    Args:
      prepare: called with each connection that has shown a valid ticket.

    Attributes:
      carried_bytes: bytes that were forwarded, both ways.
    """

    def __init__(
        self, offer: RelayOffer, prepare: Callable[[trio.abc.Stream], object] = lambda _: None
    ) -> None:
        self.offer = offer
        self._prepare = prepare
        self.carried_bytes = 0
        self._limiter = RateLimiter(offer.bytes_per_s)
        self._routes: dict[bytes, _Route] = {}

    @property
    def spent(self) -> bool:
        """Return whether the quota is used up."""
        return bool(self.offer.quota_bytes) and self.carried_bytes >= self.offer.quota_bytes

    def report(self) -> Relayed:
        """Return what is forwarded now, for the master."""
        streams = sum(route.streams for route in self._routes.values())
        return Relayed(len(self._routes), streams, self.carried_bytes, self.spent)

    def _count(self, size_bytes: int) -> bool:
        """Count bytes before they are forwarded; return False if the quota does not cover them."""
        quota_bytes = self.offer.quota_bytes
        if quota_bytes and self.carried_bytes + size_bytes > quota_bytes:
            self.carried_bytes = quota_bytes
            return False
        self.carried_bytes += size_bytes
        return True

    # ------------------------------------------------------------ orders of the master

    def carry(self, order: RelayPair) -> None:
        """Forward for a ticket, unless as many as were offered are in use.

        A ticket of an earlier master, which the present one cannot withdraw, makes way once no
        connection uses it.
        """
        if len(self._routes) >= self.offer.pairs and order.ticket not in self._routes:
            unused = (ticket for ticket, route in self._routes.items() if not route.used)
            self._routes.pop(next(unused, b""), None)
        if len(self._routes) < self.offer.pairs:
            self._routes.setdefault(order.ticket, _Route(order.peers))

    def uncarry(self, ticket: bytes) -> None:
        """Close all connections that have shown a ticket."""
        route = self._routes.pop(ticket, None)
        if route is None:
            return
        for scope in list(route.calls):
            scope.cancel()
        for parked in route.parked:
            parked.over.set()
        route.came.notify_all()

    # ------------------------------------------------------------ connections

    async def handle(self, stream: trio.abc.Stream) -> None:
        """Serve one connection to its end.

        Raises:
          RemoteProtocolError: it shows no valid ticket.
        """
        with trio.fail_after(PREAMBLE_S):
            preamble = await receive_preamble(stream)
        route = self._routes.get(preamble.ticket)
        if route is None or self.spent:
            raise RemoteProtocolError("the ticket is not valid here, or the quota is used up")
        self._prepare(stream)
        if preamble.part is RelayRole.PARK:
            await self._park(route, stream)
        elif route.streams < STREAMS_MAX:
            await self._call(route, stream)

    async def _park(self, route: _Route, stream: trio.abc.Stream) -> None:
        if len(route.parked) >= PARKED_MAX:
            # A member that parks again has most likely lost the oldest of these.
            route.parked.popleft().over.set()
        parked = _Parked(stream)
        route.parked.append(parked)
        route.came.notify_all()
        try:
            await parked.over.wait()
        finally:
            if parked in route.parked:
                route.parked.remove(parked)

    async def _call(self, route: _Route, stream: trio.abc.Stream) -> None:
        with trio.CancelScope() as scope:
            route.calls[scope] = None
            route.streams += 1
            try:
                parked = await self._take(route)
                if parked is not None:
                    try:
                        await stream.send_all(PAIRED)
                        await self._forward(stream, parked.stream)
                    finally:
                        parked.over.set()
            finally:
                route.streams -= 1
                del route.calls[scope]

    async def _take(self, route: _Route) -> _Parked | None:
        """Wait for a parked connection that still works; return None if there is none in time."""
        with trio.move_on_after(CALL_S):
            while True:
                while not route.parked:
                    await route.came.wait()
                parked = route.parked.pop()  # the newest: the oldest may be broken
                try:
                    await parked.stream.send_all(PAIRED)
                except STREAM_ENDS:
                    parked.over.set()
                else:
                    return parked
        return None

    async def _forward(self, one: trio.abc.Stream, other: trio.abc.Stream) -> None:
        async with trio.open_nursery() as nursery:

            async def copy(source: trio.abc.Stream, target: trio.abc.Stream) -> None:
                try:
                    while data := await source.receive_some(COPY_BYTES):
                        if not self._count(len(data)):
                            nursery.cancel_scope.cancel()
                            return
                        await self._limiter.take(len(data))
                        await target.send_all(data)
                    if isinstance(target, trio.abc.HalfCloseableStream):
                        await target.send_eof()
                except STREAM_ENDS:
                    nursery.cancel_scope.cancel()  # the other direction is of no use alone

            nursery.start_soon(copy, one, other)
            nursery.start_soon(copy, other, one)

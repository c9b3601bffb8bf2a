"""A relay: forwards bytes between two members that cannot reach each other.

It forwards for those who show a ticket that the master has told it of, and for nobody else; what it
forwards is ciphertext to it. Of each pair one end parks connections, the other one calls; a call is
joined to a parked connection, and from then on both are one stream.

    handle           one per connection, in the tasks of ``Network.serve``
     ├── parked      waits until a call takes it, then for that call's end
     └── a call      takes a parked one, forwards both ways until both have ended
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio
from attrs import define, field

from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import LANES_OPEN_MAX, Relayed, RelayOffer, RelayPair
from ...protocol.network.relay_ticket import PAIRED, RelayRole, receive_preamble
from .rate_limiter import RateLimiter

PREAMBLE_S = 10.0  # for a connection to show its ticket
CALL_S = 10.0  # a call waits so long for somebody who is parked
PARKED_MAX = 4  # of a pair; more are hung up on
STREAMS_MAX = LANES_OPEN_MAX + 2  # of a pair: the lanes of a link, a control stream, its successor
COPY_BYTES = 65_536  # at once

STREAM_ENDS = (trio.BrokenResourceError, trio.ClosedResourceError)


@define(eq=False)
class _Parked:
    stream: trio.abc.Stream
    over: trio.Event = field(factory=trio.Event)


@define(eq=False)
class _Route:
    """One ticket."""

    peers: tuple[str, ...]
    parked: deque[_Parked] = field(factory=deque)
    came: trio.Event = field(factory=trio.Event)  # somebody has parked
    streams: int = 0
    calls: dict[trio.CancelScope, None] = field(factory=dict)  # that are forwarded, or wait


class RelayForwarder:
    """See the top of this file; ``offer`` bounds what it does.

    Args:
      proven: called with a connection that has shown a good ticket.

    Attributes:
      carried_bytes: that were forwarded, both ways.
    """

    def __init__(
        self, offer: RelayOffer, proven: Callable[[trio.abc.Stream], None] = lambda _: None
    ) -> None:
        self.offer = offer
        self._proven = proven
        self.carried_bytes = 0
        self._limiter = RateLimiter(offer.bytes_per_s)
        self._routes: dict[bytes, _Route] = {}

    @property
    def spent(self) -> bool:
        """Whether the quota is used up."""
        return bool(self.offer.quota_bytes) and self.carried_bytes >= self.offer.quota_bytes

    def report(self) -> Relayed:
        streams = sum(route.streams for route in self._routes.values())
        return Relayed(len(self._routes), streams, self.carried_bytes, self.spent)

    # ------------------------------------------------------------ what the master says

    def carry(self, order: RelayPair) -> None:
        """Forward for a ticket; one more than was offered is not."""
        if len(self._routes) < self.offer.pairs:
            self._routes.setdefault(order.ticket, _Route(order.peers))

    def uncarry(self, ticket: bytes) -> None:
        """Hang up on all who have shown it."""
        route = self._routes.pop(ticket, None)
        if route is None:
            return
        for scope in list(route.calls):
            scope.cancel()
        for parked in route.parked:
            parked.over.set()
        route.came.set()

    def clear(self) -> None:
        """Another master has no tickets here."""
        for ticket in list(self._routes):
            self.uncarry(ticket)

    # ------------------------------------------------------------ connections

    async def handle(self, stream: trio.abc.Stream) -> None:
        """Serve one connection to its end.

        Raises:
          RemoteProtocolError: it shows no ticket that is good here.
        """
        with trio.fail_after(PREAMBLE_S):
            preamble = await receive_preamble(stream)
        route = self._routes.get(preamble.ticket)
        if route is None or self.spent:
            raise RemoteProtocolError("no ticket that is good here")
        self._proven(stream)
        if preamble.part is RelayRole.PARK:
            await self._park(route, stream)
        elif route.streams < STREAMS_MAX:
            await self._call(route, stream)

    async def _park(self, route: _Route, stream: trio.abc.Stream) -> None:
        if len(route.parked) >= PARKED_MAX:
            # Whoever parks again has most likely lost the oldest of these.
            route.parked.popleft().over.set()
        parked = _Parked(stream)
        route.parked.append(parked)
        route.came.set()
        route.came = trio.Event()
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
        """Somebody who is parked and still there."""
        with trio.move_on_after(CALL_S):
            while True:
                while not route.parked:
                    await route.came.wait()
                parked = route.parked.pop()  # the newest: the oldest may have lost its line
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
                        await self._limiter.take(len(data))
                        await target.send_all(data)
                        self.carried_bytes += len(data)
                        if self.spent:
                            nursery.cancel_scope.cancel()
                    if isinstance(target, trio.abc.HalfCloseableStream):
                        await target.send_eof()
                except STREAM_ENDS:
                    nursery.cancel_scope.cancel()  # the other half has lost its sense, too

            nursery.start_soon(copy, one, other)
            nursery.start_soon(copy, other, one)

"""Getting to one other member, and again: over which route, and when the master is asked for another.

    keep     while there is something to do at this end
     ├── dial over the route of the moment, carry the link to its end, back off, again
     ├── or park at a relay: whoever calls there is welcomed as one that was accepted
     └── or meet the other end in a hole (``hole_punching``), and do the one or the other there

The route follows from the view until the master arranges another one. Whoever dials notices that it does
not work; if neither can dial both say so at once.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from ...protocol.addresses import Address
from ...protocol.dial_order import dialler
from ...protocol.errors import RemoteProtocolError, UserError
from ...protocol.messages import MemberInfo, Message, Route, RouteKind, RouteWanted, RouteWorks
from ...protocol.network.interface import Channel, ChannelHandler, LaneHandler, Network
from ...protocol.network.relay_ticket import RelayPreamble, RelayRole, wait_paired
from ...protocol.text import plain
from ...protocol.trust.authority import Party
from .handshake import Connect, LinkKeys, dial_lane, dial_link
from .hole_punching import HolePuncher, answer, meet
from .lane_pool import FIRST_LANE, DialLane, LanePool
from .link import Link
from .link_lane import LinkLane

DIAL_S = 5.0  # per address of a member: longer than any round trip, short enough to try the next
HANDSHAKE_S = 15.0  # from the control stream to open lanes; the other side gave up or is stuck
BACK_OFF_FIRST_S = 0.1
BACK_OFF_LAST_S = 5.0  # a member that cannot be dialled costs a dozen packets a minute
# A route that has not worked for so long is given up: its other end may be about to start again, or
# to leave the view.
ROUTE_PATIENCE_S = 4.0
ROUTE_ASK_S = 5.0  # between two times that we ask for another one


class PeerLink:
    """One other member of the view, as seen by the hub that makes it.

    Attributes:
      route: what the master has arranged; None: what follows from the view.
      error: why there is no link; empty: nothing is amiss.

    Args:
      up: whether there is a link.
      doubt: called when the master does not take a link for granted any more.
      new_link: makes one of an authenticated stream, not yet running.
      carry: publishes a link and runs it to its end.
      tell: says something to the master.
      accepts: what takes control streams, and lanes, that come over an arranged route.
    """

    def __init__(
        self,
        member: MemberInfo,
        me: MemberInfo,
        network: Network,
        *,
        up: Callable[[], bool],
        new_link: Callable[[str, Channel], Link],
        carry: Callable[[Link, DialLane], Awaitable[None]],
        tell: Callable[[Message], None],
        doubt: Callable[[], None],
        accepts: tuple[ChannelHandler, LaneHandler],
    ) -> None:
        self.route: Route | None = None
        self.error = ""
        self._member = member
        self._me = me
        self._network = network
        self._up = up
        self._new_link = new_link
        self._carry = carry
        self._tell = tell
        self._doubt = doubt
        self._accepts = accepts
        self._nursery: trio.Nursery | None = None
        self._scope: trio.CancelScope | None = None  # of the task, while there is one
        self._asked_s = -math.inf  # when the master was last asked for a route
        self._worked = False  # there was a link over this route, ever
        self._links_made = 0

    # ------------------------------------------------------------ what holds now

    @property
    def dials(self) -> bool:
        """Whether this end keeps the dialler's part."""
        if self.route is not None:
            return self.route.dials
        chosen = dialler(self._me, self._member)
        return chosen is not None and chosen.peer == self._me.peer

    @property
    def _acts(self) -> bool:
        """Whether this end has anything to do; the other one has, if it is not for both."""
        return self.dials or self._roadless or self._kind is not RouteKind.DIRECT

    @property
    def _kind(self) -> RouteKind:
        return RouteKind.DIRECT if self.route is None else self.route.kind

    @property
    def _roadless(self) -> bool:
        return self.route is None and dialler(self._me, self._member) is None

    # ------------------------------------------------------------ for the hub

    def look(self, member: MemberInfo, me: MemberInfo, nursery: trio.Nursery | None) -> None:
        """Do what a view calls for; a link that is there is left alone."""
        self._member, self._me, self._nursery = member, me, nursery
        if self._scope is not None and not self._acts and not self._up():
            self.stop()
        self._start()

    def take(self, route: Route) -> None:
        """From now on this is the route; a link over the old one that this end dialled is given up."""
        self.stop()
        self.route, self._worked = route, False
        self._doubt()
        self._start()

    def stop(self) -> None:
        if self._scope is not None:
            self._scope.cancel()
            self._scope = None

    def linked(self) -> None:
        """There is a link."""
        self.error, self._worked = "", True
        self._links_made += 1
        self._asked_s = -math.inf

    def tell_works(self) -> None:
        """Tell the master so, which does not take it for granted."""
        self._tell(RouteWorks(self._member.peer, self._number))

    @property
    def _number(self) -> int:
        return 0 if self.route is None else self.route.number

    # ------------------------------------------------------------ the task

    def _start(self) -> None:
        if self._nursery is not None and self._scope is None and self._acts:
            self._scope = trio.CancelScope()
            self._nursery.start_soon(self._keep, self._scope)

    async def _keep(self, scope: trio.CancelScope) -> None:
        back_off_s = BACK_OFF_FIRST_S
        failing_since_s = trio.current_time()
        with scope:
            while not scope.cancel_called and self._acts:
                started_s = trio.current_time()
                links_before = self._links_made
                try:
                    await self._follow_route()
                except (OSError, UserError, RemoteProtocolError) as error:
                    self.error = str(error)
                except (trio.BrokenResourceError, trio.EndOfChannel):
                    self.error = "it hung up while the link was being made"
                now_s = trio.current_time()
                if self._links_made > links_before:
                    failing_since_s = now_s
                if self._roadless or now_s - failing_since_s >= ROUTE_PATIENCE_S:
                    self._ask()
                if now_s - started_s > BACK_OFF_LAST_S:
                    back_off_s = BACK_OFF_FIRST_S  # there was a link, or a long wait already
                await trio.sleep(back_off_s)
                back_off_s = min(2 * back_off_s, BACK_OFF_LAST_S)
        if self._scope is scope:
            self._scope = None

    def _ask(self) -> None:
        now_s = trio.current_time()
        if self._up() or now_s - self._asked_s < ROUTE_ASK_S:
            return
        self._asked_s = now_s
        self._doubt()
        why = plain(self.error)
        self._tell(RouteWanted(self._member.peer, self._number, self._worked, why))

    async def _follow_route(self) -> None:
        """Do this end's part, until it is over or fails."""
        if self._roadless:
            raise OSError("neither of the two can be dialled")
        if self._kind is RouteKind.PUNCHED:
            await self._punch()
        elif self._kind is RouteKind.DIRECT:
            await self._carry_over(*await self._dial())
        elif self.dials:
            await self._carry_over(await self._dial_over(self._call), self._call)
        else:
            await self._park()

    async def _carry_over(self, channel: Channel, connect: Connect) -> None:
        peer = self._member.peer
        link = self._new_link(peer, channel)
        try:
            with trio.move_on_after(HANDSHAKE_S) as scope:
                keys = await dial_link(link.messages)
                dial = partial(self._dial_lane, connect, keys)
                link.lane_pool.lane_opened(await dial(link.lane_pool, FIRST_LANE))
            if scope.cancelled_caught:
                where = channel.remote_address
                raise TimeoutError(f"{where} did not finish the link in {HANDSHAKE_S:g} s")
            await self._carry(link, dial)
        finally:
            await link.aclose()

    async def _dial_lane(
        self, connect: Connect, keys: LinkKeys, lane_pool: LanePool, number: int
    ) -> LinkLane:
        return await dial_lane(self._network, connect, keys, lane_pool, number)

    # ------------------------------------------------------------ over an arranged route

    async def _dial_over(self, connect: Connect) -> Channel:
        peer, name = self._member.peer, self._route_said()
        stream = await connect()
        with trio.move_on_after(DIAL_S):
            return await self._network.dial_over(stream, party=Party.PEER, peer=peer, name=name)
        raise TimeoutError(f"{name} did not answer within {DIAL_S:g} s")

    async def _welcome(self, stream: trio.abc.Stream) -> None:
        await self._network.welcome(stream, *self._accepts, self._route_said())

    async def _call(self) -> trio.abc.Stream:
        """A stream to the other end, which is parked."""
        stream = await self._at_relay(RelayRole.CALL)
        try:
            with trio.fail_after(DIAL_S):
                await wait_paired(stream)
        except trio.TooSlowError:
            await trio.aclose_forcefully(stream)
            raise TimeoutError(f"nobody is parked at {self._route_said()}") from None
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return stream

    async def _park(self) -> None:
        """Wait at the relay; each call takes one connection, and another one is parked."""
        while True:
            stream = await self._at_relay(RelayRole.PARK)
            try:
                await wait_paired(stream)
            except BaseException:
                await trio.aclose_forcefully(stream)
                raise
            assert self._nursery is not None
            self._nursery.start_soon(self._welcome, stream)

    async def _at_relay(self, part: RelayRole) -> trio.abc.Stream:
        """A connection to the relay that has shown the ticket; raises the last address's error."""
        route = self.route
        assert route is not None
        error: OSError = OSError("the relay has no address")
        for text in route.addresses:
            try:
                with trio.fail_after(DIAL_S):
                    stream = await self._network.dial_relay(Address.parse(text))
                    try:
                        await stream.send_all(RelayPreamble(part, route.ticket).pack())
                    except BaseException:
                        await trio.aclose_forcefully(stream)
                        raise
                    return stream
            except trio.TooSlowError:
                error = TimeoutError(f"the relay at {text} did not answer within {DIAL_S:g} s")
            except (OSError, trio.BrokenResourceError) as failure:
                error = OSError(f"the relay at {text}: {failure}")
        raise error

    def _route_said(self) -> str:
        by = f" by relay {self.route.relay[:8]}" if self.route and self.route.relay else ""
        return f"peer {self._member.peer[:8]}{by}"

    # ------------------------------------------------------------ through both routers

    async def _punch(self) -> None:
        route, nursery = self.route, self._nursery
        assert route is not None
        assert nursery is not None
        if not route.addresses:
            raise RemoteProtocolError("a route to nowhere")
        address = Address.parse(route.addresses[0])
        stream = await meet(self._network, address, route.local_port)
        try:
            if route.dials:
                caller = HolePuncher(self._network, stream, address.host)
                await self._carry_over(await self._dial_over(caller.connect), caller.connect)
            else:
                await answer(self._network, stream, address.host, nursery, self._welcome)
        finally:
            await trio.aclose_forcefully(stream)

    # ------------------------------------------------------------ directly

    async def _dial(self) -> tuple[Channel, Connect]:
        """Try the member's addresses in order; raises the last one's error."""
        error: Exception = OSError("it has no address")
        peer = self._member.peer
        for text in self._member.addresses:
            try:
                address = Address.parse(text)
                with trio.move_on_after(DIAL_S):
                    channel = await self._network.dial(address, party=Party.PEER, peer=peer)
                    return channel, partial(self._network.dial_lane, address)
                error = TimeoutError(f"{text} did not answer within {DIAL_S:g} s")
            except (OSError, UserError, RemoteProtocolError) as failure:
                error = failure
        raise error

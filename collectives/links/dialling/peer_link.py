"""The way to one other member: dialling it, again and again, over the route that holds now.

    keep     while this end has something to do
     ├── dial over the route, run the link to its end, back off, again
     ├── or park at a relay: a call there is handled as an accepted stream
     └── or meet the other end by hole punching (``hole_punching``), then dial or accept as above

The route follows from the view until the master arranges another one. The end that dials notices
when the route does not work, and asks the master for another; if neither can dial, both ask.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial

import trio
from attrs import define, field

from ....protocol import messages as m
from ....protocol.addresses import Address
from ....protocol.dial_order import dialler
from ....protocol.errors import RemoteProtocolError, UserError
from ....protocol.network.interface import Channel, ChannelHandler, LaneHandler, Network
from ....protocol.network.relay_ticket import RelayPreamble, RelayRole, wait_paired
from ....protocol.text import plain
from ....protocol.trust.authority import Party
from ..lane_pool import FIRST_LANE, DialLane
from ..link import Link
from .handshake import Connect, dial_lane, dial_link
from .hole_punching import HolePuncher, answer, meet
from .staggered_dial import DIAL_S, dial_first

# From the control stream to an open lane; later the other side gave up or is stuck.
HANDSHAKE_S = 15.0
BACK_OFF_FIRST_S = 0.1
BACK_OFF_LAST_S = 5.0  # a member that cannot be dialled costs a dozen packets a minute
# The master is asked for another route after this one has failed for this long. Until then the
# other end may be about to start again, or to leave the view.
ROUTE_PATIENCE_S = 4.0
ROUTE_ASK_S = 5.0  # between two requests for another route


@define(eq=False)
class PeerLink:
    """This node's part in having a link to one other member of the view. Made by ``LinkHub``.

    Attributes:
      route: the route that the master has arranged; None: it follows from the view.
      error: why there is no link; empty if none is missing.

    Args:
      is_up: returns whether there is a link.
      new_link: makes a link of an authenticated stream; it does not run yet.
      carry: publishes a link and runs it to its end.
      tell_master: sends a message to the master.
      unconfirm: called when the master must be told as soon as there is a link.
      accept: handle control streams, and lanes, that come over an arranged route.
    """

    _member: m.MemberInfo
    _me: m.MemberInfo
    _network: Network
    _is_up: Callable[[], bool] = field(kw_only=True)
    _new_link: Callable[[str, Channel], Link] = field(kw_only=True)
    _carry: Callable[[Link, DialLane], Awaitable[None]] = field(kw_only=True)
    _tell_master: Callable[[m.Message], None] = field(kw_only=True)
    _unconfirm: Callable[[], None] = field(kw_only=True)
    _accept: tuple[ChannelHandler, LaneHandler] = field(kw_only=True)
    route: m.Route | None = field(default=None, init=False)
    error: str = field(default="", init=False)
    _nursery: trio.Nursery | None = field(default=None, init=False)
    # Of the task, while there is one.
    _scope: trio.CancelScope | None = field(default=None, init=False)
    _asked_s: float = field(default=-math.inf, init=False)  # when the master was last asked
    _worked: bool = field(default=False, init=False)  # whether a link ever was over this route
    _links_made: int = field(default=0, init=False)

    # ------------------------------------------------------------ the route

    @property
    def dials(self) -> bool:
        """Return whether this end dials."""
        if self.route is not None:
            return self.route.dials
        chosen = dialler(self._me, self._member)
        return chosen is not None and chosen.peer == self._me.peer

    @property
    def _acts(self) -> bool:
        """Return whether this end has anything to do. If not, the other end has."""
        return self.dials or self._has_no_route or self._kind is not m.RouteKind.DIRECT

    @property
    def _kind(self) -> m.RouteKind:
        return m.RouteKind.DIRECT if self.route is None else self.route.kind

    @property
    def _has_no_route(self) -> bool:
        return self.route is None and dialler(self._me, self._member) is None

    # ------------------------------------------------------------ for the hub

    def update(self, member: m.MemberInfo, me: m.MemberInfo, nursery: trio.Nursery | None) -> None:
        """Start or stop dialling as a new view calls for; leave an existing link alone."""
        self._member, self._me, self._nursery = member, me, nursery
        if self._scope is not None and not self._acts and not self._is_up():
            self.stop()
        self._start()

    def set_route(self, route: m.Route) -> None:
        """Use a route from now on; give up a link over the old route that this end dialled."""
        self.stop()
        self.route, self._worked = route, False
        self._unconfirm()
        self._start()

    def stop(self) -> None:
        """Stop dialling, and give up a link that this end dialled."""
        if self._scope is not None:
            self._scope.cancel()
            self._scope = None

    def note_link(self) -> None:
        """Take note that there is a link now."""
        self.error, self._worked = "", True
        self._links_made += 1
        self._asked_s = -math.inf

    def report_works(self) -> None:
        """Tell the master that the route works."""
        self._tell_master(m.RouteWorks(self._member.peer, self._number))

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
                    self.error = "it hung up during the handshake"
                now_s = trio.current_time()
                if self._links_made > links_before:
                    failing_since_s = now_s
                if self._has_no_route or now_s - failing_since_s >= ROUTE_PATIENCE_S:
                    self._ask_for_route()
                if now_s - started_s > BACK_OFF_LAST_S:
                    # There was a link, or a long wait already.
                    back_off_s = BACK_OFF_FIRST_S
                await trio.sleep(back_off_s)
                back_off_s = min(2 * back_off_s, BACK_OFF_LAST_S)
        if self._scope is scope:
            self._scope = None

    def _ask_for_route(self) -> None:
        now_s = trio.current_time()
        if self._is_up() or now_s - self._asked_s < ROUTE_ASK_S:
            return
        self._asked_s = now_s
        self._unconfirm()
        why = plain(self.error)
        self._tell_master(m.RouteWanted(self._member.peer, self._number, self._worked, why))

    async def _follow_route(self) -> None:
        """Dial or park as the route says, until that is over or fails."""
        if self._has_no_route:
            raise OSError("neither end can be dialled")
        if self._kind is m.RouteKind.PUNCHED:
            await self._punch()
        elif self._kind is m.RouteKind.DIRECT:
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
                dial = partial(dial_lane, self._network, connect, keys)
                link.lanes.start_lane(await dial(link.lanes, FIRST_LANE))
            if scope.cancelled_caught:
                where = channel.remote_address
                raise TimeoutError(f"{where} did not finish the link in {HANDSHAKE_S:g} s")
            await self._carry(link, dial)
        finally:
            await link.aclose()

    # ------------------------------------------------------------ over an arranged route

    async def _dial_over(self, connect: Connect) -> Channel:
        peer, name = self._member.peer, self._describe_route()
        stream = await connect()
        with trio.move_on_after(DIAL_S):
            return await self._network.dial_over(stream, party=Party.PEER, peer=peer, name=name)
        raise TimeoutError(f"{name} did not answer within {DIAL_S:g} s")

    async def _welcome(self, stream: trio.abc.Stream) -> None:
        await self._network.welcome(stream, *self._accept, self._describe_route())

    async def _call(self) -> trio.abc.Stream:
        """Return a stream to the other end, which is parked at the relay."""
        stream = await self._dial_relay(RelayRole.CALL)
        try:
            with trio.fail_after(DIAL_S):
                await wait_paired(stream)
        except trio.TooSlowError:
            await trio.aclose_forcefully(stream)
            raise TimeoutError(f"{self._describe_route()} has parked no connection") from None
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return stream

    async def _park(self) -> None:
        """Park connections at the relay. Each call takes one, and another one is parked."""
        while True:
            stream = await self._dial_relay(RelayRole.PARK)
            try:
                await wait_paired(stream)
            except BaseException:
                await trio.aclose_forcefully(stream)
                raise
            assert self._nursery is not None
            self._nursery.start_soon(self._welcome, stream)

    async def _dial_relay(self, role: RelayRole) -> trio.abc.Stream:
        """Connect to the relay and show it the ticket; raise OSError if no address answers."""
        route = self.route
        assert route is not None

        async def dial(address: Address) -> trio.abc.Stream:
            return await self._network.dial_relay(address)

        try:
            _address, stream = await dial_first(route.addresses, dial, trio.aclose_forcefully)
            try:
                await stream.send_all(RelayPreamble(role, route.ticket).pack())
            except BaseException:
                await trio.aclose_forcefully(stream)
                raise
        except (OSError, trio.BrokenResourceError) as failure:
            raise OSError(f"the relay {route.relay[:8]}: {failure}") from None
        return stream

    def _describe_route(self) -> str:
        by = f" by relay {self.route.relay[:8]}" if self.route and self.route.relay else ""
        return f"peer {self._member.peer[:8]}{by}"

    # ------------------------------------------------------------ through both routers

    async def _punch(self) -> None:
        route, nursery = self.route, self._nursery
        assert route is not None
        assert nursery is not None
        if not route.addresses:
            raise RemoteProtocolError("the punched route has no address")
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
        """Dial the member; raise the last error if no address answers."""
        peer = self._member.peer

        async def dial(address: Address) -> Channel:
            return await self._network.dial(address, party=Party.PEER, peer=peer)

        async def close(channel: Channel) -> None:
            await trio.aclose_forcefully(channel.stream)

        address, channel = await dial_first(self._member.addresses, dial, close)
        return channel, partial(self._network.dial_lane, address)

"""A node's links: one to every other member of the view, kept up as long as both are in it.

In a pair one dials, again and again (``peer_link``); the other one accepts, but only from whom its own view,
or the route that the master has arranged, lets it expect that: the view may be a moment late, so a
stranger waits a little before it is refused. A link that both ends see replaced (the old one broke and
one end did not notice) is replaced. Who leaves the view is cut off at once.

    run                     one nursery; the node's
     ├── keep_watch         looks after all links, now and then
     ├── Pair.keep          one per member that we dial
     └── background tasks   of reductions: results for receivers that nobody waits for

    handle_channel          one per accepted control stream, in the tasks of ``Network.serve``
    handle_lane             one per accepted lane, likewise; holds the stream for its link
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import trio

from ...protocol.dial_order import are_linked
from ...protocol.errors import LocalProtocolError, PeerLostError, RemoteProtocolError
from ...protocol.messages import (
    LinkBroken,
    LinkHello,
    MemberInfo,
    Message,
    RefusalCode,
    Refused,
    Route,
)
from ...protocol.network.interface import Channel, Network
from ...protocol.trust.authority import Party
from .buffer_pool import BufferPool
from .frame_routing import EARLY_WAIT_S, FrameRouter, Key, Sink
from .handshake import LaneAcceptor, keys_for, version_refusal, welcome_link
from .link import LANE_STALL_SHARE, STALL_S, WATCH_TICKS, DialLane, Link, OnMessage
from .link_parts import LaneRules, NodeLinkParts
from .peer_link import HANDSHAKE_S, PeerLink
from .rate_limiter import RateLimiter
from .rate_meter import Measurements
from .send_priority import SendPriority

STRANGER_WAIT_S = 5.0  # our view may come this much later than the other side's
LINK_WAIT_S = 15.0  # who needs a link waits this long for it unless they say otherwise
# Rounds that a member outside the contributors may lag behind in what it is sent. Each holds one
# encoded result in memory; a member that lags further has to be resynced anyway.
TRAILING_MAX = 4
SPARE_FRAGMENTS_MAX = 2  # an encoded input and an encoded result, or results of two fragments
# What a round needs for chunks that wait for others, and no more than it may need at all.
SPARE_CHUNKS_MAX = 1_024
SPARE_CHUNKS_BYTES_MAX = 64 * 2**20


class LinkHub:
    """See the top of this file.

    Attributes:
      me: this node's peer id.
      router: the table of who wants which frames.
      buffers: memory for whole fragments, used again round after round.
      chunk_buffers: the same for single chunks.
      silence_s: a link on which nothing comes for so long is lost; for links made from now on.
      rules: for the lanes of links made from now on.
      on_message: called with each message that arrives on a link's control stream, one at a time
        per link; it should not wait for long. What it raises as RemoteProtocolError ends the link.
      tell_master: called with what the master should know of routes and links; without one it is
        dropped.

    Args:
      upload, download: caps on what all lanes together carry; None: no cap.
      stall_s: a link on which nothing moves for this long is lost.
      early_wait_s: how long a frame waits for somebody to want it; less than what a lane may stand
        still, or waiting would look like a stall to the sender.
    """

    def __init__(
        self,
        network: Network,
        me: str,
        *,
        on_message: OnMessage | None = None,
        tell_master: Callable[[Message], None] = lambda _message: None,
        upload: RateLimiter | None = None,
        download: RateLimiter | None = None,
        rules: LaneRules | None = None,
        stall_s: float = STALL_S,
        early_wait_s: float = EARLY_WAIT_S,
    ) -> None:
        if early_wait_s >= LANE_STALL_SHARE * stall_s:
            raise LocalProtocolError(f"early wait {early_wait_s} s, stall only {stall_s} s")
        self.me = me
        self.router = FrameRouter(early_wait_s)
        self.buffers = BufferPool(SPARE_FRAGMENTS_MAX)
        self.chunk_buffers = BufferPool(SPARE_CHUNKS_MAX, SPARE_CHUNKS_BYTES_MAX)
        self.on_message: OnMessage = on_message if on_message is not None else _refuse
        self.tell_master = tell_master
        self._network = network
        self._node = NodeLinkParts(self.router, upload, download)
        self.silence_s = math.inf
        self.rules = rules if rules is not None else LaneRules()
        self._stall_s = stall_s
        self._members: dict[str, MemberInfo] = {}
        self._links: dict[str, Link] = {}
        self._running: dict[Link, None] = {}  # those, and replaced ones that still close
        self._lane_desk = LaneAcceptor(network)
        self._pairs: dict[str, PeerLink] = {}
        # To whom the master may not take a link for granted: it is told when there is one. It lasts
        # beyond a session: a link may break when the next one has begun and its first view is on its way.
        self._doubted: set[str] = set()
        self._handshakes: dict[str, trio.CancelScope] = {}  # accepted, not yet a link
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._trailing: dict[str, list[tuple[int, trio.CancelScope]]] = {}
        self._closed_sent_bytes = 0
        self._closed_received_bytes = 0

    # ------------------------------------------------------------ for everyone

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the links up until cancelled; then close them all."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for member in self._members.values():
                    self._start_pair(member)
                task_status.started()
                await self._keep_watch()
        finally:
            self._nursery = None
            for link in list(self._links.values()):
                link.close("this node stopped")
            for scope in list(self._handshakes.values()):
                scope.cancel()

    async def _keep_watch(self) -> None:
        while True:
            while not self._running:
                await self._changed.wait()
            tick_s = min(LANE_STALL_SHARE * self._stall_s, self.silence_s) / WATCH_TICKS
            await trio.sleep(tick_s)
            for link in list(self._running):
                link.look_after(tick_s)

    def set_members(
        self, members: Sequence[MemberInfo], *, back: bool = False, new_master: bool = False
    ) -> None:
        """Take over a view: cut off who left, start dialling who came.

        Args:
          back: it is the first one of another session with the same master. To all others we have left
            and come back, though no view told us: what the master had arranged for us is void, there
            and here, and the others have ended their links to us.
          new_master: it is the first one of this master. It knows of no route that another one had
            arranged; links that follow from the view stay, and with them what is being reduced.
        """
        before, self._members = self._members, {member.peer: member for member in members}
        if self.me not in self._members:
            self._members = {}  # we are out: so is everybody else, as seen from here

        def stays(peer: str) -> bool:
            now = self._members.get(peer)
            return now is not None and peer in before and now.number == before[peer].number

        for peer in before:
            # Who joined anew starts anew, with everybody; so do we.
            pair = self._pairs.get(peer)
            void = back or (new_master and pair is not None and pair.route is not None)
            if void or not stays(peer) or not stays(self.me):
                self._cut_off(peer, "it left the view")
        for member in self._members.values():
            self._start_pair(member)
        self._wake()

    async def link(self, peer: str, deadline_s: float = LINK_WAIT_S) -> Link:
        """The link to a member, waiting for it to come up.

        Args:
          deadline_s: how long to wait, from now.

        Raises:
          PeerLostError: the peer is not in the view or leaves it, or the wait was in vain.
        """
        if self._up(peer) is None:
            with trio.move_on_after(deadline_s):
                while peer in self._members and self._up(peer) is None:
                    await self._changed.wait()
        if peer not in self._members:
            raise PeerLostError(peer, "not in the view")
        link = self._up(peer)
        if link is None:
            pair = self._pairs.get(peer)
            why = (pair.error if pair is not None else "") or "it did not dial us"
            raise PeerLostError(peer, f"no link within {deadline_s:g} s ({why})")
        return link

    def _up(self, peer: str) -> Link | None:
        link = self._links.get(peer)
        return None if link is None or link.lost.is_set() else link

    async def send(self, peer: str, message: Message, deadline_s: float = LINK_WAIT_S) -> None:
        """Send a message to a member; raises PeerLostError as ``link`` and ``Link.send`` do."""
        link = await self.link(peer, deadline_s)
        await link.send(message)

    def register(
        self, key: Key, sink: Sink, *, threads: bool = False
    ) -> AbstractContextManager[None]:
        """See ``FrameRouter.register``."""
        return self.router.register(key, sink, threads=threads)

    def forget_through(self, round_: int, attempt: int) -> None:
        """See ``FrameRouter.forget_through``."""
        self.router.forget_through(round_, attempt)

    def start_trailing(
        self, peer: str, round_: int, task: Callable[[], Awaitable[None]]
    ) -> trio.CancelScope:
        """Run a task that sends a round to a member nobody waits for.

        It may outlive the reduction that starts it, but not the hub, and tasks of no more than
        ``TRAILING_MAX`` rounds run per member: the oldest round is given up for a new one.

        Returns:
          What cancels it.
        """
        if self._nursery is None:
            raise LocalProtocolError("the hub is not running")
        scope = trio.CancelScope()
        tasks = self._trailing.setdefault(peer, [])
        tasks.append((round_, scope))
        rounds = list(dict.fromkeys(trailing_round for trailing_round, _scope in tasks))
        for trailing_round, trailing_scope in tasks:
            if trailing_round in rounds[:-TRAILING_MAX]:
                trailing_scope.cancel()
        self._nursery.start_soon(self._trail, peer, (round_, scope), task)
        return scope

    async def _trail(
        self,
        peer: str,
        entry: tuple[int, trio.CancelScope],
        task: Callable[[], Awaitable[None]],
    ) -> None:
        try:
            with entry[1]:
                await task()
        finally:
            self._trailing[peer].remove(entry)
            if not self._trailing[peer]:
                del self._trailing[peer]

    def stop_trailing(self, round_: int) -> None:
        """Stop sending what is left of a round that is void or repeated."""
        for tasks in self._trailing.values():
            for trailing_round, scope in tasks:
                if trailing_round == round_:
                    scope.cancel()

    def is_in_sync(self, peer: str) -> bool:
        """Whether the view says so."""
        return peer in self._members and self._members[peer].in_sync

    @property
    def send_priority(self) -> SendPriority:
        """Which frames of this node go before which."""
        return self._node.send_priority

    @property
    def links(self) -> dict[str, Link]:
        """The links that are up, by peer."""
        return {peer: link for peer, link in self._links.items() if not link.lost.is_set()}

    @property
    def sent_bytes(self) -> int:
        """Bytes of frames sent over all links, past ones too."""
        return self._closed_sent_bytes + sum(link.sent_bytes for link in self._running)

    @property
    def received_bytes(self) -> int:
        """Bytes of frames received over all links, past ones too."""
        return self._closed_received_bytes + sum(link.received_bytes for link in self._running)

    def take_measurements(self) -> Measurements:
        """What the lines carried since the last call, and how long they were busy.

        Per member only of links that are up; a link that ended meanwhile counts in the sums.
        """
        sent_to = {peer: link.sent_meter.take() for peer, link in self._links.items()}
        return Measurements(
            sent=self._node.sent.take(),
            received=self._node.received.take(),
            sent_to={peer: reading for peer, reading in sent_to.items() if reading.carried_bytes},
        )

    # ------------------------------------------------------------ accepting

    async def handle_channel(self, channel: Channel) -> None:
        """Make a link of an accepted control stream and carry it to its end.

        Raises:
          RemoteProtocolError: the other side has no business here, or did not go on.
        """
        peer = channel.peer
        link = self._new_link(peer, channel)
        try:
            if channel.party is not Party.PEER:
                raise RemoteProtocolError(f"{channel.remote_address} is no peer")
            # A peer that dials again has given up what it tried before.
            if (previous := self._handshakes.pop(peer, None)) is not None:
                previous.cancel()
            with ExitStack() as offered:  # lanes may be dialled as long as the link lives
                with trio.move_on_after(HANDSHAKE_S) as scope:
                    self._handshakes[peer] = scope
                    try:
                        await self._accept(link, offered)
                    finally:
                        if self._handshakes.get(peer) is scope:
                            del self._handshakes[peer]
                if scope.cancelled_caught:
                    raise RemoteProtocolError(f"peer {peer[:8]} did not finish its link")
                await self._carry(link)
        finally:
            await link.aclose()

    async def _accept(self, link: Link, offered: ExitStack) -> None:
        try:
            hello = await link.messages.receive_expected(LinkHello)
            refusal = version_refusal(hello) or await self._stranger_refusal(link.peer)
            if refusal is not None:
                await link.messages.send(refusal)
                raise RemoteProtocolError(f"refused peer {link.peer[:8]}: {refusal.reason}")
            keys = keys_for(hello)
            offered.enter_context(self._lane_desk.offer(keys, link))
            await welcome_link(link.messages, keys)
            await link.wait_lane()
        except trio.EndOfChannel:
            raise RemoteProtocolError(f"peer {link.peer[:8]} hung up on its link") from None

    async def _stranger_refusal(self, peer: str) -> Refused | None:
        """Wait for the view that names the peer; say why not if it does not come."""
        with trio.move_on_after(STRANGER_WAIT_S):
            while True:
                pair = self._pairs.get(peer)
                if pair is not None and not pair.dials:
                    return None
                await self._changed.wait()
        why = "you are not in my view" if peer not in self._members else "it is I who dials"
        return Refused(RefusalCode.PROTOCOL, why)

    async def handle_lane(self, stream: trio.abc.Stream) -> None:
        """Give an accepted lane to its link and hold it until the lane's end.

        Raises:
          RemoteProtocolError: it belongs to no link, or its dialer does not have the keys.
        """
        lane = None
        with trio.move_on_after(HANDSHAKE_S):
            lane = await self._lane_desk.accept(stream)
        if lane is None:
            raise RemoteProtocolError("a lane that was never opened")
        await lane.finished.wait()

    # ------------------------------------------------------------ routes

    def set_route(self, route: Route) -> None:
        """The master says how to get to a member from now on."""
        if (pair := self._pairs.get(route.peer)) is not None:
            pair.take(route)
            self._wake()

    def _start_pair(self, member: MemberInfo) -> None:
        me = self._members.get(self.me)
        if me is None or not are_linked(me, member):
            return
        pair = self._pairs.get(member.peer)
        if pair is None:
            pair = self._pairs[member.peer] = PeerLink(
                member,
                me,
                self._network,
                up=lambda: self._up(member.peer) is not None,
                new_link=self._new_link,
                carry=self._carry,
                tell=lambda message: self.tell_master(message),
                doubt=lambda: self._doubted.add(member.peer),
                accepts=(self.handle_channel, self.handle_lane),
            )
        pair.look(member, me, self._nursery)

    # ------------------------------------------------------------ both

    def _new_link(self, peer: str, channel: Channel) -> Link:
        return Link(
            peer,
            channel.stream,
            self._node,
            self._dispatch,
            stall_s=self._stall_s,
            silence_s=self.silence_s,
            rules=self.rules,
        )

    async def _dispatch(self, peer: str, message: Message) -> None:
        if isinstance(message, Refused):
            raise RemoteProtocolError(f"peer {peer[:8]} ended the link: {message.reason}")
        await self.on_message(peer, message)

    async def _carry(self, link: Link, dial: DialLane | None = None) -> None:
        """Publish a link that has a lane, and run it to its end."""
        peer = link.peer
        if peer not in self._members or peer not in self._pairs:
            raise RemoteProtocolError(f"peer {peer[:8]} left the view while it made its link")
        if (old := self._links.get(peer)) is not None:
            old.close("replaced by a newer link")
        self._links[peer] = link
        self._running[link] = None
        pair = self._pairs[peer]
        pair.linked()
        if peer in self._doubted:
            self._doubted.discard(peer)
            pair.tell_works()
        self._wake()
        try:
            await link.run(dial)
        finally:
            del self._running[link]
            self._closed_sent_bytes += link.sent_bytes
            self._closed_received_bytes += link.received_bytes
            if self._links.get(peer) is link:
                del self._links[peer]
                pair.error = f"the last link was lost: {link.reason}"
                if peer in self._members and self._nursery is not None:
                    self._doubted.add(peer)
                    self.tell_master(LinkBroken(peer))
            self._wake()

    def _cut_off(self, peer: str, reason: str) -> None:
        if (link := self._links.get(peer)) is not None:
            link.close(reason)
        if (pair := self._pairs.pop(peer, None)) is not None:
            pair.stop()
        if (handshake := self._handshakes.get(peer)) is not None:
            handshake.cancel()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


async def _refuse(_peer: str, message: Message) -> None:
    raise RemoteProtocolError(f"nobody here handles a {type(message).__name__}")

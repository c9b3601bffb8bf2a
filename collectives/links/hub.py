"""The links of a node: one to each other member of the view, kept up as long as both are in it.

Of two members one dials, again and again (``peer_link``). The other accepts, but only a peer that
its own view, or the route that the master has arranged, lets it expect. The view may be a moment
late, so a peer that is not expected waits a little before it is refused. A link that was replaced
at the other side (the old one broke and this side did not notice) is replaced here. A link to a
peer that leaves the view is closed at once.

    run                     one nursery; the node's
     ├── keep_watch         calls ``Link.watch`` of all links at regular intervals
     ├── PeerLink.keep      one per member that this node dials or waits for at a relay
     └── trailing tasks     of reductions: results for receivers that no other node waits for

    handle_channel          one per accepted control stream, in the tasks of ``Network.serve``
    handle_lane             one per accepted lane, likewise; holds the stream for its link
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import trio
from attrs import evolve

from ...protocol import messages as m
from ...protocol.dial_order import are_linked
from ...protocol.errors import LocalProtocolError, PeerLostError, RemoteProtocolError
from ...protocol.network.interface import Channel, Network
from ...protocol.trust.authority import Party
from ...protocol.wakeups import Pulse
from .buffer_pool import BufferPool
from .dialling.handshake import LaneAcceptor, keys_for, version_refusal, welcome_link
from .dialling.peer_link import HANDSHAKE_S, PeerLink
from .frame_routing import FrameRouter, Key, Sink
from .lane_pool import DialLane
from .link import WATCH_TICKS, Link, OnMessage
from .link_parts import LANE_STALL_S, CarriedBytes, LaneRules, LinkRules, SharedByLinks
from .rates.line_watch import LOOK_S, LineWatch
from .rates.rate_limiter import RateLimiter
from .rates.rate_meter import Measurements
from .rates.send_priority import SendPriority

UNEXPECTED_WAIT_S = 5.0  # this node's view may come this much later than the other side's
LINK_WAIT_S = 15.0  # how long a caller waits for a link unless it says otherwise


class LinkHub:
    """See the top of this file.

    Attributes:
      me: this node's peer id.
      router: the table of sinks for frames.
      buffers: memory for chunks, used again round after round.
      trailing: tasks of reductions that may outlive them.
      on_message: called with each message that arrives on a link's control stream, one at a time
        per link; it should not wait for long. A RemoteProtocolError that it raises ends the link.
      tell_master: called with messages to the master about routes and links; by default dropped.

    Args:
      upload, download: caps on what all lanes over sockets together carry; None: no cap.
      rules: of links made before ``configure``; None: without a limit on silence.
    """

    def __init__(
        self,
        network: Network,
        me: str,
        *,
        on_message: OnMessage | None = None,
        tell_master: Callable[[m.Message], None] = lambda _message: None,
        upload: RateLimiter | None = None,
        download: RateLimiter | None = None,
        rules: LinkRules | None = None,
    ) -> None:
        self.me = me
        self.router = FrameRouter()
        self.buffers = BufferPool()
        self.on_message: OnMessage = on_message if on_message is not None else _refuse
        self.tell_master = tell_master
        self._network = network
        line = LineWatch(upload)
        self._shared = SharedByLinks(
            self.router, download, line, send_priority=SendPriority(spare=line.spare)
        )
        self._rules = rules or LinkRules()  # of links made from now on
        self._members: dict[str, m.MemberInfo] = {}
        self._peer_links: dict[str, PeerLink] = {}
        self._links: dict[str, Link] = {}  # the newest of each peer
        self._running: dict[Link, None] = {}  # those, and replaced ones that still close
        # Peers to which the master does not know of a link: it is told when there is one. An entry
        # lasts beyond a session: a link may break when the next one has begun and its first view is
        # on its way.
        self._unconfirmed: set[str] = set()
        self._lane_acceptor = LaneAcceptor(network)
        self._handshakes: dict[str, trio.CancelScope] = {}  # of accepted streams, by peer
        self._changed = Pulse()
        self._nursery: trio.Nursery | None = None  # while it runs
        self.trailing = TrailingTasks()
        self._ended = CarriedBytes()

    # ------------------------------------------------------------ running, and the view

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the links up until cancelled; then close all of them."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = self.trailing.nursery = nursery
                for member in self._members.values():
                    self._update_peer_link(member)
                task_status.started()
                while True:
                    while not self._running:
                        await self._changed.wait()
                    tick_s = min(LANE_STALL_S, self._rules.silence_s) / WATCH_TICKS
                    # Later the looks that come with acknowledgements are often enough.
                    if self._shared.line.learns:
                        tick_s = LOOK_S
                        if any(link.lanes.sending for link in self._running):
                            self._shared.line.look(trio.current_time())
                    await trio.sleep(tick_s)
                    for link in list(self._running):
                        link.watch(tick_s)
        finally:
            self._nursery = self.trailing.nursery = None
            for link in list(self._links.values()):
                link.close("this node stopped")
            for scope in list(self._handshakes.values()):
                scope.cancel()

    def set_members(
        self, members: Sequence[m.MemberInfo], *, back: bool = False, new_master: bool = False
    ) -> None:
        """Take over a view: close the links to peers that left, dial those that came.

        Args:
          back: this is the first view of a new session with the same master. For the other members
            this node has left and come back, though no view told it: the routes that the master had
            arranged for it are void at both ends, and the others have ended their links to it.
          new_master: this is the first view of this master. It knows of no route that an earlier
            master had arranged; links that follow from the view stay, with what they reduce.
        """
        before, self._members = self._members, {member.peer: member for member in members}
        if self.me not in self._members:
            self._members = {}  # this node is not in the view, so it has no links

        def stays(peer: str) -> bool:
            now = self._members.get(peer)
            return now is not None and peer in before and now.number == before[peer].number

        for peer in before:
            # A member that joined again needs new links to all; so does this node.
            peer_link = self._peer_links.get(peer)
            arranged = peer_link is not None and peer_link.route is not None
            void = back or (new_master and arranged)
            if void or not stays(peer) or not stays(self.me):
                self._cut_off(peer, "it left the view")
        for member in self._members.values():
            self._update_peer_link(member)
        self._changed.notify_all()

    async def link(self, peer: str, deadline_s: float = LINK_WAIT_S) -> Link:
        """Wait for the link to a member to come up, and return it.

        Args:
          deadline_s: how long to wait, from now.

        Raises:
          PeerLostError: the peer is not in the view or leaves it, or no link came up in time.
        """
        if self._up(peer) is None:
            with trio.move_on_after(deadline_s):
                while peer in self._members and self._up(peer) is None:
                    await self._changed.wait()
        if peer not in self._members:
            raise PeerLostError(peer, "not in the view")
        link = self._up(peer)
        if link is None:
            peer_link = self._peer_links.get(peer)
            why = (peer_link.error if peer_link is not None else "") or "it did not dial this node"
            raise PeerLostError(peer, f"no link within {deadline_s:g} s ({why})")
        return link

    def _up(self, peer: str) -> Link | None:
        link = self._links.get(peer)
        return None if link is None or link.lost.is_set() else link

    def register(
        self, key: Key, sink: Sink, *, threads: bool = False
    ) -> AbstractContextManager[None]:
        """See ``FrameRouter.register``."""
        return self.router.register(key, sink, threads=threads)

    def is_in_sync(self, peer: str) -> bool:
        """Return whether the view has the peer as a member in sync."""
        return peer in self._members and self._members[peer].in_sync

    def configure(
        self, *, rules: LaneRules, silence_s: float, donor_share: float | None = None
    ) -> None:
        """Apply the run's spec, which a peer gets when it attaches; links made later use it.

        Args:
          silence_s: a link without a byte for so long is given up.
          donor_share: the line's least for copies of the state in a round; None leaves it.
        """
        self._rules = evolve(self._rules, lanes=rules, silence_s=silence_s)
        if donor_share is not None:
            self._shared.send_priority.share = donor_share

    @property
    def links(self) -> dict[str, Link]:
        """The links that are up, by peer."""
        return {peer: link for peer, link in self._links.items() if not link.lost.is_set()}

    @property
    def sent_bytes(self) -> int:
        """Bytes of frames sent over all links, past ones too."""
        return self._ended.sent + sum(link.lanes.sent_bytes for link in self._running)

    @property
    def received_bytes(self) -> int:
        """Bytes of frames received over all links, past ones too."""
        return self._ended.received + sum(link.lanes.received_bytes for link in self._running)

    def count_retransmitted(self) -> int:
        """Return how many bytes the kernel has sent again over all links, past ones too."""
        return self._ended.retransmitted + sum(
            link.lanes.count_retransmitted() for link in self._running
        )

    def take_measurements(self) -> Measurements:
        """Return what the lines carried since the last call, and how long they were busy.

        Readings by member are of links that are up; a link that ended meanwhile counts in the sums.
        """
        sent_to = {peer: link.sent_meter.take() for peer, link in self._links.items()}
        return Measurements(
            sent=self._shared.sent.take(),
            received=self._shared.received.take(),
            sent_to={peer: reading for peer, reading in sent_to.items() if reading.carried_bytes},
            best_bytes_per_s=self._shared.line.take_best_rate(),
        )

    # ------------------------------------------------------------ accepting

    async def handle_channel(self, channel: Channel) -> None:
        """Make a link of an accepted control stream and carry it to its end.

        Raises:
          RemoteProtocolError: the other side is not expected, or did not finish the link in time.
        """
        peer = channel.peer
        link = self._new_link(peer, channel)
        try:
            if channel.party is not Party.PEER:
                raise RemoteProtocolError(f"{channel.remote_address} has no certificate of a peer")
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
            hello = await link.messages.receive_expected(m.LinkHello)
            refusal = version_refusal(hello) or await self._check_expected(link.peer)
            if refusal is not None:
                await link.messages.send(refusal)
                raise RemoteProtocolError(f"refused peer {link.peer[:8]}: {refusal.reason}")
            keys = keys_for(hello)
            offered.enter_context(self._lane_acceptor.offer(keys, link.lanes))
            await welcome_link(link.messages, keys)
            await link.lanes.wait_lane()
        except trio.EndOfChannel:
            raise RemoteProtocolError(f"peer {link.peer[:8]} hung up on its link") from None

    async def _check_expected(self, peer: str) -> m.Refused | None:
        """Wait for the view or route that lets the peer dial; return a refusal if none comes."""
        with trio.move_on_after(UNEXPECTED_WAIT_S):
            while True:
                peer_link = self._peer_links.get(peer)
                if peer_link is not None and not peer_link.dials:
                    return None
                await self._changed.wait()
        why = "you are not in my view" if peer not in self._members else "I dial this link, not you"
        return m.Refused(m.RefusalCode.PROTOCOL, why)

    async def handle_lane(self, stream: trio.abc.Stream) -> None:
        """Give an accepted lane to its link and hold it until the lane's end.

        Raises:
          RemoteProtocolError: it belongs to no link, its dialer does not have the keys, or it was
            not opened in time.
        """
        lane = None
        with trio.move_on_after(HANDSHAKE_S):
            lane = await self._lane_acceptor.accept(stream)
        if lane is None:
            raise RemoteProtocolError(f"a lane was not opened within {HANDSHAKE_S:g} s")
        await lane.finished.wait()

    # ------------------------------------------------------------ routes

    def set_route(self, route: m.Route) -> None:
        """Reach a member over the route that the master has arranged, from now on."""
        if (peer_link := self._peer_links.get(route.peer)) is not None:
            peer_link.set_route(route)
            self._changed.notify_all()

    def _update_peer_link(self, member: m.MemberInfo) -> None:
        me = self._members.get(self.me)
        if me is None or not are_linked(me, member):
            return
        peer_link = self._peer_links.get(member.peer)
        if peer_link is None:
            peer_link = self._peer_links[member.peer] = PeerLink(
                member,
                me,
                self._network,
                is_up=lambda: self._up(member.peer) is not None,
                new_link=self._new_link,
                carry=self._carry,
                tell_master=lambda message: self.tell_master(message),
                unconfirm=lambda: self._unconfirmed.add(member.peer),
                accept=(self.handle_channel, self.handle_lane),
            )
        peer_link.update(member, me, self._nursery)

    # ------------------------------------------------------------ dialled and accepted links

    def _new_link(self, peer: str, channel: Channel) -> Link:
        return Link(peer, channel.stream, self._shared, self._dispatch, self._rules)

    async def _dispatch(self, peer: str, message: m.Message) -> None:
        if isinstance(message, m.Refused):
            raise RemoteProtocolError(f"peer {peer[:8]} ended the link: {message.reason}")
        await self.on_message(peer, message)

    async def _carry(self, link: Link, dial: DialLane | None = None) -> None:
        """Publish a link that has a lane, and run it to its end."""
        peer = link.peer
        if peer not in self._members or peer not in self._peer_links:
            raise RemoteProtocolError(f"peer {peer[:8]} left the view while it made its link")
        if (old := self._links.get(peer)) is not None:
            old.close("replaced by a newer link")
        self._links[peer] = link
        self._running[link] = None
        peer_link = self._peer_links[peer]
        peer_link.note_link()
        if peer in self._unconfirmed:
            self._unconfirmed.discard(peer)
            peer_link.report_works()
        self._changed.notify_all()
        try:
            await link.run(dial)
        finally:
            del self._running[link]
            self._ended.add(
                link.lanes.sent_bytes, link.lanes.received_bytes, link.lanes.count_retransmitted()
            )
            if self._links.get(peer) is link:
                del self._links[peer]
                peer_link.error = f"the last link was lost: {link.reason}"
                if peer in self._members and self._nursery is not None:
                    self._unconfirmed.add(peer)
                    self.tell_master(m.LinkBroken(peer))
            self._changed.notify_all()

    def _cut_off(self, peer: str, reason: str) -> None:
        if (link := self._links.get(peer)) is not None:
            link.close(reason)
        if (peer_link := self._peer_links.pop(peer, None)) is not None:
            peer_link.stop()
        if (handshake := self._handshakes.get(peer)) is not None:
            handshake.cancel()


async def _refuse(_peer: str, message: m.Message) -> None:
    raise RemoteProtocolError(f"this node takes no {type(message).__name__}")


# ---------------------------------------------------------------- trailing tasks


# Rounds that a member outside the contributors may lag behind in what it is sent. Each holds one
# encoded result in memory; a member that lags further has to be resynced anyway.
TRAILING_MAX = 4


class TrailingTasks:
    """The trailing tasks of a node, by member and round. Made and owned by ``LinkHub``.

    Attributes:
      nursery: the hub's, while it runs.
    """

    def __init__(self) -> None:
        self.nursery: trio.Nursery | None = None
        self._by_peer: dict[str, list[tuple[int, trio.CancelScope]]] = {}

    def start(
        self, peer: str, round_: int, task: Callable[[], Awaitable[None]]
    ) -> trio.CancelScope:
        """Run a task that sends a round to a member that no other node waits for.

        It may outlive the reduction that starts it, but not the hub. Tasks of no more than
        ``TRAILING_MAX`` rounds run per member: the oldest round is given up for a new one.

        Returns:
          The scope that cancels the task.

        Raises:
          LocalProtocolError: the hub is not running.
        """
        if self.nursery is None:
            raise LocalProtocolError("the hub is not running")
        scope = trio.CancelScope()
        tasks = self._by_peer.setdefault(peer, [])
        tasks.append((round_, scope))
        rounds = list(dict.fromkeys(trailing_round for trailing_round, _scope in tasks))
        for trailing_round, trailing_scope in tasks:
            if trailing_round in rounds[:-TRAILING_MAX]:
                trailing_scope.cancel()
        self.nursery.start_soon(self._run, peer, (round_, scope), task)
        return scope

    async def _run(
        self,
        peer: str,
        entry: tuple[int, trio.CancelScope],
        task: Callable[[], Awaitable[None]],
    ) -> None:
        try:
            with entry[1]:
                await task()
        finally:
            self._by_peer[peer].remove(entry)
            if not self._by_peer[peer]:
                del self._by_peer[peer]

    def has(self, round_: int) -> bool:
        """Return whether any of the round's tasks still run."""
        tasks = itertools.chain.from_iterable(self._by_peer.values())
        return any(trailing_round == round_ for trailing_round, _scope in tasks)

    def stop(self, round_: int) -> None:
        """Stop sending what is left of a round that is void or repeated."""
        for tasks in self._by_peer.values():
            for trailing_round, scope in tasks:
                if trailing_round == round_:
                    scope.cancel()

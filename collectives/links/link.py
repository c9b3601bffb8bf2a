"""A link: everything between this node and one other member.

One control stream (messages, inside TLS) and some lanes (frames of bulk bytes). The lanes have no
static split: a frame goes to the lane that is idle first. Lanes may break, and stall, and are
replaced; how many there are follows what they carry (``lane_count``). The link is lost when its
control stream breaks or is silent for ``silence_s`` (both sides send a ``Heartbeat`` several times in
that span), when no lane has worked for a while, or when the other side sends what it never should.
Then all of it is closed, ``lost`` is set, and whoever waits is told.

    run                    until the link is lost; closes all its streams
     ├── read_messages     control stream -> on_message
     ├── write_messages    outbox of messages -> control stream
     ├── acknowledge       tells the other side what came
     ├── keep_lanes        opens and retires lanes; at the dialer
     └── carry_lane        one per lane: ``LinkLane.run``, then what did not arrive goes to others

The hub's watch calls ``look_after`` now and then, which counts silence and how long nothing moves.

Nothing is ever sent from the caller's task: a caller that is cancelled in the middle of a frame
would tear the lane. It may leave a frame that is still queued; one that is on its way is finished.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from ...protocol.connection_phases import LINK, LINK_GREETING
from ...protocol.errors import PeerLostError, RemoteProtocolError
from ...protocol.message_quota import LINK_ITEMS_PER_S, Quota
from ...protocol.messages import (
    LANES_OPEN_MAX,
    Heartbeat,
    LaneReceived,
    LanesReceived,
    LanesWanted,
    Message,
)
from ...protocol.network.stream import MessageStream
from .event_loop import Loop
from .lane_count import LaneCount, Sample
from .link_lane import LinkLane
from .link_parts import LaneRules, LinkParts, NodeLinkParts, UsedLaneNumbers
from .message_queue import MessageQueue
from .paced_stream import PacedStream
from .rate_meter import Meter
from .send_priority import SendRank
from .send_queue import FrameSource, SendQueue

STALL_S = 20.0  # a link on which nothing moves for so long is lost, though something should
# Of that: after so much a lane on which nothing moves is given up, though others may well work ...
LANE_STALL_SHARE = 0.75
# ... and with no lane at all, the rest is left for finding another one.
LANELESS_SHARE = 0.25
WATCH_TICKS = 8  # looks in the time after which a lane counts as stalled, or silence as loss
LANE_OPEN_S = 10.0  # to dial a lane and prove the keys; then another one is tried
BACK_OFF_FIRST_S = 0.1  # before a lane is dialled again; doubled each time
BACK_OFF_LAST_S = 5.0
BACK_OFF_DOUBLINGS = 6
FIRST_LANE = (
    0  # the number of the lane with which a link is up; it is dialled by who makes the link
)
# What came is acknowledged so much later, with what came meanwhile. As long, and a trip, whoever sent
# it keeps it in memory.
ACKNOWLEDGE_S = 0.1
PROGRESS_S = 0.25  # how often progress of frames under way is told: see ``LaneReceived.bytes``
BEATS_PER_SILENCE = 4  # heartbeats in the time after which silence means loss

# This congestion control does not slow down for single losses: two of its lanes fill a line, and more
# only crowd each other out of its queue.
STEADY = "bbr"


OnMessage = Callable[[str, Message], Awaitable[None]]
DialLane = Callable[["Link", int], Awaitable[LinkLane]]


class Link:
    """See the top of this file. Made by ``LinkHub``.

    Attributes:
      peer: who is at the other end.
      lost: set once the link is lost; ``reason`` then says why.
      finished: set once all its streams are closed.
      sent_meter: what its lanes send.
      rules: for its lanes.

    Args:
      stall_s: when nothing moves for so long, though something should, the link is lost.
      silence_s: when nothing at all comes for so long, likewise.
    """

    def __init__(
        self,
        peer: str,
        stream: trio.abc.Stream,
        node: NodeLinkParts,
        on_message: OnMessage,
        *,
        stall_s: float = STALL_S,
        silence_s: float = math.inf,
        rules: LaneRules | None = None,
    ) -> None:
        self.peer = peer
        self.lost = trio.Event()
        self.finished = trio.Event()
        self.reason = ""
        self._control = PacedStream(stream)
        quota = Quota(trio.current_time(), LINK_ITEMS_PER_S)
        self.messages = MessageStream(self._control, LINK_GREETING, quota)
        self.sent_meter = Meter(node.sent)
        self.rules = rules if rules is not None else LaneRules()
        self._stream = stream
        self._on_message = on_message
        self._stall_s = stall_s
        self._silence_s = silence_s
        self._beats = itertools.count()
        self._unbeaten_s = 0.0  # since the last heartbeat
        self._silent_s = 0.0  # how long nothing has come
        self._mute_s = 0.0  # how long no message could be sent, though one waits
        self._control_sent_bytes = 0  # when that was last looked at
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None  # while it runs
        self._message_outbox: MessageQueue[Message] = MessageQueue()
        self._send_queue = SendQueue(node.send_priority)
        self._loop = Loop()
        self._parts = LinkParts(
            peer=peer,
            send_queue=self._send_queue,
            router=node.router,
            flows=node.flows,
            loop=self._loop,
            sent_meter=self.sent_meter,
            received_meter=Meter(node.received),
            news=self._note_news,
            lose_link=self.close,
            upload=node.upload,
            download=node.download,
        )
        self._numbers = UsedLaneNumbers()
        self._lanes: dict[int, LinkLane] = {}  # from their claim until nothing of them is open
        self._working: dict[int, LinkLane] = {}  # those that carry frames
        self._changed = trio.Event()  # of what ``_keep_lanes`` looks at
        self._opening_count = 0
        self._failures = 0  # of dialled lanes, in a row
        self._lane_trouble = ""  # why the last lane ended
        self._laneless_s = 0.0
        self._count = LaneCount(self.rules.first, self.rules.count_max, node.trials)
        self._node = node
        self._arrived_bytes = 0  # of all lanes, as far as the other side said
        self._wanted_there = 1
        self._wanted_told = self.rules.first
        self._dials = False
        self._next_number = FIRST_LANE + 1  # that we dial
        self._hurry = trio.Event()
        self._news = trio.Event()
        self._news_noted = False  # set from lanes' threads too; cleared before what came is read
        self._past_sent_bytes = 0  # of lanes that are gone
        self._past_received_bytes = 0
        self._past_arrived_bytes = 0

    # ------------------------------------------------------------ for everyone

    async def send(self, message: Message) -> None:
        """Send on the control stream; returns when the network took it.

        Raises:
          PeerLostError: the link is lost; the message may or may not have arrived.

        Cancellation: safe; the message is sent or not.
        """
        if not await self._message_outbox.put(message):
            raise PeerLostError(self.peer, self.reason)

    async def send_from(
        self, source: FrameSource, rank: SendRank = SendRank.ROUND, age: int = 0
    ) -> None:
        """Send all frames of a source, over whichever lane is idle, in turn with others of its rank and age.

        Frames leave in order, but need not arrive in order. Each arrives once, or the link is lost: a lane
        that breaks gives what did not arrive to others.

        Returns when the network took the last one; see ``outlet.Load`` for how long frames must
        stay what they are.

        Raises:
          PeerLostError: the link is lost; the last frames may or may not have arrived.

        Cancellation: safe; frames that are on their way are finished, no others are taken.
        """
        if not await self._send_queue.drain(source, rank, age):
            raise PeerLostError(self.peer, self.reason)

    def wake(self) -> None:
        """A source may have more frames than when it was last asked; from any thread."""
        self._send_queue.wake()

    @property
    def sent_bytes(self) -> int:
        """Bytes of all frames sent, overhead and parts of frames included; some perhaps twice."""
        return self._past_sent_bytes + sum(lane.sent_bytes for lane in self._lanes.values())

    @property
    def received_bytes(self) -> int:
        """Bytes of all frames received, overhead and parts of frames included."""
        return self._past_received_bytes + sum(lane.received_bytes for lane in self._lanes.values())

    @property
    def lanes(self) -> tuple[LinkLane, ...]:
        """Those that carry frames, in order of their numbers."""
        return tuple(self._working[number] for number in sorted(self._working))

    def close(self, reason: str) -> None:
        """Give the link up; only the first reason is kept."""
        if self.lost.is_set():
            return
        self.reason = reason
        self.lost.set()
        self._message_outbox.close()
        self._send_queue.close()
        self._count.stop()
        self._scope.cancel()

    # ------------------------------------------------------------ for who makes it

    def make_lane(
        self, number: int, stream: trio.abc.Stream, send_key: bytes, receive_key: bytes
    ) -> LinkLane:
        return LinkLane(number, stream, send_key, receive_key, self._parts)

    def claim_lane(self, lane: LinkLane) -> None:
        """Make ``lane`` this link's, before its first record is sent.

        Raises:
          RemoteProtocolError: its number was used before, or there are too many.
        """
        full = len(self._lanes) >= LANES_OPEN_MAX
        if self.lost.is_set() or full or not self._numbers.use(lane.number):
            raise RemoteProtocolError(f"lane {lane.number} is not wanted")
        self._lanes[lane.number] = lane

    def forget_lane(self, lane: LinkLane) -> None:
        """It was claimed, but could not be opened."""
        self._lanes.pop(lane.number, None)

    def lane_opened(self, lane: LinkLane) -> None:
        """A claimed lane is open both ways: it carries frames as soon as the link runs."""
        self._working[lane.number] = lane
        self._wake()
        if self._nursery is not None:
            self._nursery.start_soon(self._guard, partial(self._carry_lane, lane))

    async def wait_lane(self) -> None:
        """Wait for the first lane."""
        while not self._working:
            await self._changed.wait()

    async def run(self, dial: DialLane | None = None) -> None:
        """Carry messages and frames until the link is lost; then close everything of it.

        Args:
          dial: makes one more lane, at the side that dials; it raises what cannot be helped now as
            OSError or as trio's errors of broken streams.
        """
        self._dials = dial is not None
        self.messages.phase = LINK
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    for task in (self._write_messages, self._acknowledge):
                        nursery.start_soon(self._guard, task)
                    for lane in self.lanes:
                        nursery.start_soon(self._guard, partial(self._carry_lane, lane))
                    if dial is not None:
                        nursery.start_soon(self._keep_lanes, dial, nursery)
                    await self._guard(self._read_messages)
        finally:
            self._nursery = None
            await self.aclose()

    async def aclose(self) -> None:
        """Close all streams at once, without goodbyes."""
        self.close("this node closed the link")
        if self.finished.is_set():
            return
        with trio.CancelScope(shield=True):  # forceful closing does not wait for anybody
            await trio.aclose_forcefully(self._stream)
            for lane in self._lanes.values():
                if not lane.finished.is_set():
                    await trio.aclose_forcefully(lane.stream)
                    lane.finished.set()
        self.finished.set()

    async def _guard(self, task: Callable[[], Awaitable[None]]) -> None:
        """The one place where the other side's faults, and the network's, end the link."""
        try:
            await task()
        except trio.EndOfChannel:
            self.close("the other side closed the link")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self.close(f"the connection broke ({error})")
        except (RemoteProtocolError, PeerLostError) as error:
            self.close(str(error))

    # ------------------------------------------------------------ messages

    async def _read_messages(self) -> None:
        while True:
            message = await self.messages.receive()
            self._silent_s = 0.0
            if isinstance(message, LanesReceived):
                self._take_acknowledged(message)
            elif isinstance(message, LanesWanted):
                self._wanted_there = message.count
                self._wake()
            elif not isinstance(message, Heartbeat):
                await self._on_message(self.peer, message)

    async def _write_messages(self) -> None:
        while True:
            job = await self._message_outbox.take()
            await self.messages.send(job.what)
            self._message_outbox.finish(job)

    # ------------------------------------------------------------ looking after it

    def look_after(self, elapsed_s: float) -> None:
        """Say now and then that we live; give up what does not move, and who is silent.

        Args:
          elapsed_s: time since the last call in which we were awake. Only that counts: after our own
            process was stopped, or the machine slept, what the others sent meanwhile is still to be
            read.
        """
        self._unbeaten_s += elapsed_s
        if self._unbeaten_s > self._silence_s / BEATS_PER_SILENCE - elapsed_s / 2:
            self._unbeaten_s = 0.0
            self._message_outbox.put_if_idle(Heartbeat(next(self._beats)))
        self._silent_s += elapsed_s
        if self._silent_s >= self._silence_s:
            self.close(f"nothing was heard for {self._silence_s:g} s")
        before_bytes, self._control_sent_bytes = self._control_sent_bytes, self._control.sent_bytes
        stuck = self._message_outbox.busy and self._control_sent_bytes == before_bytes
        self._mute_s = self._mute_s + elapsed_s if stuck else 0.0
        if self._mute_s >= self._stall_s:
            self.close(f"nothing could be sent for {self._stall_s:g} s")
        self._watch_lanes(elapsed_s)

    def _watch_lanes(self, elapsed_s: float) -> None:
        """Give up lanes on which nothing moves, and in the end the link."""
        stall_s = LANE_STALL_SHARE * self._stall_s
        for lane in list(self._lanes.values()):
            lane.watch(elapsed_s)
            if lane.still_s < stall_s:
                continue
            if lane.finished.is_set():
                self.close(f"it does not say what came on lane {lane.number}")
            lane.close(f"nothing moved for {stall_s:g} s")
        laneless_s = LANELESS_SHARE * self._stall_s
        self._laneless_s = 0.0 if self._working else self._laneless_s + elapsed_s
        if self._laneless_s >= laneless_s:
            self.close(f"no lane has worked for {laneless_s:g} s ({self._lane_trouble})")

    # ------------------------------------------------------------ what has arrived

    def _note_news(self) -> None:
        """Something came on a lane; from any thread."""
        self._silent_s = 0.0
        if not self._news_noted:
            self._news_noted = True
            self._loop.soon(self._set_news)

    def _set_news(self) -> None:
        self._news.set()

    def acknowledge_now(self) -> None:
        """All that was expected has come: the other side need not keep it in memory any longer."""
        self._hurry.set()

    async def _acknowledge(self) -> None:
        """Tell the other side what came, and how many lanes we want if that is not ours to do."""
        while True:
            if any(lane.receiving for lane in self._working.values()):  # a long frame
                with trio.move_on_after(PROGRESS_S):
                    await self._news.wait()
            else:
                await self._news.wait()
            with trio.move_on_after(ACKNOWLEDGE_S):
                await self._hurry.wait()
            self._hurry = trio.Event()
            self._news = trio.Event()
            self._news_noted = False
            received = [lane.take_news() for lane in self.lanes]
            if told := tuple(each for each in received if each is not None):
                await self.send(LanesReceived(told))
            if not self._dials and self._count.wanted != self._wanted_told:
                self._wanted_told = self._count.wanted
                await self.send(LanesWanted(self._wanted_told))

    def _take_acknowledged(self, message: LanesReceived) -> None:
        for received in message.lanes:
            lane = self._lanes.get(received.lane)
            if lane is not None:
                lane.acknowledge(received)
            elif received.closed:
                self._numbers.use(received.lane)  # it was dialled in vain, and must not come late
        before_bytes = self._arrived_bytes
        self._arrived_bytes = self._past_arrived_bytes + sum(
            lane.arrived_bytes for lane in self._lanes.values()
        )
        self._node.arrived_bytes += self._arrived_bytes - before_bytes
        sample = Sample(
            now_s=trio.current_time(),
            carried_bytes=self._arrived_bytes,
            lane_count=len(self._working),
            busy=all(lane.writing for lane in self._working.values()),
            others_bytes=self._node.arrived_bytes - self._arrived_bytes,
        )
        if not self._slows_on_loss:
            return
        if self._count.sample(sample, self.round_trip_s) != self._wanted_told:
            self._wake()
            if not self._dials:
                self._news.set()

    @property
    def _slows_on_loss(self) -> bool:
        """Whether losses slow our lanes down, so that more of them may carry more."""
        return any(lane.facts.congestion != STEADY for lane in self._working.values())

    @property
    def round_trip_s(self) -> float:
        """The shortest that any lane saw when it was opened; infinite: unknown."""
        return min((lane.facts.round_trip_s for lane in self._working.values()), default=math.inf)

    # ------------------------------------------------------------ lanes

    async def _carry_lane(self, lane: LinkLane) -> None:
        """Run a lane to its end, and settle what became of its frames."""
        try:
            await lane.run()
        finally:
            self._working.pop(lane.number, None)
            self._lane_trouble = lane.reason or self._lane_trouble
            self._wake()
        if (received := lane.take_news()) is not None:
            await self.send(LanesReceived((received,)))
        await lane.closed_there.wait()
        lane.give_back()
        del self._lanes[lane.number]
        self._past_sent_bytes += lane.sent_bytes
        self._past_received_bytes += lane.received_bytes
        self._past_arrived_bytes += lane.arrived_bytes

    async def _keep_lanes(self, dial: DialLane, nursery: trio.Nursery) -> None:
        while True:
            wanted = min(max(self._count.wanted, self._wanted_there), self.rules.count_max)
            active = [lane for lane in self.lanes if not lane.retiring]
            for _missing in range(wanted - len(active) - self._opening_count):
                self._opening_count += 1
                nursery.start_soon(self._guard, partial(self._open_lane, dial))
            for lane in active[max(wanted, 1) :]:
                lane.retire()
            self._wanted_told = self._count.wanted
            await self._changed.wait()

    async def _open_lane(self, dial: DialLane) -> None:
        number = self._next_number
        self._next_number += 1
        lane: LinkLane | None = None
        try:
            with trio.move_on_after(LANE_OPEN_S):
                lane = await dial(self, number)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._lane_trouble = str(error)
        except trio.EndOfChannel:
            self._lane_trouble = "the other side hung up on a lane"
        if lane is not None:
            self._failures = 0
            self._opening_count -= 1
            self.lane_opened(lane)
            return
        # The other side may hold it for open, and may even have sent something.
        await self.send(LanesReceived((LaneReceived(number, 0, 0, closed=True),)))
        await trio.sleep(min(BACK_OFF_FIRST_S * 2**self._failures, BACK_OFF_LAST_S))
        self._failures = min(self._failures + 1, BACK_OFF_DOUBLINGS)
        self._opening_count -= 1
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

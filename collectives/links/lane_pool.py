"""The lanes of one link: opened, counted, watched, and replaced when they break.

A lane in the pool:

    make_lane -> claim_lane -> start_lane: it carries frames -> closed here, then there: removed
                     └── forget_lane: it could not be opened

    start
     ├── keep_count   opens and retires lanes; only at the side that dialled the link
     └── carry        one per lane: ``LinkLane.run``, then other lanes send what did not arrive

The number of lanes follows what they carry (``lane_count``). Each side decides for what it sends;
the side that accepted the link tells the dialer how many it wants.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial

import trio
from attrs import define

from ...protocol.errors import RemoteProtocolError
from ...protocol.messages import LANES_OPEN_MAX, LaneReceived, LanesReceived, Message
from ...protocol.wakeups import Pulse
from .lane_count import LaneCount, Sample
from .link_lane import LinkLane
from .link_parts import (
    LANE_STALL_S,
    LANELESS_S,
    CarriedBytes,
    LaneRules,
    LinkRules,
    SharedByLanes,
)

LANE_OPEN_S = 10.0  # to dial a lane and prove the keys; then another one is tried
BACK_OFF_FIRST_S = 0.1  # before a lane is dialled again; doubled each time
BACK_OFF_LAST_S = 5.0
BACK_OFF_DOUBLINGS = 6
# For which a link makes do with the lanes that it has, when no further one can be opened.
REFUSED_S = 60.0
CONGESTION_AGAIN_S = 60.0  # after which lanes ask again for the congestion control of the rules
FIRST_LANE = 0  # the number of the lane with which a link comes up; the link's dialer dials it

# This congestion control does not slow down for single losses: two of its lanes fill a line, and
# more only crowd each other out of its queue.
STEADY = "bbr"

DialLane = Callable[["LanePool", int], Awaitable[LinkLane]]
Task = Callable[[], Awaitable[None]]


@define(eq=False)
class _Opening:
    """Lanes that are dialled, and what became of the last ones.

    Attributes:
      count: of lanes that are dialled now.
      failures: of dialled lanes, in a row.
      refused_s: when no further lane could be opened; there were ``refused_at`` then.
    """

    count: int = 0
    failures: int = 0
    refused_s: float = -math.inf
    refused_at: int = 0
    next_number: int = FIRST_LANE + 1

    def count_max(self, rules: LaneRules) -> int:
        """Return how many lanes to open at most: not many more than could be opened lately."""
        if trio.current_time() < self.refused_s + REFUSED_S:
            return max(1, self.refused_at)
        return rules.count_max

    def take_number(self) -> int:
        number, self.next_number = self.next_number, self.next_number + 1
        return number


class UsedLaneNumbers:
    """Numbers of lanes. Each is good for one lane, for a lane's keys must never encrypt twice.

    Remembers the last ``LANES_OPEN_MAX`` numbers; older ones count as used.
    """

    def __init__(self) -> None:
        self._newest = -1
        self._used: set[int] = set()

    def use(self, number: int) -> bool:
        """Mark a number as used. Returns whether it was free until now."""
        if number in self._used or number <= self._newest - LANES_OPEN_MAX:
            return False
        self._newest = max(self._newest, number)
        self._used.add(number)
        self._used = {used for used in self._used if used > self._newest - LANES_OPEN_MAX}
        return True


class LanePool:
    """See the top of this file. Made and owned by ``Link``.

    Args:
      send: sends a message on the link's control stream.
    """

    def __init__(
        self,
        shared: SharedByLanes,
        rules: LinkRules,
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        self.rules = rules.lanes
        self._shared = shared
        self._send = send
        self._lanes: dict[int, LinkLane] = {}  # from their claim until both sides have closed them
        self._working: dict[int, LinkLane] = {}  # those that carry frames
        self._numbers = UsedLaneNumbers()
        self._removed = CarriedBytes()  # by lanes that were in the pool
        self._changed = Pulse()  # when ``_keep_count`` has to look again
        self._closed = False
        self._trouble = ""  # why the last lane ended, or could not be opened
        self._laneless_s = 0.0
        self._unasked_s = 0.0  # since lanes were refused their congestion control
        # How many lanes there should be.
        self._count = LaneCount(self.rules.first, self.rules.count_max)
        self._removed_arrived_bytes = 0  # on lanes that were in the pool, as ``LinkLane`` counts
        self._wanted_there = 1
        self._announced_count = self.rules.first
        # Opening them.
        self._start_task: Callable[[Task], None] | None = None  # while the link runs
        self._dials = False
        self._opening = _Opening()

    @property
    def working(self) -> tuple[LinkLane, ...]:
        """The lanes that carry frames, in order of their numbers."""
        return tuple(self._working[number] for number in sorted(self._working))

    @property
    def sent_bytes(self) -> int:
        """Bytes of all frames sent, overhead and parts of frames included; some perhaps twice."""
        return self._removed.sent + sum(lane.sent_bytes for lane in self._lanes.values())

    @property
    def received_bytes(self) -> int:
        """Bytes of all frames received, overhead and parts of frames included."""
        lanes = self._lanes.values()
        return self._removed.received + sum(lane.received_bytes for lane in lanes)

    def count_retransmitted(self) -> int:
        """Return how many bytes the kernel has sent again on all lanes; asks about open ones."""
        lanes = self._lanes.values()
        return self._removed.retransmitted + sum(lane.count_retransmitted() for lane in lanes)

    @property
    def receiving(self) -> bool:
        """Return whether a frame has begun to come on any lane and is not whole yet."""
        return any(lane.frames.receiving for lane in self._working.values())

    @property
    def sending(self) -> bool:
        """Return whether a frame was sent on any lane that is not known to have arrived."""
        return any(lane.frames.sending for lane in self._working.values())

    @property
    def round_trip_s(self) -> float:
        """The shortest round trip that any lane saw when it was opened; infinite if unknown."""
        return min((lane.facts.round_trip_s for lane in self._working.values()), default=math.inf)

    # ------------------------------------------------------------ opening a lane

    def make_lane(
        self, number: int, stream: trio.abc.Stream, send_key: bytes, receive_key: bytes
    ) -> LinkLane:
        return LinkLane(number, stream, send_key, receive_key, self._shared)

    def claim_lane(self, lane: LinkLane) -> None:
        """Add ``lane`` to the pool, before its first record is sent.

        Raises:
          RemoteProtocolError: its number was used before, there are too many, or the link is lost.
        """
        full = len(self._lanes) >= LANES_OPEN_MAX
        if self._closed or full or not self._numbers.use(lane.number):
            raise RemoteProtocolError(f"lane {lane.number} is not wanted")
        self._lanes[lane.number] = lane

    def forget_lane(self, lane: LinkLane) -> None:
        """Remove a claimed lane that could not be opened."""
        self._lanes.pop(lane.number, None)

    def start_lane(self, lane: LinkLane) -> None:
        """Let a claimed lane, now open both ways, carry frames as soon as the link runs."""
        self._working[lane.number] = lane
        self._changed.notify_all()
        if self._start_task is not None:
            self._start_task(partial(self._carry, lane))

    async def wait_lane(self) -> None:
        """Wait for the first lane."""
        while not self._working:
            await self._changed.wait()

    # ------------------------------------------------------------ running

    def start(self, start_task: Callable[[Task], None], dial: DialLane | None) -> None:
        """Carry frames on the lanes that are open, and keep their number right.

        Args:
          start_task: runs a task until the link is lost.
          dial: see ``Link.run``.
        """
        self._start_task, self._dials = start_task, dial is not None
        self._shared.node.links.count += 1
        if self._slows_on_loss:
            self._count.begin(self.round_trip_s, self._shared.node.links.count)
        for lane in self.working:
            start_task(partial(self._carry, lane))
        if dial is not None:
            start_task(partial(self._keep_count, dial, start_task))

    def close(self) -> None:
        """Take no more lanes: the link is lost."""
        if self._start_task is not None:
            self._shared.node.links.count -= 1
        self._closed, self._start_task = True, None

    async def aclose(self) -> None:
        """Close all streams at once, after the link's tasks have ended."""
        for lane in self._lanes.values():
            if not lane.finished.is_set():
                await trio.aclose_forcefully(lane.stream)
                lane.finished.set()

    async def _carry(self, lane: LinkLane) -> None:
        """Run a lane to its end, and give what did not arrive to other lanes."""
        try:
            await lane.run()
        finally:
            self._working.pop(lane.number, None)
            self._trouble = lane.reason or self._trouble
            self._changed.notify_all()
        if (received := lane.take_received()) is not None:
            await self._send(LanesReceived((received,)))
        await lane.closed_there.wait()
        lane.frames.give_back()
        del self._lanes[lane.number]
        self._removed.add(lane.sent_bytes, lane.received_bytes, lane.count_retransmitted())
        self._removed_arrived_bytes += lane.arrived_bytes

    async def _keep_count(self, dial: DialLane, start_task: Callable[[Task], None]) -> None:
        while True:
            count_max = self._opening.count_max(self.rules)
            wanted = min(max(self._count.wanted, self._wanted_there), count_max)
            active = [lane for lane in self.working if not lane.frames.retiring]
            for _missing in range(wanted - len(active) - self._opening.count):
                self._opening.count += 1
                start_task(partial(self._open_lane, dial))
            for lane in active[max(wanted, 1) :]:
                lane.frames.retire()
            self._announced_count = self._count.wanted
            await self._changed.wait()

    async def _open_lane(self, dial: DialLane) -> None:
        opening, number = self._opening, self._opening.take_number()
        lane: LinkLane | None = None
        try:
            with trio.move_on_after(LANE_OPEN_S):
                lane = await dial(self, number)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._trouble = str(error)
        except trio.EndOfChannel:
            self._trouble = "the other side hung up on a lane"
        if lane is not None:
            opening.failures = 0
            opening.count -= 1
            self.start_lane(lane)
            return
        if len(self._working) >= self.rules.first:  # it has what it needs
            opening.refused_s, opening.refused_at = trio.current_time(), len(self._working)
        # The other side may take it for open, and may even have sent something.
        await self._send(LanesReceived((LaneReceived(number, 0, 0, closed=True),)))
        await trio.sleep(min(BACK_OFF_FIRST_S * 2**opening.failures, BACK_OFF_LAST_S))
        opening.failures = min(opening.failures + 1, BACK_OFF_DOUBLINGS)
        opening.count -= 1
        self._changed.notify_all()

    # ------------------------------------------------------------ what has arrived

    def take_received(self) -> LanesReceived | None:
        """Return what is to be acknowledged; None if all of it was."""
        received = [lane.take_received() for lane in self.working]
        unsent = tuple(each for each in received if each is not None)
        return LanesReceived(unsent) if unsent else None

    def take_acknowledged(self, message: LanesReceived) -> None:
        """Take note of what came at the other side.

        Raises:
          RemoteProtocolError: it acknowledges what was not sent.
        """
        for received in message.lanes:
            lane = self._lanes.get(received.lane)
            if lane is not None:
                lane.acknowledge(received)
            elif received.closed:
                # The other side has given up dialling this lane: it must not come late.
                self._numbers.use(received.lane)
        self._shared.node.line.look(trio.current_time())
        on_lanes_bytes = sum(lane.arrived_bytes for lane in self._lanes.values())
        sample = Sample(
            now_s=trio.current_time(),
            carried_bytes=self._removed_arrived_bytes + on_lanes_bytes,
            lane_count=len(self._working),
            busy=all(lane.frames.writing for lane in self._working.values()),
            room=self._shared.node.line.has_room(
                (lane.on_socket for lane in self.working), self.round_trip_s
            ),
        )
        if (
            self._slows_on_loss
            and self._count.sample(sample, self.round_trip_s, self._shared.node.links.count)
            != self._announced_count
        ):
            self._changed.notify_all()

    @property
    def _slows_on_loss(self) -> bool:
        """Return whether losses are known to slow lanes down: more lanes may carry more then."""
        return any(lane.facts.congestion not in ("", STEADY) for lane in self._working.values())

    @property
    def has_new_count(self) -> bool:
        """Return whether the other side is to be told how many lanes this side wants."""
        return not self._dials and self._count.wanted != self._announced_count

    def take_wanted(self) -> int:
        self._announced_count = self._count.wanted
        return self._announced_count

    def set_wanted_there(self, count: int) -> None:
        self._wanted_there = count
        self._changed.notify_all()

    # ------------------------------------------------------------ watching

    def watch(self, elapsed_s: float) -> None:
        """Give up lanes on which nothing moves, and in the end the link."""
        self._unasked_s += elapsed_s
        if self._unasked_s >= CONGESTION_AGAIN_S:
            self._unasked_s = 0.0
            for lane in self.working:
                lane.choose_congestion(self.rules.congestion)
        lose_link = self._shared.lose_link
        for lane in list(self._lanes.values()):
            lane.watch(elapsed_s)
            if lane.still_s < LANE_STALL_S:
                continue
            if lane.finished.is_set():
                lose_link(f"the other side does not acknowledge what came on lane {lane.number}")
            lane.close(f"nothing moved for {LANE_STALL_S:g} s")
        self._laneless_s = 0.0 if self._working else self._laneless_s + elapsed_s
        if self._laneless_s >= LANELESS_S:
            lose_link(f"no lane has worked for {LANELESS_S:g} s ({self._trouble})")

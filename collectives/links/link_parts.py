"""Objects that several links or lanes share, and the rules for lanes.

LinkHub  makes  SharedByLinks   one per node
Link     makes  SharedByLanes   one per link; refers to its node's
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from attrs import Factory, define, frozen

from ...protocol.connection_phases import LINK, ConnectionPhase
from ...protocol.wakeups import Loop
from .frame_routing import FrameRouter
from .lane_count import COUNT_FIRST, COUNT_MAX, NodeLinks
from .rates.line_watch import LineWatch
from .rates.rate_limiter import RateLimiter
from .rates.rate_meter import Meter
from .rates.send_priority import SendBacklog, SendPriority
from .send_queue import SendQueue

# A lane on which nothing moves for so long, though something should, is given up, even if others
# work. Then a link without any lane has so long to find another one.
LANE_STALL_S, LANELESS_S = 15.0, 5.0
STALL_S = LANE_STALL_S + LANELESS_S  # after which a link is lost on which nothing moves
LANES_WAITING_MAX = 4  # of a link, for the line's pace, at a time


@frozen
class LaneRules:
    """The number and the kind of a link's lanes.

    Attributes:
      first: lanes to begin with.
      count_max: the most lanes that the link may open while more of them carry more.
      congestion: TCP's congestion control for them, where the kernel has it.
    """

    first: int = COUNT_FIRST
    count_max: int = COUNT_MAX
    congestion: str = "bbr"


@frozen
class LinkRules:
    """When a link is lost, and the rules for its lanes.

    Attributes:
      silence_s: the link is lost when nothing at all comes for this long.
      phase: the messages that may come on the control stream.
    """

    lanes: LaneRules = LaneRules()
    silence_s: float = math.inf
    phase: ConnectionPhase = LINK


@define(eq=False)
class CarriedBytes:
    """Bytes of frames that links, or lanes, had carried when they ended."""

    sent: int = 0
    received: int = 0
    retransmitted: int = 0

    def add(self, sent_bytes: int, received_bytes: int, retransmitted_bytes: int) -> None:
        self.sent += sent_bytes
        self.received += received_bytes
        self.retransmitted += retransmitted_bytes


@frozen(eq=False)
class SharedByLinks:
    """Objects that all links of a node share. ``LinkHub`` makes and owns them.

    Attributes:
      router: finds the sink of a frame.
      download: cap on what all lanes over sockets together receive; None: no cap.
      line: learns what the line carries, and paces the lanes by it and by the cap on sending.
      send_priority: decides which frames of all links go first.
      send_backlog: decides which links get more of the line.
      sent, received: meters of what all links carry.
      links: how many of them are up.
    """

    router: FrameRouter
    download: RateLimiter | None = None
    line: LineWatch = Factory(LineWatch)
    send_priority: SendPriority = Factory(SendPriority)
    send_backlog: SendBacklog = Factory(SendBacklog)
    sent: Meter = Factory(Meter)
    received: Meter = Factory(Meter)
    links: NodeLinks = Factory(NodeLinks)


@frozen(eq=False)
class SharedByLanes:
    """Objects that all lanes of a link share. ``Link`` makes and owns them.

    Attributes:
      peer: the peer id of the other side.
      node: what all links of this node share.
      send_queue: the frames that wait to be sent over the link.
      loop: the event loop, for lanes in threads.
      sent_meter, received_meter: meters of this link; they pass everything on to the node's.
      note_received: called, from any thread, when something came that must be acknowledged.
      lose_link: called with the reason when the other side breaks the protocol.
      turns: held by lanes in threads while their bytes wait for the line's pace. They wait first
        come, first served, as many of each link: links get equal parts whatever their lanes.
    """

    peer: str
    node: SharedByLinks
    send_queue: SendQueue
    loop: Loop
    sent_meter: Meter
    received_meter: Meter
    note_received: Callable[[], None]
    lose_link: Callable[[str], None]
    turns: threading.Semaphore = Factory(lambda: threading.Semaphore(LANES_WAITING_MAX))

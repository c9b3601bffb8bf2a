"""What links and lanes are made of and made by: shared parts, rules, numbers."""

from __future__ import annotations

from collections.abc import Callable

from attrs import Factory, define, frozen

from ...protocol.messages import LANES_OPEN_MAX
from .event_loop import Loop
from .fan_out import FanOutLimit
from .frame_routing import FrameRouter
from .lane_count import COUNT_FIRST, COUNT_MAX, LaneTrials
from .rate_limiter import RateLimiter
from .rate_meter import Meter
from .send_priority import SendPriority
from .send_queue import SendQueue


@frozen
class LaneRules:
    """How many lanes a link has, and of what kind.

    Attributes:
      first: lanes to begin with.
      count_max: as many as it may open while they carry more.
      congestion: TCP's congestion control for them, where the kernel has it.
    """

    first: int = COUNT_FIRST
    count_max: int = COUNT_MAX
    congestion: str = "bbr"


@define(eq=False)
class NodeLinkParts:
    """What all links of a node have in common.

    Attributes:
      upload, download: caps on what all lanes carry; None: no cap.
      sent, received: what they carry, measured.
      send_priority: which frames of all links go before which.
      trials: which link tries another number of lanes.
      arrived_bytes: what all links' other sides have acknowledged.
    """

    router: FrameRouter
    upload: RateLimiter | None = None
    download: RateLimiter | None = None
    flows: FanOutLimit = Factory(FanOutLimit)
    send_priority: SendPriority = Factory(SendPriority)
    sent: Meter = Factory(Meter)
    received: Meter = Factory(Meter)
    trials: LaneTrials = Factory(LaneTrials)
    arrived_bytes: int = 0


@define(eq=False)
class LinkParts:
    """What the lanes of one link have in common.

    Attributes:
      flows: the node's.
      upload, download: the node's caps; None: no cap.
      lose_link: told why, when the other side does what it never should.
      news: called, from any thread, when something has come: it should be acknowledged soon.
    """

    peer: str
    send_queue: SendQueue
    router: FrameRouter
    flows: FanOutLimit
    loop: Loop
    sent_meter: Meter
    received_meter: Meter
    news: Callable[[], None]
    lose_link: Callable[[str], None]
    upload: RateLimiter | None = None
    download: RateLimiter | None = None


class UsedLaneNumbers:
    """Lanes' numbers, each good for one lane: its keys must never encrypt twice.

    Remembers those of the last ``LANES_OPEN_MAX``; older ones count as used.
    """

    def __init__(self) -> None:
        self._newest = -1
        self._used: set[int] = set()

    def use(self, number: int) -> bool:
        """Whether it was free until now."""
        if number in self._used or number <= self._newest - LANES_OPEN_MAX:
            return False
        self._newest = max(self._newest, number)
        self._used.add(number)
        self._used = {used for used in self._used if used > self._newest - LANES_OPEN_MAX}
        return True

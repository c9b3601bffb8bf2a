"""A joiner's record of one donor: the blocks requested from it and the size of its window."""

from __future__ import annotations

import math
from collections.abc import Iterable

import trio
from attrs import Factory, define

from ..protocol.errors import PeerLostError, StateMismatchError
from ..protocol.messages import BlocksRefused, Index

# Blocks requested from a donor that are not here yet. The window grows while blocks come within
# WINDOW_S of their request, so that each donor stays busy and a slow one does not owe many blocks
# at the end.
WINDOW_FIRST = 2
WINDOW_MAX = 32
WINDOW_S = 1.0

# None: look for blocks to request again.
Item = Index | BlocksRefused | PeerLostError | StateMismatchError | None


@define(eq=False)
class DonorView:
    """A joiner's record of one donor.

    Attributes:
      inbox: its messages, and None after each block. Unbounded, but only requested things enter it.
      window: limit of outstanding blocks.
      outstanding: requested blocks with the time of the request.
      heard_s: time of its last block, or of a request while it owed nothing.
      asked_index: an answer to ``IndexRequest`` is due.
      gave: number of blocks that it served.
      refusals: number of refusals in a row.
      gone: the donor was dropped.
    """

    peer: str
    send: trio.MemorySendChannel[Item]
    inbox: trio.MemoryReceiveChannel[Item]
    window: int = WINDOW_FIRST
    outstanding: dict[int, float] = Factory(dict)
    heard_s: float = -math.inf
    asked_index: bool = False
    gave: int = 0
    refusals: int = 0
    gone: bool = False

    @property
    def has_room(self) -> bool:
        """Return whether half of the window is free; requests for single blocks cost too much."""
        return 2 * len(self.outstanding) <= self.window

    def came(self, block: int, now_s: float) -> None:
        """Take note of a block that came."""
        self.heard_s = now_s
        self.refusals = 0
        if (asked_s := self.outstanding.get(block)) is not None:
            if now_s - asked_s <= WINDOW_S:
                self.window = min(self.window + 1, WINDOW_MAX)
            else:
                self.window = max(self.window - 1, WINDOW_FIRST)


def owed_since(long_ago_s: float, donors: Iterable[DonorView]) -> list[int]:
    """Return blocks requested from one donor only, no later than a time; the oldest first."""
    asked_s: dict[int, list[float]] = {}
    for donor in donors:
        for block, when_s in donor.outstanding.items():
            asked_s.setdefault(block, []).append(when_s)
    owed = [(when[0], block) for block, when in asked_s.items() if len(when) == 1]
    return [block for when_s, block in sorted(owed) if when_s <= long_ago_s]

"""A donor as a joiner sees it: what it was asked for, and how much it is worth to ask it for at once."""

from __future__ import annotations

import math
from collections.abc import Iterable

import trio
from attrs import Factory, define

from ..protocol.errors import PeerLostError, StateMismatchError
from ..protocol.messages import BlocksRefused, Index

# Blocks asked of a donor and not yet here. It grows while blocks come within WINDOW_S of being asked
# for, so each donor is kept busy, and slow ones are not left with many blocks at the end.
WINDOW_FIRST = 2
WINDOW_MAX = 32
WINDOW_S = 1.0

# None: look for work again.
Item = Index | BlocksRefused | PeerLostError | StateMismatchError | None


@define(eq=False)
class DonorView:
    """A donor as the joiner sees it.

    Attributes:
      inbox: what it said, and that a block has come. Unbounded, but nothing enters it that was not
        asked for.
      window: how many blocks may be outstanding.
      outstanding: blocks asked for, with the time of asking.
      heard_s: when its last block came, or when it was asked while it owed nothing.
      asked_index: an answer to ``IndexRequest`` is due.
      gave: blocks it gave.
      refusals: in a row.
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
        """Half of its window is: requests for single blocks would cost more than they bring."""
        return 2 * len(self.outstanding) <= self.window

    def came(self, block: int, now_s: float) -> None:
        """It has given a block."""
        self.heard_s = now_s
        self.refusals = 0
        if (asked_s := self.outstanding.get(block)) is not None:
            if now_s - asked_s <= WINDOW_S:
                self.window = min(self.window + 1, WINDOW_MAX)
            else:
                self.window = max(self.window - 1, WINDOW_FIRST)


def owed_since(long_ago_s: float, donors: Iterable[DonorView]) -> list[int]:
    """Blocks that have been asked of one donor only, and not later than that; the oldest first."""
    asked_s: dict[int, list[float]] = {}
    for donor in donors:
        for block, when_s in donor.outstanding.items():
            asked_s.setdefault(block, []).append(when_s)
    owed = [(when[0], block) for block, when in asked_s.items() if len(when) == 1]
    return [block for when_s, block in sorted(owed) if when_s <= long_ago_s]

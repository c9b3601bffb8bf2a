"""A host as its head knows it."""

from __future__ import annotations

import trio
from attrs import define, field

from ....collectives.links.link import Link
from ....protocol import messages as m
from ....protocol.pulse import Pulse


@define(eq=False)
class HostPeer:
    """A host whose link is up.

    Attributes:
      ranks: what comes from each of its ranks.
      samplers: what comes from each sampler, and the scope around its answers.
      versions: of its boxes, by fragment.
      sent_bytes: of its boxes of each fragment, when they were sent last.
      slow: the operator was told that the line to it is.
      changed: notified when one of these has changed, or the host is gone.
    """

    peer: str
    link: Link
    hello: m.HostHello
    queue: trio.MemorySendChannel[m.Message]
    nursery: trio.Nursery
    ranks: dict[int, trio.MemorySendChannel[m.Message]] = field(factory=dict)
    samplers: dict[int, tuple[trio.MemorySendChannel[m.Message], trio.CancelScope]] = field(
        factory=dict
    )
    versions: dict[int, int] = field(factory=dict)
    sent_bytes: dict[int, int] = field(factory=dict)
    changed: Pulse = field(factory=Pulse)
    slow: bool = False

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def gone(self) -> bool:
        return self.link.lost.is_set()

    def tell(self, message: m.Message) -> None:
        if not self.gone:
            self.queue.send_nowait(message)

    def forget(self, rank: int, channel: trio.MemorySendChannel[m.Message]) -> bool:
        """Forget a rank; return False if its number is another one's by now."""
        if self.ranks.get(rank) is not channel:
            return False
        del self.ranks[rank]
        return True

    def end_samplers(self, *numbers: int) -> None:
        """End the connections of these samplers, or of all."""
        for number, (_, scope) in self.samplers.items():
            if not numbers or number in numbers:
                scope.cancel()

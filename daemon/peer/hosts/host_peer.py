"""A host as its head knows it, and the processes there as the head's bridge knows them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection

import trio
from attrs import define, field

from ....collectives.links.link import Link
from ....protocol import messages as m
from ....protocol import wire
from ....protocol.connection_phases import ANY
from ....protocol.errors import RemoteProtocolError
from ....protocol.network.stream import MessageStream
from ....protocol.wakeups import Pulse


@define(eq=False)
class HostPeer:
    """A host whose link is up.

    Attributes:
      processes: connections at its socket, by number.
      newest: the highest of these numbers so far.
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
    processes: dict[int, FarProcess] = field(factory=dict)
    newest: int = 0
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

    @property
    def ranks(self) -> list[int]:
        """The ranks whose processes run there."""
        known = (process.rank for process in self.processes.values())
        return [rank for rank in known if rank is not None]


class FarProcess(MessageStream):
    """The stream and connection of a process on a host, as if it were at the head's own socket.

    Args:
      before: does what has to be done before a message of a rank is taken.

    Attributes:
      rank: of the process; None: it is a sampler.
    """

    def __init__(
        self, host: HostPeer, number: int, before: Callable[[int, m.Message], Awaitable[None]]
    ) -> None:
        self.phase = ANY
        self.rank: int | None = None
        self._host, self._number, self._before = host, number, before
        self._heard, self._to_hear = trio.open_memory_channel[m.Message](math.inf)
        self._why_gone = ""

    def hear(self, message: m.Message) -> None:
        """Take a message of the process."""
        if isinstance(message, m.TrainerHello):
            if message.part.world_size == 1:
                raise RemoteProtocolError("a trainer of one process, on a further host")
            self.rank = message.part.rank
        self._heard.send_nowait(message)

    def end(self, reason: str) -> None:
        """Take note that the process has gone, after its last message."""
        self._why_gone = reason
        self._heard.close()

    async def send(self, message: m.Message) -> None:
        self._host.tell(m.ProcessSays(self._number, wire.encode(message)))

    async def _receive(self, types: Collection[type[m.Message]] | None) -> m.Message:
        try:
            message = await self._to_hear.receive()
        except trio.EndOfChannel:
            raise trio.EndOfChannel(self._why_gone) from None
        if types is not None and type(message) not in types:
            raise RemoteProtocolError(f"an unexpected {type(message).__name__}")
        if self.rank is not None:
            await self._before(self.rank, message)
        return message

    def close(self) -> None:
        """End the connection, if it has not ended at the host."""
        if self._host.processes.pop(self._number, None) is not None:
            self._host.tell(m.ProcessGone(self._number))
        self._host.changed.notify_all()

    async def aclose(self) -> None:
        self.close()

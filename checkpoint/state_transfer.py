"""State transfer: a joiner fetches a fragment from several donors at once, block by checked block.

    joiner   > IndexRequest(head)                 donor   < Index(head, digests) or BlocksRefused
             > BlocksRequest(transfer, blocks)            < one BLOCK frame per block, or BlocksRefused

The root comes from the master, the index must hash to the root, every block must hash to its entry
in the index: a donor can be slow or gone, but it cannot make us believe other bytes. A donor that
tries is dropped and named. A BLOCK frame that is shorter than its block holds it compressed.

The two sides are ``joiner.Joiner`` and ``donor.Donor``; here is what they need of the links, and how
a fetch ends. Both take the messages that come in over the links by ``receive``, which never waits, so
a link's control stream never queues behind blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import trio
from attrs import frozen

from ..collectives.links.send_priority import SendRank
from ..collectives.links.send_queue import FrameSource
from ..protocol.errors import StateMismatchError
from ..protocol.messages import FragmentHead, Message
from ..protocol.network.lane import FrameHeader


class BlockLink(Protocol):
    """What a transfer needs of ``collectives.link.Link``."""

    lost: trio.Event
    reason: str

    async def send(self, message: Message) -> None: ...

    async def send_from(
        self, source: FrameSource, rank: SendRank = ..., age: int = ...
    ) -> None: ...


class BlockSink(Protocol):
    """What a transfer offers to the hub; see ``collectives.routing.Sink``."""

    def place(self, peer: str, header: FrameHeader) -> memoryview | None: ...

    def deliver(self, peer: str, header: FrameHeader, payload: memoryview) -> None: ...

    def abandon(self, peer: str, header: FrameHeader, view: memoryview) -> None: ...


class BlockHub(Protocol):
    """What a transfer needs of ``collectives.hub.LinkHub``."""

    @property
    def links(self) -> Mapping[str, BlockLink]: ...

    async def link(self, peer: str, deadline_s: float = ...) -> BlockLink: ...

    def register(
        self, key: tuple[int, ...], sink: BlockSink, *, threads: bool = ...
    ) -> AbstractContextManager[None]: ...


class FetchFailedError(StateMismatchError):
    """No donor is left that could give the fragment. Tell the master; it may name others.

    Attributes:
      bad_donors: peer ids of those that served wrong bytes.
      reasons: why each donor was given up, by peer id.
    """

    def __init__(self, head: FragmentHead, bad: Sequence[str], reasons: dict[str, str]) -> None:
        told = "; ".join(f"{peer[:8]}: {why}" for peer, why in reasons.items()) or "no donors"
        super().__init__(f"could not fetch version {head.version} of {head.fragment}: {told}")
        self.bad_donors = tuple(bad)
        self.reasons = reasons


@frozen
class FetchReport:
    """How a fetch went.

    Attributes:
      head: what is installed now.
      received_bytes: of the blocks that came; 0 when we held them all.
      donors: peer ids of those that gave at least one block.
      bad_donors: peer ids of those that served wrong bytes.
      saved_bytes: of the received ones, that never travelled: blocks came compressed.
    """

    head: FragmentHead
    received_bytes: int
    donors: tuple[str, ...]
    bad_donors: tuple[str, ...]
    saved_bytes: int = 0

"""A donor: it serves index and blocks of the fragments that this node holds.

    Donor.run                    until cancelled
     └── Donor._serve            a few per receiver, while it waits for blocks

What goes before what on the line, the links know: blocks come after rounds' frames.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import trio
from attrs import Factory, define, frozen

from ..protocol.errors import PeerLostError, RemoteProtocolError
from ..protocol.lane import FrameHeader, FrameKind
from ..protocol.messages import BlocksRefused, BlocksRequest, FragmentHead, Index, IndexRequest
from ..protocol.network import Network
from .state import NotHeldError, SharedState
from .transfer import BlockHub, BlockLink

# What a donor queues for one receiver; honest joiners ask for WINDOW_MAX a fragment.
QUEUED_MAX = 1_024
SENDERS_MAX = 4  # frames handed to one link at once: enough to keep its lanes busy


@frozen
class _Wanted:
    """One block, or the index (``block`` None), asked for over a link; the answer takes that link.

    Frames of a transfer that its joiner has forgotten, because it was restarted, would hold up the
    lanes of its new link.
    """

    link: BlockLink
    request: IndexRequest | BlocksRequest
    block: int | None


def _asked_over(link: BlockLink, wanted: _Wanted) -> bool:
    return wanted.link is link


@define(eq=False)
class _Receiver:
    queue: deque[_Wanted] = Factory(deque)
    senders: int = 0

    def forget(self, unwanted: Callable[[_Wanted], bool]) -> None:
        kept = [wanted for wanted in self.queue if not unwanted(wanted)]
        self.queue.clear()
        self.queue.extend(kept)


class Donor:
    """Serves index and blocks of what this node holds: the present version and pinned ones."""

    def __init__(self, state: SharedState, hub: BlockHub, network: Network) -> None:
        self._state = state
        self._hub = hub
        self._network = network
        self._receivers: dict[str, _Receiver] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; requests that came before wait for it."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for peer in list(self._receivers):
                    self._start_senders(peer)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            self._receivers.clear()

    def receive(self, peer: str, message: IndexRequest | BlocksRequest) -> None:
        """Take a request that came over a link.

        Raises:
          RemoteProtocolError: it asks for what does not exist, or for far too much at once.
        """
        blocks: tuple[int | None, ...]
        if isinstance(message, IndexRequest):
            self._check_fragment(message.head.fragment)
            blocks = (None,)
        else:
            self._check_fragment(message.fragment)
            block_count = len(self._state.places(message.fragment))
            if any(block >= block_count for block in message.blocks):
                raise RemoteProtocolError(f"fragment {message.fragment} has no such block")
            if message.transfer >= 2**32:
                raise RemoteProtocolError("a transfer's number has 32 bits")
            blocks = message.blocks
        receiver = self._receivers.setdefault(peer, _Receiver())
        if len(receiver.queue) + len(blocks) > QUEUED_MAX:
            raise RemoteProtocolError(f"more than {QUEUED_MAX} blocks asked for at once")
        if (link := self._hub.links.get(peer)) is not None:
            receiver.queue.extend(_Wanted(link, message, block) for block in blocks)
        self._start_senders(peer)

    def _check_fragment(self, fragment: int) -> None:
        if fragment >= len(self._state.sizes):
            raise RemoteProtocolError(f"there is no fragment {fragment}")

    def _start_senders(self, peer: str) -> None:
        receiver = self._receivers[peer]
        if self._nursery is not None:
            while receiver.senders < min(SENDERS_MAX, len(receiver.queue)):
                receiver.senders += 1
                self._nursery.start_soon(self._serve, peer, receiver)
        if not receiver.senders and not receiver.queue:
            del self._receivers[peer]

    async def _serve(self, peer: str, receiver: _Receiver) -> None:
        try:
            while receiver.queue:
                wanted = receiver.queue.popleft()
                link = wanted.link
                try:
                    if isinstance(wanted.request, IndexRequest):
                        await link.send(await self._index(wanted.request.head))
                    else:
                        assert wanted.block is not None
                        await self._send_block(link, receiver, wanted.request, wanted.block)
                except PeerLostError:
                    receiver.forget(partial(_asked_over, link))
        finally:
            receiver.senders -= 1
            if not receiver.senders and self._receivers.get(peer) is receiver:
                del self._receivers[peer]

    async def _index(self, head: FragmentHead) -> Index | BlocksRefused:
        try:
            digests = self._state.index(head.fragment, head.version)
        except NotHeldError as error:
            return BlocksRefused(head.fragment, head.version, 0, str(error))
        fits = partial(self._state.check_index, head, digests)
        if not await self._network.run_sync(fits):
            return BlocksRefused(head.fragment, head.version, 0, "our copy has another root")
        return Index(head, digests)

    async def _send_block(
        self, link: BlockLink, receiver: _Receiver, request: BlocksRequest, block: int
    ) -> None:
        read = partial(self._state.block, request.fragment, request.version, block)
        try:
            payload = await self._network.run_sync(read)
        except NotHeldError as error:
            receiver.forget(
                lambda other: (
                    isinstance(other.request, BlocksRequest)
                    and other.request.transfer == request.transfer
                )
            )
            await link.send(
                BlocksRefused(request.fragment, request.version, request.transfer, str(error))
            )
            return
        header = FrameHeader(
            kind=FrameKind.BLOCK,
            round=0,
            attempt=0,
            index=block,
            transfer=request.transfer,
            payload_bytes=len(payload),
        )
        await link.send_frame(header, payload)

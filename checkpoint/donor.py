"""A donor: it serves the index and blocks of the fragments that this peer holds.

    Donor.run                    until cancelled
     └── Donor._serve            one per request

The blocks of a request are a source of frames: a lane reads each block when it can send it, in the
lane's own thread, so nothing is queued. The links send frames of rounds before blocks.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial

import trio

from ..collectives.links.hub import LinkHub
from ..collectives.links.link import Link
from ..collectives.links.rates.send_priority import SendRank
from ..collectives.links.send_queue import Frame, Load
from ..protocol import messages as m
from ..protocol.errors import PeerLostError, RemoteProtocolError
from ..protocol.network.interface import Network
from ..protocol.network.lane import FrameHeader, FrameKind
from .fragment_state import NotHeldError
from .shared_state import SharedState

# Limit of unsent blocks per receiver; an honest joiner requests up to WINDOW_MAX per fragment.
QUEUED_MAX = 1_024


class _Batch:
    """The blocks of one request as frames; a ``FrameSource`` of ``collectives.links.send_queue``.

    Attributes:
      refusal: why the rest is not sent: the version is gone.
    """

    def __init__(self, state: SharedState, request: m.BlocksRequest) -> None:
        self.request = request
        self.refusal = ""
        self._state = state
        self._blocks = deque(request.blocks)

    def next_frame(self) -> Load | None:
        try:
            return partial(self._frame, self._blocks.popleft())
        except IndexError:  # checked first, it could be emptied by another lane's thread
            return None

    def left(self) -> int:
        return len(self._blocks)

    def _frame(self, block: int) -> Frame | None:
        request = self.request
        try:
            payload = self._state.fragments[request.fragment].block(request.version, block)
        except NotHeldError as error:
            self.refusal = str(error)
            self._blocks.clear()
            return None
        header = FrameHeader(
            kind=FrameKind.BLOCK,
            round=0,
            attempt=0,
            index=block,
            transfer=request.transfer,
            payload_bytes=len(payload),
        )
        return header, payload


class Donor:
    """Server of the index and blocks of current and pinned versions."""

    def __init__(self, state: SharedState, hub: LinkHub, network: Network) -> None:
        self._state = state
        self._hub = hub
        self._network = network
        self._nursery: trio.Nursery | None = None
        self._early: list[tuple[str, Link, m.IndexRequest | m.BlocksRequest]] = []
        # Requested blocks that were not sent yet, by receiver.
        self._unsent: Counter[str] = Counter()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, beginning with requests that came before."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for early in self._early:
                    nursery.start_soon(self._serve, *early)
                self._early.clear()
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    def receive(self, peer: str, message: m.IndexRequest | m.BlocksRequest) -> None:
        """Take a request that came over a link.

        Raises:
          RemoteProtocolError: it asks for something that does not exist, or for too many blocks.
        """
        if isinstance(message, m.IndexRequest):
            self._check_fragment(message.head.fragment)
        else:
            self._check_fragment(message.fragment)
            block_count = len(self._state.fragments[message.fragment].places)
            if any(block >= block_count for block in message.blocks):
                raise RemoteProtocolError(f"fragment {message.fragment} has no such block")
            if message.transfer >= 2**32:
                raise RemoteProtocolError("a transfer's number has 32 bits")
        if self._unsent[peer] + _count(message) > QUEUED_MAX:
            raise RemoteProtocolError(f"more than {QUEUED_MAX} blocks asked for at once")
        # The answer uses this link or none: after a restart the joiner does not know the transfer,
        # and its frames would hold up the lanes of the new link.
        if (link := self._hub.links.get(peer)) is None:
            return
        self._unsent[peer] += _count(message)
        if self._nursery is None:
            self._early.append((peer, link, message))
        else:
            self._nursery.start_soon(self._serve, peer, link, message)

    def _check_fragment(self, fragment: int) -> None:
        if fragment >= len(self._state.sizes):
            raise RemoteProtocolError(f"there is no fragment {fragment}")

    async def _serve(
        self, peer: str, link: Link, request: m.IndexRequest | m.BlocksRequest
    ) -> None:
        try:
            if isinstance(request, m.IndexRequest):
                await link.send(await self._index(request.head))
                return
            batch = _Batch(self._state, request)
            await link.send_from(batch, SendRank.COPY)
            if batch.refusal:
                await link.send(
                    m.BlocksRefused(
                        request.fragment, request.version, request.transfer, batch.refusal
                    )
                )
        except PeerLostError:
            pass  # the joiner asks again, over another link
        finally:
            self._unsent[peer] -= _count(request)
            if not self._unsent[peer]:
                del self._unsent[peer]

    async def _index(self, head: m.FragmentHead) -> m.Index | m.BlocksRefused:
        try:
            digests = self._state.fragments[head.fragment].index(head.version)
        except NotHeldError as error:
            return m.BlocksRefused(head.fragment, head.version, 0, str(error))
        fits = partial(self._state.check_index, head, digests)
        if not await self._network.run_sync(fits):
            return m.BlocksRefused(head.fragment, head.version, 0, "its copy has another root")
        return m.Index(head, digests)


def _count(request: m.IndexRequest | m.BlocksRequest) -> int:
    return 1 if isinstance(request, m.IndexRequest) else len(request.blocks)

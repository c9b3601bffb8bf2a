"""A donor: it serves index and blocks of the fragments that this node holds.

    Donor.run                    until cancelled
     └── Donor._serve            one per request

The blocks of a request are a source of frames: a lane reads each when it can send it, in the lane's
own thread, so nothing is queued and a copy never holds more than what is on its way. What goes before
what on the line, the links know: blocks come after rounds' frames. There, too, blocks for a slow line
are compressed, where ``block_compression`` finds that it pays.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from weakref import WeakKeyDictionary

import trio

from ..collectives.links.send_priority import SendRank
from ..collectives.links.send_queue import Frame, Load
from ..protocol.errors import PeerLostError, RemoteProtocolError
from ..protocol.messages import BlocksRefused, BlocksRequest, FragmentHead, Index, IndexRequest
from ..protocol.network.interface import Network
from ..protocol.network.lane import Buffer, FrameHeader, FrameKind
from .block_compression import CompressionGain, LineRate
from .byte_shuffle import squeeze
from .fragment_state import NotHeldError
from .shared_state import SharedState
from .state_transfer import BlockHub, BlockLink

# What one receiver may have asked for and not been sent; honest joiners ask for WINDOW_MAX a fragment.
QUEUED_MAX = 1_024


class _Batch:
    """The blocks of one request, as frames; see ``collectives.outlet.FrameSource``.

    Attributes:
      refusal: why the rest of it is not sent: the version is gone.

    Args:
      line: what it goes over.
      savings: of its fragment.
    """

    def __init__(
        self, state: SharedState, request: BlocksRequest, line: LineRate, savings: CompressionGain
    ) -> None:
        self.request = request
        self.refusal = ""
        self._state = state
        self._line = line
        self._savings = savings
        self._blocks = deque(request.blocks)
        # By block, as decided when it was first made: it must be the same frame each time.
        self._compressed: dict[int, bool] = {}
        self._frames_bytes: deque[int] = deque()  # lanes' threads append, several at a time

    @property
    def carried_bytes(self) -> int:
        """What its blocks were on the line, so far."""
        return sum(self._frames_bytes)

    def next_frame(self) -> Load | None:
        try:
            return partial(self._frame, self._blocks.popleft())
        except IndexError:  # not asked before: another lane's thread may find the version gone
            return None

    def exhausted(self) -> bool:
        return not self._blocks

    def _frame(self, block: int) -> Frame | None:
        request = self.request
        try:
            plain = self._state.block(request.fragment, request.version, block)
        except NotHeldError as error:
            self.refusal = str(error)
            self._blocks.clear()
            return None
        payload = self._to_send(block, plain)
        self._frames_bytes.append(len(payload))
        header = FrameHeader(
            kind=FrameKind.BLOCK,
            round=0,
            attempt=0,
            index=block,
            transfer=request.transfer,
            payload_bytes=len(payload),
        )
        return header, payload

    def _to_send(self, block: int, plain: memoryview) -> Buffer:
        if block not in self._compressed:
            self._compressed[block] = self._line.slow and self._savings.worth_trying()
        if not self._compressed[block]:
            return plain
        place = self._state.places(self.request.fragment)[block]
        compressed = squeeze(plain, place.element_bytes)
        self._savings.note(len(plain), len(compressed))
        return compressed if len(compressed) < len(plain) else plain


class Donor:
    """Serves index and blocks of what this node holds: the present version and pinned ones."""

    def __init__(self, state: SharedState, hub: BlockHub, network: Network) -> None:
        self._state = state
        self._hub = hub
        self._network = network
        self._nursery: trio.Nursery | None = None
        self._early: list[tuple[str, BlockLink, IndexRequest | BlocksRequest]] = []
        self._asked: Counter[str] = Counter()  # blocks that were not sent yet, by receiver
        self._lines: WeakKeyDictionary[BlockLink, LineRate] = WeakKeyDictionary()
        self._savings = [CompressionGain() for _ in state.sizes]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; requests that came before wait for it."""
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

    @property
    def busy(self) -> bool:
        """Whether anybody was promised something that it has not got."""
        return bool(+self._asked)

    def receive(self, peer: str, message: IndexRequest | BlocksRequest) -> None:
        """Take a request that came over a link.

        Raises:
          RemoteProtocolError: it asks for what does not exist, or for far too much at once.
        """
        if isinstance(message, IndexRequest):
            self._check_fragment(message.head.fragment)
        else:
            self._check_fragment(message.fragment)
            block_count = len(self._state.places(message.fragment))
            if any(block >= block_count for block in message.blocks):
                raise RemoteProtocolError(f"fragment {message.fragment} has no such block")
            if message.transfer >= 2**32:
                raise RemoteProtocolError("a transfer's number has 32 bits")
        if self._asked[peer] + _count(message) > QUEUED_MAX:
            raise RemoteProtocolError(f"more than {QUEUED_MAX} blocks asked for at once")
        # The answer takes this link, or none: frames of a transfer that its joiner has forgotten,
        # because it was restarted, would hold up the lanes of its new link.
        if (link := self._hub.links.get(peer)) is None:
            return
        self._asked[peer] += _count(message)
        if self._nursery is None:
            self._early.append((peer, link, message))
        else:
            self._nursery.start_soon(self._serve, peer, link, message)

    def _check_fragment(self, fragment: int) -> None:
        if fragment >= len(self._state.sizes):
            raise RemoteProtocolError(f"there is no fragment {fragment}")

    async def _serve(
        self, peer: str, link: BlockLink, request: IndexRequest | BlocksRequest
    ) -> None:
        try:
            if isinstance(request, IndexRequest):
                await link.send(await self._index(request.head))
                return
            line = self._lines.setdefault(link, LineRate())
            batch = _Batch(self._state, request, line, self._savings[request.fragment])
            line.begin()
            try:
                await link.send_from(batch, SendRank.COPY)
            finally:
                line.end(batch.carried_bytes)
            if batch.refusal:
                await link.send(
                    BlocksRefused(
                        request.fragment, request.version, request.transfer, batch.refusal
                    )
                )
        except PeerLostError:
            pass  # it will ask again, over another link
        finally:
            self._asked[peer] -= _count(request)
            if not self._asked[peer]:
                del self._asked[peer]

    async def _index(self, head: FragmentHead) -> Index | BlocksRefused:
        try:
            digests = self._state.index(head.fragment, head.version)
        except NotHeldError as error:
            return BlocksRefused(head.fragment, head.version, 0, str(error))
        fits = partial(self._state.check_index, head, digests)
        if not await self._network.run_sync(fits):
            return BlocksRefused(head.fragment, head.version, 0, "our copy has another root")
        return Index(head, digests)


def _count(request: IndexRequest | BlocksRequest) -> int:
    return 1 if isinstance(request, IndexRequest) else len(request.blocks)

"""State transfer: a joiner fetches a fragment from several donors at once, block by checked block.

    joiner   > IndexRequest(head)                 donor   < Index(head, digests) or BlocksRefused
             > BlocksRequest(transfer, blocks)            < one BLOCK frame per block, or BlocksRefused

The root comes from the master, the index must hash to the root, every block must hash to its entry
in the index: a donor can be slow or gone, but it cannot make us believe other bytes. A donor that
tries is dropped and named.

    Joiner.fetch                 one fragment; fails only when no donor is left
     └── _Fetch._draw            one per donor: asks it for the next blocks as it delivers
          └── _Fetch._watch      wakes it when the link is lost

    Donor.run                    until cancelled
     └── Donor._serve            a few per receiver, while it waits for blocks

``Joiner.receive`` and ``Donor.receive`` take the messages that come in over the links. They never
wait, so a link's control stream never queues behind blocks.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import trio
from attrs import Factory, define, frozen

from ..protocol.errors import (
    PeerLostError,
    RemoteProtocolError,
    StateMismatchError,
)
from ..protocol.lane import Buffer, FrameHeader, FrameKind
from ..protocol.messages import (
    BlocksRefused,
    BlocksRequest,
    FragmentHead,
    Index,
    IndexRequest,
    Message,
    SyncFragment,
)
from ..protocol.network import Network
from .state import Incoming, NotHeldError, SharedState

# A donor that has sent nothing it was asked for in this long is given up; longer than a megabyte
# takes on a slow uplink that a round's chunks keep busy.
STALL_S = 20.0
LINK_WAIT_S = 15.0  # for the link to a donor to come up
# A donor may hear of the version, or get to it, a moment later than we do: ask it again.
INDEX_ATTEMPTS_MAX = 5
INDEX_RETRY_S = 1.0
# Blocks asked of a donor and not yet here. It grows while blocks come within WINDOW_S of being asked
# for, so each donor is kept busy, and slow ones are not left with many blocks at the end.
WINDOW_FIRST = 2
WINDOW_MAX = 32
WINDOW_S = 1.0
# What a donor queues for one receiver; honest joiners ask for WINDOW_MAX a fragment.
QUEUED_MAX = 1_024
SENDERS_MAX = 4  # frames handed to one link at once: enough to keep its lanes busy

Progress = Callable[[int, int], None]  # (blocks that came, blocks that had to come)


class BlockLink(Protocol):
    """What a transfer needs of ``collectives.link.Link``."""

    lost: trio.Event
    reason: str

    async def send(self, message: Message) -> None: ...

    async def send_frame(self, header: FrameHeader, payload: Buffer) -> None: ...


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

    def register(self, key: tuple[int, ...], sink: BlockSink) -> AbstractContextManager[None]: ...


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
    """

    head: FragmentHead
    received_bytes: int
    donors: tuple[str, ...]
    bad_donors: tuple[str, ...]


# ---------------------------------------------------------------- the joiner


@frozen
class _Arrived:
    block: int
    payload: memoryview


_Item = _Arrived | Index | BlocksRefused | PeerLostError | None  # None: look for work again


@define(eq=False)
class _DonorView:
    """A donor as the joiner sees it.

    Attributes:
      inbox: what came from it. Unbounded, but nothing enters it that was not asked for.
      window: how many blocks may be outstanding.
      outstanding: blocks asked for, with the time of asking.
      heard_s: when its last block came, or when it was asked while it owed nothing.
      asked_index: an answer to ``IndexRequest`` is due.
      gave: blocks it gave.
    """

    peer: str
    send: trio.MemorySendChannel[_Item]
    inbox: trio.MemoryReceiveChannel[_Item]
    window: int = WINDOW_FIRST
    outstanding: dict[int, float] = Factory(dict)
    heard_s: float = -math.inf
    asked_index: bool = False
    gave: int = 0
    gone: bool = False


class Joiner:
    """Fetches fragments of the state, several at once if need be.

    Args:
      stall_s: see ``STALL_S``.
    """

    def __init__(
        self, state: SharedState, hub: BlockHub, network: Network, *, stall_s: float = STALL_S
    ) -> None:
        self.state = state
        self.hub = hub
        self.network = network
        self.stall_s = stall_s
        self._fetches: dict[int, _Fetch] = {}
        self._turns: dict[int, trio.Lock] = {}

    def receive(self, peer: str, message: Index | BlocksRefused) -> None:
        """Take an answer that came over a link; one that nobody waits for is ignored."""
        fragment = message.head.fragment if isinstance(message, Index) else message.fragment
        fetch = self._fetches.get(fragment)
        if fetch is not None:
            fetch.hear(peer, message)

    async def fetch(self, order: SyncFragment, progress: Progress | None = None) -> FetchReport:
        """Make a fragment what ``order.head`` says, with the help of ``order.donors``.

        Blocks whose bytes we hold already are not sent again; all others come from all donors at
        once, each giving as fast as it can. A fetch of the same fragment that has not ended (it may
        have been cancelled just now) is waited for.

        Args:
          progress: called after each block.

        Raises:
          FetchFailedError: every donor is lost, refuses, stalls or lies.
          StateMismatchError: the fragment changed behind our back; it is not valid.

        Cancellation: safe; a fragment that was valid stays what it was, and one that was not keeps
        the blocks that came, for the next fetch.
        """
        fragment = order.head.fragment
        async with self._turns.setdefault(fragment, trio.Lock()):
            fetch = self._fetches[fragment] = _Fetch(self, order, progress)
            try:
                return await fetch.run()
            finally:
                del self._fetches[fragment]


class _Fetch:
    """One transfer of one fragment; the hub's sink for its frames."""

    def __init__(self, joiner: Joiner, order: SyncFragment, progress: Progress | None) -> None:
        self._state = joiner.state
        self._hub = joiner.hub
        self._network = joiner.network
        self._stall_s = joiner.stall_s
        self._head = order.head
        # Random, so that frames for a daemon that was restarted since mean nothing to this one.
        self._transfer = secrets.randbits(32)
        self._progress = progress
        self._donors = {
            peer: _DonorView(peer, *trio.open_memory_channel[_Item](math.inf))
            for peer in order.donors
        }
        self._incoming: Incoming | None = None
        self._beginning = trio.Lock()
        self._unassigned: deque[int] = deque()
        self._wanted_count = 0
        self._received_count = 0
        self._received_bytes = 0
        self._bad: list[str] = []
        self._reasons: dict[str, str] = {}
        self._done = trio.CancelScope()

    async def run(self) -> FetchReport:
        try:
            await self._begin_with_our_own_index()
            with self._hub.register((FrameKind.BLOCK, self._transfer), self):
                with self._done:
                    if not self._complete():
                        async with trio.open_nursery() as nursery:
                            for donor in self._donors.values():
                                nursery.start_soon(self._draw, donor)
            if self._incoming is None or self._incoming.missing:
                raise FetchFailedError(self._head, self._bad, self._reasons)
            await self._network.run_sync(self._incoming.finish)
        finally:
            if self._incoming is not None:
                self._incoming.abandon()
        givers = tuple(donor.peer for donor in self._donors.values() if donor.gave)
        return FetchReport(self._head, self._received_bytes, givers, tuple(self._bad))

    # ------------------------------------------------------------ the hub's side

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """A new buffer for each frame: bytes that are not checked yet touch no state."""
        donor = self._donors.get(peer)
        if donor is None or header.index not in donor.outstanding:
            return None
        return memoryview(bytearray(header.payload_bytes))

    def deliver(self, peer: str, header: FrameHeader, payload: memoryview) -> None:
        donor = self._donors[peer]
        asked_s = donor.outstanding.get(header.index)
        if asked_s is None or donor.gone:
            return
        donor.heard_s = trio.current_time()
        if donor.heard_s - asked_s <= WINDOW_S:
            donor.window = min(donor.window + 1, WINDOW_MAX)
        else:
            donor.window = max(donor.window - 1, WINDOW_FIRST)
        donor.send.send_nowait(_Arrived(header.index, payload))

    def abandon(self, peer: str, header: FrameHeader, view: memoryview) -> None:
        """Nothing to take back: the block is still outstanding."""

    def hear(self, peer: str, message: Index | BlocksRefused) -> None:
        donor = self._donors.get(peer)
        if donor is None or donor.gone:
            return
        if isinstance(message, Index):
            expected = donor.asked_index and message.head == self._head
        else:
            # The index's refusal has transfer 0; a batch's counts once, for the donor is then gone.
            expected = message.version == self._head.version and (
                donor.asked_index if message.transfer == 0 else message.transfer == self._transfer
            )
        if expected:
            donor.asked_index = False
            donor.send.send_nowait(message)

    # ------------------------------------------------------------ one donor

    async def _draw(self, donor: _DonorView) -> None:
        """Get what this donor can give, until all has come or it is of no use any more."""
        try:
            link = await self._hub.link(donor.peer, LINK_WAIT_S)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, link, donor)
                await self._learn_index(link, donor)
                while True:
                    await self._ask(link, donor)
                    await self._take(donor, await self._next_item(donor))
        except* PeerLostError as errors:
            self._drop(donor, str(errors.exceptions[0]))
        except* StateMismatchError as errors:
            self._bad.append(donor.peer)
            self._drop(donor, str(errors.exceptions[0]))

    async def _watch(self, link: BlockLink, donor: _DonorView) -> None:
        await link.lost.wait()
        donor.send.send_nowait(PeerLostError(donor.peer, link.reason))

    async def _learn_index(self, link: BlockLink, donor: _DonorView) -> None:
        """Ask for the index if nobody has given it yet; whoever answers first begins the transfer."""
        for attempt in range(INDEX_ATTEMPTS_MAX):
            if self._incoming is not None:
                return
            if attempt:
                await trio.sleep(INDEX_RETRY_S)
            donor.asked_index = True
            donor.heard_s = trio.current_time()
            await self._within_stall(link.send(IndexRequest(self._head)), donor)
            answer = await self._next_item(donor)
            while answer is None:
                answer = await self._next_item(donor)
            if isinstance(answer, Index):
                await self._begin(answer.digests)
                return
            if isinstance(answer, PeerLostError):
                raise answer
            assert isinstance(answer, BlocksRefused)
            refusal = answer.reason
        raise PeerLostError(donor.peer, f"it refuses the index: {refusal}")

    async def _ask(self, link: BlockLink, donor: _DonorView) -> None:
        room = donor.window - len(donor.outstanding)
        blocks = [self._unassigned.popleft() for _ in range(min(room, len(self._unassigned)))]
        if not blocks:
            return
        now_s = trio.current_time()
        if not donor.outstanding:
            donor.heard_s = now_s
        donor.outstanding.update(dict.fromkeys(blocks, now_s))
        request = BlocksRequest(
            self._head.fragment, self._head.version, self._transfer, tuple(blocks)
        )
        await self._within_stall(link.send(request), donor)

    async def _next_item(self, donor: _DonorView) -> _Item:
        """The next thing from this donor; raises PeerLostError if it owes us and is silent."""
        owes = donor.outstanding or donor.asked_index
        while True:
            deadline_s = donor.heard_s + self._stall_s if owes else math.inf
            with trio.move_on_at(deadline_s):
                return await donor.inbox.receive()
            if trio.current_time() >= donor.heard_s + self._stall_s:
                raise PeerLostError(donor.peer, f"it sent nothing for {self._stall_s:g} s")

    async def _take(self, donor: _DonorView, item: _Item) -> None:
        if isinstance(item, PeerLostError):
            raise item
        if isinstance(item, BlocksRefused):
            raise PeerLostError(donor.peer, f"it refuses: {item.reason}")
        if not isinstance(item, _Arrived) or item.block not in donor.outstanding:
            return  # woken up, or the block came twice
        assert self._incoming is not None
        await self._network.run_sync(partial(self._incoming.accept, item.block, item.payload))
        del donor.outstanding[item.block]
        donor.gave += 1
        self._received_count += 1
        self._received_bytes += len(item.payload)
        if self._progress is not None:
            self._progress(self._received_count, self._wanted_count)
        self._complete()

    async def _within_stall(self, sending: Awaitable[None], donor: _DonorView) -> None:
        with trio.move_on_after(self._stall_s) as scope:
            await sending
        if scope.cancelled_caught:
            raise PeerLostError(donor.peer, "its link takes no messages")

    def _drop(self, donor: _DonorView, reason: str) -> None:
        """Give the donor up; the others get what it owed."""
        donor.gone = True
        self._reasons[donor.peer] = reason
        self._unassigned.extendleft(sorted(donor.outstanding, reverse=True))
        donor.outstanding.clear()
        for other in self._donors.values():
            if not other.gone:
                other.send.send_nowait(None)

    # ------------------------------------------------------------ the whole

    async def _begin_with_our_own_index(self) -> None:
        """If we hold the head already, only our memory is checked against it."""
        held = self._state.head(self._head.fragment)
        if held is not None and held == self._head:
            await self._begin(self._state.index(held.fragment, held.version))

    async def _begin(self, digests: bytes) -> None:
        """Start the transfer with an index; later indices are only checked.

        Raises:
          StateMismatchError: the index does not hash to the root.
        """
        run_sync = self._network.run_sync
        async with self._beginning:
            if self._incoming is not None:
                if not await run_sync(partial(self._state.check_index, self._head, digests)):
                    raise StateMismatchError("its index does not fit the root")
                return
            await run_sync(partial(self._begin_sync, digests))
            assert self._incoming is not None
            self._unassigned.extend(sorted(self._incoming.missing))
            self._wanted_count = len(self._unassigned)
            self._complete()

    def _begin_sync(self, digests: bytes) -> None:
        # Kept here, not by the caller: whoever is cancelled in the meantime must still abandon it.
        self._incoming = self._state.begin(self._head, digests)

    def _complete(self) -> bool:
        """Whether all blocks are here; then everything that still waits for some is ended."""
        complete = self._incoming is not None and not self._incoming.missing
        if complete:
            self._done.cancel()
        return complete


# ---------------------------------------------------------------- the donor


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

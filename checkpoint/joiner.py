"""A joiner: it fetches one version of a fragment from all its donors at once.

    Joiner.fetch                 one fragment; fails only when no donor is left
     └── _Fetch._draw            one per donor: requests the next blocks as it delivers
          └── _Fetch._watch      wakes it when the link is lost

    _Fetch.place, deliver        lanes' threads: a block is checked and put in place as it comes

A donor without requests takes over blocks that another donor has owed for long. Blocks that came
and were checked are never fetched again, even if this fetch fails: the next one, of this version or
another, finds them by their digests.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio
from attrs import define, field

from ..collectives.links.hub import LinkHub
from ..collectives.links.link import Link
from ..protocol import messages as m
from ..protocol.errors import PeerLostError, StateMismatchError
from ..protocol.network.interface import Network
from ..protocol.network.lane import FrameHeader, FrameKind
from ..protocol.wakeups import Loop
from .blocks import DIGEST_BYTES, FragmentArrays
from .donor_view import DonorView, Item, owed_since
from .incoming_fragment import Find, IncomingFragment
from .shared_state import SharedState
from .state_transfer import FetchFailedError, FetchReport

# A donor that owes blocks and sends none for this time is dropped; longer than a megabyte takes on
# a slow uplink that a round's chunks keep busy.
STALL_S = 20.0
LINK_WAIT_S = 15.0  # for the link to a donor to come up
# A donor may reach the version a moment later than this peer learns of it, so it is asked again.
REFUSALS_MAX = 5
RETRY_S = 1.0
OWED_S_MAX = 3.0  # a block owed for longer is also requested from a donor without requests

RATE_S = 10.0  # the rate of a fetch is the mean over this time

OnProgress = Callable[
    [m.CopyProgress, int], None
]  # the progress, and the bytes of blocks that came


@define(eq=False)
class Joiner:
    """Fetches fragments of the state, several at once if needed.

    Args:
      on_disk: returns a version from a checkpoint on this machine, checked, with its blocks'
        digests; called in a thread.
    """

    state: SharedState
    hub: LinkHub
    network: Network
    on_disk: Callable[[m.FragmentHead], tuple[FragmentArrays, bytes] | None] = field(
        default=lambda _head: None, kw_only=True
    )
    _fetches: dict[int, _Fetch] = field(factory=dict, init=False)
    _turns: dict[int, trio.Lock] = field(factory=dict, init=False)

    def receive(self, peer: str, message: m.Index | m.BlocksRefused) -> None:
        """Take an answer that came over a link; an unexpected one is ignored."""
        fragment = message.head.fragment if isinstance(message, m.Index) else message.fragment
        fetch = self._fetches.get(fragment)
        if fetch is not None:
            fetch.hear(peer, message)

    async def fetch(self, order: m.SyncFragment, progress: OnProgress | None = None) -> FetchReport:
        """Bring a fragment to ``order.head``, from ``order.donors``.

        Blocks whose bytes are here already are not sent again; the others come from all donors at
        once, each as fast as it can. An earlier fetch of the same fragment that has not ended (it
        may have been cancelled just now) is waited for.

        Args:
          progress: called when the missing blocks are known, and after each block.

        Raises:
          FetchFailedError: every donor is lost, refuses, stalls or sends wrong bytes.
          StateMismatchError: the fragment changed during the fetch; it is not valid.

        Cancellation: safe; a fragment that was valid stays unchanged. Blocks that came are kept for
        the next fetch.
        """
        fragment = order.head.fragment
        async with self._turns.setdefault(fragment, trio.Lock()):
            fetch = self._fetches[fragment] = _Fetch(self, order, progress)
            try:
                return await fetch.run()
            finally:
                del self._fetches[fragment]
                self.next_turn()

    def has_turn(self, fetch: _Fetch, peer: str) -> bool:
        """Return whether a fetch may ask this donor: no earlier fetch has blocks to ask it for.

        Two fetches that share a donor would end together, and nothing would come for a while.
        """
        for other in self._fetches.values():  # in order of their beginning
            if other is fetch:
                break
            if other.wants_of(peer):
                return False
        return True

    def next_turn(self) -> None:
        """Have all fetches look again for donors that they may ask."""
        for fetch in self._fetches.values():
            fetch.look_again()


class _Fetch:
    """One transfer of one fragment; the hub's sink for its frames."""

    def __init__(self, joiner: Joiner, order: m.SyncFragment, progress: OnProgress | None) -> None:
        self._joiner = joiner
        self._head = order.head
        # Random, so that a restarted daemon ignores frames for its predecessor.
        self._transfer = secrets.randbits(32)
        self._tell = progress
        self._donors = {
            peer: DonorView(peer, *trio.open_memory_channel[Item](math.inf))
            for peer in order.donors
        }
        self._incoming: IncomingFragment | None = None
        self._beginning = trio.Lock()
        self._loop = Loop()
        self._ended = False
        # Buffers for frames, used again once their bytes are in the fragment.
        self._rooms: list[memoryview] = []
        # Blocks that have not come yet; used on the event loop only.
        self._awaited: set[int] = set()
        self._unassigned: deque[int] = deque()
        self._arrived = _Arrived()
        self._bad: list[str] = []
        self._reasons: dict[str, str] = {}
        self._done = trio.CancelScope()

    async def run(self) -> FetchReport:
        try:
            await self._begin_with_our_own_index()
            with self._joiner.hub.register((FrameKind.BLOCK, self._transfer), self, threads=True):
                with self._done:
                    if not self._complete():
                        async with trio.open_nursery() as nursery:
                            for donor in self._donors.values():
                                nursery.start_soon(self._draw, donor)
            if self._incoming is None or self._awaited:
                raise FetchFailedError(self._head, self._bad, self._reasons)
            await self._joiner.network.run_sync(self._incoming.finish)
        finally:
            self._ended = True
            if self._incoming is not None:
                self._incoming.abandon()
        givers = tuple(donor.peer for donor in self._donors.values() if donor.gave)
        return FetchReport(self._arrived.received_bytes, givers, tuple(self._bad))

    # ------------------------------------------------------------ the hub's side, in lanes' threads

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """Return a buffer beside the state: unchecked bytes must not touch it."""
        donor = self._donors.get(peer)
        if donor is None or header.index not in donor.outstanding:
            return None
        try:
            room = self._rooms.pop()
        except IndexError:
            return memoryview(bytearray(header.payload_bytes))
        if len(room) == header.payload_bytes:
            return room
        return memoryview(bytearray(header.payload_bytes))

    def deliver(self, peer: str, header: FrameHeader, payload: memoryview) -> None:
        donor, incoming = self._donors[peer], self._incoming
        if incoming is None or header.index not in donor.outstanding or donor.gone:
            return
        try:
            new = incoming.accept(header.index, payload)
        except StateMismatchError as error:
            self._loop.soon(partial(donor.send.send_nowait, error))
            return
        if incoming.in_place:
            self._rooms.append(payload)
        size_bytes = len(payload) if new else 0
        self._loop.soon(partial(self._accepted, donor, header.index, size_bytes))

    def abandon(self, peer: str, header: FrameHeader, view: memoryview) -> None:
        """Do nothing: the block is still outstanding."""

    # ------------------------------------------------------------ on the event loop

    def _accepted(self, donor: DonorView, block: int, size_bytes: int) -> None:
        """Count a block that came; 0 bytes if it came before."""
        if self._ended:
            return
        donor.came(block, trio.current_time())
        if size_bytes:
            self._awaited.discard(block)
            self._arrived.add(size_bytes)
            donor.gave += 1
        for other in self._donors.values():
            other.outstanding.pop(block, None)
        self._tell_progress()
        if not self._complete() and donor.has_room:
            donor.send.send_nowait(None)

    def hear(self, peer: str, message: m.Index | m.BlocksRefused) -> None:
        donor = self._donors.get(peer)
        if donor is None or donor.gone:
            return
        if isinstance(message, m.Index):
            expected = donor.asked_index and message.head == self._head
        else:
            # The refusal of an index has transfer 0.
            expected = message.version == self._head.version and (
                donor.asked_index if message.transfer == 0 else message.transfer == self._transfer
            )
        if expected:
            donor.asked_index = False
            donor.send.send_nowait(message)

    # ------------------------------------------------------------ one donor

    async def _draw(self, donor: DonorView) -> None:
        """Fetch from one donor until all blocks are here or the donor is dropped."""
        try:
            link = await self._joiner.hub.link(donor.peer, LINK_WAIT_S)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, link, donor)
                while True:
                    if self._incoming is None and not donor.asked_index:
                        await self._ask_index(link, donor)
                    await self._ask(link, donor)
                    await self._take(donor, await self._next_item(donor))
        except* PeerLostError as errors:
            self._drop(donor, str(errors.exceptions[0]))
        except* StateMismatchError as errors:
            self._bad.append(donor.peer)
            self._drop(donor, str(errors.exceptions[0]))

    async def _watch(self, link: Link, donor: DonorView) -> None:
        await link.lost.wait()
        donor.send.send_nowait(PeerLostError(donor.peer, link.reason))

    async def _ask_index(self, link: Link, donor: DonorView) -> None:
        """Request the index; the first donor that answers begins the transfer."""
        donor.asked_index = True
        donor.heard_s = trio.current_time()
        await self._within_stall(link.send(m.IndexRequest(self._head)), donor)

    def wants_of(self, peer: str) -> bool:
        """Return whether unrequested blocks are left that this donor would serve."""
        donor = self._donors.get(peer)
        willing = donor is not None and not donor.gone and not donor.refusals
        return willing and bool(self._unassigned)

    def look_again(self) -> None:
        """Wake all donors' tasks: there may be blocks to request."""
        for donor in self._donors.values():
            if not donor.gone:
                donor.send.send_nowait(None)

    async def _ask(self, link: Link, donor: DonorView) -> None:
        if not self._joiner.has_turn(self, donor.peer):
            return
        if not donor.has_room:
            return
        room = donor.window - len(donor.outstanding)
        blocks: list[int] = []
        while self._unassigned and len(blocks) < room:
            if (block := self._unassigned.popleft()) in self._awaited:
                blocks.append(block)
        if blocks and not self._unassigned:
            self._joiner.next_turn()
        if not blocks and not donor.outstanding:
            long_ago_s = trio.current_time() - OWED_S_MAX
            blocks = owed_since(long_ago_s, self._donors.values())[:room]
        if not blocks:
            return
        now_s = trio.current_time()
        if not donor.outstanding:
            donor.heard_s = now_s
        donor.outstanding.update(dict.fromkeys(blocks, now_s))
        request = m.BlocksRequest(
            self._head.fragment, self._head.version, self._transfer, tuple(blocks)
        )
        await self._within_stall(link.send(request), donor)

    async def _next_item(self, donor: DonorView) -> Item:
        """Wait for the next item of a donor; raises PeerLostError if it owes blocks and stalls."""
        owes = donor.outstanding or donor.asked_index
        if not owes and self._incoming is not None:  # take over from slow donors soon
            with trio.move_on_after(OWED_S_MAX / 2):
                return await donor.inbox.receive()
            return None
        while True:
            deadline_s = donor.heard_s + STALL_S if owes else math.inf
            with trio.move_on_at(deadline_s):
                return await donor.inbox.receive()
            if trio.current_time() >= donor.heard_s + STALL_S:
                raise PeerLostError(donor.peer, f"it sent nothing for {STALL_S:g} s")

    async def _take(self, donor: DonorView, item: Item) -> None:
        if isinstance(item, PeerLostError | StateMismatchError):
            raise item
        if isinstance(item, m.Index):
            await self._begin(item.digests)
        elif isinstance(item, m.BlocksRefused):
            await self._refused(donor, item)

    async def _refused(self, donor: DonorView, message: m.BlocksRefused) -> None:
        """Let other donors serve this one's blocks and wait: it may not have the version yet."""
        donor.refusals += 1
        if donor.refusals >= REFUSALS_MAX:
            raise PeerLostError(donor.peer, f"it refuses: {message.reason}")
        self._take_back(donor)
        await trio.sleep(RETRY_S)
        while donor.inbox.statistics().current_buffer_used:  # refusals of the same request
            item = donor.inbox.receive_nowait()
            if isinstance(item, PeerLostError | StateMismatchError):
                raise item

    def _tell_progress(self) -> None:
        if self._tell is not None:
            giving = tuple(d.peer for d in self._donors.values() if d.outstanding)
            self._tell(self._arrived.progress(self._head, giving), self._arrived.received_bytes)

    async def _within_stall(self, sending: Awaitable[None], donor: DonorView) -> None:
        with trio.move_on_after(STALL_S) as scope:
            await sending
        if scope.cancelled_caught:
            raise PeerLostError(donor.peer, "its link takes no messages")

    def _drop(self, donor: DonorView, reason: str) -> None:
        """Drop a donor; its blocks are requested from the others."""
        donor.gone = True
        self._reasons[donor.peer] = reason
        self._take_back(donor)

    def _take_back(self, donor: DonorView) -> None:
        """Return a donor's blocks to the unassigned ones, unless another donor owes them, too."""
        blocks, donor.outstanding = sorted(donor.outstanding, reverse=True), {}
        owed = {block for other in self._donors.values() for block in other.outstanding}
        self._unassigned.extendleft(block for block in blocks if block not in owed)
        self._joiner.next_turn()

    # ------------------------------------------------------------ the whole

    async def _begin_with_our_own_index(self) -> None:
        """Begin without a donor if the head is in memory, to be checked, or in a checkpoint."""
        fragment = self._joiner.state.fragments[self._head.fragment]
        if self._joiner.state.head(fragment.number) == self._head:
            await self._begin(fragment.index(self._head.version))
            return
        found = await self._joiner.network.run_sync(partial(self._joiner.on_disk, self._head))
        if found is not None:
            parts, digests = found
            blocks = {
                digests[DIGEST_BYTES * index :][:DIGEST_BYTES]: place.of(parts).data
                for index, place in enumerate(fragment.places)
            }
            await self._begin(digests, blocks.get)

    async def _begin(self, digests: bytes, find: Find | None = None) -> None:
        """Start the transfer with an index; later indices are only checked.

        Args:
          find: see ``SharedState.begin``.

        Raises:
          StateMismatchError: the index does not hash to the root.
        """
        run_sync = self._joiner.network.run_sync
        async with self._beginning:
            if self._incoming is not None:
                if not await run_sync(partial(self._joiner.state.check_index, self._head, digests)):
                    raise StateMismatchError("its index does not fit the root")
                return
            await run_sync(partial(self._begin_sync, digests, find))
            assert self._incoming is not None
            missing = sorted(self._incoming.missing)
            self._awaited.update(missing)
            self._unassigned.extend(missing)
            places = self._joiner.state.fragments[self._head.fragment].places
            self._arrived.begin([place.size_bytes for place in places], missing)
            self._tell_progress()
            self._complete()
            self.look_again()

    def _begin_sync(self, digests: bytes, find: Find | None) -> None:
        # Assigned here, in the thread: a caller that is cancelled meanwhile must still abandon it.
        self._incoming = self._joiner.state.begin(self._head, digests, find)

    def _complete(self) -> bool:
        """Return whether all blocks are here; if so, end the donors' tasks."""
        complete = self._incoming is not None and not self._awaited
        if complete:
            self._done.cancel()
        return complete


class _Arrived:
    """The blocks of a fragment that are here, and the mean rate over the last ``RATE_S``.

    Attributes:
      received_bytes: those that came over links.
    """

    def __init__(self) -> None:
        self.received_bytes = 0
        self._count = 0
        self._all_count = 0
        self._bytes = 0
        self._all_bytes = 0
        # Times, with the bytes received until then.
        self._came: deque[tuple[float, int]] = deque([(trio.current_time(), 0)])

    def begin(self, sizes_bytes: Sequence[int], missing: Sequence[int]) -> None:
        """Count the blocks that need not be fetched."""
        self._all_count, self._all_bytes = len(sizes_bytes), sum(sizes_bytes)
        self._count = len(sizes_bytes) - len(missing)
        self._bytes = self._all_bytes - sum(sizes_bytes[block] for block in missing)

    def add(self, size_bytes: int) -> None:
        """Count a block that came."""
        self._count += 1
        self._bytes += size_bytes
        self.received_bytes += size_bytes
        now_s = trio.current_time()
        self._came.append((now_s, self.received_bytes))
        while now_s - self._came[0][0] > RATE_S:
            self._came.popleft()

    def progress(self, head: m.FragmentHead, giving: tuple[str, ...]) -> m.CopyProgress:
        """Return the progress of the fetch of ``head`` from the donors that owe blocks."""
        then_s, then_bytes = self._came[0]
        past_s = trio.current_time() - then_s
        return m.CopyProgress(
            head.fragment,
            head.version,
            self._count,
            self._all_count,
            self._bytes,
            self._all_bytes,
            (self.received_bytes - then_bytes) / past_s if past_s > 0 else 0.0,
            giving,
            rounds_kept=0,  # the replica's to know
        )

"""The state of each chunk of a reduction: which frames it waits for, and from which peers.

Frames change this state from lanes' threads, the master's orders from the event loop. One lock
guards it. It is held for some microseconds, never during a computation, and no other lock but a
buffer pool's is taken under it.

    a chunk that we own             contributions arrive -> begun (none is missing) -> held
    any other chunk                 its result arrives -> held

A chunk is begun once, and a result that is held never changes. When peers are shut out, chunks stop
waiting for them. When an owner is shut out, another peer takes its chunks over under the number of
a later attempt, so that the former owner's frames cannot be taken for the new owner's.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Collection, Iterable

from attrs import define, field

from ..protocol.errors import RemoteProtocolError
from ..protocol.messages import Assignment
from ..protocol.network.lane import FrameHeader, FrameKind
from .arithmetic import ChunkLayout
from .links.buffer_pool import BufferPool
from .result import RoundResult, pack_set


class FrameDuty(enum.Enum):
    """The work that a delivered frame asks for."""

    NOTHING = enum.auto()
    ADD_UP = enum.auto()  # it was the last contribution that its chunk lacked
    DECODE = enum.auto()  # it is a result


class UnwantedFrameError(Exception):
    """A frame that its sender should not have sent; the text completes "peer X ...".

    Attributes:
      owing: the sender still owes us frames, so the reduction cannot go on without it.
    """

    def __init__(self, reason: str, owing: bool) -> None:
        super().__init__(reason)
        self.owing = owing


@define(eq=False)
class _Chunk:
    owner: str  # the peer that sends its result; another one after a repair
    since: int  # the attempt that named this owner
    missing: set[str]  # peers whose contributions it waits for here; never this node
    arrived: dict[str, memoryview] = field(factory=dict)
    begun: bool = False
    held: bool = False


class ChunkTracker:
    """The chunks of one reduction on one node. Thread-safe.

    Args:
      contributors: peer ids.
      attempt: of the order.
      result: memory for results.
      buffers: memory for contributions.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        contributors: Collection[str],
        me: str,
        attempt: int,
        fragment: int,
        result: RoundResult,
        buffers: BufferPool,
    ) -> None:
        self._layout = layout
        self._me = me
        self._contributes = me in contributors
        self._givers = frozenset(contributors) - {me}  # to our chunks
        self._first_attempt = attempt
        self._fragment = fragment
        self._result = result
        self._buffers = buffers
        self._up_bytes_max = max((cut.up_bytes for cut in layout.cuts), default=0)
        self._lock = threading.Lock()  # guards all that follows
        self._shut: set[str] = set()
        self._makers = [cut.owner for cut in layout.cuts]
        self._chunks = [
            _Chunk(owner, attempt, set(self._givers) if owner == me else set())
            for owner in self._makers
        ]
        self._placed: dict[tuple[int, str], memoryview] = {}  # by chunk and sender
        self._owed = self._count_owed()

    # ------------------------------------------------------------ frames

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """Return memory for a frame's payload, or None to drop it.

        The payload of a wrong frame gets memory that is never read: its header may be forged.
        """
        with self._lock:
            if peer in self._shut or self._is_repeated(peer, header):
                return None
            if self._objection(peer, header) is not None:
                return memoryview(bytearray(header.payload_bytes))
            if header.kind is FrameKind.CONTRIBUTION:
                # All chunks but the last are equally long, so buffers are used again.
                view = self._buffers.take(self._up_bytes_max)[: header.payload_bytes]
            else:
                view = self._result.place(header.kind, header.index, header.payload_bytes)
            self._placed[header.index, peer] = view
            return view

    def deliver(
        self, peer: str, header: FrameHeader, payload: memoryview
    ) -> tuple[FrameDuty, bool]:
        """Record a frame whose payload is whole and authentic, so that its sender can be named.

        Returns:
          The work to do now, and whether this was the last frame that the peer owed.

        Raises:
          UnwantedFrameError: the frame should not have been sent.
        """
        index = header.index
        with self._lock:
            if peer in self._shut:
                return FrameDuty.NOTHING, False
            if self._placed.get((index, peer)) is not payload:
                reason = self._objection(peer, header) or f"sent chunk {index} twice"
                raise UnwantedFrameError(reason, peer in self._owed)
            del self._placed[index, peer]
            chunk = self._chunks[index]
            if header.kind is not FrameKind.CONTRIBUTION:
                chunk.held = True
                duty = FrameDuty.DECODE
            else:
                chunk.arrived[peer] = payload
                chunk.missing.discard(peer)
                duty = FrameDuty.ADD_UP if self._begin(chunk) else FrameDuty.NOTHING
            self._owed[peer] -= 1
            paid = self._owed[peer] == 0
            if paid:
                del self._owed[peer]
            return duty, paid

    def abandon(self, peer: str, header: FrameHeader, view: memoryview) -> None:
        """Free a frame's memory: its lane broke. The frame may come again over another lane."""
        with self._lock:
            if self._placed.get((header.index, peer)) is view:
                del self._placed[header.index, peer]

    def _is_repeated(self, peer: str, header: FrameHeader) -> bool:
        """Return whether a peer spreads to us, after a repair, a result that we already hold."""
        if header.kind is FrameKind.CONTRIBUTION or header.index >= len(self._chunks):
            return False
        chunk = self._chunks[header.index]
        return (
            chunk.held
            and chunk.owner == peer
            and header.attempt == chunk.since > self._first_attempt
        )

    def _objection(self, peer: str, header: FrameHeader) -> str | None:
        """Return what is wrong with a frame, as text that completes "peer X ..."."""
        index = header.index
        if header.transfer != self._fragment:
            return f"sent a chunk of fragment {header.transfer}"
        if index >= len(self._chunks):
            return f"sent chunk {index}, which does not exist"
        chunk = self._chunks[index]
        if header.kind is FrameKind.CONTRIBUTION:
            if chunk.owner != self._me or peer not in self._givers:
                return f"sent a contribution to chunk {index} that it does not owe"
            twice = peer not in chunk.missing
            length = self._layout.objection(header.kind, index, header.payload_bytes)
        else:
            if chunk.owner != peer:
                return f"sent a result for chunk {index}, which is not its to send"
            twice = chunk.held
            length = self._result.objection(header.kind, index, header.payload_bytes)
        if header.attempt != chunk.since:
            return f"sent chunk {index} under attempt {header.attempt}, {chunk.since} was due"
        if length is not None:
            return length
        if twice or (index, peer) in self._placed:
            return f"sent chunk {index} twice"
        return None

    # ------------------------------------------------------------ chunks that we add up

    def begin_complete(self, indices: Iterable[int]) -> list[int]:
        """Begin and return those of the chunks that this node adds up and that lack nothing."""
        with self._lock:
            return [index for index in indices if self._begin(self._chunks[index])]

    def _begin(self, chunk: _Chunk) -> bool:
        if chunk.owner != self._me or chunk.missing or chunk.begun or chunk.held:
            return False
        if not chunk.arrived and not self._contributes:
            return False  # no contributor is left
        chunk.begun = True
        return True

    def contributions(self, index: int) -> dict[str, memoryview]:
        """Return the other peers' contributions to a chunk that is begun, by peer."""
        with self._lock:
            return dict(self._chunks[index].arrived)

    def added_up(self, index: int) -> None:
        """Record that a begun chunk is added up, and free its contributions."""
        with self._lock:
            chunk = self._chunks[index]
            chunk.held = True
            chunk.arrived.clear()

    # ------------------------------------------------------------ losses

    def shut_out(self, peers: Iterable[str]) -> list[int]:
        """Accept nothing more of these peers, and wait for nothing of them.

        What has fully arrived of their contributions stays in.

        Returns:
          The chunks that lack nothing any more; they count as begun.
        """
        with self._lock:
            new = set(peers) - self._shut - {self._me}
            self._shut |= new
            for peer in new:
                self._owed.pop(peer, None)
            for index, peer in [key for key in self._placed if key[1] in new]:
                del self._placed[index, peer]
                if self._chunks[index].owner == peer:  # a lane may still write a result there
                    self._result.move(index)
            complete = []
            for index, chunk in enumerate(self._chunks):
                if chunk.missing & new:
                    chunk.missing -= new
                    if self._begin(chunk):
                        complete.append(index)
            return complete

    def take_over(self, assignment: Assignment, attempt: int) -> range:
        """Give chunks of a lost owner to another owner, and return these chunks.

        Raises:
          RemoteProtocolError: there are no such chunks; their owner is not lost; or they are to be
            made again, and one of them is held here already.
        """
        chunks = range(assignment.first_chunk, assignment.first_chunk + assignment.chunk_count)
        if chunks.stop > len(self._chunks):
            raise RemoteProtocolError("a repair of chunks that do not exist")
        with self._lock:
            for index in chunks:
                chunk = self._chunks[index]
                if chunk.owner not in self._shut:
                    raise RemoteProtocolError("a repair of chunks whose owner is not lost")
                if assignment.from_scratch and chunk.held:
                    raise RemoteProtocolError(
                        f"chunk {index} is made again, but its result is held here"
                    )
                chunk.owner, chunk.since = assignment.owner, attempt
                if assignment.from_scratch:
                    self._makers[index] = assignment.owner
                    if assignment.owner == self._me:
                        chunk.missing = set(self._givers) - self._shut
            self._owed = self._count_owed()
        return chunks

    def is_shut_out(self, peer: str) -> bool:
        with self._lock:
            return peer in self._shut

    # ------------------------------------------------------------ state

    def attempt_of(self, index: int) -> int:
        """Return the attempt under which a chunk's frames are sent."""
        return self._chunks[index].since

    def unheld(self) -> list[int]:
        """Return the chunks whose results are not held here, in order."""
        with self._lock:
            return [index for index, chunk in enumerate(self._chunks) if not chunk.held]

    def owner(self, index: int) -> str:
        """Return a chunk's present owner: contributions go to it, and it sends the result."""
        return self._chunks[index].owner

    def owing(self) -> list[str]:
        """Return the peers that owe this node frames."""
        with self._lock:
            return list(self._owed)

    def lacking(self) -> tuple[list[str], list[str]]:
        """Return, sorted, the peers whose contributions or results this node lacks.

        Of this node's chunks only the first one that lacks anything counts: contributors send only
        a few chunks ahead of the results, so the chunks after it wait for the same peers.
        """
        contributors: set[str] = set()
        owners: set[str] = set()
        with self._lock:
            for chunk in self._chunks:
                if chunk.owner == self._me and not contributors:
                    contributors = set(chunk.missing)
                if not chunk.held and chunk.owner != self._me:
                    owners.add(chunk.owner)
        return sorted(contributors), sorted(owners)

    def makers(self) -> list[str]:
        """Return for each chunk the peer that adds it up or did, even if another spreads it."""
        with self._lock:
            return list(self._makers)

    def held(self) -> bytes:
        """Return a bit for each chunk, the first one lowest: whether its result is here."""
        with self._lock:
            return pack_set([chunk.held for chunk in self._chunks])

    def _count_owed(self) -> dict[str, int]:
        owed: Counter[str] = Counter()
        for chunk in self._chunks:
            owed.update(chunk.missing)
            if not chunk.held and chunk.owner not in {self._me, *self._shut}:
                owed[chunk.owner] += 1
        return dict(owed)

"""What a reduction waits for, chunk by chunk, and from whom it accepts what.

Frames change these books from the lanes' threads, orders of the master from the event loop. One lock
guards them; it is held for some microseconds, never while something is computed, and no other lock
but a buffer pool's is taken under it.

    a chunk that we own       missing contributions arrive -> begun (all that can come is here) -> held
    one that our site's       the same, then what was added up goes to the owner, whose result
      leader, us, gathers       arrives -> held
    any other                 its result arrives -> held

A chunk is begun once, and a result that is held stays what it is. When peers are shut out, chunks
stop waiting for them; when an owner is, somebody else takes its chunks over, under the number of a
later attempt, so that what the former owner sent cannot be taken for the new one's.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Iterable

import numpy as np
from attrs import define, field

from ..protocol.errors import RemoteProtocolError
from ..protocol.messages import Assignment
from ..protocol.network.lane import FrameHeader, FrameKind
from .arithmetic import ChunkLayout
from .gather_tree import ChunkRole, Tree
from .links.buffer_pool import BufferPool
from .result import RoundResult


class FrameDuty(enum.Enum):
    """What has to be done about a frame that was delivered."""

    NOTHING = enum.auto()
    ADD_UP = enum.auto()  # it was the last contribution that its chunk lacked
    DECODE = enum.auto()  # it is a result


class UnwantedFrameError(Exception):
    """A frame that its sender should not have sent; the text is the end of a sentence about it.

    Attributes:
      owing: whether the sender still owes us frames, so that we cannot go on without it.
    """

    def __init__(self, reason: str, owing: bool) -> None:
        super().__init__(reason)
        self.owing = owing


@define(eq=False)
class _Chunk:
    part: ChunkRole  # ours
    since: int  # the attempt that made it that
    missing: set[str]  # whose contributions it waits for; never our own
    arrived: dict[str, memoryview] = field(factory=dict)
    begun: bool = False
    held: bool = False


class ChunkTracker:
    """See the top of this file.

    Args:
      layout: of what crosses sites and of results.
      inner: of contributions within our site.
      contributes: whether we do.
      attempt: of the order.
      result: where results go.
      buffers: where memory for contributions comes from.
      seal_bytes: behind each contribution. If there are seals, contributions are kept when they are
        added up, for who asks what they were: of a fragment, one encoding in all.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        inner: ChunkLayout,
        tree: Tree,
        me: str,
        contributes: bool,
        attempt: int,
        fragment: int,
        result: RoundResult,
        buffers: BufferPool,
        seal_bytes: int = 0,
    ) -> None:
        self._seal_bytes = seal_bytes
        self._layout = layout
        self._inner = inner
        self._tree = tree
        self._me = me
        self._contributes = contributes
        self._first_attempt = attempt
        self._fragment = fragment
        self._result = result
        self._buffers = buffers
        self._up_bytes_max = seal_bytes + max(
            (cut.up_bytes for cut in (*layout.cuts, *inner.cuts)), default=0
        )
        self._lock = threading.Lock()  # guards all that follows
        self._shut: set[str] = set()
        parts = [tree.part(index) for index in range(len(layout.cuts))]
        self._chunks = [_Chunk(part, attempt, set(part.givers)) for part in parts]
        self._makers = [part.parent or me for part in parts]
        self._placed: dict[tuple[int, str], memoryview] = {}  # by chunk and sender
        # For contributions; used chunk after chunk, since all rooms but the last are equally long.
        self._spare: list[memoryview] = []
        self._lent: dict[tuple[int, str], memoryview] = {}  # by chunk and contributor
        self._owed = self._count_owed()

    # ------------------------------------------------------------ frames

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        """Where a frame's payload goes; None: nowhere. What is wrong goes where nobody reads it."""
        with self._lock:
            if peer in self._shut or self._is_repeated(peer, header):
                return None
            if self._objection(peer, header) is not None:
                return memoryview(bytearray(header.payload_bytes))
            if header.kind is FrameKind.CONTRIBUTION:
                view = self._lend(header.index, peer)[: header.payload_bytes]
            else:
                view = self._result.place(header.kind, header.index, header.payload_bytes)
            self._placed[header.index, peer] = view
            return view

    def deliver(
        self, peer: str, header: FrameHeader, payload: memoryview
    ) -> tuple[FrameDuty, bool]:
        """The payload is whole and authentic now, so its sender can be named.

        Returns:
          What is to be done now, and whether this was the last frame that the peer owed.

        Raises:
          UnwantedFrameError: it should not have been sent.
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
        """The lane broke before the payload was whole; the frame may come again over another."""
        with self._lock:
            if self._placed.get((header.index, peer)) is view:
                del self._placed[header.index, peer]
                self._take_back(header.index, peer)

    def _is_repeated(self, peer: str, header: FrameHeader) -> bool:
        """Whether somebody spreads to us, after a repair, what we have already."""
        if header.kind is FrameKind.CONTRIBUTION or header.index >= len(self._chunks):
            return False
        chunk = self._chunks[header.index]
        return (
            chunk.held
            and chunk.part.parent == peer
            and header.attempt == chunk.since > self._first_attempt
        )

    def _objection(self, peer: str, header: FrameHeader) -> str | None:
        """What is wrong with a frame, as the end of a sentence about its sender."""
        index = header.index
        if header.transfer != self._fragment:
            return f"sent a chunk of fragment {header.transfer}"
        if index >= len(self._chunks):
            return f"sent chunk {index}, which does not exist"
        chunk = self._chunks[index]
        if header.kind is FrameKind.CONTRIBUTION:
            if peer not in chunk.part.givers:
                return f"sent a contribution to chunk {index} that nobody asked it for"
            twice = peer not in chunk.missing
            layout = self._inner if self._tree.is_near(peer) else self._layout
            length = layout.objection(header.kind, index, header.payload_bytes - self._seal_bytes)
        else:
            if chunk.part.parent != peer:
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
        """Those of the chunks that we add up and that lack nothing; they count as begun now."""
        with self._lock:
            return [index for index in indices if self._begin(self._chunks[index])]

    def _begin(self, chunk: _Chunk) -> bool:
        if not chunk.part.gathers or chunk.missing or chunk.begun or chunk.held:
            return False
        if not chunk.arrived and not self._contributes:
            return False  # nobody who contributed is left
        chunk.begun = True
        return True

    def contributions(self, index: int) -> dict[str, memoryview]:
        """Others' contributions to a chunk that is begun, by peer; with their seals."""
        with self._lock:
            return dict(self._chunks[index].arrived)

    def added_up(self, index: int) -> None:
        """A chunk that was begun is added up; its contributions are not needed any more."""
        with self._lock:
            chunk = self._chunks[index]
            chunk.held = chunk.part.parent is None
            if self._seal_bytes:
                return
            for peer in chunk.arrived:
                self._take_back(index, peer)
            chunk.arrived.clear()

    def has_added(self, index: int) -> bool:
        """Whether the chunk's result was made here, of contributions that are kept."""
        with self._lock:
            chunk = self._chunks[index]
            return bool(self._seal_bytes) and chunk.begun and chunk.held

    def _lend(self, index: int, peer: str) -> memoryview:
        buffer = self._spare.pop() if self._spare else self._buffers.take(self._up_bytes_max)
        self._lent[index, peer] = buffer
        return buffer

    def _take_back(self, index: int, peer: str) -> None:
        buffer = self._lent.pop((index, peer), None)
        if buffer is not None:
            self._spare.append(buffer)

    # ------------------------------------------------------------ losses

    def shut_out(self, peers: Iterable[str]) -> list[int]:
        """Accept nothing more of these peers, and wait for nothing of them.

        What has fully arrived of their contributions stays in.

        Returns:
          Chunks that lack nothing any more; they count as begun.
        """
        with self._lock:
            new = set(peers) - self._shut - {self._me}
            self._shut |= new
            for peer in new:
                self._owed.pop(peer, None)
            for index, peer in [key for key in self._placed if key[1] in new]:
                # A lane may still write there: nobody else may use that memory.
                del self._placed[index, peer]
                if self._lent.pop((index, peer), None) is None:
                    self._result.move(index)
            complete = []
            for index, chunk in enumerate(self._chunks):
                if chunk.missing & new:
                    chunk.missing -= new
                    if self._begin(chunk):
                        complete.append(index)
            return complete

    def take_over(self, assignment: Assignment, attempt: int) -> range:
        """Chunks of a lost owner get another one.

        Returns:
          Which chunks these are.

        Raises:
          RemoteProtocolError: there are no such chunks; or they are to be made again, and one of
            them is held here already.
        """
        chunks = range(assignment.first_chunk, assignment.first_chunk + assignment.chunk_count)
        if chunks.stop > len(self._chunks):
            raise RemoteProtocolError("a repair of chunks that do not exist")
        with self._lock:
            for index in chunks:
                chunk = self._chunks[index]
                if chunk.part.parent not in self._shut:
                    raise RemoteProtocolError("a repair of chunks whose owner is not lost")
                if assignment.anew and chunk.held:
                    raise RemoteProtocolError(f"chunk {index} is made again, but we hold it")
                chunk.part, chunk.since = self._tree.star(assignment.owner), attempt
                if assignment.anew:
                    self._makers[index] = assignment.owner
                    chunk.missing = set(chunk.part.givers) - self._shut
            self._owed = self._count_owed()
        return chunks

    def is_shut_out(self, peer: str) -> bool:
        with self._lock:
            return peer in self._shut

    # ------------------------------------------------------------ what there is

    def attempt_of(self, index: int) -> int:
        """The attempt under which a chunk's frames are sent."""
        return self._chunks[index].since

    def unheld(self) -> list[tuple[int, ChunkRole]]:
        """The chunks that are not held here, in order, and our part in them."""
        with self._lock:
            return [(i, chunk.part) for i, chunk in enumerate(self._chunks) if not chunk.held]

    def part(self, index: int) -> ChunkRole:
        """Our part in a chunk, as it is now."""
        return self._chunks[index].part

    def owing(self) -> list[str]:
        """Peers that owe us frames."""
        with self._lock:
            return list(self._owed)

    def lacking(self) -> tuple[list[str], list[str]]:
        """Whose contributions our own chunks lack, and who owes us results; sorted.

        Of our chunks the first one that lacks anything counts: contributors send so far ahead of the results
        only, and what comes after it waits for the same ones.
        """
        contributors: set[str] = set()
        owners: set[str] = set()
        with self._lock:
            for chunk in self._chunks:
                if chunk.part.gathers and not contributors:
                    contributors = set(chunk.missing)
                if not chunk.held and chunk.part.parent is not None:
                    owners.add(chunk.part.parent)
        return sorted(contributors), sorted(owners)

    def makers(self) -> list[str]:
        """By chunk: who adds it up, or did; that may be us. Somebody else may spread it since."""
        with self._lock:
            return list(self._makers)

    def held(self) -> bytes:
        """A bit for each chunk, the first one lowest: whether its result is here."""
        with self._lock:
            bits = np.array([chunk.held for chunk in self._chunks], np.bool_)
        return np.packbits(bits, bitorder="little").tobytes()

    def _count_owed(self) -> dict[str, int]:
        owed: Counter[str] = Counter()
        for chunk in self._chunks:
            owed.update(chunk.missing)
            parent = chunk.part.parent
            if parent is not None and not chunk.held and parent not in self._shut:
                owed[parent] += 1
        return dict(owed)

"""Boxes of a fragment on their way between the arenas of two hosts.

The receiver asks, with a transfer number of its own; the sender's answer is frames of about
``PIECE_BYTES``, which both ends cut alike. A host's arenas have the full shape, in memory that the
kernel gives where it is written: they take the boxes of its ranks, and no more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import trio
from attrs import field, frozen
from numpy.typing import NDArray

from ....collectives.links.frame_routing import frame_key
from ....collectives.links.hub import LinkHub
from ....collectives.links.send_queue import Frame, Load
from ....diloco.fragments import COUNTER
from ....membership.peer.rank_parts import box_of
from ....protocol import messages as m
from ....protocol.arena import Arena, NotWholeError
from ....protocol.messages import ModelLayout, TensorBox
from ....protocol.network.lane import FrameHeader, FrameKind

PIECE_BYTES = 2**20
VALUE_BYTES, COUNTER_BYTES = 4, 8


@frozen
class BoxPiece:
    """Consecutive rows of a box, in one frame.

    Attributes:
      counter: it lies in the fragment's counters, else in its values.
      offset: of its tensor there, in elements.
      shape: of the whole tensor.
      where: its ranges in the tensor, one for each dimension.
    """

    counter: bool
    offset: int
    shape: tuple[int, ...]
    where: tuple[slice, ...]

    @property
    def size_bytes(self) -> int:
        count = math.prod(int(each.stop - each.start) for each in self.where)
        return count * (COUNTER_BYTES if self.counter else VALUE_BYTES)

    def of(self, arena: Arena, fragment: int) -> NDArray[np.generic]:
        """Return its elements in an arena; a view."""
        array: NDArray[Any] = arena.counters(fragment) if self.counter else arena.values(fragment)
        tensor = array[self.offset : self.offset + math.prod(self.shape)].reshape(self.shape)
        index: Any = (..., *self.where)  # of no dimensions a view, too
        view: NDArray[np.generic] = tensor[index]
        return view


def pieces_of(
    layout: ModelLayout, tensors: Sequence[int], held: Mapping[int, Iterable[TensorBox]]
) -> tuple[BoxPiece, ...]:
    """Cut the boxes of a fragment into pieces.

    Args:
      tensors: the fragment's, as indices into the layout, in the fragment's order.
      held: the boxes of each tensor; a tensor that is missing has none.
    """
    pieces: list[BoxPiece] = []
    ends = {False: 0, True: 0}
    for index in tensors:
        spec = layout.tensors[index]
        counter = spec.kind == COUNTER
        offset = ends[counter]
        ends[counter] += math.prod(spec.shape)
        element_bytes = COUNTER_BYTES if counter else VALUE_BYTES
        for box in sorted(set(held.get(index, ())), key=lambda each: each.start):
            whole = tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))
            cuts = _cut(whole, 0, element_bytes) if math.prod(box.shape) else ()
            pieces += (BoxPiece(counter, offset, spec.shape, where) for where in cuts)
    return tuple(pieces)


def pieces_held(
    hellos: Iterable[m.TrainerHello], tensors: Sequence[int], named: Collection[int] | None = None
) -> tuple[BoxPiece, ...]:
    """Return what ranks hold of a fragment; with ``named``, of these tensors alone.

    Args:
      hellos: of the ranks, which have one layout.
      tensors: the fragment's, as of ``pieces_of``.
    """
    held: dict[int, list[TensorBox]] = {}
    layout = None
    for hello in hellos:
        layout = hello.layout
        for index in tensors if named is None else set(named).intersection(tensors):
            held.setdefault(index, []).append(box_of(hello.part, layout, index))
    return () if layout is None else pieces_of(layout, tensors, held)


def _cut(where: tuple[slice, ...], axis: int, element_bytes: int) -> Iterator[tuple[slice, ...]]:
    """Cut ranges into consecutive rows along an axis, along the next one where a row is too
    long.
    """
    counts = [each.stop - each.start for each in where]
    if axis == len(where) or math.prod(counts) * element_bytes <= PIECE_BYTES:
        yield where
        return
    row_bytes = math.prod(counts[axis + 1 :]) * element_bytes
    rows = max(1, PIECE_BYTES // row_bytes)
    for start in range(where[axis].start, where[axis].stop, rows):
        stop = min(start + rows, where[axis].stop)
        part = (*where[:axis], slice(start, stop), *where[axis + 1 :])
        yield from _cut(part, axis + 1, element_bytes) if rows == 1 else (part,)


class BoxSource:
    """The pieces of a transfer as frames; a ``FrameSource`` of ``collectives.links.send_queue``.

    Args:
      version: that the arena's fragment must have; None: nobody writes there meanwhile.

    Attributes:
      stale: the fragment has another version by now, and the rest is not sent.
    """

    def __init__(
        self,
        arena: Arena,
        fragment: int,
        pieces: Sequence[BoxPiece],
        transfer: int,
        version: int | None,
    ) -> None:
        self.stale = False
        self._arena, self._fragment, self._pieces = arena, fragment, pieces
        self._transfer, self._version = transfer, version
        self._left = deque(range(len(pieces)))

    def next_frame(self) -> Load | None:
        try:
            return partial(self._frame, self._left.popleft())
        except IndexError:  # another lane's thread was faster
            return None

    def left(self) -> int:
        return len(self._left)

    def _frame(self, index: int) -> Frame | None:
        piece = self._pieces[index]
        payload = np.empty(piece.size_bytes, np.uint8)
        view = piece.of(self._arena, self._fragment)

        def copy() -> None:
            payload.view(view.dtype).reshape(view.shape)[...] = view

        if self._version is None:
            copy()
        else:
            try:
                found = self._arena.read_once(self._fragment, copy)
            except NotWholeError:
                found = None
            if found != self._version:
                self.stale = True
                self._left.clear()
                return None
        header = FrameHeader(FrameKind.BLOCK, 0, 0, index, self._transfer, payload.size)
        return header, payload.data


@frozen
class BoxSink:
    """Puts the pieces of a transfer, from one peer, into an arena.

    Attributes:
      whole: all pieces are there.
    """

    _peer: str
    _arena: Arena
    _fragment: int
    _pieces: Sequence[BoxPiece]
    whole: trio.Event = field(factory=trio.Event, init=False)
    _come: set[int] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        if not self._pieces:
            self.whole.set()

    def place(self, peer: str, header: FrameHeader) -> memoryview | None:
        if peer != self._peer or header.index >= len(self._pieces):
            return None
        fits = header.payload_bytes == self._pieces[header.index].size_bytes
        return memoryview(bytearray(header.payload_bytes)) if fits else None

    def deliver(self, _peer: str, header: FrameHeader, payload: memoryview) -> None:
        view = self._pieces[header.index].of(self._arena, self._fragment)
        view[...] = np.frombuffer(payload, view.dtype).reshape(view.shape)
        self._come.add(header.index)
        if len(self._come) == len(self._pieces):
            self.whole.set()

    def abandon(self, peer: str, header: FrameHeader, view: memoryview) -> None:
        pass  # it comes again, over another lane


async def receive_boxes(
    hub: LinkHub,
    peer: str,
    arena: Arena,
    pieces: Sequence[BoxPiece],
    wanted: m.BoxesWanted,
    tell: Callable[[m.Message], None],
) -> None:
    """Ask a peer for pieces of a fragment, and wait until they are in an arena."""
    sink = BoxSink(peer, arena, wanted.fragment, pieces)
    key = frame_key(FrameHeader(FrameKind.BLOCK, 0, 0, 0, wanted.transfer, 0))
    with hub.register(key, sink):
        tell(wanted)
        await sink.whole.wait()

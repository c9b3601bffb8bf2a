"""One node's copy of a round's encoded result, as it comes together chunk by chunk.

It owns the memory in which results arrive or are made, knows how much of a chunk's room its
encoding takes, and keeps apart what travels (maybe compressed) from what counts (as encoded).
"""

from __future__ import annotations

import numpy as np

from ..protocol.errors import BadContributionError
from .arithmetic import Layout
from .coding import Bytes
from .compression import Squeezer, expand


class EncodedResult:
    """See the top of this file. Different chunks may be worked on by different threads.

    Attributes:
      data: all chunks' room; chunk ``i`` has ``layout.cuts[i].down``.
    """

    def __init__(self, layout: Layout) -> None:
        self.data = np.empty(layout.down_bytes, np.uint8).data
        self._layout = layout
        self._lengths = [cut.down_bytes for cut in layout.cuts]  # right for chunks that are there
        self._squeezer = Squeezer(layout.zstd_down)
        self._squeezed: dict[int, Bytes] = {}

    def room(self, index: int) -> memoryview:
        """Where a chunk is encoded into; ``made`` then tells how much of it was needed."""
        return self.data[self._layout.cuts[index].down]

    def chunk(self, index: int) -> memoryview:
        """A chunk's encoding, once it is there."""
        return self.room(index)[: self._lengths[index]]

    def made(self, index: int, length: int) -> None:
        """The owner encoded a chunk; takes the time to compress it, if that is wanted and pays."""
        self._lengths[index] = length
        if self._squeezer.pays and not self._layout.cuts[index].is_counters:
            self._squeezed[index] = self._squeezer.squeeze(self.chunk(index))

    def payload(self, index: int) -> Bytes:
        """What a frame carries of a chunk that was made here."""
        return self._squeezed.get(index, self.chunk(index))

    def place(self, index: int, payload_bytes: int) -> memoryview:
        """Where a frame's payload goes, of a length that ``Layout.objection`` accepts."""
        if self._is_squeezed(index, payload_bytes):
            return memoryview(bytearray(payload_bytes))
        return self.room(index)[:payload_bytes]

    def arrived(self, index: int, payload: memoryview) -> None:
        """The payload is authentic and where ``place`` said; ``expand`` comes next."""
        if self._is_squeezed(index, len(payload)):
            self._squeezed[index] = payload
        else:
            self._lengths[index] = len(payload)

    def expand(self, index: int) -> memoryview:
        """``chunk``, undoing compression first.

        Raises:
          BadContributionError: the owner compressed something else, or nothing at all.
        """
        squeezed = self._squeezed.pop(index, None)
        room = self.room(index)
        if squeezed is not None:
            try:
                room[:] = expand(squeezed, len(room))
            except ValueError as error:
                raise BadContributionError(self._layout.cuts[index].owner, str(error)) from error
        return self.chunk(index)

    def pieces(self, start: int, end: int) -> list[memoryview]:
        """These chunks' encodings; in one piece if no room is left between them."""
        if self._layout.codec_down.variable:
            return [self.chunk(index) for index in range(start, end)]
        cuts = self._layout.cuts
        return [self.data[cuts[start].down.start : cuts[end - 1].down.stop]]

    def whole(self) -> memoryview:
        """All encodings, one right after the other, read-only."""
        if self._layout.codec_down.variable:
            return memoryview(b"".join(self.pieces(0, len(self._lengths))))
        return self.data.toreadonly()

    def _is_squeezed(self, index: int, payload_bytes: int) -> bool:
        return self._layout.zstd_down and payload_bytes < self._layout.cuts[index].down_bytes

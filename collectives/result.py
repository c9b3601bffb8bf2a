"""One node's copy of a round's result, filled chunk by chunk.

It owns the memory in which results arrive or are made. For each chunk it stores the encoding, its
length, the set of its contributors, and the compressed form for sending if that is shorter.

Only encodings are held. Their values are decoded when they are read (``pieces``), chunk by chunk.

Each chunk has a room of its own, taken from a pool when its first byte comes. A frame that was sent
but not acknowledged, and a lane that still receives from a peer that is shut out, hold it.

A whole result that waits (for a copy that it will be replayed on, or for receivers with slow lines)
may be moved into a file.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np
from blake3 import blake3

from ..protocol.errors import BadContributionError
from ..protocol.messages import ContributorRun
from ..protocol.network.lane import Buffer, FrameKind
from ..protocol.unnamed_file import UnnamedFile
from .arithmetic import ChunkLayout, Counters, Values, check_finite, decode_checked
from .codecs.codec_base import Bytes
from .codecs.codecs import FrameCompressor, expand
from .links.buffer_pool import BufferPool


class RoundResult:
    """The chunks of a round's result. Several threads may work on different chunks at once.

    Args:
      contributor_count: of the order.
      pool: where the memory comes from.

    Attributes:
      counters: shape ``(counter_count,)``, int64; valid once their chunk is done.
    """

    def __init__(self, layout: ChunkLayout, contributor_count: int, pool: BufferPool) -> None:
        self._layout = layout
        self._contributor_count = contributor_count
        self._full_set = pack_set([True] * contributor_count)
        self._pool = pool
        self._rooms: list[memoryview | None] = [None] * len(layout.cuts)
        self._lengths = [cut.down_bytes for cut in layout.cuts]  # valid for chunks that are here
        self._sets: dict[int, bytes] = {}  # packed; of chunks that lack a contributor
        self._verbatim = layout.codec_down.verbatim
        self.counters: Counters = np.empty(layout.size.counter_count, np.int64)
        self._compressor = FrameCompressor(layout.zstd_down)
        self._compressed: dict[int, Bytes] = {}
        self._digests = [b""] * len(layout.cuts)
        self._undone_count = len(layout.cuts)
        self._lock = threading.Lock()  # for the count
        self._file: UnnamedFile | None = None
        self._starts: dict[int, int] = {}  # of the chunks in the file

    # ------------------------------------------------------------ a chunk that is made here

    def room(self, index: int) -> memoryview:
        """Return the memory to encode a chunk into; ``made`` then gets the length needed."""
        room = self._rooms[index]
        if room is None:
            room = self._rooms[index] = self._pool.take(self._layout.cuts[index].down_bytes)
        return room

    def scratch(self, index: int) -> Values:
        """Return memory for a chunk's values: its room, if the codec is verbatim."""
        if self._verbatim:
            return np.frombuffer(self.room(index), np.float32)
        return np.frombuffer(self._pool.take(4 * self._layout.cuts[index].count), np.float32)

    def made(self, index: int, length: int, present: Sequence[bool]) -> None:
        """Record a chunk that this node encoded, and compress it if that is wanted and pays."""
        self._lengths[index] = length
        if not all(present):
            self._sets[index] = pack_set(present)
        elif self._compressor.pays and not self._layout.cuts[index].is_counters:
            self._compressed[index] = self._compressor.compress(self.chunk(index))

    # ------------------------------------------------------------ a chunk that comes in

    def objection(self, kind: FrameKind, index: int, payload_bytes: int) -> str | None:
        """Return what is wrong with a frame's length, as text that completes "peer X ..."."""
        suffix_bytes = len(self._full_set) if kind is FrameKind.PARTIAL else 0
        return self._layout.objection(FrameKind.RESULT, index, payload_bytes - suffix_bytes)

    def place(self, kind: FrameKind, index: int, payload_bytes: int) -> memoryview:
        """Return memory for a frame's payload, whose length has no ``objection``."""
        if kind is FrameKind.PARTIAL or self._is_compressed(index, payload_bytes):
            return memoryview(bytearray(payload_bytes))
        return self.room(index)[:payload_bytes]

    def move(self, index: int) -> None:
        """Give a chunk another room: a lane may still write to what ``place`` returned."""
        self._rooms[index] = None

    def decode(self, kind: FrameKind, index: int, payload: memoryview, owner: str) -> None:
        """Check an authentic payload that lies in the memory that ``place`` returned.

        Raises:
          BadContributionError: the payload cannot be a result; names the owner.
        """
        cut = self._layout.cuts[index]
        try:
            self._take_in(kind, index, payload)
        except ValueError as error:
            raise BadContributionError(owner, str(error)) from error
        encoded = self.chunk(index)
        if cut.is_counters:
            self.counters[:] = np.frombuffer(encoded, "<i8")
        elif not self._verbatim:
            values = self.scratch(index)
            decode_checked(self._layout.codec_down, False, encoded, values, owner)
        else:
            check_finite(np.frombuffer(encoded, np.float32), owner)

    def _take_in(self, kind: FrameKind, index: int, payload: memoryview) -> None:
        if kind is FrameKind.PARTIAL:
            end = len(payload) - len(self._full_set)
            encoded, packed = payload[:end], bytes(payload[end:])
            unpack_set(packed, self._contributor_count)
            self._sets[index] = packed
            self._rooms[index], self._lengths[index] = encoded, len(encoded)
        elif self._is_compressed(index, len(payload)):
            room = self.room(index)
            room[:] = expand(payload, len(room))
        else:
            self._lengths[index] = len(payload)

    # ------------------------------------------------------------ chunks that are here

    def done(self, index: int) -> bool:
        """Hash a chunk, which will not change any more, while it is in the cache.

        Returns:
          Whether all chunks are done; true at one of the calls only.
        """
        self._digests[index] = blake3(self.chunk(index)).digest()
        with self._lock:
            self._undone_count -= 1
            return self._undone_count == 0

    def chunk(self, index: int) -> memoryview:
        """Return the encoding of a chunk that is here; OSError if its file is not readable."""
        room = self._rooms[index]
        if room is None and self._file is not None:
            return self._file.read(self._starts[index], self._lengths[index])
        return self.room(index)[: self._lengths[index]]

    def move_to_file(self, indices: Collection[int], folder: Path) -> None:
        """Move these chunks of a whole result into a file, and forget all others. Heavy.

        They can be read meanwhile. If the disk does not take them, all stays as it is.
        """
        if self._file is not None:
            return
        lengths = [self._lengths[index] for index in indices]
        try:
            file = UnnamedFile(folder, (self.chunk(index) for index in indices))
        except OSError:
            return
        self._starts = dict(zip(indices, accumulate(lengths, initial=0), strict=False))
        self._file = file
        self._compressed = {}
        self._rooms = [None] * len(self._rooms)  # from here on ``chunk`` reads the file

    def payload(self, index: int) -> tuple[FrameKind, tuple[Bytes, ...]]:
        """Return kind and payload, in pieces, of the frame that carries a chunk to a receiver."""
        if index in self._sets:
            return FrameKind.PARTIAL, (self.chunk(index), self._sets[index])
        return FrameKind.RESULT, (self._compressed.get(index, self.chunk(index)),)

    def pieces(self) -> Iterator[tuple[slice, Values]]:
        """Decode a whole result, chunk by chunk, in order. Heavy.

        Yields:
          The place of a chunk's values in the fragment, and the values, read-only.
        """
        for index, cut in enumerate(self._layout.cuts):
            if not cut.is_counters:
                encoded = self.chunk(index)
                if self._verbatim:
                    values = np.frombuffer(encoded, np.float32)
                else:
                    values = self.scratch(index)
                    decode_checked(self._layout.codec_down, False, encoded, values, "")
                values.flags.writeable = False
                yield cut.values, values

    def manifest(self) -> tuple[ContributorRun, ...]:
        """Return which contributors are in which chunks; empty if all are in all."""
        if not self._sets:
            return ()
        runs = groupby(self._packed_sets())
        return tuple(ContributorRun(packed, len(list(run))) for packed, run in runs)

    def digest(self) -> bytes:
        """Return BLAKE3 of all chunks' digests, followed by all sets if a contributor is missing.

        A chunk's digest is BLAKE3 of its encoding (what a frame carries before it is compressed).
        """
        sets = self._packed_sets() if self._sets else ()
        return blake3(b"".join((*self._digests, *sets))).digest()

    def digest_of_chunks(self, indices: Iterable[int]) -> bytes:
        """Return BLAKE3 of these chunks' digests and sets; empty if any chunk is not done."""
        hasher = blake3()
        for index in indices:
            if not self._digests[index]:
                return b""
            hasher.update(self._digests[index])
            hasher.update(self.present(index))
        return hasher.digest()

    def present(self, index: int) -> bytes:
        """Return the packed set of a chunk's contributors."""
        return self._sets.get(index, self._full_set)

    def _packed_sets(self) -> list[bytes]:
        return [self.present(index) for index in range(len(self._rooms))]

    def _is_compressed(self, index: int, payload_bytes: int) -> bool:
        return self._layout.zstd_down and payload_bytes < self._layout.cuts[index].down_bytes


# ---------------------------------------------------------------- sets of contributors


# One bit for each contributor, in the order's order, the first one lowest, in as few bytes as hold
# them all. A result in which no contributor is missing has no manifest.


def pack_set(present: Sequence[bool]) -> bytes:
    """Pack a set of contributors as it follows a chunk's mean on the wire."""
    return np.packbits(np.array(present, np.bool_), bitorder="little").tobytes()


def unpack_bits(data: Buffer, count: int) -> list[bool]:
    """Unpack ``count`` bits, the lowest of each byte first; bits beyond the data are 0."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:count].tolist()
    return [bool(bit) for bit in bits] + [False] * (count - len(bits))


def unpack_set(data: Buffer, contributor_count: int) -> list[bool]:
    """Unpack a set of contributors from the wire.

    Raises:
      ValueError: the set is empty, full (then it is not sent), or has bits beyond the contributors.
    """
    bits = unpack_bits(data, 8 * len(data))
    within = bits[:contributor_count]
    if any(bits[contributor_count:]) or not any(within) or all(within):
        raise ValueError("a set of contributors that cannot be")
    return within

"""Partial copies: blocks of an unfinished fetch, on disk, which a reboot need not fetch again.

    FOLDER/FRAGMENT.blocks      records, appended: digest (32 bytes), length (u32), the block

A block is identified by its digest, so its version does not matter, and it is checked again when it
is read. Nothing is synced: blocks lost in a power failure are fetched again, and the file ends at
the first cut record. The first blocks of a copy are not stored: a copy of a few seconds is not
worth writes to disk.

A disk that is full or fails ends the storing, not the copy. Everything blocks: use threads.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from .blocks import BLOCK_BYTES

log = logging.getLogger("holdfast.peer")

# After this time blocks are stored; a fast line fetches the earlier ones again in as long.
KEPT_AFTER_S = 10.0

_HEAD = struct.Struct("<32sI")


class FragmentPartialCopy:
    """The stored blocks of one fragment. ``find`` and ``put`` may be called from several threads.

    Args:
      has_room: returns whether a number of further bytes may be stored.
    """

    def __init__(self, path: Path, has_room: Callable[[int], bool] = lambda _bytes: True) -> None:
        self._path = path
        self._has_room = has_room
        self._lock = threading.Lock()
        self._places: dict[bytes, tuple[int, int]] = {}  # (offset, length) by digest
        self._end = 0
        self._file: int | None = None
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._scan(self._file)
        except OSError as error:
            self._give_up(error)

    def _scan(self, file: int) -> None:
        """Index the records, up to the first one that is not whole."""
        size = os.fstat(file).st_size
        while self._end + _HEAD.size <= size:
            digest, length = _HEAD.unpack(os.pread(file, _HEAD.size, self._end))
            start = self._end + _HEAD.size
            if length > BLOCK_BYTES or start + length > size:
                break
            self._places[digest] = start, length
            self._end = start + length
        os.ftruncate(file, self._end)

    def find(self, digest: bytes) -> bytes | None:
        """Return the block with a digest, or None if it is not here or is damaged."""
        with self._lock:
            place = self._places.get(digest)
            if place is None or self._file is None:
                return None
            try:
                data = os.pread(self._file, place[1], place[0])
            except OSError as error:
                self._give_up(error)
                return None
            if blake3(data).digest() != digest:
                del self._places[digest]
                return None
        return data

    def drop_unless(self, wanted: Collection[bytes]) -> None:
        """Empty the file if most of its bytes are blocks that are not wanted."""
        with self._lock:
            useful = sum(
                _HEAD.size + length
                for digest, (_start, length) in self._places.items()
                if digest in wanted
            )
            if self._file is not None and 2 * useful < self._end:
                self._places.clear()
                self._end = 0
                with suppress(OSError):
                    os.ftruncate(self._file, 0)

    def put(self, digest: bytes, data: bytes | bytearray | memoryview) -> None:
        """Store a checked block."""
        with self._lock:
            if self._file is None or digest in self._places:
                return
            if not self._has_room(_HEAD.size + len(data)):
                return
            try:
                record = (_HEAD.pack(digest, len(data)), data)
                written = os.pwritev(self._file, record, self._end)
            except OSError as error:
                self._give_up(error)
                return
            if written == _HEAD.size + len(data):
                self._places[digest] = self._end + _HEAD.size, len(data)
                self._end += written

    @property
    def size_bytes(self) -> int:
        return self._end

    def close(self) -> None:
        with self._lock:
            self._places.clear()
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _give_up(self, error: OSError) -> None:
        log.warning("blocks of the copy are no longer stored on disk: %s: %s", self._path, error)
        self._places.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None


class PartialCopies:
    """The stored blocks of all fragments, in a folder.

    Args:
      after_s: see ``KEPT_AFTER_S``.
      limit_bytes: for all files, exceeded by at most a block per writing thread; None: no limit.
    """

    def __init__(
        self, folder: Path, after_s: float = KEPT_AFTER_S, limit_bytes: int | None = None
    ) -> None:
        self.after_s = after_s
        self._limit_bytes = limit_bytes
        self._folder = folder
        self._fragments: dict[int, FragmentPartialCopy] = {}

    def fragment(self, number: int) -> FragmentPartialCopy:
        if number not in self._fragments:
            path = self._folder / f"{number}.blocks"
            self._fragments[number] = FragmentPartialCopy(path, self._has_room)
        return self._fragments[number]

    def _has_room(self, more_bytes: int) -> bool:
        if self._limit_bytes is None:
            return True
        used_bytes = sum(each.size_bytes for each in list(self._fragments.values()))
        return used_bytes + more_bytes <= self._limit_bytes

    def close(self) -> None:
        """Close the files and keep them for the next process."""
        for fragment in self._fragments.values():
            fragment.close()
        self._fragments.clear()

    def clear(self) -> None:
        """Delete all files."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

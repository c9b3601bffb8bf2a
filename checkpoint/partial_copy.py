"""Blocks of a copy under way, on disk: what a machine that reboots meanwhile need not fetch again.

    FOLDER/FRAGMENT.blocks      records, appended: digest (32 bytes), length (u32), the block

A block is known by its digest, so it does not matter of which version it was, and what is read is
checked again. Nothing is synced: what a power failure takes is fetched once more, and a record that is
cut short is where the file ends. A copy of seconds is not worth a disk's work, so the first blocks of a
copy are not kept.

A disk that is full or fails ends the keeping, not the copy. All of it blocks: call it in threads.
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

# Of copying; a fast line fetches again in that time what a disk would have kept.
KEPT_AFTER_S = 10.0

_HEAD = struct.Struct("<32sI")


class FragmentPartialCopy:
    """One fragment's blocks. ``find`` and ``put`` may be called from several threads.

    Args:
      has_room: whether so many bytes more may be kept.
    """

    def __init__(self, path: Path, has_room: Callable[[int], bool] = lambda _bytes: True) -> None:
        self._path = path
        self._has_room = has_room
        self._lock = threading.Lock()
        self._places: dict[bytes, tuple[int, int]] = {}  # by digest: where, how long
        self._end = 0
        self._file: int | None = None
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._scan(self._file)
        except OSError as error:
            self._give_up(error)

    def _scan(self, file: int) -> None:
        """Learn what is there, up to the first record that is not whole."""
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
        """The block that has this digest, if it is here and still does."""
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
        """Begin the file anew if it is mostly of blocks that are not among these digests."""
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
        """Keep a block that has come and was checked."""
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
        log.warning("blocks of the copy are not kept on disk any more: %s: %s", self._path, error)
        self._places.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None


class PartialCopies:
    """All fragments' blocks, in a folder of their own.

    Args:
      after_s: see ``KEPT_AFTER_S``.
      limit_bytes: of all files together, give or take a block for each thread that writes; None: none.
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
        """Keep the files for the next process."""
        for fragment in self._fragments.values():
            fragment.close()
        self._fragments.clear()

    def clear(self) -> None:
        """The state is whole: nothing here is of use any more."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

"""One fragment of the shared state in memory: its arrays, digests and pinned versions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import numpy as np
from attrs import Factory, define

from ..protocol.arena import Arena
from ..protocol.errors import HoldfastError
from ..protocol.messages import FragmentHead, FragmentSize
from ..protocol.unnamed_file import IN_MEMORY_BYTES_MAX, UnnamedFile
from .blocks import BlockPlace, Bytes, FragmentArrays, block_places, digest_blocks, zeros_digest


class VersionCopy:
    """A copy of a fragment's arrays, readable by block from any thread.

    A copy of more than ``IN_MEMORY_BYTES_MAX`` lies in a file: a large model would otherwise need
    its values and momentum twice for as long as a newcomer copies.

    Args:
      parts: the arrays, which do not change meanwhile.
      folder: on the disk of the file; None, or if it cannot be written there: in memory.
    """

    def __init__(self, parts: FragmentArrays, folder: Path | None) -> None:
        self._parts: FragmentArrays | None = None
        self._file: UnnamedFile | None = None
        self._starts = list(accumulate((part.nbytes for part in parts), initial=0))
        if folder is not None and self._starts[-1] > IN_MEMORY_BYTES_MAX:
            self._file = _written(parts, folder)
        if self._file is None:
            self._parts = parts.copy()

    def read(self, place: BlockPlace) -> memoryview:
        """Return the bytes of a block.

        Raises:
          OSError: the disk cannot be read.
        """
        if self._parts is not None:
            return place.of(self._parts).data.toreadonly()
        assert self._file is not None
        return self._file.read(self._starts[place.part] + place.start, place.size_bytes)


def _written(parts: FragmentArrays, folder: Path) -> UnnamedFile | None:
    """Return a new file with the arrays; None if the disk does not take them."""
    try:
        return UnnamedFile(folder, (part.view(np.uint8).data for part in parts))
    except OSError:
        return None


class NotHeldError(HoldfastError):
    """This peer does not hold the version of the fragment. Ask another donor."""


@define
class Pin:
    """A version that receivers read.

    Attributes:
      receivers: names of the readers that still need it: peer ids, or a local reader's name.
      copy: its arrays, if they had to be copied; None while the live arrays hold it.
      digests: its block digests; set together with ``copy``.
    """

    receivers: set[str] = Factory(set)
    copy: VersionCopy | None = None
    digests: bytes = b""


class FragmentState:
    """One fragment: its arrays, digests and pins. Belongs to ``SharedState``, which changes it.

    Args:
      folder: of the files of pinned versions that are large; see ``VersionCopy``.

    Attributes:
      number: the fragment's number.
      parts: the live arrays: float32 values, parameters first; the outer momentum of the
        parameters; int64 counters.
      places: positions of its blocks.
      head: version and root of the live arrays; None if they are not whole.
      digests: block digests of ``head``.
      kept: blocks, by digest, of transfers that did not finish.
      blank: the arrays are unwritten zeros.
      changes: held for as long as the live arrays change.
    """

    def __init__(
        self, number: int, size: FragmentSize, arena: Arena, folder: Path | None = None
    ) -> None:
        self.number = number
        self.size = size
        self.parts = FragmentArrays(
            arena.values(number), np.zeros(size.momentum_count, np.float32), arena.counters(number)
        )
        self.places = block_places(size)
        self.head: FragmentHead | None = None
        self.digests = b""
        self.kept: dict[bytes, Bytes] = {}
        self.blank = True
        self.changes = threading.Lock()
        self._folder = folder
        self._writing = False  # True: the live arrays serve no version
        self._pins: dict[int, Pin] = {}
        # Held briefly: while a block is copied out or a pin is changed.
        self._lock = threading.Lock()

    def digest_all(self) -> bytes:
        """Digest all blocks of the live arrays again."""
        if self.blank:  # reading would only allocate the pages
            return b"".join(zeros_digest(place.size_bytes) for place in self.places)
        return digest_blocks(self.parts, self.places)

    # ------------------------------------------------------------ old versions

    def pin(self, version: int, receiver: str) -> bool:
        """Keep a version, which may be a future one, readable until ``receiver`` is released.

        Returns:
          False if the version is gone or the fragment is not whole.
        """
        with self._lock:
            pin = self._pins.get(version)
            if pin is None:
                if self.head is None or version < self.head.version + self._writing:
                    return False
                pin = self._pins[version] = Pin()
            pin.receivers.add(receiver)
            return True

    def release(self, receiver: str, version: int | None = None) -> None:
        """Release a receiver's pin of a version, or all its pins; an unknown one is ignored."""
        with self._lock:
            for pinned in [version] if version is not None else list(self._pins):
                pin = self._pins.get(pinned)
                if pin is not None:
                    pin.receivers.discard(receiver)
                    if not pin.receivers:
                        del self._pins[pinned]

    def index(self, version: int) -> bytes:
        """Return the joined block digests of a version; raises NotHeldError."""
        with self._lock:
            copied = self._copied(version)
            return self.digests if copied is None else copied.digests

    def block(self, version: int, index: int) -> memoryview:
        """Return the bytes of a block, which do not change any more; raises NotHeldError."""
        place = self.places[index]
        with self._lock:
            pin = self._copied(version)
            if pin is None:  # the live arrays may change as soon as the lock is gone
                return place.of(self.parts).copy().data.toreadonly()
            copied = pin.copy
        assert copied is not None
        try:
            return copied.read(place)
        except OSError as error:
            raise NotHeldError(f"version {version} of fragment {self.number}: {error}") from error

    def _copied(self, version: int) -> Pin | None:
        """Return the pin with the copy of a version; None if the live arrays hold it."""
        pin = self._pins.get(version)
        if pin is not None and pin.copy is not None:
            return pin
        if self.head is not None and self.head.version == version and not self._writing:
            return None
        raise NotHeldError(f"version {version} of fragment {self.number} is not held here")

    # ------------------------------------------------------------ changes

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Allow writes to the live arrays inside the block; pinned bytes are copied before.

        The block must end with ``became``; if it raises, the fragment is not valid any more.
        """
        self._stop_serving()
        self.blank = False
        try:
            yield
        except BaseException:
            with self._lock:
                self.head = None
                self._writing = False
            raise

    def _stop_serving(self) -> None:
        copied: VersionCopy | None = None
        while True:
            with self._lock:
                pin = self._pins.get(self.head.version) if self.head is not None else None
                if pin is None or pin.copy is not None or copied is not None:
                    if pin is not None and pin.copy is None:
                        pin.copy, pin.digests = copied, self.digests
                    self._writing = True
                    return
            # The slow part is outside of the lock: readers can read the live arrays meanwhile.
            copied = VersionCopy(self.parts, self._folder)

    def became(self, head: FragmentHead, digests: bytes) -> None:
        with self._lock:
            self.head, self.digests = head, digests
            self._writing = False

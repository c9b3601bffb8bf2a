"""The copy of a version that receivers still read after the live arrays have changed."""

from __future__ import annotations

import os
import weakref
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from .blocks import BlockPlace, FragmentArrays

IN_MEMORY_BYTES_MAX = 64 * 2**20  # of a fragment's copy; a larger one goes into a file


class VersionCopy:
    """A copy of a fragment's arrays, readable by block from any thread.

    A copy of more than ``IN_MEMORY_BYTES_MAX`` lies in a file without a name, which ends with this object or
    with the process: a large model would otherwise need its values and momentum twice for as long as a
    newcomer copies. The kernel keeps of the file in memory what there is room for.

    Args:
      parts: the arrays, which do not change meanwhile.
      folder: on the disk of the file; None, or if it cannot be written there: memory takes the copy.

    Attributes:
      in_file: it does not lie in memory.
    """

    def __init__(self, parts: FragmentArrays, folder: Path | None) -> None:
        self._parts: FragmentArrays | None = None
        self._descriptor: int | None = None
        self._starts = _starts(parts)
        if folder is not None and self._starts[-1] > IN_MEMORY_BYTES_MAX:
            self._descriptor = _written(parts, folder)
        if self._descriptor is None:
            self._parts = parts.copy()
        else:
            weakref.finalize(self, os.close, self._descriptor)

    @property
    def in_file(self) -> bool:
        return self._descriptor is not None

    def read(self, place: BlockPlace) -> memoryview:
        """Return the bytes of a block.

        Raises:
          OSError: the disk cannot be read.
        """
        if self._parts is not None:
            return place.of(self._parts).data.toreadonly()
        assert self._descriptor is not None
        data = os.pread(self._descriptor, place.size_bytes, self._starts[place.part] + place.start)
        if len(data) != place.size_bytes:
            raise OSError(f"{len(data)} of a block's {place.size_bytes} bytes could be read")
        return memoryview(data)


def _starts(parts: FragmentArrays) -> list[int]:
    """Return where each array begins in the file, and the end."""
    return list(accumulate((part.nbytes for part in parts), initial=0))


def _written(parts: FragmentArrays, folder: Path) -> int | None:
    """Return the descriptor of a new file with the arrays; None if the disk does not take them."""
    try:
        with TemporaryFile(dir=folder, buffering=0) as file:
            for part in parts:
                left = part.view(np.uint8).data
                while left:  # a call writes 2 GiB at most
                    left = left[file.write(left) :]
            return os.dup(file.fileno())
    except OSError:
        return None

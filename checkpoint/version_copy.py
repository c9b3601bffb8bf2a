"""The copy of a version that receivers still read after the live arrays have changed."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import numpy as np

from ..protocol.unnamed_file import IN_MEMORY_BYTES_MAX, UnnamedFile
from .blocks import BlockPlace, FragmentArrays


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

"""Bytes on disk without a name, for what would otherwise stay in memory.

The file ends with its object or with the process. The kernel keeps of it in memory what there is
room for, and gives that up before a program fails.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile

# Of a version or a result that waits; a larger one goes into a file.
IN_MEMORY_BYTES_MAX = 64 * 2**20


class UnnamedFile:
    """A file that is written once, and then read from any thread.

    Args:
      folder: on the disk of the file.
      pieces: its bytes, in order; taken one by one.

    Raises:
      OSError: the disk does not take them.
    """

    def __init__(self, folder: Path, pieces: Iterable[memoryview]) -> None:
        with TemporaryFile(dir=folder, buffering=0) as file:
            for piece in pieces:
                left = piece.cast("B")
                while left:  # a call writes 2 GiB at most
                    left = left[file.write(left) :]
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, count: int) -> memoryview:
        """Return a range of bytes.

        Raises:
          OSError: the disk cannot be read.
        """
        data = os.pread(self._descriptor, count, start)
        if len(data) != count:
            raise OSError(f"{len(data)} of {count} bytes could be read")
        return memoryview(data)

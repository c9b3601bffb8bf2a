"""Hiding of secrets in this process's command line.

All users of a machine can read the arguments of every process (``ps``, ``/proc/PID/cmdline``), and
an invite is a secret. Linux reads them from the process's own memory, where they can be
overwritten.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

START_FIELD, END_FIELD = 47, 48  # of /proc/self/stat, counted from 0: proc(5)
MASK = b"*"
SHOWN_BYTES = 10  # of its beginning, which stay readable


def mask(secret: str) -> bool:
    """Overwrite an argument of this process; return False if it is not found."""
    word = secret.encode()
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        # The first two fields, with the name that may contain anything, are cut off.
        start, end = int(fields[START_FIELD - 2]), int(fields[END_FIELD - 2])
        at = ctypes.string_at(start, end - start).find(b"\0" + word + b"\0") + 1
        if at and len(word) > SHOWN_BYTES:
            rest = len(word) - SHOWN_BYTES
            ctypes.memmove(start + at + SHOWN_BYTES, MASK * rest, rest)
            return True
    return False

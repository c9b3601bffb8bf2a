"""Writing files that must survive a crash."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

# In the metadata of exported weights: a tensor's name -> its other names, in JSON.
TIES_KEY = "holdfast.ties"


def write_private(path: Path, data: bytes) -> None:
    """Write a file with mode 0600, whole or not at all, even over a crash."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_to_disk(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def keep_private(path: Path) -> None:
    """Create a file with mode 0600 if there is none, for a library that opens it by name."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    if path.stat().st_mode & 0o077:  # made by an older version, which left it to the umask
        path.chmod(0o600)


def put_in_place(scratch: Path, target: Path) -> None:
    """Give a whole file its name; after a loss of power it has the old content or the new."""
    sync_to_disk(scratch)
    scratch.replace(target)
    sync_to_disk(target.parent)


def sync_to_disk(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to disk, so that they survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

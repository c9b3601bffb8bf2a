"""Stores of checkpoints: a folder of this machine, or any URL that fsspec supports.

A file gets its name only when it is whole:

    NAME.WRITER.part --written, synced--> NAME      a writer that dies leaves a .part file

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ..protocol.durable_files import sync_to_disk
from ..protocol.errors import HoldfastError

PART = ".part"
Piece = bytes | memoryview


class StoreError(HoldfastError):
    """The store cannot be used, now or ever; the message is the reason."""


class FileGoneError(StoreError):
    """There is no such file, perhaps no longer: a writer deletes old checkpoints at any time."""


class CheckpointStore(Protocol):
    """Files by name. All methods raise StoreError."""

    def names(self) -> list[str]:
        """Return the names of all files; none if the store does not exist yet."""
        ...

    def size_bytes(self, name: str) -> int: ...

    def reading(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file for random access; errors while reading raise StoreError, too."""
        ...

    def write(self, name: str, writer: str, pieces: Iterable[Piece]) -> Generator[int, None, None]:
        """Write a file, piece by piece; yields the size of each piece once it is written.

        The file appears at the end. A generator that is closed before that leaves no file.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        ...


class FolderStore:
    """A folder of this machine; only the user who runs the daemon can read its files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def names(self) -> list[str]:
        with _as_store_error(self):
            if not self.root.exists():
                return []
            return sorted(path.name for path in self.root.iterdir() if path.is_file())

    def size_bytes(self, name: str) -> int:
        with _as_store_error(self):
            return (self.root / name).stat().st_size

    @contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        with _as_store_error(self), open(self.root / name, "rb") as file:
            yield file

    def write(self, name: str, writer: str, pieces: Iterable[Piece]) -> Generator[int, None, None]:
        part = self.root / f"{name}.{writer}{PART}"
        with _as_store_error(self):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with self._create(part) as file:
                    for piece in pieces:
                        file.write(piece)
                        yield len(piece)
                self._sync(part)
                self._rename(part, self.root / name)
                self._sync(self.root)
            except BaseException:
                with suppress(OSError):
                    part.unlink()
                raise

    # The steps to the disk, in this order: tests interrupt before, within and after each.

    def _create(self, path: Path) -> BinaryIO:
        return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))

    def _sync(self, path: Path) -> None:
        sync_to_disk(path)

    def _rename(self, path: Path, target: Path) -> None:
        path.replace(target)

    def delete(self, name: str) -> None:
        with _as_store_error(self):
            (self.root / name).unlink(missing_ok=True)


class UrlStore:
    """A store at a URL of fsspec: ``s3://``, ``gs://``, ``memory://``, ...

    Args:
      filesystem: an ``fsspec.AbstractFileSystem``; fsspec has no types.
      root: the path in the file system.
    """

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.url = url
        self._files = filesystem
        self._root = root.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[str]:
        with _as_store_error(self, Exception):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            files = (str(each["name"]) for each in found if each.get("type") != "directory")
            return sorted(name for each in files if (name := each.rpartition("/")[2]))

    def size_bytes(self, name: str) -> int:
        with _as_store_error(self, Exception):
            return int(self._files.size(self._path(name)))

    @contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        with _as_store_error(self, Exception), self._files.open(self._path(name), "rb") as file:
            yield file

    def write(self, name: str, writer: str, pieces: Iterable[Piece]) -> Generator[int, None, None]:
        part = self._path(f"{name}.{writer}{PART}")
        with _as_store_error(self, Exception):
            self._files.makedirs(self._root, exist_ok=True)
            try:
                with self._files.open(part, "wb") as file:
                    for piece in pieces:
                        file.write(piece)
                        yield len(piece)
                self._files.mv(part, self._path(name))
            except BaseException:
                with suppress(Exception):  # the first error is the one to report
                    self._files.rm_file(part)
                raise

    def delete(self, name: str) -> None:
        with _as_store_error(self, Exception), suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def place_at(text: str) -> CheckpointStore:
    """Return the store at a folder's path or a URL.

    Raises:
      StoreError: the URL is not supported here.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        return FolderStore(Path(text).expanduser())
    if scheme == "file":
        return FolderStore(Path(rest))
    import fsspec  # slow to import, and not needed for folders

    try:
        filesystem, root = fsspec.core.url_to_fs(text)
    except Exception as error:  # each file system raises its own classes
        raise StoreError(f"{text} cannot be used: {error}") from error
    return UrlStore(text, filesystem, root)


@contextmanager
def _as_store_error(place: object, kind: type[Exception] = OSError) -> Iterator[None]:
    """Raise errors of a file system as StoreError; each backend of fsspec has its own classes."""
    try:
        yield
    except HoldfastError:
        raise
    except kind as error:
        name = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        raised = FileGoneError if isinstance(error, FileNotFoundError) else StoreError
        raise raised(f"{place}: {name}{error}") from error

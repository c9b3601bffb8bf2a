"""Where checkpoints lie: a folder of this machine, or anything that fsspec knows by a URL.

A file appears under its name only when all of it is there:

    NAME.WRITER.part --written, synced--> NAME      what is left of a writer that died is a .part

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from ..protocol.durable_files import sync_to_disk
from ..protocol.errors import HoldfastError

PART = ".part"
Piece = bytes | memoryview


class StoreError(HoldfastError):
    """The place cannot be used, for now or at all; the text says why."""


class CheckpointStore(Protocol):
    """Files by name. All methods raise PlaceError."""

    def names(self) -> list[str]:
        """Of the files that are there; none if the place does not exist yet."""
        ...

    def size_bytes(self, name: str) -> int: ...

    def reading(self, name: str) -> AbstractContextManager[BinaryIO]:
        """The file, to be read from anywhere in it; errors of the reading are PlaceErrors, too."""
        ...

    def write(self, name: str, writer: str, pieces: Iterable[Piece]) -> Generator[int, None, None]:
        """Write a file, piece by piece; yields the bytes of each once they are written.

        The name is given at the end. A generator that is closed before has written nothing.
        """
        ...

    def delete(self, name: str) -> None:
        """Harmless if it is not there."""
        ...


class FolderStore:
    """A folder of this machine; only its owner can read what is written there."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def names(self) -> list[str]:
        with _told(self):
            if not self.root.exists():
                return []
            return sorted(path.name for path in self.root.iterdir() if path.is_file())

    def size_bytes(self, name: str) -> int:
        with _told(self):
            return (self.root / name).stat().st_size

    @contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        with _told(self), open(self.root / name, "rb") as file:
            yield file

    def write(self, name: str, writer: str, pieces: Iterable[Piece]) -> Generator[int, None, None]:
        part = self.root / f"{name}.{writer}{PART}"
        with _told(self):
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

    # What reaches the disk, in this order: tests die before, within and after each.

    def _create(self, path: Path) -> BinaryIO:
        return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))

    def _sync(self, path: Path) -> None:
        sync_to_disk(path)

    def _rename(self, path: Path, target: Path) -> None:
        path.replace(target)

    def delete(self, name: str) -> None:
        with _told(self):
            (self.root / name).unlink(missing_ok=True)


class UrlStore:
    """A URL of fsspec's: ``s3://``, ``gs://``, ``memory://``, ...

    Args:
      filesystem: an ``fsspec.AbstractFileSystem``.
      root: the path in it.
    """

    def __init__(self, url: str, filesystem: object, root: str) -> None:
        self.url = url
        self._files = cast("_FileSystem", filesystem)
        self._root = root.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def names(self) -> list[str]:
        with _told(self, Exception):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            names = (str(each["name"]).rpartition("/")[2] for each in found if _is_file(each))
            return sorted(name for name in names if name)

    def size_bytes(self, name: str) -> int:
        with _told(self, Exception):
            return int(self._files.size(self._path(name)))

    @contextmanager
    def reading(self, name: str) -> Iterator[BinaryIO]:
        with _told(self, Exception), self._files.open(self._path(name), "rb") as file:
            yield file

    def write(self, name: str, writer: str, pieces: Iterable[Piece]) -> Generator[int, None, None]:
        part = self._path(f"{name}.{writer}{PART}")
        with _told(self, Exception):
            self._files.makedirs(self._root, exist_ok=True)
            try:
                with self._files.open(part, "wb") as file:
                    for piece in pieces:
                        file.write(piece)
                        yield len(piece)
                self._files.mv(part, self._path(name))
            except BaseException:
                with suppress(Exception):  # whatever it is, the first error is told
                    self._files.rm_file(part)
                raise

    def delete(self, name: str) -> None:
        with _told(self, Exception), suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class _FileSystem(Protocol):
    """What is used of fsspec, which has no types."""

    def invalidate_cache(self) -> None: ...
    def ls(self, path: str, *, detail: bool) -> list[dict[str, object]]: ...
    def size(self, path: str) -> int: ...
    def open(self, path: str, mode: str) -> BinaryIO: ...
    def makedirs(self, path: str, *, exist_ok: bool) -> None: ...
    def mv(self, path: str, target: str) -> None: ...
    def rm_file(self, path: str) -> None: ...


def _is_file(entry: dict[str, object]) -> bool:
    return entry.get("type") != "directory"


def place_at(text: str) -> CheckpointStore:
    """A folder's path, or a URL.

    Raises:
      PlaceError: nothing here knows such URLs.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        return FolderStore(Path(text).expanduser())
    if scheme == "file":
        return FolderStore(Path(rest))
    import fsspec  # takes its time, and is not needed for folders

    try:
        filesystem, root = fsspec.core.url_to_fs(text)
    except Exception as error:  # every file system has errors of its own
        raise StoreError(f"{text} cannot be used: {error}") from error
    return UrlStore(text, filesystem, root)


@contextmanager
def _told(place: object, kind: type[Exception] = OSError) -> Iterator[None]:
    """Errors of a file system as one kind; those that fsspec calls have classes of their own."""
    try:
        yield
    except HoldfastError:
        raise
    except kind as error:
        name = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        raise StoreError(f"{place}: {name}{error}") from error

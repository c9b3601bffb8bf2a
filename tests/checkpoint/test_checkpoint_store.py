"""Places: a file is there whole or not at all, whenever its writer dies; local, and by URLs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import fsspec
import pytest

from holdfast.checkpoint.checkpoint_store import (
    CheckpointStore,
    FolderStore,
    StoreError,
    UrlStore,
    place_at,
)

PIECES = (b"one", b"two", b"three")


class Snapshots:
    """A file that shows its folder to ``look`` before, within and after each write."""

    def __init__(self, file: BinaryIO, look: Callable[[str], None], stride: int) -> None:
        self.file = file
        self.look = look
        self.stride = stride

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, *_error: object) -> None:
        self.file.close()
        self.look("closed")

    def write(self, data: bytes) -> None:
        self.look("before a write")
        for at in range(0, len(data), self.stride):
            self.file.write(data[at : at + self.stride])
            self.file.flush()
            self.look("within a write")


class LookedAtPlace(FolderStore):
    """A folder in which ``look`` is called at each instant at which a process may be killed."""

    look: Callable[[str], None]
    stride = 1  # bytes from look to look

    def _create(self, path: Path) -> BinaryIO:
        self.look("before it is created")
        file = super()._create(path)
        return cast(BinaryIO, Snapshots(file, self.look, self.stride))

    def _sync(self, path: Path) -> None:
        self.look("before a sync")
        super()._sync(path)
        self.look("synced")

    def _rename(self, path: Path, target: Path) -> None:
        self.look("before the rename")
        super()._rename(path, target)
        self.look("renamed")


def put(place: CheckpointStore, name: str, *pieces: bytes) -> None:
    for _written in place.write(name, "me", pieces):
        pass


def got(place: CheckpointStore, name: str) -> bytes:
    with place.reading(name) as file:
        return file.read()


@pytest.fixture(params=["folder", "memory", "local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    if request.param == "memory":
        yield place_at("memory://runs/one")
        fsspec.filesystem("memory").rm("/runs", recursive=True)
    elif request.param == "local":
        folder = tmp_path / "deep" / "er"
        yield UrlStore(f"local://{folder}", fsspec.filesystem("local"), str(folder))
    else:
        yield FolderStore(tmp_path / "deep" / "er")


def test_what_was_written_is_there_and_nothing_else(place: CheckpointStore) -> None:
    assert place.names() == []
    put(place, "a", *PIECES)
    put(place, "b", b"")
    put(place, "a", b"anew", memoryview(b"!").tobytes())
    assert place.names() == ["a", "b"]
    assert got(place, "a") == b"anew!"
    assert place.size_bytes("a") == 5
    place.delete("a")
    place.delete("a")
    assert place.names() == ["b"]


def test_it_is_read_from_anywhere(place: CheckpointStore) -> None:
    put(place, "a", b"0123456789")
    with place.reading("a") as file:
        file.seek(7)
        data = bytearray(2)
        assert file.readinto(data) == 2  # type: ignore[attr-defined]
        assert data == b"78"


def test_a_writer_that_is_stopped_leaves_nothing(place: CheckpointStore) -> None:
    put(place, "a", b"before")
    for count in range(1, len(PIECES) + 1):
        writing = place.write("a", "me", PIECES)
        for _ in range(count):
            next(writing)
        writing.close()
    assert place.names() == ["a"]
    assert got(place, "a") == b"before"


def test_what_fails_while_it_is_read_or_written_is_told(place: CheckpointStore) -> None:
    with pytest.raises(StoreError):
        place.size_bytes("none")
    with pytest.raises(StoreError), place.reading("none"):
        pass

    def broken() -> Iterator[bytes]:
        yield b"some"
        raise OSError(28, "No space left on device")

    writing = place.write("a", "me", broken())
    with pytest.raises(StoreError, match="No space left"):
        for _written in writing:
            pass
    assert place.names() == []


def test_its_bytes_are_on_disk_before_its_name(tmp_path: Path) -> None:
    place, instants = LookedAtPlace(tmp_path), list[str]()
    place.look = instants.append
    put(place, "a", b"x")
    assert instants == [
        "before it is created", "before a write", "within a write", "closed",
        "before a sync", "synced", "before the rename", "renamed", "before a sync", "synced",
    ]  # fmt: skip


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    put(FolderStore(tmp_path / "new"), "a", b"x")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "a").stat().st_mode & 0o777 == 0o600


def test_places_by_their_names(tmp_path: Path) -> None:
    assert isinstance(place_at(str(tmp_path)), FolderStore)
    assert str(place_at(f"file://{tmp_path}")) == str(tmp_path)
    assert str(place_at("memory://x")) == "memory://x"
    with pytest.raises(StoreError, match="nosuch"):
        place_at("nosuch://bucket/run")


def test_a_place_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    place = FolderStore(tmp_path / "file")
    with pytest.raises(StoreError, match="file"):
        place.names()
    with pytest.raises(StoreError, match="file"):
        put(place, "a", b"x")

"""The inputs that the repository keeps for each target, one archive per target, to keep the tree
readable.

An archive depends on its inputs and nothing else: entries are sorted and not compressed, and all
have the same time. So the same inputs are the same bytes, whichever machine and whichever zlib
wrote them.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

CORPUS = Path(__file__).resolve().with_name("corpus")
SUFFIX = ".zip"
NAME_CHARS = 16
EARLIEST = (1980, 1, 1, 0, 0, 0)  # that a zip archive can say


def archive_of(target: str, corpus: Path = CORPUS) -> Path:
    return corpus / f"{target}{SUFFIX}"


def targets() -> set[str]:
    """Return the targets that have an archive."""
    return {path.name.removesuffix(SUFFIX) for path in CORPUS.iterdir()}


def read(target: str, corpus: Path = CORPUS) -> dict[str, bytes]:
    """Return the inputs, by name; none if there is no archive yet."""
    path = archive_of(target, corpus)
    if not path.exists():
        return {}
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(target: str, inputs: Mapping[str, bytes], corpus: Path = CORPUS) -> None:
    """Write these inputs, by name, to the archive, unless it holds exactly them."""
    if inputs == read(target, corpus):
        return
    corpus.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive_of(target, corpus), "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(inputs):
            entry = zipfile.ZipInfo(name, EARLIEST)
            entry.create_system = 3  # or it says on which system it was written
            archive.writestr(entry, inputs[name])


def unpack(target: str, folder: Path) -> None:
    """Write each input to a file, for a fuzzer."""
    for name, data in read(target).items():
        (folder / name).write_bytes(data)


def name_of(data: bytes) -> str:
    """Return the default name of an input: libFuzzer's, but shorter."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:NAME_CHARS]

"""The inputs that the repository keeps for each target, one archive a target, so that the tree can be read.

An archive depends on its inputs and nothing else: entries are sorted and not compressed, and all have
the same time. So the same inputs are the same bytes, whichever machine and whichever zlib wrote them.
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


def targets(corpus: Path = CORPUS) -> set[str]:
    """Those that have an archive."""
    return {path.name.removesuffix(SUFFIX) for path in corpus.iterdir()}


def read(target: str, corpus: Path = CORPUS) -> dict[str, bytes]:
    """The inputs, by name; none where there is no archive yet."""
    path = archive_of(target, corpus)
    if not path.exists():
        return {}
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(target: str, inputs: Mapping[str, bytes], corpus: Path = CORPUS) -> None:
    """Let the archive hold these, by name; it is left alone if it does already."""
    if inputs == read(target, corpus):
        return
    corpus.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive_of(target, corpus), "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(inputs):
            entry = zipfile.ZipInfo(name, EARLIEST)
            entry.create_system = 3  # or it says on which system it was written
            archive.writestr(entry, inputs[name])


def unpack(target: str, folder: Path, corpus: Path = CORPUS) -> None:
    """A file each, for a fuzzer."""
    for name, data in read(target, corpus).items():
        (folder / name).write_bytes(data)


def name_of(data: bytes) -> str:
    """What an input is called that nobody has given a name: as libFuzzer does, but shorter."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:NAME_CHARS]

"""Checkpoints: the shared state at one instant, in one self-describing file.

    BRANCH-STEP-ROUNDS-DIGEST.safetensors   counters of all fragments, then values and momentum of
                                            each; as metadata, the manifest in JSON with its digest

The name follows from the content, so peers that write to one place write the same files. Names sort
by age; the branch comes first, since states that a rewind discarded may have a higher step. A file
is checked by its digests: the manifest by its own, every fragment by its root, which binds run,
fragment and version. Whether a file is the run's newest state only the master's journal tells.

A checkpoint is written from pinned versions, so the state may change meanwhile.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
from attrs import field, frozen
from attrs.validators import matches_re, max_len
from blake3 import blake3

from ..protocol import messages as m
from ..protocol import wire
from ..protocol.errors import HoldfastError, RemoteProtocolError
from .blocks import (
    BlockPlace,
    Bytes,
    FragmentArrays,
    block_places,
    digest_blocks,
    fragment_root,
)
from .checkpoint_store import PART, CheckpointStore, FileGoneError, Piece
from .shared_state import SharedState
from .tensor_file import (
    Header,
    TensorEntry,
    TensorFileError,
    encode_header,
    find_array,
    read_bytes,
    read_header,
)

FORMAT = 1
MANIFEST_KEY = "holdfast"
DIGEST_KEY = "holdfast.blake3"
DIGEST_CHARS = 12  # in a name

_NAME = re.compile(
    rf"(\d{{1,18}})-(\d{{1,18}})-(\d{{1,18}})-[0-9a-f]{{{DIGEST_CHARS}}}\.safetensors"
)
_VALUES, _MOMENTUM, _COUNTERS = range(3)  # indices in ``FragmentArrays``
_DTYPES = ("F32", "F32", "I64")


# Errors of the decoders for bytes that are no manifest.
_DECODE_ERRORS = (
    TensorFileError,
    RemoteProtocolError,
    ValueError,
    LookupError,
    TypeError,
    RecursionError,
)


class CheckpointError(HoldfastError):
    """A checkpoint is damaged, or belongs to another run. Try another one."""


@frozen
class SavedHead:
    """The version and root of a fragment in the file."""

    version: int
    root: str = field(validator=matches_re(r"[0-9a-f]{64}"))


@frozen
class Manifest:
    """The description of a checkpoint, in its file.

    Attributes:
      term, nonce: of the last master that the writer obeyed.
      branch: of the run's history; it grows whenever versions are discarded.
      step: the run's global step.
      spec_toml: the run's spec at that time; it defines how the layout is cut into fragments.
      heads: of all fragments, in order.
    """

    format: int
    run_id: str = field(validator=matches_re(m.RUN_ID))
    lineage: str = field(validator=matches_re(r"[0-9a-f]{64}"))
    term: int
    nonce: str = field(validator=matches_re(r"([0-9a-f]{2}){0,128}"))
    branch: int
    step: int
    written_s: float  # Unix time
    spec_toml: str
    layout: m.ModelLayout
    sizes: tuple[m.FragmentSize, ...] = field(validator=max_len(m.FRAGMENTS_MAX))
    heads: tuple[SavedHead, ...] = field(validator=max_len(m.FRAGMENTS_MAX))

    def __attrs_post_init__(self) -> None:
        if len(self.heads) != len(self.sizes):
            raise ValueError("the number of heads differs from the number of fragments")
        versions = (head.version for head in self.heads)
        if any(number < 0 for number in (self.term, self.branch, self.step, *versions)):
            raise ValueError("a term, branch, step or version is negative")

    @property
    def rounds(self) -> int:
        """Return the number of rounds that led to this state."""
        return sum(head.version for head in self.heads)

    @property
    def name(self) -> str:
        """Return the name of its file."""
        roots = "".join(head.root for head in self.heads)
        digest = blake3(f"{self.lineage} {self.step} {roots}".encode()).hexdigest()
        digest = digest[:DIGEST_CHARS]
        return f"{self.branch}-{self.step:09d}-{self.rounds:06d}-{digest}.safetensors"

    def fragment_heads(self) -> tuple[m.FragmentHead, ...]:
        return tuple(
            m.FragmentHead(number, head.version, bytes.fromhex(head.root))
            for number, head in enumerate(self.heads)
        )

    def same_state(self, other: Manifest) -> bool:
        """Return whether both describe the same bits, on one branch."""
        mine, theirs = ((each.lineage, each.branch, each.heads) for each in (self, other))
        return mine == theirs


def manifest_of(
    state: SharedState,
    *,
    lineage: bytes,
    term: int,
    nonce: bytes,
    branch: int,
    step: int,
    layout: m.ModelLayout,
    spec_toml: str,
    now_s: float,
) -> Manifest | None:
    """Return the manifest of the current state; None if not all of it is whole."""
    heads = state.heads()
    if not heads or len(heads) != len(state.sizes):
        return None
    return Manifest(
        format=FORMAT,
        run_id=state.run_id,
        lineage=lineage.hex(),
        term=term,
        nonce=nonce.hex(),
        branch=branch,
        step=step,
        written_s=now_s,
        spec_toml=spec_toml,
        layout=layout,
        sizes=state.sizes,
        heads=tuple(SavedHead(head.version, head.root.hex()) for head in heads),
    )


# ---------------------------------------------------------------- writing


def pin(state: SharedState, manifest: Manifest, reader: str) -> bool:
    """Pin all versions of a manifest for a reader; return False if some are gone."""
    for number, head in enumerate(manifest.heads):
        if not state.fragments[number].pin(head.version, reader):
            state.release_receiver(reader)
            return False
    return True


def write(
    place: CheckpointStore, state: SharedState, manifest: Manifest, *, reader: str, writer: str
) -> Generator[int, None, None]:
    """Write a checkpoint, piece by piece; each fragment is released as soon as it is written.

    A file that exists already is not written again.

    Args:
      reader: the name that pinned it. A caller that closes the generator early releases the rest.
      writer: distinguishes peers that write the same file to the same place.

    Raises:
      StoreError: it cannot be written; earlier files are unchanged.
    """
    if manifest.name not in place.names():
        yield from place.write(manifest.name, writer, _pieces(state, manifest, reader))


def _pieces(state: SharedState, manifest: Manifest, reader: str) -> Iterator[Piece]:
    text = json.dumps(wire.to_plain(manifest))
    yield encode_header(_tensors(manifest), {MANIFEST_KEY: text, DIGEST_KEY: _digest(text)})
    numbers = range(len(manifest.sizes))
    for number in numbers:
        yield from _blocks(state, manifest, number, (_COUNTERS,))
    for number in numbers:
        yield from _blocks(state, manifest, number, (_VALUES, _MOMENTUM))
        state.fragments[number].release(reader, manifest.heads[number].version)


def _blocks(
    state: SharedState, manifest: Manifest, number: int, parts: tuple[int, ...]
) -> Iterator[Piece]:
    version = manifest.heads[number].version
    for index, place in enumerate(state.fragments[number].places):
        if place.part in parts:
            yield state.fragments[number].block(version, index)


def _tensors(manifest: Manifest) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype and shape of the file's tensors, in their order."""
    for number, size in enumerate(manifest.sizes):
        yield _name(number, _COUNTERS), "I64", (size.counter_count,)
    for number, size in enumerate(manifest.sizes):
        yield _name(number, _VALUES), "F32", (size.value_count,)
        yield _name(number, _MOMENTUM), "F32", (size.momentum_count,)


def _name(number: int, part: int) -> str:
    return f"{number}.{FragmentArrays._fields[part]}"


def _digest(text: str) -> str:
    return blake3(text.encode()).hexdigest()


# ---------------------------------------------------------------- reading


@frozen
class Checkpoint:
    """A stored checkpoint whose manifest is whole."""

    place: CheckpointStore
    name: str
    manifest: Manifest
    header: Header

    def parts(self, number: int) -> tuple[FragmentArrays, bytes]:
        """Read a fragment, check its root and return it with its blocks' digests.

        Raises:
          CheckpointError, StoreError: it cannot be read, or is damaged.
        """
        with self._reading(number) as (file, entries):
            values, momentum, counters = (
                read_bytes(file, self.header, entry, 0, entry.stop - entry.start)
                for entry in entries
            )
        parts = FragmentArrays(
            values.view(np.float32), momentum.view(np.float32), counters.view(np.int64)
        )
        digests = digest_blocks(parts, block_places(self.manifest.sizes[number]))
        self._check(number, digests)
        return parts, digests

    def blocks(self, number: int) -> Iterator[tuple[BlockPlace, Bytes]]:
        """Yield a fragment's blocks one by one, and check its root after the last one.

        Raises:
          CheckpointError, StoreError: it is unreadable or damaged; what came before is void.
        """
        digests = []
        with self._reading(number) as (file, entries):
            for place in block_places(self.manifest.sizes[number]):
                entry = entries[place.part]
                data = read_bytes(file, self.header, entry, place.start, place.stop)
                digests.append(blake3(data.data).digest())
                yield place, data
        self._check(number, b"".join(digests))

    @contextmanager
    def _reading(self, number: int) -> Iterator[tuple[BinaryIO, list[TensorEntry]]]:
        """Open the file at a fragment's arrays; raise CheckpointError for a damaged one."""
        size = self.manifest.sizes[number]
        counts = (size.value_count, size.momentum_count, size.counter_count)
        try:
            entries = [
                find_array(self.header, _name(number, part), _DTYPES[part], count)
                for part, count in enumerate(counts)
            ]
            with self.place.reading(self.name) as file:
                yield file, entries
        except TensorFileError as error:
            raise self._damaged(str(error)) from error

    def _check(self, number: int, digests: bytes) -> None:
        """Raise CheckpointError unless a fragment of these blocks' digests has its root."""
        manifest = self.manifest
        size, head = manifest.sizes[number], manifest.heads[number]
        if fragment_root(manifest.run_id, number, head.version, size, digests).hex() != head.root:
            raise self._damaged(f"fragment {number} does not have its root")

    def load(self, state: SharedState) -> None:
        """Load it into the state, every byte checked against its root.

        Raises:
          CheckpointError, StoreError: it is unreadable or damaged; the state is not valid then.
        """
        for head in self.manifest.fragment_heads():
            state.restore(head, *self.parts(head.fragment))

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.name} in {self.place} is damaged: {reason}")


def names(place: CheckpointStore) -> list[str]:
    """Return the names of all checkpoints, whole or not, the newest first; raises StoreError."""
    return sorted(filter(_NAME.fullmatch, place.names()), key=_age_of, reverse=True)


def _age_of(name: str) -> tuple[int, int, int, str]:
    found = _NAME.match(name)
    assert found is not None
    branch, step, rounds = map(int, found.groups())
    return branch, step, rounds, name


def open_checkpoint(place: CheckpointStore, name: str) -> Checkpoint:
    """Read a checkpoint's manifest.

    Raises:
      CheckpointError: it is damaged, or has another format.
      StoreError: it cannot be read.
    """
    try:
        with place.reading(name) as file:
            header = read_header(file, place.size_bytes(name))
        text = header.metadata[MANIFEST_KEY]
        if header.metadata[DIGEST_KEY] != _digest(text):
            raise TensorFileError("its manifest does not have its digest")
        plain = json.loads(text)
        if plain["format"] != FORMAT:
            raise CheckpointError(
                f"{name} in {place} has format {plain['format']}; this version reads format"
                f" {FORMAT}"
            )
        manifest = wire.from_plain(Manifest, plain)
    except _DECODE_ERRORS as error:
        raise CheckpointError(f"{name} in {place} is damaged: {error}") from error
    return Checkpoint(place, name, manifest, header)


# ---------------------------------------------------------------- pruning and finding


def prune(
    place: CheckpointStore, run_id: str, *, keep_count: int, keep_s: float, now_s: float
) -> list[str]:
    """Delete a run's surplus and old checkpoints, and unfinished files of writers that died.

    The newest checkpoint stays. Files that are damaged, of another run, or misnamed are neither
    deleted nor counted.

    Args:
      keep_s: maximum age; 0: no limit.

    Returns:
      The deleted names.

    Raises:
      StoreError: the place cannot be used.
    """
    gone: list[str] = []
    kept: list[str] = []
    for name in names(place):
        try:
            manifest = open_checkpoint(place, name).manifest
        except CheckpointError:
            continue
        if manifest.run_id != run_id or manifest.name != name:
            continue  # it must not count as one of the run's checkpoints
        too_old = keep_s and manifest.written_s < now_s - keep_s
        if kept and (len(kept) >= keep_count or too_old):
            place.delete(name)
            gone.append(name)
        else:
            kept.append(name)
    if kept:
        for name in place.names():
            base = name.partition(".safetensors")[0] + ".safetensors"
            if name.endswith(PART) and _NAME.fullmatch(base) and _age_of(base) < _age_of(kept[0]):
                place.delete(name)
    return gone


def newest(
    place: CheckpointStore, fits: Callable[[Manifest], str], tell: Callable[[str], None]
) -> Iterator[Checkpoint]:
    """Yield checkpoints that can be opened, the newest first.

    Args:
      fits: returns what is wrong with a manifest; empty if nothing is.
      tell: takes a sentence about each checkpoint that is skipped.
    """
    for name in names(place):
        try:
            checkpoint = open_checkpoint(place, name)
        except FileGoneError:
            continue  # its writer has deleted it since the names were read
        except CheckpointError as error:
            tell(str(error))
            continue
        fault = fits(checkpoint.manifest)
        if fault:
            tell(f"{name} in {place} is not used: {fault}")
        else:
            yield checkpoint

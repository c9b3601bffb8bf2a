"""Checkpoints: the shared state at one instant, in one file that says what it is.

    BRANCH-STEP-ROUNDS-DIGEST.safetensors   counters of all fragments, then values and momentum of each;
                                       as metadata, the manifest in JSON with a digest of its own

The name follows from what is in it, so peers that write into one place write the same files, and the
newest is the one whose name says so: of the run's latest branch, since what was given up when it went
back to an older version had come further. What is read is believed as far as its digests go: the manifest
by its own, every fragment by its root, which binds run, fragment and version. Whether it is the run's
newest state is not for a file to say; the master's journal knows.

Written is what a reader has pinned, so the state may go on meanwhile.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator

import numpy as np
from attrs import field, frozen
from attrs.validators import matches_re, max_len
from blake3 import blake3

from ..protocol import wire
from ..protocol.errors import HoldfastError, RemoteProtocolError, StateMismatchError
from ..protocol.messages import FRAGMENTS_MAX, RUN_ID, FragmentHead, FragmentSize, ModelLayout
from .blocks import FragmentArrays, block_places, digest_blocks, fragment_root
from .checkpoint_store import PART, CheckpointStore, Piece
from .shared_state import SharedState
from .tensor_file import Header, TensorFileError, encode_header, read_array, read_header

FORMAT = 1
MANIFEST_KEY = "holdfast"
DIGEST_KEY = "holdfast.blake3"
DIGEST_CHARS = 12  # of a name

_NAME = re.compile(
    rf"(\d{{1,18}})-(\d{{1,18}})-(\d{{1,18}})-[0-9a-f]{{{DIGEST_CHARS}}}\.safetensors"
)
_VALUES, _MOMENTUM, _COUNTERS = range(3)  # as ``FragmentArrays`` counts


# What decoders make of bytes that are not theirs, at any depth.
_NOT_OURS = (
    TensorFileError,
    RemoteProtocolError,
    ValueError,
    LookupError,
    TypeError,
    RecursionError,
)


class CheckpointError(HoldfastError):
    """A checkpoint is damaged, or not of the kind that is asked for. Try another one."""


@frozen
class SavedHead:
    """A fragment that is in the file."""

    version: int
    root: str = field(validator=matches_re(r"[0-9a-f]{64}"))


@frozen
class Manifest:
    """What the file says of itself.

    Attributes:
      term, nonce: of the last master that was obeyed.
      branch: of the run's history; it grows whenever versions are given up.
      step: the run's global step.
      spec_toml: the run's spec at that time; it says how the layout is cut into fragments.
      heads: of all fragments, in order.
    """

    format: int
    run_id: str = field(validator=matches_re(RUN_ID))
    lineage: str = field(validator=matches_re(r"[0-9a-f]{64}"))
    term: int
    nonce: str = field(validator=matches_re(r"([0-9a-f]{2}){0,128}"))
    branch: int
    step: int
    written_s: float  # Unix time
    spec_toml: str
    layout: ModelLayout
    sizes: tuple[FragmentSize, ...] = field(validator=max_len(FRAGMENTS_MAX))
    heads: tuple[SavedHead, ...] = field(validator=max_len(FRAGMENTS_MAX))

    def __attrs_post_init__(self) -> None:
        if len(self.heads) != len(self.sizes):
            raise ValueError("its heads are not those of its fragments")
        versions = (head.version for head in self.heads)
        if any(number < 0 for number in (self.term, self.branch, self.step, *versions)):
            raise ValueError("it counts below zero")

    @property
    def rounds(self) -> int:
        """How many rounds are in it."""
        return sum(head.version for head in self.heads)

    @property
    def name(self) -> str:
        """Of its file."""
        roots = "".join(head.root for head in self.heads)
        digest = blake3(f"{self.lineage} {self.step} {roots}".encode()).hexdigest()
        digest = digest[:DIGEST_CHARS]
        return f"{self.branch}-{self.step:09d}-{self.rounds:06d}-{digest}.safetensors"

    def fragment_heads(self) -> tuple[FragmentHead, ...]:
        return tuple(
            FragmentHead(number, head.version, bytes.fromhex(head.root))
            for number, head in enumerate(self.heads)
        )

    def same_state(self, other: Manifest) -> bool:
        """Whether both are of the same bits, on one branch."""
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
    layout: ModelLayout,
    spec_toml: str,
    now_s: float,
) -> Manifest | None:
    """Of the state as it is now; None: not all of it is whole."""
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
    """Keep what the manifest names readable; False: it is not all there (any more)."""
    for number, head in enumerate(manifest.heads):
        if not state.pin(number, head.version, reader):
            state.release_receiver(reader)
            return False
    return True


def write(
    place: CheckpointStore, state: SharedState, manifest: Manifest, *, reader: str, writer: str
) -> Generator[int, None, None]:
    """Write a checkpoint, piece by piece; each fragment is released as soon as it is written.

    One that is there already, by whomever, is not written again.

    Args:
      reader: who pinned it. Who closes the generator early has to release the rest.
      writer: tells apart who writes the same file into the same place.

    Raises:
      PlaceError: it cannot be written; what was there before is there still.
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
        state.release(number, manifest.heads[number].version, reader)


def _blocks(
    state: SharedState, manifest: Manifest, number: int, parts: tuple[int, ...]
) -> Iterator[Piece]:
    version = manifest.heads[number].version
    for index, place in enumerate(state.places(number)):
        if place.part in parts:
            yield state.block(number, version, index)


def _tensors(manifest: Manifest) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Of the file, in its order."""
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
    """One that lies somewhere, and whose manifest is whole."""

    place: CheckpointStore
    name: str
    manifest: Manifest
    header: Header
    size_bytes: int

    def parts(self, number: int) -> FragmentArrays:
        """A fragment as it was written, unchecked.

        Raises:
          CheckpointError, PlaceError: it cannot be read.
        """
        size = self.manifest.sizes[number]
        counts = (size.value_count, size.momentum_count, size.counter_count)
        try:
            with self.place.reading(self.name) as file:
                values, momentum, counters = (
                    read_array(
                        file, self.header, _name(number, part), ("F32", "F32", "I64")[part], count
                    )
                    for part, count in enumerate(counts)
                )
        except TensorFileError as error:
            raise self._damaged(str(error)) from error
        return FragmentArrays(
            values.view(np.float32), momentum.view(np.float32), counters.view(np.int64)
        )

    def checked_parts(self, number: int) -> tuple[FragmentArrays, bytes]:
        """A fragment with the root that the manifest names, and its blocks' digests.

        Raises as ``parts`` does.
        """
        parts, manifest = self.parts(number), self.manifest
        size, head = manifest.sizes[number], manifest.heads[number]
        digests = digest_blocks(parts, block_places(size))
        if fragment_root(manifest.run_id, number, head.version, size, digests).hex() != head.root:
            raise self._damaged(f"fragment {number} does not have its root")
        return parts, digests

    def load(self, state: SharedState) -> None:
        """Make it the state, every byte checked against its root.

        Raises:
          CheckpointError, PlaceError: it is no good; the state holds nothing whole then.
        """
        for head in self.manifest.fragment_heads():
            try:
                state.restore(head, self.parts(head.fragment))
            except StateMismatchError as error:
                raise self._damaged(str(error)) from error

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.name} in {self.place} is damaged: {reason}")


def names(place: CheckpointStore) -> list[str]:
    """Of all checkpoints of a place, whole or not, the newest first. Raises PlaceError."""
    return sorted(filter(_NAME.fullmatch, place.names()), key=_age_of, reverse=True)


def _age_of(name: str) -> tuple[int, int, int, str]:
    found = _NAME.match(name)
    assert found is not None
    branch, step, rounds = map(int, found.groups())
    return branch, step, rounds, name


def open_checkpoint(place: CheckpointStore, name: str) -> Checkpoint:
    """Read what a checkpoint says of itself.

    Raises:
      CheckpointError: it is damaged, or of another format.
      PlaceError: it cannot be read.
    """
    size_bytes = place.size_bytes(name)
    try:
        with place.reading(name) as file:
            header = read_header(file, size_bytes)
        text = header.metadata[MANIFEST_KEY]
        if header.metadata[DIGEST_KEY] != _digest(text):
            raise TensorFileError("its manifest does not have its digest")
        plain = json.loads(text)
        if plain["format"] != FORMAT:
            raise CheckpointError(
                f"{name} in {place} is of format {plain['format']}, {FORMAT} is known here"
            )
        manifest = wire.from_plain(Manifest, plain)
    except _NOT_OURS as error:
        raise CheckpointError(f"{name} in {place} is damaged: {error}") from error
    return Checkpoint(place, name, manifest, header, size_bytes)


# ---------------------------------------------------------------- keeping


def prune(
    place: CheckpointStore, run_id: str, *, keep_count: int, keep_s: float, now_s: float
) -> list[str]:
    """Delete a run's checkpoints that are too many or too old, and what died writers left.

    The newest stays. What is damaged, of another run, or not what its name says, is not touched, nor
    counted.

    Args:
      keep_s: 0: none is too old.

    Returns:
      The names that are gone.

    Raises:
      PlaceError: the place cannot be used.
    """
    gone: list[str] = []
    kept: list[str] = []
    for name in names(place):
        try:
            manifest = open_checkpoint(place, name).manifest
        except CheckpointError:
            continue
        if manifest.run_id != run_id or manifest.name != name:
            continue  # whatever it is called, it takes no checkpoint's place
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
    """Checkpoints that can be opened, the newest first.

    Args:
      fits: says what is wrong with a manifest; empty: nothing.
      tell: is told of those that are passed over.
    """
    for name in names(place):
        try:
            checkpoint = open_checkpoint(place, name)
        except CheckpointError as error:
            tell(str(error))
            continue
        fault = fits(checkpoint.manifest)
        if fault:
            tell(f"{name} in {place} is not used: {fault}")
        else:
            yield checkpoint

"""The shared state of a peer that leaves, in one file, for the same peer when it comes back.

    state.safetensors    a fragment's values, momentum and counters, each a tensor; and, as metadata,
                         the manifest in JSON with a digest of its own

It is written under another name, synced and renamed, so there is always a whole one or none, and
only the newest. What is read is believed as far as its digests go: the manifest by its own, every
fragment by its root, which binds run, fragment and version. Whether it is the run's newest state is
not for this file to say; the master's journal knows.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from attrs import field, frozen
from attrs.validators import matches_re, max_len
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..protocol import wire
from ..protocol.errors import HoldfastError, RemoteProtocolError, StateMismatchError
from ..protocol.files import sync_to_disk
from ..protocol.messages import (
    FRAGMENTS_MAX,
    TEXT_CHARS_MAX,
    FragmentHead,
    FragmentSize,
    Layout,
)
from .blocks import Parts
from .state import SharedState

FILE_NAME = "state.safetensors"
FORMAT = 1
MANIFEST_KEY = "holdfast"
DIGEST_KEY = "holdfast.blake3"


class KeptStateError(HoldfastError):
    """The file cannot be written, or is not what it should be. Go on without it."""


@frozen
class KeptHead:
    """A fragment that is in the file."""

    fragment: int
    version: int
    root: str = field(validator=matches_re(r"[0-9a-f]{64}"))

    def head(self) -> FragmentHead:
        return FragmentHead(self.fragment, self.version, bytes.fromhex(self.root))


@frozen
class Manifest:
    """What the file says of itself."""

    format: int
    run_id: str = field(validator=max_len(TEXT_CHARS_MAX))
    lineage: str = field(validator=matches_re(r"[0-9a-f]{64}"))
    term: int  # of the last master that was obeyed
    nonce: str = field(validator=matches_re(r"([0-9a-f]{2}){0,128}"))  # and what it drew
    step: int  # the run's global step
    layout: Layout
    sizes: tuple[FragmentSize, ...] = field(validator=max_len(FRAGMENTS_MAX))
    heads: tuple[KeptHead, ...] = field(validator=max_len(FRAGMENTS_MAX))

    def __attrs_post_init__(self) -> None:
        numbers = [head.fragment for head in self.heads]
        if sorted(set(numbers)) != numbers or any(n not in range(len(self.sizes)) for n in numbers):
            raise ValueError("its heads are not of its fragments")
        if any(number < 0 for number in (self.term, self.step, *(h.version for h in self.heads))):
            raise ValueError("it counts below zero")


def manifest_of(
    state: SharedState, *, lineage: bytes, term: int, nonce: bytes, step: int, layout: Layout
) -> Manifest:
    """Of all fragments that are whole."""
    return Manifest(
        format=FORMAT,
        run_id=state.run_id,
        lineage=lineage.hex(),
        term=term,
        nonce=nonce.hex(),
        step=step,
        layout=layout,
        sizes=state.sizes,
        heads=tuple(KeptHead(h.fragment, h.version, h.root.hex()) for h in state.heads()),
    )


def save(folder: Path, state: SharedState, manifest: Manifest) -> None:
    """Write the file; one of before is replaced only by a whole one.

    The state must not change meanwhile.

    Raises:
      KeptStateError: it cannot be written; the one of before is still there.
    """
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for head in manifest.heads:
        values, momentum, counters = _names(head.fragment)
        tensors[values] = state.values(head.fragment)
        tensors[momentum] = state.momentum(head.fragment)
        tensors[counters] = state.counters(head.fragment)
    text = json.dumps(wire.to_plain(manifest))
    metadata = {MANIFEST_KEY: text, DIGEST_KEY: _digest(text)}
    path, scratch = folder / FILE_NAME, scratch_path(folder)
    try:
        save_file(tensors, scratch, metadata=metadata)
        scratch.chmod(0o600)
        sync_to_disk(scratch)
        scratch.replace(path)
        sync_to_disk(folder)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            scratch.unlink()
        raise KeptStateError(f"cannot keep the shared state in {path}: {error}") from error


def scratch_path(folder: Path) -> Path:
    """Where a file grows before it gets its name."""
    return folder / f"{FILE_NAME}.new"


def find(folder: Path, run_id: str) -> Manifest | None:
    """The manifest of the file in this folder; None if there is no file.

    Raises:
      KeptStateError: it is damaged, of another format, or of another run.
    """
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
        text = metadata[MANIFEST_KEY]
        if metadata[DIGEST_KEY] != _digest(text):
            raise KeptStateError(f"{path} is damaged: its manifest does not have its digest")
        plain = json.loads(text)
        if plain["format"] != FORMAT:
            raise KeptStateError(f"{path} is of format {plain['format']}, {FORMAT} is known here")
        manifest = wire.from_plain(Manifest, plain)
    except KeptStateError:
        raise
    # What decoders and readers make of bytes that are not theirs.
    except (OSError, SafetensorError, RemoteProtocolError, ValueError, LookupError, TypeError) as e:
        raise KeptStateError(f"{path} is damaged: {e}") from e
    if manifest.run_id != run_id:
        raise KeptStateError(f"{path} is of run {manifest.run_id}, not {run_id}")
    return manifest


def load(folder: Path, manifest: Manifest, state: SharedState) -> None:
    """Read the fragments that the manifest names, and check every byte against their roots.

    Raises:
      KeptStateError: a fragment is not what its root says; it holds nothing whole then.
    """
    path = folder / FILE_NAME
    try:
        with safe_open(path, framework="np") as file:
            for kept in manifest.heads:
                parts = Parts(*(file.get_tensor(name) for name in _names(kept.fragment)))
                state.restore(kept.head(), parts)
    except StateMismatchError as error:
        raise KeptStateError(f"{path} is damaged: {error}") from error
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise KeptStateError(f"{path} cannot be read: {error}") from error


def set_aside(folder: Path) -> Path:
    """Give a file that is no good another name, for people to look at."""
    aside = folder / f"{FILE_NAME}.refused"
    (folder / FILE_NAME).replace(aside)
    return aside


def _names(fragment: int) -> tuple[str, str, str]:
    return (f"{fragment}.values", f"{fragment}.momentum", f"{fragment}.counters")


def _digest(text: str) -> str:
    return blake3(text.encode()).hexdigest()

"""Export of a checkpoint's weights for the plain model, with its own names, shapes and dtypes.

The file can be read without holdfast. It holds neither the outer momentum nor the lineage. A tied
tensor appears under all of its names, as ``load_state_dict`` requires: a safetensors file holds a
copy per name, the torch format one shared tensor.

A block at a time is in memory, whatever the model's size: each is converted and written to its
tensors' places in the file, which gets its name when all fragments have been checked.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ....checkpoint.blocks import VALUES, BlockPlace, Bytes
from ....checkpoint.checkpoint_store import StoreError
from ....checkpoint.checkpoints import Checkpoint, CheckpointError
from ....checkpoint.tensor_file import ELEMENT_BYTES, encode_header
from ....diloco.fragments import COUNTER, Fragment, TensorSlot
from ....membership.spec.spec import RunSpec
from ....protocol.durable_files import TIES_KEY, put_in_place
from ....protocol.errors import UserError
from ....protocol.messages import ModelLayout, TensorSpec
from ...fragment_layout import fragments_of, sizes_of
from ...process.exit_codes import ExitCode

TORCH_S = 3_600.0
_COUNTERS = 2  # the index of counters in ``FragmentArrays``

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1",
}  # fmt: skip

Shared = NDArray[np.float32] | NDArray[np.int64]


def encoded(shared: Shared, dtype: str) -> bytes:
    """Return values that the run shares as bytes of a tensor's own dtype (of ``DTYPES``)."""
    if dtype == "BF16":
        return to_bfloat16(shared.astype(np.float32, copy=False)).tobytes()
    if dtype == "BOOL":
        return bytes((shared != 0).astype(np.uint8).tobytes())
    with np.errstate(over="ignore"):  # values beyond float16's range become infinity
        return shared.astype(np.dtype(_NUMPY[dtype]), copy=False).tobytes()


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 values to bfloat16, to nearest with ties to even, as torch does."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def export_safetensors(checkpoint: Checkpoint, out: Path) -> None:
    """Write a safetensors file with every tensor under all of its names.

    Raises:
      CheckpointError: it cannot be read, or its spec divides the tensors in another way.
      StoreError: the store cannot be read, or the file cannot be written.
    """
    tensors = checkpoint.manifest.layout.tensors
    named = [(name, n) for n, t in enumerate(tensors) for name in (t.name, *t.aliases)]
    with _scratch_beside(out) as scratch:
        _write(checkpoint, named, {"format": "pt"}, scratch)
        put_in_place(scratch, out)


def export_torch(checkpoint: Checkpoint, out: Path) -> None:
    """Write a state dict with ``torch.save``, in a process that may import torch.

    Raises what ``export_safetensors`` does, and UserError if torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "the torch format needs torch, which is not installed here",
            exit_code=ExitCode.CONFIG,
            hint="install torch, or use --format safetensors",
        )
    tensors = checkpoint.manifest.layout.tensors
    ties = {t.name: t.aliases for t in tensors if t.aliases}
    named = [(tensor.name, number) for number, tensor in enumerate(tensors)]
    with _scratch_beside(out) as plain:
        _write(checkpoint, named, {TIES_KEY: json.dumps(ties)}, plain)
        command = [sys.executable, "-m", "holdfast.client.state.torch_file", str(plain), str(out)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TORCH_S)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no error message"]
        raise StoreError(f"{out}: torch cannot write it: {lines[-1]}")


@contextmanager
def _scratch_beside(out: Path) -> Iterator[Path]:
    """Yield a name for a file on the disk of another one; errors of the disk raise StoreError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
            yield Path(folder) / "model.safetensors"
    except OSError as error:
        raise StoreError(f"{out}: {error}") from error


def _write(
    checkpoint: Checkpoint, named: Iterable[tuple[str, int]], metadata: dict[str, str], out: Path
) -> None:
    """Write a new file with tensors of the layout, by name and index; only its owner may read."""
    layout = checkpoint.manifest.layout
    # Large elements first keeps all tensors aligned; the sort is stable.
    ordered = sorted(named, key=lambda each: -ELEMENT_BYTES[_dtype(layout.tensors[each[1]])])
    header = encode_header(
        [(name, _dtype(layout.tensors[n]), layout.tensors[n].shape) for name, n in ordered],
        metadata,
    )
    starts: dict[int, list[int]] = {}
    end = len(header)
    for _name, number in ordered:
        starts.setdefault(number, []).append(end)
        end += _size_bytes(layout.tensors[number])
    with open(out, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        written = file.write(header)
        for piece in _pieces(checkpoint):
            for start in starts[piece.index]:
                file.seek(start + piece.offset_bytes)
                written += file.write(piece.data)
    assert written == end, "every byte is in one piece"


@frozen
class _Piece:
    """Some of a tensor's bytes, in its own dtype; ``index`` is the tensor's, in the layout."""

    index: int
    offset_bytes: int
    data: bytes


def _pieces(checkpoint: Checkpoint) -> Iterator[_Piece]:
    manifest = checkpoint.manifest
    fragments = fragments_of(manifest.layout, RunSpec.parse(manifest.spec_toml).diloco)
    if sizes_of(fragments) != manifest.sizes:
        raise CheckpointError(f"{checkpoint.name} has other fragments than its spec defines")
    for number, fragment in enumerate(fragments):
        cut = _Cut(manifest.layout, fragment)
        for place, data in checkpoint.blocks(number):
            yield from cut.pieces(place, data)


class _Cut:
    """The division of one fragment's blocks into tensors."""

    def __init__(self, layout: ModelLayout, fragment: Fragment) -> None:
        self._layout = layout
        slots = [each for each in fragment.places if each.count]
        counters = [each for each in slots if layout.tensors[each.index].kind == COUNTER]
        values = [each for each in slots if layout.tensors[each.index].kind != COUNTER]
        # Slots of each vector lie one after the other.
        self._slots = {VALUES: values, _COUNTERS: counters}

    def pieces(self, place: BlockPlace, data: Bytes) -> Iterator[_Piece]:
        """Yield the tensors' pieces in a block; none of a block of momentum."""
        slots = self._slots.get(place.part, [])
        counted = place.part == _COUNTERS
        shared: Shared = data.view(np.int64) if counted else data.view(np.float32)
        first = place.start // place.element_bytes
        stop = first + len(shared)
        at = max(0, bisect_right(slots, first, key=_offset) - 1)
        for slot in slots[at:]:
            if slot.offset >= stop:
                return
            begin, end = max(first, slot.offset), min(stop, slot.offset + slot.count)
            dtype = _dtype(self._layout.tensors[slot.index])
            part = encoded(shared[begin - first : end - first], dtype)
            yield _Piece(slot.index, (begin - slot.offset) * ELEMENT_BYTES[dtype], part)


def _offset(slot: TensorSlot) -> int:
    return slot.offset


def _dtype(spec: TensorSpec) -> str:
    return DTYPES[spec.dtype]


def _size_bytes(spec: TensorSpec) -> int:
    return ELEMENT_BYTES[_dtype(spec)] * math.prod(spec.shape)

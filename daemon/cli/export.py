"""A checkpoint's weights as a file for the plain model: its own names, shapes and dtypes.

What is written needs no holdfast to be read. Outer momentum and lineage stay behind. A tied tensor
is under all of its names, as ``load_state_dict`` wants it: in a safetensors file once for each, in
torch's format as one tensor.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ...checkpoint.checkpoint_store import FolderStore, Piece, StoreError
from ...checkpoint.checkpoints import Checkpoint, CheckpointError
from ...checkpoint.tensor_file import ELEMENT_BYTES, encode_header
from ...diloco.fragments import COUNTER
from ...membership.spec.spec import RunSpec
from ...protocol.durable_files import TIES_KEY
from ...protocol.errors import UserError
from ...protocol.messages import TensorSpec
from ..exit_codes import ExitCode
from ..fragment_layout import fragments_of, sizes_of

TORCH_S = 3_600.0

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U8": "u1",
}  # fmt: skip

Shared = NDArray[np.float32] | NDArray[np.int64]


@frozen
class Tensor:
    """One of the model, with its values as the run shares them."""

    spec: TensorSpec
    shared: Shared

    @property
    def dtype(self) -> str:
        return DTYPES[self.spec.dtype]

    def encoded(self) -> bytes:
        """Its bytes in its own dtype, as a trainer that loads it would have them."""
        if self.dtype == "BF16":
            return to_bfloat16(self.shared.astype(np.float32, copy=False)).tobytes()
        if self.dtype == "BOOL":
            return bytes((self.shared != 0).astype(np.uint8).tobytes())
        with np.errstate(over="ignore"):  # beyond float16 is infinity
            own = self.shared.astype(np.dtype(_NUMPY[self.dtype]))
        return own.tobytes()


def tensors_of(checkpoint: Checkpoint) -> list[Tensor]:
    """All of the model, in the layout's order; every byte was checked.

    Raises:
      CheckpointError, StoreError: it cannot be read.
      UserError: its spec does not cut its tensors as they are cut in it.
    """
    manifest = checkpoint.manifest
    fragments = fragments_of(manifest.layout, RunSpec.parse(manifest.spec_toml).diloco)
    if sizes_of(fragments) != manifest.sizes:
        raise CheckpointError(
            f"{checkpoint.name} is cut into fragments in another way than its spec says"
        )
    found: dict[int, Tensor] = {}
    for number, fragment in enumerate(fragments):
        (values, _momentum, counters), _digests = checkpoint.checked_parts(number)
        for place in fragment.places:
            spec = manifest.layout.tensors[place.index]
            source: Shared = counters if spec.kind == COUNTER else values
            found[place.index] = Tensor(spec, source[place.offset : place.offset + place.count])
    return [found[index] for index in sorted(found)]


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even, as torch does."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def export_safetensors(tensors: list[Tensor], out: Path) -> None:
    """All names, in one file. Raises StoreError."""
    named = [(name, t) for t in tensors for name in (t.spec.name, *t.spec.aliases)]
    _write(named, {"format": "pt"}, out)


def export_torch(tensors: list[Tensor], out: Path) -> None:
    """What ``torch.save`` makes of a state dict.

    By another process: this one never imports torch. Raises StoreError, or UserError without torch.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "the torch format needs torch, which is not installed here",
            exit_code=ExitCode.CONFIG,
            hint="install torch, or take --format safetensors",
        )
    ties = {t.spec.name: t.spec.aliases for t in tensors if t.spec.aliases}
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
            plain = Path(folder) / "model.safetensors"
            _write([(t.spec.name, t) for t in tensors], {TIES_KEY: json.dumps(ties)}, plain)
            command = [sys.executable, "-m", "holdfast.client.torch_file", str(plain), str(out)]
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=TORCH_S
            )
    except OSError as error:
        raise StoreError(f"{out}: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise StoreError(f"{out}: torch cannot write it: {lines[-1]}")


def _write(named: list[tuple[str, Tensor]], metadata: dict[str, str], out: Path) -> None:
    # Aligned, and else as it was.
    ordered = sorted(named, key=lambda each: -ELEMENT_BYTES[each[1].dtype])
    for _written in FolderStore(out.parent).write(out.name, "export", _pieces(ordered, metadata)):
        pass


def _pieces(named: list[tuple[str, Tensor]], metadata: dict[str, str]) -> Iterator[Piece]:
    yield encode_header([(name, t.dtype, t.spec.shape) for name, t in named], metadata)
    for _name, tensor in named:
        data = tensor.encoded()
        assert len(data) == ELEMENT_BYTES[tensor.dtype] * math.prod(tensor.spec.shape)
        yield data

"""Export of a checkpoint's weights for the plain model, with its own names, shapes and dtypes.

The file can be read without holdfast. It holds neither the outer momentum nor the lineage. A tied
tensor appears under all of its names, as ``load_state_dict`` requires: a safetensors file holds a copy
per name, the torch format one shared tensor.
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
    """A tensor of the model, with its values as the run shares them."""

    spec: TensorSpec
    shared: Shared

    @property
    def dtype(self) -> str:
        return DTYPES[self.spec.dtype]

    def encoded(self) -> bytes:
        """Return the values as bytes of the tensor's own dtype."""
        if self.dtype == "BF16":
            return to_bfloat16(self.shared.astype(np.float32, copy=False)).tobytes()
        if self.dtype == "BOOL":
            return bytes((self.shared != 0).astype(np.uint8).tobytes())
        with np.errstate(over="ignore"):  # values beyond float16's range become infinity
            own = self.shared.astype(np.dtype(_NUMPY[self.dtype]))
        return own.tobytes()


def tensors_of(checkpoint: Checkpoint) -> list[Tensor]:
    """Return all tensors of the model in the layout's order, with every byte checked.

    Raises:
      CheckpointError: the checkpoint cannot be read, or its spec divides the tensors into fragments
        in another way than the checkpoint.
      StoreError: the store cannot be read.
    """
    manifest = checkpoint.manifest
    fragments = fragments_of(manifest.layout, RunSpec.parse(manifest.spec_toml).diloco)
    if sizes_of(fragments) != manifest.sizes:
        raise CheckpointError(f"{checkpoint.name} has other fragments than its spec defines")
    found: dict[int, Tensor] = {}
    for number, fragment in enumerate(fragments):
        (values, _momentum, counters), _digests = checkpoint.checked_parts(number)
        for place in fragment.places:
            spec = manifest.layout.tensors[place.index]
            source: Shared = counters if spec.kind == COUNTER else values
            found[place.index] = Tensor(spec, source[place.offset : place.offset + place.count])
    return [found[index] for index in sorted(found)]


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 values to bfloat16, to nearest with ties to even, as torch does."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def export_safetensors(tensors: list[Tensor], out: Path) -> None:
    """Write a safetensors file with every tensor under all of its names.

    Raises:
      StoreError: the file cannot be written.
    """
    named = [(name, t) for t in tensors for name in (t.spec.name, *t.spec.aliases)]
    _write(named, {"format": "pt"}, out)


def export_torch(tensors: list[Tensor], out: Path) -> None:
    """Write a state dict with ``torch.save``, in another process because this one never imports torch.

    Raises:
      StoreError: the file cannot be written.
      UserError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "the torch format needs torch, which is not installed here",
            exit_code=ExitCode.CONFIG,
            hint="install torch, or use --format safetensors",
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
        lines = done.stderr.strip().splitlines() or ["no error message"]
        raise StoreError(f"{out}: torch cannot write it: {lines[-1]}")


def _write(named: list[tuple[str, Tensor]], metadata: dict[str, str], out: Path) -> None:
    # Large elements first keeps all tensors aligned; the sort is stable.
    ordered = sorted(named, key=lambda each: -ELEMENT_BYTES[each[1].dtype])
    for _written in FolderStore(out.parent).write(out.name, "export", _pieces(ordered, metadata)):
        pass


def _pieces(named: list[tuple[str, Tensor]], metadata: dict[str, str]) -> Iterator[Piece]:
    yield encode_header([(name, t.dtype, t.spec.shape) for name, t in named], metadata)
    for _name, tensor in named:
        data = tensor.encoded()
        assert len(data) == ELEMENT_BYTES[tensor.dtype] * math.prod(tensor.spec.shape)
        yield data

"""A trainer's own files: tensors in the safetensors format, all else as JSON in their metadata.

Nothing is unpickled. Both functions block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..protocol.files import sync_to_disk

UNWRITABLE = (OSError, SafetensorError)
# What becomes of bytes that were written by something else, while they are read and made sense of.
UNREADABLE = (
    OSError,
    SafetensorError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
)


def write(
    path: Path, key: str, text: str, tensors: dict[str, torch.Tensor], *, durable: bool
) -> None:
    """Write it whole or not at all; only its owner can read it.

    Args:
      key: of ``text``, which is JSON, among the metadata.
      durable: it is to survive a loss of power.

    Raises:
      UNWRITABLE: the disk does not take it.
    """
    scratch = path.with_name(f"{path.name}.part")
    save_file(tensors, scratch, metadata={key: text})
    scratch.chmod(0o600)
    if durable:
        sync_to_disk(scratch)
    scratch.replace(path)
    if durable:
        sync_to_disk(path.parent)


@contextmanager
def reading(path: Path, key: str) -> Iterator[tuple[Any, Any]]:
    """What it says, and the open file, whose tensors are read one by one; raises UNREADABLE."""
    with safe_open(path, framework="pt") as file:
        yield json.loads((file.metadata() or {})[key]), file

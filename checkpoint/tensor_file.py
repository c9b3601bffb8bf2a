"""Files in the safetensors format, written and read as streams.

    u64 length | JSON: {"__metadata__": {...}, name: {"dtype", "shape", "data_offsets"}} | data

The safetensors library needs all tensors in memory and a local path; a checkpoint is written block
by block while the run goes on, also to URLs. The library reads these files, and a test checks that.
Wider elements come first, so each tensor is aligned to its element size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ..protocol.errors import HoldfastError

HEADER_BYTES_MAX = 100_000_000  # the library refuses longer ones, too
LENGTH_BYTES = 8

ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


class TensorFileError(HoldfastError):
    """The file has another format or is damaged."""


@frozen
class TensorEntry:
    """A tensor in a file, with its range of bytes in the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@frozen
class Header:
    """The header of a file.

    Attributes:
      data_start: offset of the data in the file.
    """

    metadata: dict[str, str]
    entries: dict[str, TensorEntry]
    data_start: int


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the bytes before the data.

    Args:
      tensors: name, dtype and shape of each, in the order of their bytes.
    """
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name, dtype, shape in tensors:
        stop = start + ELEMENT_BYTES[dtype] * math.prod(shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise TensorFileError(f"a header of {len(text)} bytes, at most {HEADER_BYTES_MAX}")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(file: BinaryIO, size_bytes: int) -> Header:
    """Read the header at the beginning of a file of a given size.

    Raises:
      TensorFileError: the file has another format or is cut short.
    """
    length = int.from_bytes(_exactly(file, LENGTH_BYTES), "little")
    if length > min(HEADER_BYTES_MAX, size_bytes - LENGTH_BYTES):
        raise TensorFileError(f"its header has {length} bytes, more than there are")
    try:
        table = json.loads(_exactly(file, length))
        metadata = table.pop("__metadata__", {})
        entries = {name: _entry(name, **fields) for name, fields in table.items()}
    except TensorFileError:
        raise
    # From bytes that are no header, or have other fields.
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TensorFileError(f"its header cannot be read: {error}") from error
    stop = 0
    for entry in sorted(entries.values(), key=lambda each: (each.start, each.stop)):
        if entry.start != stop:
            raise TensorFileError(f"tensor {entry.name!r} does not follow the one before it")
        stop = entry.stop
    data_start = LENGTH_BYTES + length
    if data_start + stop != size_bytes:
        raise TensorFileError(
            f"it has {size_bytes} bytes, its header describes {data_start + stop}"
        )
    return Header(metadata, entries, data_start)


def _entry(name: str, dtype: str, shape: list[int], data_offsets: list[int]) -> TensorEntry:
    start, stop = data_offsets
    if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise TensorFileError(f"tensor {name!r} has no proper shape")
    if stop - start != ELEMENT_BYTES.get(dtype, 0) * math.prod(shape):
        raise TensorFileError(f"tensor {name!r} has another size than its shape")
    return TensorEntry(name, dtype, tuple(shape), start, stop)


def find_array(header: Header, name: str, dtype: str, count: int) -> TensorEntry:
    """Return the entry of a tensor of one dimension.

    Raises:
      TensorFileError: the tensor is missing, or has another type or count.
    """
    entry = header.entries.get(name)
    if entry is None or (entry.dtype, entry.shape) != (dtype, (count,)):
        raise TensorFileError(f"tensor {name!r} is missing, or of another type or shape")
    return entry


def read_bytes(
    file: BinaryIO, header: Header, entry: TensorEntry, start: int, stop: int
) -> NDArray[np.uint8]:
    """Read a range of a tensor's bytes.

    Raises:
      TensorFileError: the file ends before.
    """
    data = np.empty(stop - start, np.uint8)
    file.seek(header.data_start + entry.start + start)
    left = data.data
    while len(left):
        got = file.readinto(left)  # type: ignore[attr-defined]
        if not got:
            raise TensorFileError(f"tensor {entry.name!r} is cut short")
        left = left[got:]
    return data


def _exactly(file: BinaryIO, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = file.read(count - len(data))
        if not more:
            raise TensorFileError(f"it ends after {len(data)} bytes of a header of {count}")
        data += more
    return data

"""Chunks that a codec encodes and decodes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdfast.collectives.codecs.codecs import Codec

Values = NDArray[np.float32]


def encode(codec: Codec, values: Values) -> bytes:
    out = bytearray(b"\xa5" * codec.encoded_bytes(values.size))
    length = codec.encode(values, memoryview(out))
    assert length == len(out) or codec.variable
    return bytes(out[:length])


def decode(codec: Codec, data: bytes, count: int) -> Values:
    out = np.full(count, 7, np.float32)
    codec.decode(data, out)
    return out

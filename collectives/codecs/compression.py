"""zstd compression of encoded chunks, where it saves enough.

A codec's name in a plan may end in ``+zstd``. Then a frame that is shorter than its chunk's
encoding is that encoding, compressed; a frame of the full length is the encoding itself. So only
codecs whose encodings have a fixed length can be combined with it (the others are entropy-coded
already). Only frames are compressed: results are stored and hashed as they are encoded.
"""

from __future__ import annotations

import zstandard

from .codec_base import Bytes, Codec
from .codecs import get_codec

ZSTD_SUFFIX = "+zstd"
ZSTD_LEVEL = 1  # higher levels save hardly more of an encoding, at a fraction of the speed
SAVING_MIN = 0.04  # share of a chunk's bytes; less is not worth the time at both ends
SAMPLE_BYTES_MIN = 4_096  # shorter chunks do not predict how the others compress


def parse_codec(name: str) -> tuple[Codec, bool]:
    """Return the codec that a plan names, and whether its frames may be compressed.

    Raises:
      ValueError: there is no such codec, or its encodings are compressed already.
    """
    plain = name.removesuffix(ZSTD_SUFFIX)
    codec = get_codec(plain)
    if codec.variable and plain != name:
        raise ValueError(f"{plain} is compressed already, so {name!r} is no codec")
    return codec, plain != name


class FrameCompressor:
    """Compressor of one node's frames of one direction of one round. Thread-safe.

    The first chunk of at least ``SAMPLE_BYTES_MIN`` is the sample: if compressing it saves less
    than ``SAVING_MIN``, the rest of the round is not compressed.

    Attributes:
      pays: whether it is worth calling ``compress``.
    """

    def __init__(self, wanted: bool) -> None:
        self.pays = wanted
        self._sampled = False

    def compress(self, payload: memoryview) -> Bytes:
        """Return the payload compressed, or the payload itself if that is not longer."""
        if not self.pays:
            return payload
        compressed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(payload)
        if not self._sampled and len(payload) >= SAMPLE_BYTES_MIN:
            self._sampled = True
            self.pays = len(compressed) <= (1 - SAVING_MIN) * len(payload)
        return compressed if len(compressed) < len(payload) else payload


def expand(data: Bytes, wanted_bytes: int) -> bytes:
    """Undo ``compress``. No more than the known length is ever allocated.

    Raises:
      ValueError: not a compressed chunk of that length.
    """
    try:
        parameters = zstandard.get_frame_parameters(data)
        if parameters.content_size != wanted_bytes or parameters.dict_id:
            raise ValueError(f"zstd: not a frame of {wanted_bytes} bytes")
        expanded = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=wanted_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd: {error}") from error
    if len(expanded) != wanted_bytes:
        raise ValueError(f"zstd: {len(expanded)} bytes, {wanted_bytes} wanted")
    return expanded

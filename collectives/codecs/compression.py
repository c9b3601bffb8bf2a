"""zstd over encoded chunks, where it pays.

A codec's name in a plan may end in ``+zstd``. Then a frame that is shorter than its chunk's
encoding is that encoding, compressed; a frame of the full length is the encoding itself. So only
codecs whose encodings have a fixed length can be combined with it (the other kind is entropy-coded
already). Only frames are compressed: results are kept, hashed and forwarded as they are encoded.
"""

from __future__ import annotations

import zstandard

from .codec_base import Bytes, Codec
from .codecs import get_codec

ZSTD_SUFFIX = "+zstd"
ZSTD_LEVEL = 1  # higher ones find hardly more in what a codec left, at a fraction of the speed
SAVING_MIN = 0.04  # share of a chunk's bytes; less is not worth the time at both ends
SAMPLE_BYTES_MIN = 4_096  # shorter chunks say nothing about the others


def parse_codec(name: str) -> tuple[Codec, bool]:
    """The codec that a plan names, and whether its frames may be compressed.

    Raises:
      ValueError: there is no such codec, or it is not one to be compressed.
    """
    plain = name.removesuffix(ZSTD_SUFFIX)
    codec = get_codec(plain)
    if codec.variable and plain != name:
        raise ValueError(f"{plain} is compressed already: {name!r} is none")
    return codec, plain != name


class FrameCompressor:
    """Compresses one node's frames of one direction of one round, as long as it pays.

    The first chunk of a decent length is the sample: when compressing it saves less than
    ``SAVING_MIN``, the rest of the round goes uncompressed. Threads may share it.

    Attributes:
      pays: whether it is worth calling ``squeeze``.
    """

    def __init__(self, wanted: bool) -> None:
        self.pays = wanted
        self._sampled = False

    def squeeze(self, payload: memoryview) -> Bytes:
        """The payload compressed, or the payload itself; never anything as long that is not it."""
        if not self.pays:
            return payload
        squeezed = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(payload)
        if not self._sampled and len(payload) >= SAMPLE_BYTES_MIN:
            self._sampled = True
            self.pays = len(squeezed) <= (1 - SAVING_MIN) * len(payload)
        return squeezed if len(squeezed) < len(payload) else payload


def expand(data: Bytes, wanted_bytes: int) -> bytes:
    """Undo ``squeeze``; the length is known, so no more than that is ever allocated.

    Raises:
      ValueError: not a compressed chunk of that length.
    """
    try:
        told = zstandard.get_frame_parameters(data)
        if told.content_size != wanted_bytes or told.dict_id:
            raise ValueError(f"zstd: not a frame of {wanted_bytes} bytes")
        expanded = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=wanted_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd: {error}") from error
    if len(expanded) != wanted_bytes:
        raise ValueError(f"zstd: {len(expanded)} bytes, {wanted_bytes} wanted")
    return expanded

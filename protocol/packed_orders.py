"""What every member must hear, sent as its difference from what it heard before.

A ``View``, a ``Reduce`` and a ``Commit`` name all members: 130, 165 and 65 bytes for each of them,
to each of them, and most of it is what the last ones said. So each is sent as ``Packed``: its
encoding, compressed by Zstandard (RFC 8878) with a raw dictionary that both ends have, the
session's last view and last reduction as they were encoded. A session keeps the order of its
messages, over all its connections, so both ends know which ones those are; a frame's checksum tells
if they do not. Members that have heard the same get the same bytes, which are made once.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import zstandard

from . import messages as m
from . import wire
from .errors import RemoteProtocolError
from .message_limits import FRAME_BYTES_MAX

PACKED = (m.View, m.Reduce, m.Commit)
ZSTD_LEVEL = 3  # higher ones win nothing here, and take up to forty times as long
KEPT_MAX = 8  # packed messages that are kept for other members


class Heard(NamedTuple):
    """The last view and reduction of a session, encoded; empty before the first ones."""

    view: bytes = b""
    order: bytes = b""

    def then(self, kind: type[m.Message], data: bytes) -> Heard:
        """Return what was heard after a message of this type, of which ``data`` is the encoding."""
        if kind is m.View:
            return self._replace(view=data)
        return self._replace(order=data) if kind is m.Reduce else self

    def unpacked(self, data: bytes) -> bytes:
        """Return the encoding of a packed message; see ``OrderReader.unpack``."""
        try:
            if not 0 <= zstandard.frame_content_size(data) <= FRAME_BYTES_MAX:
                raise RemoteProtocolError("a packed message does not say its size, or is too long")
            reader = zstandard.ZstdDecompressor(dict_data=self.dictionary())
            return reader.decompress(data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise RemoteProtocolError(f"a packed message cannot be unpacked: {error}") from None

    def dictionary(self) -> zstandard.ZstdCompressionDict:
        return zstandard.ZstdCompressionDict(
            self.view + self.order, dict_type=zstandard.DICT_TYPE_RAWCONTENT
        )


class OrderWriter:
    """Packs messages for all sessions of a master."""

    def __init__(self) -> None:
        self._made: deque[tuple[m.Message, Heard, m.Packed, Heard]] = deque(maxlen=KEPT_MAX)

    def pack(self, message: m.Message, heard: Heard) -> tuple[m.Message, Heard]:
        """Return what to send in place of a message, and what its session has heard after it."""
        if not isinstance(message, PACKED):
            return message, heard
        for given, before, made, then in self._made:
            if given is message and before == heard:
                return made, then
        data = wire.encode(message)
        compressor = zstandard.ZstdCompressor(
            level=ZSTD_LEVEL, dict_data=heard.dictionary(), write_checksum=True
        )
        packed, then = m.Packed(compressor.compress(data)), heard.then(type(message), data)
        self._made.append((message, heard, packed, then))
        return packed, then


class OrderReader:
    """Unpacks the messages of one session."""

    def __init__(self) -> None:
        self._heard = Heard()

    def unpack(self, message: m.Message) -> m.Message:
        """Return the message that a packed one stands for; any other one as it is.

        Raises:
          RemoteProtocolError: it is not what such a message is, or refers to what did not come.
        """
        if not isinstance(message, m.Packed):
            return message
        data = self._heard.unpacked(message.data)
        unpacked = wire.decode(data, PACKED)
        self._heard = self._heard.then(type(unpacked), data)
        return unpacked

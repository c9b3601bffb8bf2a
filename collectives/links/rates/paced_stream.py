"""A stream that sends and receives in slices, capped and measured.

For streams that tasks use: control streams, and lanes in memory. ``socket_lane`` does the same for
lanes in threads.
"""

from __future__ import annotations

import trio

from ....protocol.network.lane import HEADER_BYTES, PIECE_BYTES, TAG_BYTES, Buffer
from .rate_limiter import RateLimiter
from .rate_meter import Meter

# Bytes given to a stream at once. They must move within the stall time, or the stream looks stuck.
SLICE_BYTES = HEADER_BYTES + PIECE_BYTES + TAG_BYTES


class PacedStream(trio.abc.Stream):
    """See the top of this file.

    Attributes:
      sent_bytes: bytes that the transport took so far.
      received_bytes: bytes that came out of it.

    Args:
      upload, download: caps; None: no cap.
      meter: counts what is sent, and the time that the transport takes for it.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        upload: RateLimiter | None = None,
        download: RateLimiter | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._stream = stream
        self._upload = upload
        self._download = download
        self._meter = meter if meter is not None else Meter()
        self.sent_bytes = 0
        self.received_bytes = 0

    async def send_all(self, data: Buffer) -> None:
        view = memoryview(data)
        done = 0
        while done < len(view):
            slice_bytes = SLICE_BYTES
            if self._upload is not None:
                slice_bytes = min(slice_bytes, self._upload.slice_bytes)
            piece = view[done : done + slice_bytes]
            if self._upload is not None:
                await self._upload.take(len(piece))
            carried_bytes = 0
            self._meter.begin()
            try:
                await self._stream.send_all(piece)
                carried_bytes = len(piece)
            finally:
                self._meter.end(carried_bytes)
            done += len(piece)
            self.sent_bytes += len(piece)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if self._download is not None and max_bytes is not None:
            max_bytes = min(max_bytes, self._download.slice_bytes)
        data = await self._stream.receive_some(max_bytes)
        self.received_bytes += len(data)
        if self._download is not None and data:
            await self._download.take(len(data))
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()

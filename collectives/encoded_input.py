"""A node's contribution to a round, encoded chunk by chunk when it is sent or added up."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import LocalProtocolError
from ..protocol.messages import FragmentSize, Plan
from .arithmetic import ChunkLayout, Counters, Values
from .codecs.error_feedback import Residual
from .links.buffer_pool import BufferPool


class EncodedInput:
    """A contributor's own chunks, which are sent in every attempt of a round.

    Encodings are kept only if there is error feedback. Otherwise a chunk that is needed again (a
    lane broke, its owner was lost, another attempt began) is encoded again, to the same bytes, by
    any thread. If the codec is verbatim, the values are sent from where they are, without a copy.

    Args:
      values: shape ``(value_count,)``, float32; read, never written. They must not change as long
        as the round lasts.
      counters: shape ``(counter_count,)``, int64; the same.
      residual: of error feedback; None to encode the values as they are. See ``settle``.
      pool: where the memory of encodings comes from.
    """

    def __init__(
        self,
        plan: Plan,
        size: FragmentSize,
        values: Values,
        counters: Counters,
        pool: BufferPool,
        residual: Residual | None = None,
    ) -> None:
        _check_array("values", values, np.dtype(np.float32), size.value_count)
        _check_array("counters", counters, np.dtype(np.int64), size.counter_count)
        if residual is not None:
            _check_array("residual", residual.values, np.dtype(np.float32), size.value_count)
        self._layout = ChunkLayout.of(plan, size)
        self._residual = residual
        self._turn = 0 if residual is None else residual.begin()
        self._values = values
        self._counters = counters
        self._pool = pool
        self._kept: dict[int, memoryview] = {}  # encodings, if there is a residual
        # A repair may need a chunk for its new owner while it is encoded for the lost one.
        self._locks = [threading.Lock() for _cut in self._layout.cuts]

    def fits(self, plan: Plan, size: FragmentSize) -> bool:
        """Return whether the input can be used under a plan; owners may differ, cuts may not."""
        other = ChunkLayout.of(plan, size)
        mine = self._layout
        return (
            other.size == mine.size
            and other.codec_up.name == mine.codec_up.name
            and [cut.values for cut in other.cuts] == [cut.values for cut in mine.cuts]
        )

    def encode(self, index: int) -> memoryview:
        """Return the encoding of one chunk.

        Raises:
          ValueError: as the codec.
        """
        with self._locks[index]:
            return self._encode(index)

    def _encode(self, index: int) -> memoryview:
        cut, codec = self._layout.cuts[index], self._layout.codec_up
        if cut.is_counters:
            return memoryview(self._counters.astype("<i8").tobytes())
        values = self._values[cut.values]
        if codec.verbatim:
            return values.data.cast("B").toreadonly()
        if index in self._kept:
            return self._kept[index]
        room, residual = self._pool.take(cut.up_bytes), self._residual
        if residual is None:
            return room[: codec.encode(values, room)]
        length = codec.encode(residual.corrected(cut.values, values), room)
        self._kept[index] = room[:length]
        return self._kept[index]

    def settle(self) -> None:
        """Settle the residual: the round committed with this input in it. Heavy.

        Does nothing unless every chunk of values was encoded.
        """
        places = {i: cut.values for i, cut in enumerate(self._layout.cuts) if not cut.is_counters}
        if self._residual is not None and len(self._kept) == len(places):
            sent = ((places[i], self._values[places[i]], self._kept[i]) for i in places)
            self._residual.settle(self._turn, self._layout.codec_up, sent)


def _check_array(
    name: str, array: NDArray[np.generic], dtype: np.dtype[np.generic], n: int
) -> None:
    if array.dtype != dtype or array.shape != (n,) or not array.flags.c_contiguous:
        raise LocalProtocolError(
            f"{name}: {array.dtype} of shape {array.shape}, contiguous {dtype} of ({n},) wanted"
        )

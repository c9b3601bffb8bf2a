"""A node's contribution to a round, encoded chunk by chunk when it is sent or added up."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import LocalProtocolError
from ..protocol.messages import FragmentSize, Plan
from .arithmetic import ChunkLayout, Counters, Values
from .codecs.error_feedback import ResidualUse
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
      correction: of error feedback; None to encode the values as they are. See ``settle``.
      pool: where the memory of encodings comes from.
    """

    def __init__(
        self,
        plan: Plan,
        size: FragmentSize,
        values: Values,
        counters: Counters,
        pool: BufferPool,
        correction: ResidualUse | None = None,
    ) -> None:
        _check_array("values", values, np.dtype(np.float32), size.value_count)
        _check_array("counters", counters, np.dtype(np.int64), size.counter_count)
        if correction is not None and correction.count != size.value_count:
            raise LocalProtocolError(
                f"a residual of {correction.count} values for {size.value_count}"
            )
        self._layout = ChunkLayout.of(plan, size)
        self._correction = correction
        self._values = values
        self._counters = counters
        self._pool = pool
        self._done = [False] * len(self._layout.cuts)
        self._kept: dict[int, memoryview] = {}  # encodings, if there is a correction
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

    @property
    def complete(self) -> bool:
        """Whether every chunk was encoded at least once."""
        return all(self._done)

    def encode(self, index: int) -> memoryview:
        """Return the encoding of one chunk.

        Raises:
          ValueError: as the codec.
        """
        with self._locks[index]:
            encoded = self._encode(index)
            self._done[index] = True
        return encoded

    def _encode(self, index: int) -> memoryview:
        cut, codec = self._layout.cuts[index], self._layout.codec_up
        if cut.is_counters:
            return memoryview(self._counters.astype("<i8").tobytes())
        values = self._values[cut.values]
        if codec.verbatim:
            return values.data.cast("B").toreadonly()
        if index in self._kept:
            return self._kept[index]
        room, correction = self._pool.take(cut.up_bytes), self._correction
        if correction is None:
            return room[: codec.encode(values, room)]
        length = codec.encode(correction.corrected(cut.values, values), room)
        self._kept[index] = room[:length]
        return self._kept[index]

    def settle(self) -> None:
        """Settle the correction: the round committed with this input in it. Heavy."""
        if self._correction is not None and self.complete:
            cuts = self._layout.cuts
            sent = (
                (cuts[i].values, self._values[cuts[i].values], self._kept[i]) for i in self._kept
            )
            self._correction.settle(self._layout.codec_up, sent)


def _check_array(
    name: str, array: NDArray[np.generic], dtype: np.dtype[np.generic], n: int
) -> None:
    if array.dtype != dtype or array.shape != (n,) or not array.flags.c_contiguous:
        raise LocalProtocolError(
            f"{name}: {array.dtype} of shape {array.shape}, contiguous {dtype} of ({n},) wanted"
        )

"""A node's contribution to a round, encoded once."""

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
    """A contributor's own encoded chunks: made once, sent in every attempt of a round.

    Chunks are encoded one by one, when they are first needed, by any thread. The encoding outlives the
    reduction: a second attempt sends the same bytes of a chunk that was encoded, even if the arrays
    have changed since.

    Args:
      values: shape ``(value_count,)``, float32; read, never written.
      counters: shape ``(counter_count,)``, int64.
      correction: of error feedback; None to encode the values as they are. See ``settle``.
      values_stay: ``values`` will not change as long as this is in use; if the codec is verbatim they
        are then sent from where they are, without a copy.
      pool: where its memory comes from.
    """

    def __init__(
        self,
        plan: Plan,
        size: FragmentSize,
        values: Values,
        counters: Counters,
        correction: ResidualUse | None = None,
        *,
        values_stay: bool = False,
        pool: BufferPool | None = None,
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
        self._done = [False] * len(self._layout.cuts)
        # After a repair a chunk may be needed for its new owner while it is encoded for the lost one.
        self._locks = [threading.Lock() for _cut in self._layout.cuts]
        self._lengths = [cut.up_bytes for cut in self._layout.cuts]
        self._in_place = values_stay and self._layout.codec_up.verbatim
        if self._in_place or pool is None:
            # If values are sent from where they are, these pages are never written and cost nothing.
            self._data = np.empty(self._layout.up_bytes, np.uint8).data
        else:
            self._data = pool.take(self._layout.up_bytes)

    def fits(self, plan: Plan, size: FragmentSize) -> bool:
        """Return whether the encoding can be used under a plan; owners may differ, cuts may not."""
        other = ChunkLayout.of(plan, size)
        mine = self._layout
        return (
            other.size == mine.size
            and other.codec_up.name == mine.codec_up.name
            and [cut.values for cut in other.cuts] == [cut.values for cut in mine.cuts]
        )

    @property
    def complete(self) -> bool:
        return all(self._done)

    def encode(self, index: int) -> None:
        """Encode one chunk unless it is encoded already.

        Raises:
          ValueError: as the codec.
        """
        with self._locks[index]:
            if not self._done[index]:
                self._encode(index)
                self._done[index] = True

    def _encode(self, index: int) -> None:
        cut = self._layout.cuts[index]
        out = self._data[cut.up]
        if cut.is_counters:
            np.frombuffer(out, "<i8")[:] = self._counters
        elif not self._in_place:
            codec, values = self._layout.codec_up, self._values[cut.values]
            if self._correction is None:
                self._lengths[index] = codec.encode(values, out)
            else:
                self._lengths[index] = self._correction.encode(codec, cut.values, values, out)

    def chunk(self, index: int) -> memoryview:
        """Return the bytes of a chunk that is encoded."""
        if not self._done[index]:
            raise LocalProtocolError(f"chunk {index} is not encoded yet")
        cut = self._layout.cuts[index]
        if self._in_place and not cut.is_counters:
            return self._values[cut.values].data.cast("B").toreadonly()
        return self._data[cut.up][: self._lengths[index]]

    def settle(self) -> None:
        """Settle the correction: the round committed with this input in it."""
        if self._correction is not None and self.complete:
            self._correction.settle()


def _check_array(
    name: str, array: NDArray[np.generic], dtype: np.dtype[np.generic], n: int
) -> None:
    if array.dtype != dtype or array.shape != (n,) or not array.flags.c_contiguous:
        raise LocalProtocolError(
            f"{name}: {array.dtype} of shape {array.shape}, contiguous {dtype} of ({n},) wanted"
        )

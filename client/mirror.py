"""One fragment as this trainer sees it: its tensors, what they are measured against, its merges.

The *anchor* is where local training started from: the shared values as of the version merged last.
Its distance to the local tensors is the pseudo-gradient, and every operation here keeps that so:

    load     local <- theta                           anchor <- theta     nothing is pending
    post     posted arena <- anchor - local           snapshot <- local   only with overlap
    merge    local <- theta + (local - base)          anchor <- theta     or the spec's other merge

The base of a merge is the snapshot when the round contains our contribution, else the anchor, so
that what the run has not counted yet stays in the local tensors and in the next pseudo-gradient.
Tensors in 16 bits are rounded when they are written; their anchor moves by the same rounding, which
therefore never passes for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..diloco.fragments import BUFFER, COUNTER, PARAMETER
from ..diloco.merge import Merge, merged
from ..protocol.arena import Arena
from ..protocol.messages import FragmentSize
from .tensors import SharedTensor

Values = NDArray[np.float32]
Counters = NDArray[np.int64]

FOUNDING_VERSION = 0  # of the weights that a run starts from

# Weights that are not finite are the daemon's to refuse, and masks of infinities are handled below.
_ROUGH = np.errstate(invalid="ignore", over="ignore")


class Mirror:
    """A fragment's tensors and their anchor.

    Args:
      index: of the fragment.
      tensors: the fragment's, in its order: parameters, buffers, counters.
      shared: the arena that the daemon writes.
      posted: the arena that we write.
      overlap: whether training goes on while a round runs; takes memory for a snapshot.

    Attributes:
      version: of the shared state that the local tensors are based on.
    """

    def __init__(
        self,
        index: int,
        tensors: Sequence[SharedTensor],
        shared: Arena,
        posted: Arena,
        overlap: bool,
    ) -> None:
        floating = [tensor for tensor in tensors if tensor.spec.kind != COUNTER]
        floating.sort(key=lambda tensor: tensor.spec.kind != PARAMETER)  # stable
        self._index = index
        self._floating = _places(floating)
        self._integer = _places([tensor for tensor in tensors if tensor.spec.kind == COUNTER])
        self._shared = shared
        self._posted = posted
        self._overlap = overlap
        self._anchor: Values = np.zeros(sum(tensor.count for tensor in floating), np.float32)
        self._snapshot: Values | None = None
        self.version = FOUNDING_VERSION

    @property
    def size(self) -> FragmentSize:
        """What the tensors need; the arenas must agree."""
        momentum_count = sum(
            tensor.count for tensor, _ in self._floating if tensor.spec.kind == PARAMETER
        )
        counter_count = sum(tensor.count for tensor, _ in self._integer)
        return FragmentSize(len(self._anchor), momentum_count, counter_count)

    def post_present(self) -> None:
        """Write the tensors themselves into the posted arena: the run's first weights."""
        with self._posted.writing(self._index, FOUNDING_VERSION):
            values = self._posted.values(self._index)
            for tensor, place in self._floating:
                values[place] = tensor.read()
            self._post_counters()

    @_ROUGH
    def post(self) -> None:
        """Write the pseudo-gradient, anchor minus local, into the posted arena."""
        if not self._overlap:
            self._snapshot = None  # of a round that was not committed
        elif self._snapshot is None:
            self._snapshot = np.empty_like(self._anchor)
        with self._posted.writing(self._index, self.version):
            values = self._posted.values(self._index)
            for tensor, place in self._floating:
                local = tensor.read()
                _subtract(self._anchor[place], local, values[place], tensor)
                if self._snapshot is not None:
                    self._snapshot[place] = local
            self._post_counters()

    def keep(self) -> None:
        """Training goes on though there is no overlap: remember what was posted.

        For a trainer that has stood still since; harmless if the snapshot is there.
        """
        if self._snapshot is None:
            self._snapshot = np.empty_like(self._anchor)
            for tensor, place in self._floating:
                self._snapshot[place] = tensor.read()

    def _post_counters(self) -> None:
        counters = self._posted.counters(self._index)
        for tensor, place in self._integer:
            counters[place] = tensor.read_counters()

    def load(self) -> None:
        """Take the shared state as it is; what was trained since the last post is dropped."""
        counters = self._read_shared(self._anchor)
        if not self._overlap:
            self._snapshot = None
        for tensor, place in self._floating:
            tensor.write(self._anchor[place])
            if tensor.low_precision:
                self._anchor[place] = tensor.read()
        for tensor, place in self._integer:
            tensor.write(counters[place])

    @_ROUGH
    def merge(self, merge: Merge, *, contributed: bool) -> None:
        """Take over a committed version and keep what was trained beside it.

        Args:
          merge: for a round that contains our contribution; without it, the delta always stays.
          contributed: whether it does; ``post`` was called for it and no ``load`` since.
        """
        if contributed and self._snapshot is None and merge is merged:
            self.load()  # the trainer has stood still since it posted: nothing is pending
            return
        theta = np.empty_like(self._anchor)
        counters = self._read_shared(theta)
        for tensor, place in self._floating:
            local = tensor.read_precisely()
            base: Any = self._anchor[place]
            if contributed:
                base = local if self._snapshot is None else self._snapshot[place]
            rule = merge if contributed else merged
            # float64 tensors go through the same formulas in their own precision.
            new = rule(theta[place], cast(Values, local), base)
            if tensor.spec.kind == BUFFER:
                # A mask of infinities has no differences; where nothing moved there is no need.
                np.copyto(new, theta[place], where=local == base)
            tensor.write(new)
            if tensor.low_precision:
                np.subtract(theta[place], new, out=theta[place])
                np.add(tensor.read(), theta[place], out=theta[place])
        for tensor, place in self._integer:
            tensor.write(np.maximum(counters[place], tensor.read_counters()))
        self._anchor = theta
        if not self._overlap:
            self._snapshot = None

    def _read_shared(self, values: Values) -> Counters:
        """Copy the fragment's shared values to ``values``; returns its counters."""
        counters: Counters = np.empty(self.size.counter_count, np.int64)

        def copy() -> None:
            np.copyto(values, self._shared.values(self._index))
            np.copyto(counters, self._shared.counters(self._index))

        self.version = self._shared.read(self._index, copy)
        return counters


def _places(tensors: Sequence[SharedTensor]) -> list[tuple[SharedTensor, slice]]:
    places = []
    start = 0
    for tensor in tensors:
        places.append((tensor, slice(start, start + tensor.count)))
        start += tensor.count
    return places


def _subtract(anchor: Values, local: Values, out: Values, tensor: SharedTensor) -> None:
    np.subtract(anchor, local, out=out)
    if tensor.spec.kind == BUFFER:
        out[anchor == local] = 0.0  # a mask of infinities has not moved

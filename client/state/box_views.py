"""Views of a process's parts of a whole fragment, of which several processes may hold boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar, cast

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ...diloco.fragments import BUFFER, COUNTER, KINDS, PARAMETER
from ...protocol.arena import Arena
from ...protocol.messages import FragmentSize
from .tensors import SharedTensor

Values = NDArray[np.float32]
Counters = NDArray[np.int64]
Array = TypeVar("Array", Values, Counters)


@frozen
class BoxViews:
    """A process's parts of a fragment in an arena, each in its tensor's dimensions; none of what is
    absent here.

    Attributes:
      values: of the floating tensors.
      counters: of the integer tensors.
    """

    values: list[Values]
    counters: list[Counters]

    @classmethod
    def of(
        cls,
        arena: Arena,
        fragment: int,
        floating: Sequence[SharedTensor],
        integer: Sequence[SharedTensor],
    ) -> BoxViews:
        """Return the views of a fragment that consists of these tensors, in this order."""
        values, counters = arena.values(fragment), arena.counters(fragment)
        return cls(_box_views(values, floating), _box_views(counters, integer))


def _box_views(fragment: Array, tensors: Sequence[SharedTensor]) -> list[Array]:
    views, start = [], 0
    for tensor in tensors:
        end = start + _whole_count(tensor)
        if not tensor.absent:
            view = fragment[start:end].reshape(tensor.spec.shape)
            if tensor.box is not None:
                pairs = zip(tensor.box.start, tensor.box.shape, strict=True)
                view = view[tuple(slice(first, first + length) for first, length in pairs)]
            views.append(cast("Array", view))
        start = end
    return views


def _whole_count(tensor: SharedTensor) -> int:
    return math.prod(tensor.spec.shape)


def fragment_size(tensors: Sequence[SharedTensor]) -> FragmentSize:
    """Return the size of the fragment that consists of these tensors."""
    counts = dict.fromkeys(KINDS, 0)
    for tensor in tensors:
        counts[tensor.spec.kind] += _whole_count(tensor)
    return FragmentSize(counts[PARAMETER] + counts[BUFFER], counts[PARAMETER], counts[COUNTER])

"""Views of one process's parts of a whole fragment, when several processes share the model."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from .tensors import SharedTensor

Values = NDArray[np.float32]
Counters = NDArray[np.int64]
Array = TypeVar("Array", Values, Counters)


class BoxViews:
    """Views of this process's parts of a whole fragment."""

    def __init__(
        self,
        floating: Sequence[SharedTensor],
        integer: Sequence[SharedTensor],
        writes: Collection[SharedTensor],
    ) -> None:
        self._floating = floating
        self._integer = integer
        self._written = {id(tensor) for tensor in writes}

    def values(self, fragment: Values) -> list[Values]:
        """Return views of a fragment's values, each in its tensor's dimensions."""
        return _box_views(fragment, self._floating)

    def counters(self, fragment: Counters) -> list[Counters]:
        """Return views of a fragment's counters, likewise."""
        return _box_views(fragment, self._integer)

    def written(
        self, views: Sequence[Array], tensors: Sequence[tuple[SharedTensor, slice]]
    ) -> list[Array | None]:
        """Return the views with None for those that another process writes."""
        return [
            view if id(tensor) in self._written else None
            for view, (tensor, _) in zip(views, tensors, strict=True)
        ]


def _box_views(fragment: Array, tensors: Sequence[SharedTensor]) -> list[Array]:
    views, start = [], 0
    for tensor in tensors:
        end = start + whole_count(tensor)
        view = fragment[start:end].reshape(tensor.spec.shape)
        if tensor.box is not None:
            pairs = zip(tensor.box.start, tensor.box.shape, strict=True)
            view = view[tuple(slice(first, first + length) for first, length in pairs)]
        views.append(cast("Array", view))
        start = end
    return views


def whole_count(tensor: SharedTensor) -> int:
    """Return the number of elements of the whole tensor."""
    return math.prod(tensor.spec.shape)

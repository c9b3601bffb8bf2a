"""How a trainer takes over a committed fragment while it keeps training on it.

``anchor`` is what the local tensors were when the round's pseudo-gradient was taken, ``local`` what
they are now, some steps later, and ``shared`` what the round made of the fragment. The rules use
operators only, so they work on numpy's arrays and on torch's tensors, wherever those are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Merge = Callable[[Values, Values, Values], Values]  # (shared, local, anchor) -> new local


def merged(shared: Values, local: Values, anchor: Values) -> Values:
    """``shared + (local - anchor)``: the steps taken since the anchor are kept, counted once.

    It is computed as ``shared - (anchor - local)``: the same rounding, but where ``local`` and
    ``anchor`` are the same bits the result has exactly the bits of ``shared``, even of a -0.0.
    """
    return shared - (anchor - local)


def lerp(shared: Values, local: Values, keep: float) -> Values:
    """``keep * local + (1 - keep) * shared``, Streaming DiLoCo's mixing (arXiv 2501.18512)."""
    return local * np.float32(keep) + shared * np.float32(1.0 - keep)


def parse_merge(text: str) -> Merge:
    """The merge that a spec names: ``delta``, or ``lerp:a`` with ``a`` from 0 to 1.

    Raises:
      ValueError: it names no merge.
    """
    if text == "delta":
        return merged
    name, _, amount = text.partition(":")
    if name == "lerp":
        try:
            keep = float(amount)
        except ValueError:
            keep = -1.0
        if 0.0 <= keep <= 1.0:
            return lambda shared, local, anchor: lerp(shared, local, keep)
    raise ValueError(f'merge must be "delta" or "lerp:a" with a from 0 to 1, got {text!r}')

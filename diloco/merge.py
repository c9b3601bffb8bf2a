"""Rules by which a trainer takes over a committed fragment while it keeps training on it.

``anchor`` are the local tensors at the time of the round's pseudo-gradient, ``local`` the tensors now,
some steps later, and ``shared`` the fragment after the round. The rules use operators only, so they work
on numpy arrays and on torch tensors, on any device.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
MergeRule = Callable[[Values, Values, Values], Values]  # (shared, local, anchor) -> new local


def merged(shared: Values, local: Values, anchor: Values) -> Values:
    """Return ``shared + (local - anchor)``: the steps taken since the anchor are kept, counted once.

    It is computed as ``shared - (anchor - local)``: the rounding is the same, but where ``local`` and
    ``anchor`` have the same bits the result has exactly the bits of ``shared``, even those of a -0.0.
    """
    return shared - (anchor - local)


def lerp(shared: Values, local: Values, keep: float) -> Values:
    """Return ``keep * local + (1 - keep) * shared``, Streaming DiLoCo's mixing (arXiv 2501.18512)."""
    return local * np.float32(keep) + shared * np.float32(1.0 - keep)


def parse_merge(text: str) -> MergeRule:
    """Parse a spec's merge rule: ``delta``, or ``lerp:a`` with ``a`` from 0 to 1.

    Raises:
      ValueError: not a merge rule.
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

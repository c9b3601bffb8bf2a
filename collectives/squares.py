"""Sums of products, as fast as BLAS makes them. They decide no bit of a result."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]

PIECE_VALUES = 2**13  # multiplied at once; BLAS starts its threads for longer ones


def product(one: Values, other: Values) -> float:
    """Return the sum of products, in float32 by pieces; not finite if they are too large.

    Callers use ``np.errstate``, since numpy warns of products that are too large.
    """
    whole = one.size - one.size % PIECE_VALUES
    pieces = np.vecdot(
        one[:whole].reshape(-1, PIECE_VALUES), other[:whole].reshape(-1, PIECE_VALUES)
    )
    total = float(sum(pieces.tolist()))
    if whole < one.size:
        total += float(np.dot(one[whole:], other[whole:]))
    return total


def all_finite(values: Values) -> bool:
    """Return whether all values, shape ``(n,)``, are finite.

    Squares cannot cancel each other, so a finite sum of them has no infinity and no NaN in it. BLAS
    makes that sum in a third of the time of ``np.isfinite``, which is asked only where squares are
    too large for float32. Callers use ``np.errstate``, as for ``product``.
    """
    return math.isfinite(product(values, values)) or bool(np.isfinite(values).all())

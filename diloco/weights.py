"""How much each contributor counts in a round's mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def coefficients(weights: Sequence[int]) -> NDArray[np.float32]:
    """Weights relative to the largest, shape ``(n,)``, float32.

    A mean is ``sum(c_i * x_i) / sum(c_i)``. Dividing by the largest weight first keeps the products
    in the range of what is averaged, and makes equal weights exactly 1. Each quotient is rounded
    once to double and once to float32, so all machines agree.

    Args:
      weights: tokens behind each contribution, none negative and not all 0.

    Raises:
      ValueError: there is no positive weight, or one is negative.
    """
    largest = max(weights, default=0)
    if largest <= 0 or min(weights) < 0:
        raise ValueError(f"weights must be non-negative and not all zero, got {list(weights)}")
    return np.array([weight / largest for weight in weights], np.float64).astype(np.float32)

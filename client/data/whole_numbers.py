"""Whole numbers as scripts give them."""

from __future__ import annotations

import operator
from typing import SupportsIndex

WHOLE_MAX = 2**40  # of one step: sums of millions of steps are numbers of a message


def whole(name: str, value: SupportsIndex) -> int:
    """Return a count as a plain int, which numpy's and torch's integers become."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from None
    if count < 0:
        raise ValueError(f"{name} must not be negative, got {count}")
    if count > WHOLE_MAX:
        raise ValueError(f"{name} must be of one step, and at most 2**40, got {count}")
    return count

"""Norms of contributions, and directions along the outer momentum, measured while adding.

Before a round each member announces the norm of its update, which the master checks and clips by.
The peers that add chunks up have the values themselves: they report these sums, and the master adds
the reports up. They decide no bit of the result, so the fastest summation is used.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .arithmetic import Values, product

SAMPLE_VALUES = 2**14  # values of each chunk that are compared with the outer momentum; enough
LARGEST = float(np.finfo(np.float32).max)  # that a message may carry; larger sums are clipped to it
NOTHING: Values = np.empty(0, np.float32)
RESULT = ""  # in place of a contributor: what its chunks became


class NormSums:
    """Sums over some chunks' values, by contributor.

    Args:
      momentum: the outer momentum of one chunk's values, or of the first of them; only read.
    """

    def __init__(self, momentum: Values = NOTHING) -> None:
        self._momentum = momentum[:SAMPLE_VALUES]
        with np.errstate(over="ignore"):
            self._momentum_square = product(self._momentum, self._momentum)
        self._sums: dict[str, tuple[float, float, float]] = {}  # as in ``Reduced``

    def take(self, peer: str, start: int, values: Values) -> None:
        """See ``arithmetic.Observe``."""
        square, sampled, along = self._sums.get(peer, (0.0, 0.0, 0.0))
        found = product(values, values)
        sample = self._momentum[start : start + values.size]
        if sample.size:
            within = values[: sample.size]
            sampled += found if within.size == values.size else product(within, within)
            along += product(within, sample)
        self._sums[peer] = square + found, sampled, along

    def take_result(self, values: Values) -> None:
        """Take a chunk's result, shape ``(n,)``; only the sample counts."""
        with np.errstate(over="ignore"):
            self.take(RESULT, 0, values[: self._momentum.size])

    def add(self, other: NormSums) -> None:
        """Add the sums of another chunk."""
        self._momentum_square += other._momentum_square
        for peer, sums in other._sums.items():
            mine = self._sums.get(peer, (0.0, 0.0, 0.0))
            square, sampled, along = (a + b for a, b in zip(mine, sums, strict=True))
            self._sums[peer] = square, sampled, along

    @property
    def momentum_square(self) -> float:
        return min(self._momentum_square, LARGEST)

    def norm_sums(self, peers: Iterable[str]) -> bytes:
        """Return the sums as ``Reduced`` has them; empty if nothing was added here."""
        if not self._sums:
            return b""
        sums = [self._sums.get(peer, (0.0, 0.0, 0.0)) for peer in (*peers, RESULT)]
        reported = np.array(sums, np.float64)
        np.nan_to_num(reported, copy=False, nan=0.0, posinf=LARGEST, neginf=-LARGEST)
        return reported.clip(-LARGEST, LARGEST).astype("<f4").tobytes()

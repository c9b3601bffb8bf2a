"""Figures of contributions, measured while they are added up.

Before a round each member announces the norm of its update, which the master checks and clips by.
The peers that add chunks up have the values themselves: they report these sums, and the master adds
the reports up, or compares members by each (``update_history``). They decide no bit of the result,
so the fastest summation is used.

A *sketch* tells copies: 64 signs, each of a sum of a part of the values with random signs. Two
vectors at an angle ``a`` have ``a / pi`` of them unlike (Charikar 2002). The random signs follow
from what all contributors have sent for a chunk, so they are known to its owner alone, and only
once nobody can change its contribution any more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..protocol.messages import SKETCH_BYTES, Contributor
from .arithmetic import Values, product

SAMPLE_VALUES = 2**13  # of each chunk, that are compared with others: four rows of many a matrix
LARGEST = float(np.finfo(np.float32).max)  # that a message may carry; larger sums are clipped to it
NOTHING: Values = np.empty(0, np.float32)
SIGNS = 8 * SKETCH_BYTES


class NormSums:
    """Figures of some chunks' values, by contributor.

    Args:
      contributors: of the order, in its order.
      momentum: the outer momentum of one chunk's values, or of the first of them; only read. Its
        beginning is the sample.
    """

    def __init__(self, contributors: Sequence[Contributor], momentum: Values = NOTHING) -> None:
        self._momentum = momentum[:SAMPLE_VALUES]
        self._places = {each.peer: place for place, each in enumerate(contributors)}
        self._scales = np.array([each.scale for each in contributors], np.float32)
        self._samples = np.zeros((len(contributors), self._momentum.size), np.float32)
        # As ``Reduced`` has them, but for the sketches: sums with random signs.
        self._sums: NDArray[np.float64] = np.zeros((len(contributors) + 1, 3))
        self._signed = np.zeros((len(contributors), SIGNS), np.float32)
        self._momentum_square = 0.0
        self._added = False

    def take(self, peer: str, start: int, values: Values) -> None:
        """See ``arithmetic.Observe``."""
        place = self._places[peer]
        self._sums[place, 0] += product(values, values)
        sample = self._samples[place, start : start + values.size]
        sample[:] = values[: sample.size]

    def take_result(self, values: Values) -> None:
        """Take a chunk's result, shape ``(n,)``, once all its contributions are taken."""
        samples, momentum = self._samples, self._momentum
        with np.errstate(over="ignore", invalid="ignore"):
            together = self._scales @ samples
            sums = self._sums[:-1]
            sums[:, 1] = np.vecdot(samples, samples)
            sums[:, 2] = samples @ together
            within = values[: momentum.size]
            along = product(within, momentum)
            self._sums[-1] = product(within, within), product(together, together), along
            self._momentum_square = product(momentum, momentum)
            self._signed[:] = self._sketched()
        self._added = True

    def _sketched(self) -> Values:
        """Return the sums with random signs, shape ``(n, SIGNS)``."""
        length = self._momentum.size // SIGNS
        seed = hashlib.shake_128(self._sums.tobytes()).digest(length * SKETCH_BYTES)
        signs = np.unpackbits(np.frombuffer(seed, np.uint8)).astype(np.float32) * 2 - 1
        parts = self._samples[:, : length * SIGNS].reshape(len(self._samples), SIGNS, length)
        sums: Values = np.vecdot(parts, signs.reshape(SIGNS, length))
        return sums

    def add(self, other: NormSums) -> None:
        """Add the figures of another chunk."""
        self._momentum_square += other._momentum_square
        self._sums += other._sums
        self._signed += other._signed
        self._added = True

    @property
    def momentum_square(self) -> float:
        return min(self._momentum_square, LARGEST)

    def norm_sums(self) -> bytes:
        """Return the figures as ``Reduced`` has them; empty if nothing was added here."""
        if not self._added:
            return b""
        sums = np.nan_to_num(self._sums, nan=0.0, posinf=LARGEST, neginf=-LARGEST)
        figures = sums.clip(-LARGEST, LARGEST).astype("<f4").tobytes()
        return figures + np.packbits(self._signed > 0, axis=1).tobytes()

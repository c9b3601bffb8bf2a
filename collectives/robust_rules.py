"""Robust rules: one chunk's result of contributions of which some may be false.

Pure functions of the contributions' values, with bits that depend on nothing else: neither on the
machine nor on the order of arrival. Elementwise float32, every operation rounded by itself; norms are
sums of float64 squares, added in halves, never in a library's own order.

A contributor's announced weight counts up to the median of the order's weights and no further, so
that a claim buys no influence: with ``m`` that median, c_i = float32(min(w_i, m) / m).
x_i are a contributor's decoded values times its clip factor s_i.

**Trimmed** (Yin et al., arXiv 1803.01498). In each coordinate the ``k`` lowest and the ``k`` highest
of the ``n`` values are left out, k = ceil(A n) but less than half; the result is the weighted mean of
the others. As long as no more than ``k`` values are false, it lies between honest values.

**Clipped** (Karimireddy et al., arXiv 2012.10333; chunk by chunk as in BTARD, arXiv 2106.11257).
The centre v begins as the coordinates' median, which needs no history; then ``CLIP_STEPS`` times

    d_i = |x_i - v|;    t = R * median of d_i;    s_i = min(1, t / d_i)
    v <- v + (sum of c_i s_i^2 (x_i - v)) / (sum of c_i)

The papers have s_i instead of its square: then a contribution beyond the distance t moves the result
as far as one at t. Here it moves the result by t / d_i times that: the farther, the less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ..protocol.errors import RemoteProtocolError
from ..protocol.messages import Contributor
from .arithmetic import BLOCK_VALUES, Values

CLIP_STEPS = 3  # of the centre, towards the point where it would stay
ZERO = np.float32(0)
HALF = np.float32(0.5)


def capped_weights(
    contributors: Sequence[Contributor], present: Sequence[bool]
) -> list[np.float32]:
    """Return the c_i of the contributors in a chunk; the median is that of all in the order.

    Raises:
      RemoteProtocolError: a contributor has no weight.
    """
    cap = statistics.median_low(c.weight for c in contributors)
    if min(c.weight for c in contributors) < 1:
        raise RemoteProtocolError("a contributor without any weight")
    return [
        np.float32(min(c.weight, cap) / cap)
        for c, here in zip(contributors, present, strict=True)
        if here
    ]


def trim_count(share: float, count: int) -> int:
    """Return the number of values that are left out at each end, of ``count``."""
    # Rounded first, so that a product like 3.0000000001 is not rounded up to 4.
    return min(math.ceil(round(share * count, 9)), (count - 1) // 2)


def trimmed_mean(
    rows: Sequence[Values], weights: Sequence[np.float32], share: float, out: Values
) -> None:
    """Write the trimmed mean to ``out``; see the top of this file.

    Args:
      rows: the x_i, shape ``(n,)`` each.
    """
    cut = trim_count(share, len(rows))
    block_count = min(BLOCK_VALUES, out.size)
    scratch = [np.empty(block_count, np.float32) for _ in range(len(rows) + 3)]
    with np.errstate(over="ignore", invalid="ignore"):  # what came out is checked by the caller
        for start in range(0, out.size, BLOCK_VALUES):
            where = slice(start, min(start + BLOCK_VALUES, out.size))
            part = [each[: where.stop - start] for each in scratch]
            low, high = _order_statistics(
                [row[where] for row in rows], (cut, len(rows) - 1 - cut), part[3:], part[0]
            )
            total, divisor, term = out[where], part[1], part[2]
            total[:], divisor[:] = ZERO, ZERO
            for row, weight in zip(rows, weights, strict=True):
                values = row[where]
                inside = np.logical_and(values >= low, values <= high)
                np.multiply(inside, weight, out=term)
                np.add(divisor, term, out=divisor)
                np.multiply(term, values, out=term)
                np.add(total, term, out=total)
            np.divide(total, divisor, out=total)


def clipped_mean(
    rows: Sequence[Values], weights: Sequence[np.float32], radius: float, out: Values
) -> None:
    """Write the clipped mean to ``out``; see the top of this file. ``rows``: see ``trimmed_mean``."""
    divisor = ZERO
    for weight in weights:
        divisor = np.float32(divisor + weight)
    _median(rows, out)
    step, apart = np.empty_like(out), np.empty_like(out)
    with np.errstate(over="ignore", invalid="ignore"):  # what came out is checked by the caller
        for _ in range(CLIP_STEPS):
            distances = []
            for row in rows:
                np.subtract(row, out, out=apart)
                distances.append(math.sqrt(sum_of_squares(apart)))
            bound = radius * statistics.median(distances)
            step[:] = ZERO
            for row, weight, distance in zip(rows, weights, distances, strict=True):
                share = bound / distance if distance > bound else 1.0
                np.subtract(row, out, out=apart)
                np.multiply(apart, np.float32(float(weight) * share * share), out=apart)
                np.add(step, apart, out=step)
            np.divide(step, divisor, out=step)
            np.add(out, step, out=out)


def _median(rows: Sequence[Values], out: Values) -> None:
    """Write the coordinates' medians to ``out``; of an even number, the mean of the middle two."""
    places = ((len(rows) - 1) // 2, len(rows) // 2)
    block_count = min(BLOCK_VALUES, out.size)
    scratch = [np.empty(block_count, np.float32) for _ in range(len(rows) + 1)]
    with np.errstate(over="ignore"):  # as above
        for start in range(0, out.size, BLOCK_VALUES):
            where = slice(start, min(start + BLOCK_VALUES, out.size))
            part = [each[: where.stop - start] for each in scratch]
            low, high = _order_statistics([row[where] for row in rows], places, part[1:], part[0])
            middle = out[where]
            np.multiply(low, HALF, out=middle)
            np.multiply(high, HALF, out=part[0])
            np.add(middle, part[0], out=middle)
            # Which of two zeros of unlike sign is the smaller one depends on the processor.
            np.add(middle, ZERO, out=middle)


def sum_of_squares(values: Values) -> float:
    """Return the sum of squares in float64, added in halves: the same bits on every machine."""
    total = 0.0
    for start in range(0, values.size, BLOCK_VALUES):
        wide = values[start : start + BLOCK_VALUES].astype(np.float64)
        np.multiply(wide, wide, out=wide)
        total += _sum_in_halves(wide)
    return total


def _sum_in_halves(values: NDArray[np.float64]) -> float:
    """Add up an array by adding its halves; overwrites the array."""
    count = values.size
    while count > 1:
        half = count // 2
        rest = values[count - half : count]
        np.add(values[:half], rest, out=values[:half])
        count -= half
    return float(values[0])


# ---------------------------------------------------------------- order statistics

Exchange = tuple[int, int]  # places i < j: afterwards the smaller value is at i


def _order_statistics(
    rows: Sequence[Values], places: tuple[int, int], work: Sequence[Values], spare: Values
) -> tuple[Values, Values]:
    """Return the values at two places of each coordinate's ascending order, by a sorting network.

    Minimum and maximum of whole rows suit vector units: for eight rows this takes a tenth of the time
    of sorting each coordinate.
    """
    sorted_rows = list(work[: len(rows)])
    for into, row in zip(sorted_rows, rows, strict=True):
        into[:] = row
    for i, j in exchanges(len(rows), places):
        np.minimum(sorted_rows[i], sorted_rows[j], out=spare)
        np.maximum(sorted_rows[i], sorted_rows[j], out=sorted_rows[j])
        sorted_rows[i], spare = spare, sorted_rows[i]
    return sorted_rows[places[0]], sorted_rows[places[1]]


@cache
def exchanges(count: int, places: tuple[int, ...]) -> tuple[Exchange, ...]:
    """Return those exchanges of Batcher's odd-even merge sort that these places depend on."""
    network: list[Exchange] = []
    size = 1
    while size < count:
        step = size
        while step:
            for first in range(step % size, count - step, 2 * step):
                for i in range(first, min(first + step, count - step)):
                    if i // (2 * size) == (i + step) // (2 * size):
                        network.append((i, i + step))
            step //= 2
        size *= 2
    wanted, needed = set(places), []
    for i, j in reversed(network):
        if i in wanted or j in wanted:
            needed.append((i, j))
            wanted |= {i, j}
    return tuple(reversed(needed))

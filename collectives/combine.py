"""The result of a chunk's contributions: their mean, or their clipped mean.

``combine_chunk`` is all that an owner does to a chunk's values (counters take their maximum). It is
a pure function of the encoded contributions, of the order (contributors, weights, clip factors) and
of the plan. So every peer that has the same contributions gets the same bytes, on any machine, in
whatever order they came. Checkers call ``combined``, without an owner's buffers.

    mean          sum of c_i s_i x_i over sum of c_i; see ``arithmetic``
    clipped:R     a contribution farther away than R times the median distance counts less; see
                  ``robust_rules``
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..protocol.errors import RemoteProtocolError
from ..protocol.messages import Contributor, Plan
from .arithmetic import (
    ChunkLayout,
    Counters,
    MeanFactors,
    Observe,
    SumTerm,
    Values,
    decode_checked,
    encode_result,
    reduce_counters,
    reduce_values,
)
from .robust_rules import capped_weights, clipped_mean

MEAN, CLIPPED = "mean", "clipped"
RADIUS = 1.0  # where the plan names none


def radius_of(plan: Plan, contributors: Sequence[Contributor] = ()) -> float:
    """Parse a plan's rule: return ``R`` of the table at the top of this file, 0 for a mean.

    Raises:
      RemoteProtocolError: there is no such rule, or not for these weights.
    """
    if plan.combine == MEAN:
        return 0.0
    kind, _, text = plan.combine.partition(":")
    try:
        radius = float(text) if text else RADIUS
    except ValueError:
        radius = 0.0
    if kind != CLIPPED or not 0.0 < radius < math.inf:
        raise RemoteProtocolError(f"the plan combines by {plan.combine!r}")
    if contributors:
        capped_weights(contributors, [True] * len(contributors))
    return radius


def combine_chunk(
    contributors: Sequence[Contributor],
    encoded: Mapping[str, memoryview],
    layout: ChunkLayout,
    radius: float,
    out: Values,
    encoded_out: memoryview,
    observe: Observe | None = None,
    factors: MeanFactors | None = None,
) -> int:
    """Make the result of one chunk of ``n`` values that all contributors send to its owner.

    Args:
      contributors: of the order, in its order.
      encoded: contributions by peer, as they came; a missing contributor is left out of this chunk.
      radius: see ``radius_of``.
      out: shape ``(n,)``; becomes the result before it is encoded.
      encoded_out: becomes the encoded result; for ``verbatim`` perhaps the memory of ``out``.
      observe: reads every contribution's values.
      factors: of all contributors, from a caller that has computed them already.

    Returns:
      The length of the encoded result in bytes.

    Raises:
      BadContributionError: as ``reduce_values``.
      RemoteProtocolError: the order's weights have no mean.
    """
    present = [each.peer in encoded for each in contributors]
    if factors is None or not all(present):
        factors = MeanFactors.of(contributors, None if all(present) else present)
    here = [each for each, is_in in zip(contributors, present, strict=True) if is_in]
    up, zstd = layout.codec_up, layout.zstd_up
    terms = [
        SumTerm(each.peer, encoded[each.peer], factor, up, zstd)
        for each, factor in zip(here, factors.factors, strict=True)
    ]
    if not radius:
        down, divisor = layout.codec_down, factors.divisor
        return reduce_values(terms, divisor, down, out, encoded_out, observe)
    rows = [
        _row(term, each.scale, out.size, observe) for term, each in zip(terms, here, strict=True)
    ]
    weights = capped_weights(contributors, present)
    heavy = [at for at, weight in enumerate(weights) if weight]
    clipped_mean([rows[at] for at in heavy], [weights[at] for at in heavy], radius, out)
    finite = bool(np.isfinite(out).all())
    return encode_result(terms, finite, layout.codec_down, out, encoded_out)


def combined(
    contributors: Sequence[Contributor],
    encoded: Mapping[str, memoryview],
    layout: ChunkLayout,
    index: int,
    radius: float,
) -> bytes:
    """Return the encoded result that an honest owner makes of a chunk, of values or of counters.

    It is what a result's frame carries before it is compressed; see ``combine_chunk``.
    """
    cut = layout.cuts[index]
    if cut.is_counters:
        counters: Counters = np.empty(layout.size.counter_count, np.int64)
        reduce_counters(list(encoded.values()), counters)
        return counters.astype("<i8").tobytes()
    room = memoryview(bytearray(cut.down_bytes))
    values = np.empty(cut.count, np.float32)
    length = combine_chunk(contributors, encoded, layout, radius, values, room)
    return bytes(room[:length])


def _row(term: SumTerm, scale: float, count: int, observe: Observe | None) -> Values:
    """Return a contribution's values times its clip factor."""
    values = np.empty(count, np.float32)
    decode_checked(term.codec, term.zstd, term.data, values, term.peer)
    if observe is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            observe(term.peer, 0, values)
    if scale != 1.0:
        np.multiply(values, np.float32(scale), out=values)
    return values

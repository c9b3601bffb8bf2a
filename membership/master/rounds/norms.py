"""Norms of contributions as received, compared with the norms that their senders announced.

The norm gate uses the norms that members announce before a round. Afterwards each member that added
chunks up reports the sums of squares that it received, for each contributor; their total is the
squared norm of the contribution. A contribution longer than announced is refused if more than one
member has found it. A shorter one is not checked: it helps no liar, and a lost owner's sums are
missing.

What else is in the reports is compared over rounds, see ``update_history``.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from ....protocol.messages import NORM_SUMS_BYTES, SKETCH_BYTES

# Allowed ratio of a contribution's norm to the announced one: what rounding by the codec may add.
NORM_SLACK = {"fp32": 1.01, "bf16": 1.1, "int8": 1.1}
NORM_SLACK_COARSE = 2.0  # with 4 bits or fewer: the worst case of a whole block

Sums = tuple[float, float, float]  # see ``Reduced``
Report = tuple[bytes, float]  # a member's ``norm_sums`` and ``momentum_square``, see ``Reduced``


@frozen
class Totals:
    """The sums of all reports: of each contributor, then of the result; and the momentum's."""

    sums: Sequence[Sums]
    momentum_square: float


def makes_sense(norm_sums: bytes, contributor_count: int) -> bool:
    """Return whether ``norm_sums`` can be a report about this number of contributors."""
    if not norm_sums:
        return True
    sketch_bytes = SKETCH_BYTES * contributor_count
    if len(norm_sums) != NORM_SUMS_BYTES * (contributor_count + 1) + sketch_bytes:
        return False
    sums = numbers_of(norm_sums, contributor_count)
    return all(map(math.isfinite, sums)) and min(sums[0::3]) >= 0 and min(sums[1::3]) >= 0


def added_up(reports: Iterable[Report], contributor_count: int) -> Totals:
    """Return the sums of all reports; without contributors and result if no report has any."""
    momentum_square, total = 0.0, [0.0] * (3 * contributor_count + 3)
    some = False
    for norm_sums, square in reports:
        if norm_sums:
            some = True
            momentum_square += square
            total = list(map(operator.add, total, numbers_of(norm_sums, contributor_count)))
    sums = zip(total[0::3], total[1::3], total[2::3], strict=True)
    return Totals(tuple(sums) if some else (), momentum_square)


def cosine_of(square: float, along: float, other_square: float) -> float | None:
    """Return the cosine of two vectors by their squares and their product; None if one is zero."""
    if square <= 0.0 or other_square <= 0.0:  # also by rounding, or by a lie
        return None
    return max(-1.0, min(1.0, along / math.sqrt(square) / math.sqrt(other_square)))


def numbers_of(norm_sums: bytes, contributor_count: int) -> tuple[float, ...]:
    """Return the sums of a report, three for each contributor and for the result."""
    return struct.unpack_from(f"<{3 * contributor_count + 3}f", norm_sums)


def sketches_of(norm_sums: bytes, contributor_count: int) -> list[int]:
    """Return the contributors' sketches in a report."""
    start = NORM_SUMS_BYTES * (contributor_count + 1)
    return list(struct.unpack_from(f"<{contributor_count}Q", norm_sums, start))


@frozen
class UnderstatedNorm:
    """A contribution that is longer than its sender announced."""

    peer: str
    accuser: str  # the only member that found it; empty if it does not depend on one member's word
    why: str


def understated(
    reports: Mapping[str, Report],
    peers: Sequence[str],
    announced: Mapping[str, float],
    codec: str,
) -> list[UnderstatedNorm]:
    """Return the contributions that are longer than their senders announced.

    A contribution is too long if it remains so without any single report. If one report alone
    exceeds the limit, its reporter is the accuser. Anything else (of ``n`` reporters, up to the
    square root of ``n / (n - 1)`` times the limit) cannot be told from one reporter's lie, and
    passes.

    Args:
      reports: by the member that added up.
      peers: the order's contributors.
      announced: norms, of the contributors that are still attached.
      codec: of contributions.
    """
    slack = NORM_SLACK.get(codec.partition("+")[0], NORM_SLACK_COARSE)
    squares = {
        by: numbers_of(norm_sums, len(peers))[0::3]
        for by, (norm_sums, _) in reports.items()
        if norm_sums
    }
    found = []
    for place, peer in enumerate(peers):
        parts = {by: square[place] for by, square in squares.items()}
        if peer not in announced or not parts:
            continue
        limit = (slack * announced[peer]) ** 2
        most = max(parts, key=lambda by: parts[by])
        whole = sum(parts.values())
        why = f"its norm is {math.sqrt(whole):.4g}, and it had announced {announced[peer]:.4g}"
        if whole - parts[most] > limit:
            found.append(UnderstatedNorm(peer, "", why))
        elif parts[most] > limit:
            found.append(UnderstatedNorm(peer, most, why))
    return found

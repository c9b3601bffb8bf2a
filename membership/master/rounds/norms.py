"""Contributions as those who added them up found them, against what their senders had said.

The gate for norms goes by what members say before a round. Afterwards everybody who added chunks up
reports the sums of squares of what came, contributor by contributor; together they are the squared
norm of what was sent. Whoever sent more than it had said is refused like any update that must not be
added, if more than one member has found it. Less is no lie that helps anybody, and what a lost owner has found is missing from the sums.

Which way a contribution points, compared with the outer momentum, is told to people and decides nothing:
an honest update may point anywhere.
"""

from __future__ import annotations

import math
import operator
import statistics
import struct
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from ....protocol.messages import NORM_SUMS_BYTES

# How many times as long as its sender said a contribution may be: what rounding by the codec may add.
NORM_SLACK = {"fp32": 1.01, "bf16": 1.1, "int8": 1.1}
NORM_SLACK_COARSE = 2.0  # by 4 bits or fewer: what a whole block gets too long, if it is unlucky
# A cosine beyond which an update counts as pointing along the outer momentum, or against it. Those of
# unrelated vectors of a fragment's length are about a hundredth.
ALONG_MIN = 0.1

Report = tuple[bytes, float]  # a member's ``norm_sums`` and ``momentum_square``, see ``Reduced``


@frozen
class NormsFound:
    """What was found of one contribution.

    Attributes:
      cosine: between it and the outer momentum; None: one of them is zero, or nobody has compared.
    """

    norm: float
    cosine: float | None


def makes_sense(norm_sums: bytes, contributor_count: int) -> bool:
    """Whether somebody can have found that of so many contributors."""
    if not norm_sums:
        return True
    if len(norm_sums) != NORM_SUMS_BYTES * contributor_count:
        return False
    sums = _numbers(norm_sums)
    return all(map(math.isfinite, sums)) and min(sums[0::3]) >= 0 and min(sums[1::3]) >= 0


def found_in(reports: Iterable[Report], peers: Sequence[str]) -> dict[str, NormsFound]:
    """By contributor; ``peers`` are the order's. Empty if nobody has gauged anything."""
    momentum_square, sums = 0.0, [0.0] * (3 * len(peers))
    some = False
    for norm_sums, square in reports:
        if norm_sums:
            some = True
            momentum_square += square
            sums = list(map(operator.add, sums, _numbers(norm_sums)))
    if not some:
        return {}
    found = {}
    for place, peer in enumerate(peers):
        square, sampled, along = sums[3 * place : 3 * place + 3]
        length = math.sqrt(sampled) * math.sqrt(momentum_square)
        cosine = max(-1.0, min(1.0, along / length)) if length > 0.0 else None
        found[peer] = NormsFound(math.sqrt(square), cosine)
    return found


def _numbers(norm_sums: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(norm_sums) // 4}f", norm_sums)


@frozen
class UnderstatedNorm:
    """A contribution that is longer than its sender had said, as far as somebody is believed.

    Attributes:
      accuser: the only one who says so; empty: no single member's word is needed for it.
    """

    peer: str
    accuser: str
    why: str


def understated(
    reports: Mapping[str, Report],
    peers: Sequence[str],
    announced: Mapping[str, float],
    codec: str,
) -> list[UnderstatedNorm]:
    """Who sent more than it had said.

    It must be so whichever single report is left out; where one member has found all of it in the chunks
    that it added up, that member alone says so. What is neither (of ``n`` reporters, up to the square root of
    ``n / (n - 1)`` times the limit) cannot be told from one reporter's lie, and passes.

    Args:
      reports: by who added up.
      peers: the order's contributors.
      announced: norms, of those who are still here.
      codec: of contributions.
    """
    slack = NORM_SLACK.get(codec.partition("+")[0], NORM_SLACK_COARSE)
    squares = {by: _numbers(norm_sums)[0::3] for by, (norm_sums, _) in reports.items() if norm_sums}
    found = []
    for place, peer in enumerate(peers):
        parts = {by: square[place] for by, square in squares.items()}
        if peer not in announced or not parts:
            continue
        limit = (slack * announced[peer]) ** 2
        most = max(parts, key=lambda by: parts[by])
        whole = sum(parts.values())
        why = f"its norm is {math.sqrt(whole):.4g}, and it had said {announced[peer]:.4g}"
        if whole - parts[most] > limit:
            found.append(UnderstatedNorm(peer, "", why))
        elif parts[most] > limit:
            found.append(UnderstatedNorm(peer, most, why))
    return found


def against_the_others(found: Mapping[str, NormsFound]) -> dict[str, str]:
    """Who points against the outer momentum while most point along it, and what to say about it."""
    cosines = {peer: each.cosine for peer, each in found.items() if each.cosine is not None}
    if not cosines:
        return {}
    median = statistics.median(cosines.values())
    if median < ALONG_MIN:
        return {}
    return {
        peer: f"points against the outer momentum (cosine {cosine:.2f}, median {median:.2f})"
        for peer, cosine in cosines.items()
        if cosine < -ALONG_MIN
    }

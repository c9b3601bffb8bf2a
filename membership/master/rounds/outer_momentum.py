"""What the outer momentum makes of a run's steps: how far each goes along its own gradient.

With the mean gradient ``D`` of a round, the momentum ``b`` before it and ``mu``, the outer step is
the outer rate times ``D + mu (mu b + D)`` (Nesterov) or ``D + mu b``. Its *gain* is its part along
``D``, in units of the rate:

    1 + mu + mu^2 <D, b> / <D, D>    (Nesterov)
    1 + mu <D, b> / <D, D>

Gradients of equal lengths whose consecutive cosine is rho have ``<D, b> / <D, D> = rho / (1 - mu
rho)``, so a gain of ``1 + mu / (1 - mu rho)``. Measured is the gain itself, which needs no gradient
to be kept and is below that where the steps overshoot: then ``D`` points against ``b``, though
consecutive gradients agree (docs/design/decisions.md, 95). That sign is the condition for a restart
of O'Donoghue and Candes (arXiv 1204.3982).

The members that add up measure a sample. All of this is displayed, and decides nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from attrs import frozen

from ...spec.spec import DilocoTable
from .norms import Totals, cosine_of

# A median cosine below this is no chance: unrelated samples have less than 0.01.
OVERSHOOT_COSINE = -0.02
ROUNDS_SEEN = 10  # of the last ones the medians are shown, or one of each fragment


@frozen
class OuterMotion:
    """A round's mean gradient and the outer momentum before it."""

    cosine: float  # of the two
    gain: float


def outer_motion(totals: Totals, diloco: DilocoTable) -> OuterMotion | None:
    """Return what the reports say; None without a momentum, as in a fragment's first round."""
    if not totals.sums:
        return None
    sampled, _, along = totals.sums[-1]
    cosine = cosine_of(sampled, along, totals.momentum_square)
    if cosine is None:
        return None
    mu, share = diloco.outer_momentum, along / sampled
    return OuterMotion(cosine, 1 + mu + mu * mu * share if diloco.nesterov else 1 + mu * share)


def usual_motion(motions: Iterable[OuterMotion | None], fragment_count: int) -> OuterMotion | None:
    """Return the medians of the last committed rounds; None while these are few."""
    known = [motion for motion in motions if motion is not None]
    count = max(ROUNDS_SEEN, fragment_count)
    if len(known) < count:
        return None
    cosines, gains = zip(*((each.cosine, each.gain) for each in known[-count:]), strict=True)
    return OuterMotion(statistics.median(cosines), statistics.median(gains))


def format_motion(motion: OuterMotion | None) -> str:
    """Return a sentence for status and page; empty if nothing is known."""
    if motion is None:
        return ""
    text = f"outer steps go {motion.gain:.2f} times as far as their gradients"
    if motion.cosine >= OVERSHOOT_COSINE:
        return text
    # Around a minimum noise alone turns gradients back, so this is no alarm.
    return (
        f"{text} and overshoot (cosine {motion.cosine:.2f}): unless the loss has settled, a lower"
        " outer_momentum or outer_lr learns faster"
    )

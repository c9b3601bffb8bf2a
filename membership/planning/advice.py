"""Proposals of settings for a network: the gentlest that keep trainers busy.

Steps between rounds, coarse codecs, overlap and fragments all save time, and each may cost some of
what a run learns from its tokens. They are tried in that order, gentlest first. The first settings
that keep trainers busy for ``BUSY_ENOUGH`` of their time are proposed: the fewest steps between rounds
that suffice, for these the finest codec, for that the shortest overlap, then the fewest fragments. How
coarse a codec may be is the operator's choice, ``QUALITIES``.

If no settings suffice, the network is too slow for that quality. Then the gentlest settings are
proposed that come within ``TIE`` of the busiest.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve, frozen

from ..spec.spec import OVERLAP_AUTO_MAX, RunSpec
from .predict import Conditions, Prediction, predict

BUSY_ENOUGH = 0.98  # of a trainer's time; more would gain little
TIE = 0.01  # of a trainer's time; a smaller gain is not worth a coarser setting
FRAGMENTS_PROPOSED_MAX = 32  # by default; every fragment needs a layer or more

# Codecs of contributions and results, finest first; error feedback makes up for a coarse codec_up.
QUALITIES: dict[str, tuple[tuple[str, str], ...]] = {
    "exact": (("fp32", "fp32"),),
    "high": (("fp32", "fp32"), ("bf16", "bf16"), ("int8", "int8")),
    "frugal": (
        ("fp32", "fp32"),
        ("bf16", "bf16"),
        ("int8", "int8"),
        ("nf4", "int8"),
        ("nf4", "nf4"),
    ),
}
# Steps between two rounds of a fragment. DiLoCo (arXiv 2311.08105) loses little up to 1000.
STEPS_TRIED = (10, 20, 30, 50, 100, 200, 300, 500, 1_000)


@frozen
class Proposal:
    """Proposed settings and their predicted cost.

    Attributes:
      enough: trainers are busy for ``BUSY_ENOUGH`` of their time.
    """

    spec: RunSpec
    prediction: Prediction
    enough: bool


def propose(
    spec: RunSpec, conditions: Conditions, quality: str, fragments_max: int = FRAGMENTS_PROPOSED_MAX
) -> Proposal:
    """Return the gentlest settings of a quality that keep trainers busy, or else nearly the busiest.

    Args:
      spec: all other settings are taken from it.
      quality: one of ``QUALITIES``.
    """
    tried: list[tuple[RunSpec, Prediction]] = []
    for candidate in _gentlest_first(spec, quality, fragments_max, conditions.rounds_in_flight):
        prediction = predict(candidate, conditions)
        if prediction.utilisation >= BUSY_ENOUGH:
            return Proposal(candidate, prediction, enough=True)
        tried.append((candidate, prediction))
    busiest = max(prediction.utilisation for _, prediction in tried)
    chosen = next(each for each in tried if each[1].utilisation >= busiest - TIE)
    return Proposal(*chosen, enough=False)


def _gentlest_first(
    spec: RunSpec, quality: str, fragments_max: int, rounds_in_flight: int
) -> Iterator[RunSpec]:
    # A proposal names each key, so neither an algorithm nor groups may fix any of them.
    plain = evolve(spec.diloco, algorithm="", groups=())
    for steps in STEPS_TRIED:
        even = [p for p in range(1, min(steps, fragments_max) + 1) if steps % p == 0]
        for up, down in QUALITIES[quality]:
            reduce = evolve(spec.reduce, codec_up=up, codec_down=down)
            for overlap in range(min(steps - 1, OVERLAP_AUTO_MAX) + 1):
                for fragments in even:
                    if overlap > steps // fragments * min(fragments, rounds_in_flight):
                        continue  # the round that is due would wait for a round in flight
                    diloco = evolve(plain, sync_every=steps, fragments=fragments, overlap=overlap)
                    yield evolve(spec, diloco=diloco, reduce=reduce)

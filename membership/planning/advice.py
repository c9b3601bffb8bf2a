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

from bisect import bisect_left
from collections.abc import Iterator

from attrs import evolve, frozen

from ..spec.spec import RunSpec
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
    busiest = 0.0
    for group in _gentlest_first(spec, quality, fragments_max, conditions):
        busiest = max(busiest, *(each.utilisation_max for each in group))
        if busiest >= BUSY_ENOUGH:
            return _shortest_overlap(group, conditions, BUSY_ENOUGH, enough=True)
    wanted = busiest - TIE
    for group in _gentlest_first(spec, quality, fragments_max, conditions):
        if any(each.utilisation_max >= wanted for each in group):
            return _shortest_overlap(group, conditions, wanted, enough=False)
    raise AssertionError("some settings are the busiest")


@frozen
class _Candidate:
    """Settings without their overlap.

    Attributes:
      spec: with ``overlap_max``.
      overlap_max: with more, the round that is due would wait for a round in flight.
      utilisation_max: with that overlap; a shorter one gives no more.
    """

    spec: RunSpec
    overlap_max: int
    utilisation_max: float

    def with_overlap(self, overlap: int) -> RunSpec:
        return evolve(self.spec, diloco=evolve(self.spec.diloco, overlap=overlap))


def _shortest_overlap(
    group: list[_Candidate], conditions: Conditions, wanted: float, *, enough: bool
) -> Proposal:
    """Return the settings with the shortest overlap that keeps trainers busy for ``wanted``.

    Of equal overlaps the one with the fewest fragments, which come first in the group.
    """

    def utilisation(candidate: _Candidate, overlap: int) -> float:
        return predict(candidate.with_overlap(overlap), conditions).utilisation

    def shortest(candidate: _Candidate) -> int:
        overlaps = range(candidate.overlap_max + 1)
        return bisect_left(overlaps, wanted, key=lambda overlap: utilisation(candidate, overlap))

    sufficing = [each for each in group if each.utilisation_max >= wanted]
    overlap, chosen = min(
        ((shortest(each), each) for each in sufficing), key=lambda found: found[0]
    )
    proposed = chosen.with_overlap(overlap)
    return Proposal(proposed, predict(proposed, conditions), enough)


def _gentlest_first(
    spec: RunSpec, quality: str, fragments_max: int, conditions: Conditions
) -> Iterator[list[_Candidate]]:
    """Yield, for each number of steps and codec, the candidates by number of fragments."""
    plain = evolve(spec.diloco, groups=())  # which would fix the number of fragments
    for steps in STEPS_TRIED:
        even = [p for p in range(1, min(steps, fragments_max) + 1) if steps % p == 0]
        for up, down in QUALITIES[quality]:
            reduce = evolve(spec.reduce, codec_up=up, codec_down=down)
            group = []
            for fragments in even:
                in_flight = min(fragments, conditions.rounds_in_flight)
                overlap = min(steps - 1, steps // fragments * in_flight)
                diloco = evolve(plain, sync_every=steps, fragments=fragments, overlap=overlap)
                candidate = evolve(spec, diloco=diloco, reduce=reduce)
                found = predict(candidate, conditions)
                group.append(_Candidate(candidate, overlap, found.utilisation))
            yield group

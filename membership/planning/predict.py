"""Predictions of what a run's settings cost on a network: bytes, seconds, trainers' waiting.

Closed formulas for identical peers with equal shares; docs/design/planning.md derives them. With
``V`` values, ``n`` peers, ``H`` steps between two rounds of a fragment, ``P`` fragments, ``tau``
steps of overlap, steps of ``s`` seconds, ``c`` bytes per value on the wire, lines of ``b`` bytes
per second, and ``d`` seconds from one machine to another:

    a round's bytes   B = (n - 1)/n (S_up + S_down), S = c V/P + 48 k    per peer, each way
    their time        X = B / b                                     of the slower direction
    a round           R = max(X + 5 d, X - C (1 - 1/m) + 6 d)       from the post to the merge
    between rounds    T = max(K s, X, 2 d, R/F, (R + (K - r) s)/(q + 1))
                      with K = H/P and tau = q K + r
    utilisation       U = K s / T                                   share of time spent in steps

Left out: encoding, adding up and the outer step, differences between peers, what zstd saves, and
the bytes of control messages.
"""

from __future__ import annotations

import math
from fractions import Fraction
from statistics import fmean

from attrs import evolve, field, frozen
from attrs.validators import ge, gt

from ...protocol.messages import FragmentSize
from ..spec.spec import RunSpec
from .bandwidth import Bandwidth
from .plan import chunk_elements_of, wire_bytes_per_value

BASELINE_BYTES_PER_VALUE = 2.0  # data parallel training averages bf16 gradients, at each step
OPEN_TRIPS = 2  # Ready, and the next round's Open: one way each
ROUND_TRIPS = 5  # Ready, Reduce, the last result, Reduced, Commit
LEFT_S_MIN = 1e-6  # with less time for its bytes no line is fast enough to hide a round
MODELS_HELD = 3  # see ``memory_bytes``
AHEAD_BYTES = 64 * 2**20  # of contributions that wait, ``collectives.chunk_sender``'s
# Fragments that one member fetches at a time: one that is nearly complete and the next. For each it
# has to keep the results of all rounds since.
FETCHES_MAX = 2
PROGRAM_BYTES = 95e6  # of a daemon and a hook without a state
FRAME_BYTES = 48  # header and tag of a chunk on a lane, ``protocol.network.lane``'s


@frozen
class Conditions:
    """The conditions of a run that its operator cannot choose.

    Attributes:
      value_count: parameters of the model.
      step_s: of an inner step.
      peers: contributors.
      line: of each of them, not shared.
      delay_s: from any machine to another, one way; the master's, too.
      rounds_in_flight: rounds that may be open or reducing at a time.
    """

    value_count: int = field(validator=ge(1))
    step_s: float = field(validator=gt(0))
    peers: int = field(validator=ge(1))
    line: Bandwidth
    delay_s: float = field(default=0.0, validator=ge(0))
    rounds_in_flight: int = field(default=1, validator=ge(1))


@frozen
class Prediction:
    """The cost of settings, for one peer and each way, unless noted otherwise.

    Attributes:
      round_bytes: of one round of one fragment.
      steps_per_round: inner steps from one round to the next one.
      transfer_s: the line's time for a round.
      round_s: from the post to the merge.
      period_s: from one round to the next one.
      waited_s: of that, the time that a trainer waits.
      utilisation: the share of its time in which a trainer steps.
      blocking_utilisation: the same without overlap.
      peak_bits_per_s: while a round's bytes are on their way.
      mean_bits_per_s: over all time.
      needed_bits_per_s: of a line on which no trainer waits; infinite: no line is enough.
      bytes_per_step: over all steps.
      times_fewer_bytes: the bytes of data parallel training by these, per step.
      baseline_utilisation: of data parallel training, over the same line.
      memory_bytes: the most that daemon and hook take, beside the script's own.
    """

    round_bytes: float
    steps_per_round: float
    transfer_s: float
    round_s: float
    period_s: float
    waited_s: float
    utilisation: float
    blocking_utilisation: float
    peak_bits_per_s: float
    mean_bits_per_s: float
    needed_bits_per_s: float
    bytes_per_step: float
    times_fewer_bytes: float
    baseline_utilisation: float
    memory_bytes: float


@frozen
class RoundCost:
    """One round of one fragment, in the symbols of the module's docstring.

    Attributes:
      step_s: ``s``.
      delay_s: ``d``.
      steps: ``K``; a fraction, since the overlap may be an exact multiple of it.
      in_flight: ``F``: a fragment has one round at a time.
      moved_bytes: ``B``.
      transfer_s: ``X``.
      ahead_s: ``C (1 - 1/m)``: time for the remaining contributions when an owner sends its first
        chunk.
    """

    step_s: float
    delay_s: float
    steps: Fraction
    in_flight: int
    moved_bytes: float
    transfer_s: float
    ahead_s: float

    @classmethod
    def of(cls, spec: RunSpec, conditions: Conditions) -> RoundCost:
        fragments, peers, others = spec.diloco.fragments, conditions.peers, conditions.peers - 1
        values = math.ceil(conditions.value_count / fragments)  # as equal as layers allow
        codecs = [spec.reduce.codecs(fragment) for fragment in range(fragments)]
        elements = chunk_elements_of(
            FragmentSize(values, values, 0),
            peers,
            spec.reduce.chunk_bytes,
            bytes_per_value=max(
                fmean(map(wire_bytes_per_value, each)) for each in zip(*codecs, strict=True)
            ),
            bytes_per_s=0.0,  # as fine as chunks get: on a fast line it makes no difference
        )
        chunks = math.ceil(values / elements)
        up_bytes, down_bytes = (
            values * fmean(map(wire_bytes_per_value, each)) + FRAME_BYTES * chunks
            for each in zip(*codecs, strict=True)
        )
        out, into = conditions.line.up_bytes_per_s, conditions.line.down_bytes_per_s

        def contributing_s(share: float) -> tuple[float, float]:
            return (1 - share) * up_bytes / out, others * share * up_bytes / into

        def resulting_s(share: float) -> tuple[float, float]:
            return others * share * down_bytes / out, (1 - share) * down_bytes / into

        # The owner of most values, and the one that has the last chunk, which is short.
        most = min(1.0, math.ceil(chunks / peers) * elements / values)
        least = max(0.0, 1 - (chunks - chunks // peers) * elements / values)
        busiest_s = max(
            first_s + then_s
            for share in (most, least)
            for first_s, then_s in zip(contributing_s(share), resulting_s(share), strict=True)
        )
        return cls(
            step_s=conditions.step_s,
            delay_s=conditions.delay_s,
            steps=Fraction(spec.diloco.sync_every, fragments),
            in_flight=min(conditions.rounds_in_flight, fragments),
            moved_bytes=others / peers * (up_bytes + down_bytes),
            transfer_s=busiest_s,
            ahead_s=max(contributing_s(1 / peers)) * (1 - 1 / max(1.0, chunks / peers)),
        )

    @property
    def stepped_s(self) -> float:
        """``K s``."""
        return self.steps * self.step_s

    @property
    def took_s(self) -> float:
        """``R``; a single peer sends nothing."""
        if not self.moved_bytes:
            return (ROUND_TRIPS - 1) * self.delay_s
        idle_s = max(0.0, self.delay_s - self.ahead_s)  # the line, before the first result
        return self.transfer_s + ROUND_TRIPS * self.delay_s + idle_s

    def period_s(self, overlap: int) -> float:
        """``T``."""
        whole, rest = divmod(overlap, self.steps)
        return max(
            self.stepped_s,
            self.transfer_s,
            OPEN_TRIPS * self.delay_s,
            self.took_s / self.in_flight,
            (self.took_s + (self.steps - rest) * self.step_s) / (whole + 1),
        )


def predict(spec: RunSpec, conditions: Conditions) -> Prediction:
    cost, overlap = RoundCost.of(spec, conditions), spec.diloco.overlap_steps
    stepped_s, wall_s = cost.stepped_s, cost.period_s(overlap)
    line, peers = conditions.line, conditions.peers
    baseline_bytes = 2 * (peers - 1) / peers * BASELINE_BYTES_PER_VALUE * conditions.value_count
    baseline_s = baseline_bytes / min(line.up_bytes_per_s, line.down_bytes_per_s)
    per_step = cost.moved_bytes / float(cost.steps)
    return Prediction(
        round_bytes=cost.moved_bytes,
        steps_per_round=float(cost.steps),
        transfer_s=cost.transfer_s,
        round_s=cost.took_s,
        period_s=wall_s,
        waited_s=wall_s - stepped_s,
        utilisation=stepped_s / wall_s,
        blocking_utilisation=stepped_s / cost.period_s(0),
        peak_bits_per_s=8 * cost.moved_bytes / cost.transfer_s if cost.moved_bytes else 0.0,
        mean_bits_per_s=8 * cost.moved_bytes / wall_s,
        needed_bits_per_s=_needed_bits_per_s(spec, conditions),
        bytes_per_step=per_step,
        times_fewer_bytes=baseline_bytes / per_step if per_step else math.inf,
        baseline_utilisation=cost.step_s / (cost.step_s + baseline_s),
        memory_bytes=memory_bytes(spec, conditions.value_count),
    )


def memory_bytes(spec: RunSpec, value_count: int) -> float:
    """Return the most memory that a peer's daemon and hook take together, beside the script's own.

    In float32 models: the shared values, their momentum and the trainer's anchor; with error
    feedback what codecs have left out. And in fragments: the posted one, the encoded mean, and the
    contributions that wait; with overlap the snapshot, with error feedback the encoded
    contribution. A model on GPUs needs up to three fragments more, pinned, for copies.
    docs/large-models.md has measurements.
    """
    fragments, diloco = spec.diloco.fragments, spec.diloco
    ups, downs = zip(*(spec.reduce.codecs(fragment) for fragment in range(fragments)), strict=True)
    feedback = spec.reduce.feedback_decay > 0 and not all(c.startswith("fp32") for c in ups)
    models = MODELS_HELD + feedback
    copies = 1 + max(map(wire_bytes_per_value, downs)) / 4 + (diloco.overlap_steps > 0)
    copies += feedback * max(map(wire_bytes_per_value, ups)) / 4
    fragment_bytes = 4 * value_count / fragments
    waiting = min(AHEAD_BYTES, fragment_bytes / 2)
    return 4 * value_count * models + copies * fragment_bytes + waiting + PROGRAM_BYTES


def further_host_bytes(spec: RunSpec, value_count: int, share: float) -> float:
    """Return the most memory of daemon and hook at a further host of a peer of several hosts.

    It holds boxes with this share of the values: the shared values and the trainer's anchor, the
    posted fragment, and with overlap the snapshot. The rest is at the head host.
    """
    copies = 1 + (spec.diloco.overlap_steps > 0)
    return 4 * value_count * share * (2 + copies / spec.diloco.fragments) + PROGRAM_BYTES


def _needed_bits_per_s(spec: RunSpec, conditions: Conditions) -> float:
    """Return the line, each way, on which no trainer waits: ``R <= min(tau, F K) s`` and ``X <= K
    s``.

    ``R`` is the larger of two terms, so ``b`` is the larger of ``B/(tau s - 5 d)`` and
    ``(B - A)/(tau s - 6 d)``, where ``A`` is the part of ``B`` that is sent before the first
    result.
    """
    # On a line of a byte a second, bytes are seconds.
    cost = RoundCost.of(spec, evolve(conditions, line=Bandwidth(1.0, 1.0)))
    if not cost.moved_bytes:
        return 0.0
    hidden_s = min(spec.diloco.overlap_steps * cost.step_s, cost.in_flight * cost.stepped_s)
    limits = (
        (cost.transfer_s, hidden_s - ROUND_TRIPS * cost.delay_s),
        (cost.transfer_s - cost.ahead_s, hidden_s - (ROUND_TRIPS + 1) * cost.delay_s),
        (cost.transfer_s, cost.stepped_s),
    )
    if cost.stepped_s < OPEN_TRIPS * cost.delay_s:
        return math.inf
    if any(left_s < LEFT_S_MIN for _, left_s in limits):
        return math.inf
    return 8 * max(moved / left_s for moved, left_s in limits)

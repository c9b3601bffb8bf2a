"""How a fragment is cut into chunks, who owns which, and how long that should take.

``shares`` says how much each contributor should own; here that becomes whole chunks. The estimate
is made from the chunks as they are, so it contains what rounding costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from ..protocol.messages import FragmentSize, OwnerRun, Plan
from .bandwidth import Lines
from .shares import Workload, best_shares, bound_s, reduction_s, ring_s
from .spec import RunSpec

VALUE_BYTES = 4  # float32
COUNTER_BYTES = 8  # int64, sent verbatim
CHUNK_ALIGNMENT = 256  # elements; blocks of a codec do not straddle chunks
CHUNK_ELEMENTS_MIN = 4_096  # smaller chunks cost more in headers than they balance
CHUNKS_PER_OWNER = 4  # a small fragment is cut finer, so that shares can be unequal

# What a value takes on the wire, scales included; a codec that is not listed counts as verbatim.
WIRE_BYTES_PER_VALUE = {
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": 1 + 2 / 256,
    "nf4": 1 / 2 + 2 / 64,
    "e2m1": 1 / 2 + 2 / 64,
    "e3m0": 1 / 2 + 2 / 64,
    "topk": 9.5 / 8 / 64,  # what independent values take; it varies
}


@frozen
class PlanEstimate:
    """What a plan should need, and what to measure it against.

    Attributes:
      predicted_s: of this plan, if the lines carry what is believed of them.
      bound_s: no plan can be faster over these lines.
      ring_s: what a ring of the same contributors would need.
      guessed_count: members whose lines are not measured yet; all of them: the times mean nothing.
    """

    predicted_s: float
    bound_s: float
    ring_s: float
    guessed_count: int


def make_plan(
    size: FragmentSize,
    contributors: Sequence[str],
    receivers: Sequence[str],
    lines: Lines,
    spec: RunSpec,
) -> tuple[Plan, PlanEstimate]:
    """Cut a fragment into chunks and give each an owner.

    Args:
      size: of the fragment.
      contributors: peer ids in order of member number; owners come from among them.
      receivers: everybody who gets the result, contributors too.
      lines: of all receivers.
      spec: chunk size and codecs.

    Returns:
      A plan whose runs follow the order of ``contributors``, and its estimate. Who owns nothing
      is left out. All bandwidths times k gives the same plan, as long as rounding allows.

    Raises:
      NobodyReachableError: no contributor can be reached by all the others.
    """
    cut = _Cut.of(size, len(contributors), spec)
    members = [*contributors, *(peer for peer in receivers if peer not in set(contributors))]
    number = {peer: index for index, peer in enumerate(members)}
    work = Workload(
        rates=tuple(lines.rates[peer] for peer in members),
        contributor_count=len(contributors),
        up_bytes=cut.wire_bytes(0, cut.chunk_count, cut.up_bytes_per_value),
        down_bytes=cut.wire_bytes(0, cut.chunk_count, cut.down_bytes_per_value),
        pair_limits={
            (number[sender], number[receiver]): limit
            for (sender, receiver), limit in lines.pair_limits.items()
            if sender in number and receiver in number
        },
        delay_s=lines.delay_s,
    )
    owned = _apportion(cut.chunk_count, best_shares(work)) if cut.chunk_count else []
    own_up, own_down = [0.0] * len(contributors), [0.0] * len(contributors)
    first = 0
    for member, chunk_count in enumerate(owned):
        own_up[member] = cut.wire_bytes(first, first + chunk_count, cut.up_bytes_per_value)
        own_down[member] = cut.wire_bytes(first, first + chunk_count, cut.down_bytes_per_value)
        first += chunk_count
    plan = Plan(
        chunk_elements=cut.chunk_elements,
        owners=tuple(
            OwnerRun(peer, chunk_count)
            for peer, chunk_count in zip(contributors, owned, strict=False)
            if chunk_count
        ),
        codec_up=spec.reduce.codec_up,
        codec_down=spec.reduce.codec_down,
    )
    estimate = PlanEstimate(
        predicted_s=reduction_s(work, own_up, own_down),
        bound_s=bound_s(work),
        ring_s=ring_s(work),
        guessed_count=len(lines.guessed.intersection(members)),
    )
    return plan, estimate


def wire_bytes_per_value(codec: str) -> float:
    """What a codec makes of a value; what a compression behind it saves is not known before."""
    return WIRE_BYTES_PER_VALUE.get(codec.partition("+")[0], VALUE_BYTES)


@frozen
class _Cut:
    """A fragment's chunks: those of the values, then one of the counters if there are any."""

    size: FragmentSize
    chunk_elements: int
    up_bytes_per_value: float
    down_bytes_per_value: float

    @classmethod
    def of(cls, size: FragmentSize, owner_count: int, spec: RunSpec) -> _Cut:
        most = max(CHUNK_ALIGNMENT, spec.reduce.chunk_bytes // VALUE_BYTES)
        wanted = -(-size.value_count // (owner_count * CHUNKS_PER_OWNER))
        wanted = -(-wanted // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
        return cls(
            size,
            min(most, max(CHUNK_ELEMENTS_MIN, wanted)),
            wire_bytes_per_value(spec.reduce.codec_up),
            wire_bytes_per_value(spec.reduce.codec_down),
        )

    @property
    def chunk_count(self) -> int:
        values = -(-self.size.value_count // self.chunk_elements)
        return values + (1 if self.size.counter_count else 0)

    def wire_bytes(self, first: int, end: int, bytes_per_value: float) -> float:
        """What the chunks from ``first`` to before ``end`` take on the wire."""
        value_count = min(end * self.chunk_elements, self.size.value_count) - min(
            first * self.chunk_elements, self.size.value_count
        )
        has_counters = self.size.counter_count and first < end == self.chunk_count
        counter_bytes = COUNTER_BYTES * self.size.counter_count if has_counters else 0
        return value_count * bytes_per_value + counter_bytes


def _apportion(chunk_count: int, shares: Sequence[float]) -> list[int]:
    """Whole chunks by largest remainder; a tie goes to the one who came first."""
    exact = [share * chunk_count for share in shares]
    owned = [int(amount) for amount in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (owned[i] - exact[i], i))
    for index in by_remainder[: chunk_count - sum(owned)]:
        owned[index] += 1
    return owned

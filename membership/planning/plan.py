"""The plan of a reduction: a fragment's chunks, their owners, and the expected time.

``shares`` computes how much each contributor should own; here that becomes whole chunks, each one
unit or several. The estimate is made from the chunks as they are, so it contains the cost of
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from attrs import frozen

from ...protocol.messages import FragmentSize, OwnerRun, Plan
from ..spec.spec import RunSpec
from .bandwidth import LineCapacities
from .shares import Workload, bound_s, chosen_shares, reduction_s

VALUE_BYTES = 4  # float32
COUNTER_BYTES = 8  # int64, sent verbatim
CHUNK_ALIGNMENT = 256  # elements; blocks of a codec do not straddle chunks
CHUNK_ELEMENTS_MIN = 4_096  # smaller chunks cost more in headers than they gain in balance
CHUNKS_PER_OWNER = 4  # a small fragment is cut finer, so that shares can be unequal
# A unit takes the slowest contributor's line about this long. Every lane has one under way when a
# round ends, and a sum waits for the slowest of them; but each chunk costs the processor some
# calls, which is what many lanes over a line of 300 Mbit/s are short of (chunks of 2 ms: rounds
# took an eighth longer).
CHUNK_LINE_S = 0.007
CHUNK_WIRE_BYTES_MIN = 65_536  # ... but is not cut finer than this for it,
# ... and over lines as fast as this not at all: there the processor is the limit, which spends as
# long on the calls for a chunk of 1 MiB as on encrypting it.
FAST_BYTES_PER_S = 1e9
# An owner's first chunks are as large as several such units, and only those for the round's end are
# one unit each. Eight units instead of four cost rounds a tenth of their time.
LARGE_UNITS = 4
SMALL_SHARE = 0.25  # of an owner's units, at least
SMALL_CHUNKS_MIN = 8
# An owner buffers four chunks of each contributor that is ahead, at least. Chunks are no larger
# than keeps these within a quarter of what it may buffer (``collectives.chunk_sender``), or than 1
# MiB. Nor are chunks that must be encoded larger than that: their values stay in a core's cache,
# and each thread decodes one at a time.
OWNER_CHUNK_BYTES = 16 * 2**20
CHUNK_BYTES_ALWAYS = 2**20
UNKNOWN_BYTES_PER_S = 36e6  # for this, a line that is not known: 300 Mbit/s, fibre to a home
CHUNKS_FINE_MAX = 4_096  # nor a fragment into more chunks: each costs some work

# Bytes of a value on the wire, scales included; a codec that is not listed counts as verbatim.
WIRE_BYTES_PER_VALUE = {
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": 1 + 2 / 256,
    "nf4": 1 / 2 + 2 / 64,
    "topk": 9.5 / 8 / 64,  # for independent values; it varies
    "topk16": 7.5 / 8 / 16,
    "topk8": 6.4 / 8 / 8,
    "topk4": 5.3 / 8 / 4,
}


@frozen
class PlanEstimate:
    """The expected time of a plan, and times to compare it with.

    Attributes:
      predicted_s: of this plan, if the lines carry what was measured; None: some contributor's line
        is only assumed.
      bound_s: no plan can be faster over these lines.
      guessed_count: members whose lines are not measured yet; if no line is, the other times mean
        nothing.
    """

    predicted_s: float | None
    bound_s: float
    guessed_count: int


def make_plan(
    size: FragmentSize,
    contributors: Sequence[str],
    receivers: Sequence[str],
    lines: LineCapacities,
    spec: RunSpec,
    *,
    fragment: int = 0,
    barred: Collection[str] = (),
) -> tuple[Plan, PlanEstimate]:
    """Cut a fragment into chunks and give each an owner; raise NoReachableOwnerError if none can.

    Args:
      contributors: peer ids in order of member number; owners are chosen from them.
      receivers: all members that get the result, contributors too; ``lines`` are theirs.
      fragment: its number, by which the spec's codecs are chosen.
      barred: contributors that own nothing, unless no other contributor could.

    Returns:
      A plan and its estimate. Runs follow the order of ``contributors``, without those that own
      nothing. Multiplying all bandwidths by k gives the same plan, but for rounding.
    """
    up, down = spec.reduce.codecs(fragment)
    known = [lines.rates[p].up_bytes_per_s for p in contributors if p not in lines.guessed]
    slowest = min(known, default=UNKNOWN_BYTES_PER_S)
    cut = _Cut.of(size, len(contributors), spec.reduce.chunk_bytes, up, down, slowest)
    members = list(dict.fromkeys((*contributors, *receivers)))
    number = {peer: index for index, peer in enumerate(members)}
    work = Workload(
        rates=tuple(lines.rates[peer] for peer in members),
        contributor_count=len(contributors),
        up_bytes=cut.wire_bytes(0, cut.unit_count, cut.up_bytes_per_value),
        down_bytes=cut.wire_bytes(0, cut.unit_count, cut.down_bytes_per_value),
        pair_limits={
            (number[sender], number[receiver]): limit
            for (sender, receiver), limit in lines.pair_limits.items()
            if sender in number and receiver in number
        },
        delay_s=lines.delay_s,
    )
    owners: tuple[OwnerRun, ...] = ()
    predicted_s: float | None = bound_s(work)
    if cut.unit_count:
        shares = chosen_shares(work, [lines.cautious.get(p, lines.rates[p]) for p in members])
        owned = _apportion(cut.unit_count, _without_barred(shares, contributors, barred))
        owners = tuple(
            run
            for peer, unit_count in zip(contributors, owned, strict=True)
            for run in _runs(peer, unit_count, cut.large_units)
        )
        guessed = lines.guessed.intersection(contributors)
        predicted_s = None if guessed else _needed_s(cut, work, owned)
    plan = Plan(cut.unit_elements, owners, up, down, spec.reduce.combine)
    return plan, PlanEstimate(
        predicted_s=predicted_s,
        bound_s=bound_s(work),
        guessed_count=len(lines.guessed.intersection(members)),
    )


def _without_barred(
    shares: Sequence[float], contributors: Sequence[str], barred: Collection[str]
) -> Sequence[float]:
    """Return the shares when barred contributors own nothing and the others more, in proportion."""
    left = [
        0.0 if peer in barred else share for peer, share in zip(contributors, shares, strict=True)
    ]
    total = sum(left)
    return [share / total for share in left] if barred and total > 0 else shares


def _needed_s(cut: _Cut, work: Workload, owned: Sequence[int]) -> float:
    """Return the time of a reduction whose contributors own these numbers of units."""
    own_up, own_down, first = [], [], 0
    for unit_count in owned:
        end = first + unit_count
        own_up.append(cut.wire_bytes(first, end, cut.up_bytes_per_value))
        own_down.append(cut.wire_bytes(first, end, cut.down_bytes_per_value))
        first = end
    return reduction_s(work, own_up, own_down)


def wire_bytes_per_value(codec: str) -> float:
    """Return a codec's bytes per value, without what zstd behind it saves."""
    return WIRE_BYTES_PER_VALUE.get(codec.partition("+")[0], VALUE_BYTES)


def chunk_elements_of(
    size: FragmentSize,
    owner_count: int,
    chunk_bytes: int,
    *,
    bytes_per_value: float = VALUE_BYTES,
    bytes_per_s: float = math.inf,
) -> int:
    """Return the number of values in a unit of ``chunk_bytes`` at most, as float32.

    The fragment is divided among ``owner_count`` contributors, whose slowest line carries
    ``bytes_per_s``.
    """
    values = size.value_count
    most = _most_elements(owner_count, chunk_bytes, bytes_per_value)
    wire_bytes = max(CHUNK_WIRE_BYTES_MIN, bytes_per_s * CHUNK_LINE_S)
    if bytes_per_s >= FAST_BYTES_PER_S:
        wire_bytes = math.inf
    wanted = min(most, values / (owner_count * CHUNKS_PER_OWNER), wire_bytes / bytes_per_value)
    wanted = max(wanted, values / CHUNKS_FINE_MAX, CHUNK_ELEMENTS_MIN)
    each = max(1, math.ceil(values / (owner_count * wanted)))  # equal owners own equally many
    even = max(CHUNK_ELEMENTS_MIN, math.ceil(values / (owner_count * each)))
    return min(most, -(-even // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT)


def _most_elements(owner_count: int, chunk_bytes: int, bytes_per_value: float) -> int:
    room_bytes = CHUNK_BYTES_ALWAYS
    if bytes_per_value >= VALUE_BYTES:
        room_bytes = max(room_bytes, OWNER_CHUNK_BYTES // max(1, owner_count - 1))
    most = max(CHUNK_ALIGNMENT, min(chunk_bytes, room_bytes) // VALUE_BYTES)
    return most - most % CHUNK_ALIGNMENT


def _runs(peer: str, unit_count: int, large_units: int) -> Iterator[OwnerRun]:
    """Yield an owner's chunks: large ones first, then those for the round's end."""
    small_count = max(SMALL_CHUNKS_MIN, math.ceil(SMALL_SHARE * unit_count))
    if large_units > 1 and (large_count := (unit_count - small_count) // large_units) > 0:
        yield OwnerRun(peer, large_count, large_units)
        unit_count -= large_count * large_units
    if unit_count:
        yield OwnerRun(peer, unit_count)


@frozen
class _Cut:
    """A fragment in units: first those of values, then one of counters if there are any.

    Attributes:
      unit_elements: values in a unit.
      large_units: units in a large chunk.
    """

    size: FragmentSize
    unit_elements: int
    up_bytes_per_value: float
    down_bytes_per_value: float
    large_units: int = 1

    @classmethod
    def of(
        cls,
        size: FragmentSize,
        owner_count: int,
        chunk_bytes: int,
        up: str,
        down: str,
        bytes_per_s: float,
    ) -> _Cut:
        up_bytes, down_bytes = wire_bytes_per_value(up), wire_bytes_per_value(down)
        most_bytes = max(up_bytes, down_bytes)
        elements = chunk_elements_of(
            size,
            owner_count,
            chunk_bytes,
            bytes_per_value=most_bytes,
            bytes_per_s=bytes_per_s,
        )
        most = _most_elements(owner_count, chunk_bytes, most_bytes)
        large_units = max(1, min(LARGE_UNITS, most // elements))
        return cls(size, elements, up_bytes, down_bytes, large_units)

    @property
    def unit_count(self) -> int:
        values = -(-self.size.value_count // self.unit_elements)
        return values + (1 if self.size.counter_count else 0)

    def wire_bytes(self, first: int, end: int, bytes_per_value: float) -> float:
        """Return the bytes on the wire of the units from ``first`` to before ``end``."""
        value_count = min(end * self.unit_elements, self.size.value_count) - min(
            first * self.unit_elements, self.size.value_count
        )
        has_counters = self.size.counter_count and first < end == self.unit_count
        counter_bytes = COUNTER_BYTES * self.size.counter_count if has_counters else 0
        return value_count * bytes_per_value + counter_bytes


def _apportion(unit_count: int, shares: Sequence[float]) -> list[int]:
    """Divide whole units by largest remainder; of equal remainders the first one wins."""
    exact = [share * unit_count for share in shares]
    owned = [int(amount) for amount in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (owned[i] - exact[i], i))
    for index in by_remainder[: unit_count - sum(owned)]:
        owned[index] += 1
    return owned

"""The plan of a reduction: a fragment's chunks, their owners, and the expected time.

``shares`` computes how much each contributor should own, ``sites`` whether a tree is faster and which
members lead in it; here that becomes whole chunks. The estimate is made from the chunks as they are, so
it contains the cost of rounding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby

from attrs import evolve, frozen

from ...protocol.messages import (
    OWNER_RUNS_MAX,
    FragmentSize,
    OwnerRun,
    Plan,
    Reduce,
    SiteLeaders,
)
from ..spec.spec import MEAN, TOPK_CODECS, RunSpec
from .bandwidth import LineCapacities, SiteLine
from .shares import (
    SharedLine,
    Workload,
    are_nearly_best,
    bound_s,
    chosen_shares,
    equal_shares,
    reduction_s,
    ring_s,
)
from .sites import SitePlan, TreePlan, plan_tree, tree_s

VALUE_BYTES = 4  # float32
COUNTER_BYTES = 8  # int64, sent verbatim
CHUNK_ALIGNMENT = 256  # elements; blocks of a codec do not straddle chunks
CHUNK_ELEMENTS_MIN = 4_096  # smaller chunks cost more in headers than they gain in balance
CHUNKS_PER_OWNER = 4  # a small fragment is cut finer, so that shares can be unequal
# A chunk takes the slowest contributor's line about this long. Every lane has one under way when a round
# ends, and a sum waits for the slowest of them; but each chunk costs the processor some calls, which is what
# many lanes over a line of 300 Mbit/s are short of (chunks of 2 ms: rounds took an eighth longer).
CHUNK_LINE_S = 0.007
CHUNK_WIRE_BYTES_MIN = 65_536  # ... but is not cut finer than this for it,
# ... and over lines as fast as this not at all: there the processor is the limit, which spends as long on the
# calls for a chunk of 1 MiB as on encrypting it.
FAST_BYTES_PER_S = 1e9
# An owner buffers four chunks of each contributor that is ahead, at least. Chunks are no larger than keeps these
# within a quarter of what it may buffer (``collectives.chunk_sender``), or than 1 MiB. Nor are chunks that must be
# encoded larger than that: their values stay in a core's cache, and each thread decodes one at a time.
OWNER_CHUNK_BYTES = 16 * 2**20
CHUNK_BYTES_ALWAYS = 2**20
UNKNOWN_BYTES_PER_S = 36e6  # for this, a line that is not known: 300 Mbit/s, fibre to a home
CHUNKS_FINE_MAX = 4_096  # nor a fragment into more chunks: each costs some work

# Codecs that work in a star only: what they leave out has to come back by the sender's error feedback,
# and the sums that leaders send have none.
STAR_CODECS = frozenset(TOPK_CODECS)

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
      ring_s: the time of a ring of the same contributors.
      tree_s, star_s: the times of the best tree and the best star; None: there are no sites, or no
        tree is possible.
      guessed_count: members whose lines are not measured yet; if no line is, the other times mean
        nothing.
    """

    predicted_s: float | None
    bound_s: float
    ring_s: float
    guessed_count: int
    tree_s: float | None = None
    star_s: float | None = None


def make_plan(
    size: FragmentSize,
    contributors: Sequence[str],
    receivers: Sequence[str],
    lines: LineCapacities,
    spec: RunSpec,
    *,
    fragment: int = 0,
    star_only: bool = False,
    barred: Collection[str] = (),
) -> tuple[Plan, PlanEstimate]:
    """Cut a fragment into chunks and give each an owner, and a leader in each site if that is faster.

    Args:
      size: of the fragment.
      contributors: peer ids in order of member number; owners are chosen from them.
      receivers: all members that get the result, contributors too.
      lines: of all receivers, and their sites.
      spec: chunk size and codecs.
      fragment: its number, by which the spec's codecs are chosen.
      star_only: plan no tree, even if it is faster.
      barred: contributors that own nothing, unless no other contributor could.

    Returns:
      A plan and its estimate. A star's runs follow the order of ``contributors``, without those that
      own nothing. Multiplying all bandwidths by k gives the same plan, but for rounding.

    Raises:
      NoReachableOwnerError: no contributor can be reached by all other members.
    """
    up, down = spec.reduce.codecs(fragment)
    known = [lines.rates[p].up_bytes_per_s for p in contributors if p not in lines.guessed]
    slowest = min(known, default=UNKNOWN_BYTES_PER_S)
    cut = _Cut.of(size, len(contributors), spec.reduce.chunk_bytes, up, down, slowest)
    members = _members(contributors, receivers)
    work = _workload(cut, members, len(contributors), lines)
    estimate = PlanEstimate(
        predicted_s=None,  # replaced below
        bound_s=bound_s(work),
        ring_s=ring_s(work),
        guessed_count=len(lines.guessed.intersection(members)),
    )
    rule, audited = spec.reduce.combine, spec.reduce.audit > 0
    # A leader's sum hides the values that a robust rule must see, and no contributor has sealed it.
    star_only |= rule != MEAN or audited or bool(barred)
    bare = Plan(cut.chunk_elements, (), up, down, combine=rule, sealed=audited)
    if cut.chunk_count == 0:
        return bare, evolve(estimate, predicted_s=bound_s(work))
    # Trees with limited pairs are neither modelled nor measured.
    sited = None if work.pair_limits else _Sited.of(cut, members, work, lines.sites)
    if sited is None:
        shares = tuple(
            chosen_shares(work, [lines.cautious.get(p, lines.rates[p]) for p in members])
        )
    else:
        work, shares = sited.star, sited.best.star
        if are_nearly_best(work, equal := tuple(equal_shares(work)), shares):
            shares = equal
        possible = not star_only and not {up, down} & STAR_CODECS
        estimate = evolve(
            estimate,
            bound_s=sited.best.star_bound_s,
            star_s=sited.best.star_s,
            tree_s=sited.best.tree_s if possible else None,
        )
        if possible and sited.best.pays:
            owners, leads, needed_s = sited.deal()
            if max(len(owners), *(len(site.leaders) for site in leads), 0) <= OWNER_RUNS_MAX:
                return (
                    evolve(bare, owners=owners, sites=leads),
                    evolve(estimate, predicted_s=needed_s, bound_s=sited.best.tree_bound_s),
                )
    owning = _largest(_without_barred(shares, contributors, barred), OWNER_RUNS_MAX)
    owned = _apportion(cut.chunk_count, owning)
    if not lines.guessed.intersection(contributors):
        estimate = evolve(estimate, predicted_s=_star_s(cut, work, owned))
    return evolve(bare, owners=_runs(_owners_by_chunk(contributors, owned))), estimate


def _members(contributors: Sequence[str], receivers: Sequence[str]) -> list[str]:
    return list(dict.fromkeys((*contributors, *receivers)))


def _workload(
    cut: _Cut, members: Sequence[str], contributor_count: int, lines: LineCapacities
) -> Workload:
    number = {peer: index for index, peer in enumerate(members)}
    return Workload(
        rates=tuple(lines.rates[peer] for peer in members),
        contributor_count=contributor_count,
        up_bytes=cut.wire_bytes(0, cut.chunk_count, cut.up_bytes_per_value),
        down_bytes=cut.wire_bytes(0, cut.chunk_count, cut.down_bytes_per_value),
        pair_limits={
            (number[sender], number[receiver]): limit
            for (sender, receiver), limit in lines.pair_limits.items()
            if sender in number and receiver in number
        },
        delay_s=lines.delay_s,
    )


def planned_star_s(order: Reduce, size: FragmentSize, lines: LineCapacities) -> float | None:
    """Return the time that a reduction ordered earlier would take over lines as they are known now.

    None: its plan is a tree, members share a line, or the line of a member is not among these.
    """
    contributors, plan = [each.peer for each in order.contributors], order.plan
    members = _members(contributors, order.receivers)
    if plan.sites or lines.sites or not lines.rates.keys() >= set(members):
        return None
    codecs = (wire_bytes_per_value(plan.codec_up), wire_bytes_per_value(plan.codec_down))
    cut = _Cut(size, plan.chunk_elements, *codecs)
    owned: Counter[str] = Counter()
    for run in plan.owners:
        owned[run.peer] += run.chunk_count
    work = _workload(cut, members, len(contributors), lines)
    return _star_s(cut, work, [owned[peer] for peer in contributors])


def _without_barred(
    shares: Sequence[float], contributors: Sequence[str], barred: Collection[str]
) -> Sequence[float]:
    """Return the shares when barred contributors own nothing and the others more, in proportion."""
    kept = {index for index, peer in enumerate(contributors) if peer not in barred}
    return _only(shares, kept) if barred and any(shares[index] > 0 for index in kept) else shares


def _largest(shares: Sequence[float], count: int) -> Sequence[float]:
    """Return the shares when only so many of the largest are kept, in proportion; of equals the first."""
    if len(shares) <= count:
        return shares
    return _only(shares, set(sorted(range(len(shares)), key=lambda index: -shares[index])[:count]))


def _only(shares: Sequence[float], kept: Collection[int]) -> Sequence[float]:
    """Return the shares when only these have one, in proportion."""
    left = [share if index in kept else 0.0 for index, share in enumerate(shares)]
    total = sum(left)
    return [share / total for share in left]


def _star_s(cut: _Cut, work: Workload, owned: Sequence[int]) -> float:
    """Return the time of a star whose contributors own these numbers of chunks."""
    own_up, own_down, first = [], [], 0
    for chunk_count in owned:
        end = first + chunk_count
        own_up.append(cut.wire_bytes(first, end, cut.up_bytes_per_value))
        own_down.append(cut.wire_bytes(first, end, cut.down_bytes_per_value))
        first = end
    return reduction_s(work, own_up, own_down)


@frozen
class _Sited:
    """A workload whose members share lines.

    Attributes:
      work: its rates are what each member can do within its site.
      best: the best tree, and the best star.
    """

    cut: _Cut
    members: Sequence[str]
    work: Workload
    sites: tuple[SharedLine, ...]
    best: TreePlan

    @classmethod
    def of(
        cls, cut: _Cut, members: Sequence[str], work: Workload, lines: Sequence[SiteLine]
    ) -> _Sited | None:
        """Plan a tree and a star for these lines, or return None if no members share a line."""
        if not lines:
            return None
        number = {peer: index for index, peer in enumerate(members)}
        inner = {peer: rate for site in lines for peer, rate in site.inner.items()}
        sites = tuple(
            SharedLine(tuple(sorted(number[p] for p in site.members)), site.line) for site in lines
        )
        rates = tuple(inner.get(peer, rate) for peer, rate in zip(members, work.rates, strict=True))
        work = evolve(work, rates=rates)
        best = plan_tree(work, sites, inner_up_bytes=cut.inner_bytes, chunk_count=cut.chunk_count)
        return cls(cut, members, work, sites, best)

    @property
    def star(self) -> Workload:
        return evolve(self.work, shared=self.sites)

    def deal(self) -> tuple[tuple[OwnerRun, ...], tuple[SiteLeaders, ...], float]:
        """Return the tree in whole chunks: its owners, its leaders and its time."""
        count = self.cut.chunk_count
        owned = _apportion(count, [site.owned for site in self.best.sites])
        owners: list[str] = []
        leads, dealt = [], []
        for site, own_count in zip(self.best.sites, owned, strict=True):
            peers = [self.members[member] for member in site.members]
            first = len(owners)
            # The owner of a chunk that is owned here leads it, too; the other chunks are dealt likewise.
            owners += _owners_by_chunk(peers, _apportion(own_count, site.leading))
            rest = _owners_by_chunk(peers, _apportion(count - own_count, site.leading))
            leaders = [*rest[:first], *owners[first:], *rest[first:]]
            if len(peers) > 1:
                leads.append(SiteLeaders(tuple(peers), _runs(leaders)))
            leading = Counter(leaders)
            shares = tuple(leading[peer] / count for peer in peers)
            dealt.append(SitePlan(site.members, own_count / count, shares))
        needed_s = tree_s(
            self.work,
            self.sites,
            dealt,
            inner_up_bytes=self.cut.inner_bytes,
            chunk_count=count,
        )
        return _runs(owners), tuple(leads), needed_s


def wire_bytes_per_value(codec: str) -> float:
    """Return a codec's bytes per value, without what zstd behind it saves: that is not known before."""
    return WIRE_BYTES_PER_VALUE.get(codec.partition("+")[0], VALUE_BYTES)


def chunk_elements_of(
    size: FragmentSize,
    owner_count: int,
    chunk_bytes: int,
    *,
    bytes_per_value: float = VALUE_BYTES,
    bytes_per_s: float = math.inf,
) -> int:
    """Return the number of values in a chunk.

    Args:
      owner_count: contributors among whom the fragment's chunks are divided.
      chunk_bytes: float32 bytes of a chunk, at most.
      bytes_per_value: on the wire.
      bytes_per_s: what the slowest contributor's line carries.
    """
    values = size.value_count
    room_bytes = CHUNK_BYTES_ALWAYS
    if bytes_per_value >= VALUE_BYTES:
        room_bytes = max(room_bytes, OWNER_CHUNK_BYTES // max(1, owner_count - 1))
    most = max(CHUNK_ALIGNMENT, min(chunk_bytes, room_bytes) // VALUE_BYTES)
    most -= most % CHUNK_ALIGNMENT
    wire_bytes = max(CHUNK_WIRE_BYTES_MIN, bytes_per_s * CHUNK_LINE_S)
    if bytes_per_s >= FAST_BYTES_PER_S:
        wire_bytes = math.inf
    wanted = min(most, values / (owner_count * CHUNKS_PER_OWNER), wire_bytes / bytes_per_value)
    wanted = max(wanted, values / CHUNKS_FINE_MAX, CHUNK_ELEMENTS_MIN)
    each = max(1, math.ceil(values / (owner_count * wanted)))  # equal owners own equally many
    even = max(CHUNK_ELEMENTS_MIN, math.ceil(values / (owner_count * each)))
    return min(most, -(-even // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT)


@frozen
class _Cut:
    """A fragment's chunks: first the chunks of values, then one of counters if there are any."""

    size: FragmentSize
    chunk_elements: int
    up_bytes_per_value: float
    down_bytes_per_value: float

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
        elements = chunk_elements_of(
            size,
            owner_count,
            chunk_bytes,
            bytes_per_value=max(up_bytes, down_bytes),
            bytes_per_s=bytes_per_s,
        )
        return cls(size, elements, up_bytes, down_bytes)

    @property
    def chunk_count(self) -> int:
        values = -(-self.size.value_count // self.chunk_elements)
        return values + (1 if self.size.counter_count else 0)

    @property
    def inner_bytes(self) -> float:
        """The bytes of one contribution within a site, where values are sent as float32."""
        return self.wire_bytes(0, self.chunk_count, VALUE_BYTES)

    def wire_bytes(self, first: int, end: int, bytes_per_value: float) -> float:
        """Return the bytes on the wire of the chunks from ``first`` to before ``end``."""
        value_count = min(end * self.chunk_elements, self.size.value_count) - min(
            first * self.chunk_elements, self.size.value_count
        )
        has_counters = self.size.counter_count and first < end == self.chunk_count
        counter_bytes = COUNTER_BYTES * self.size.counter_count if has_counters else 0
        return value_count * bytes_per_value + counter_bytes


def _apportion(chunk_count: int, shares: Sequence[float]) -> list[int]:
    """Divide whole chunks by largest remainder; of equal remainders the first one wins."""
    exact = [share * chunk_count for share in shares]
    owned = [int(amount) for amount in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (owned[i] - exact[i], i))
    for index in by_remainder[: chunk_count - sum(owned)]:
        owned[index] += 1
    return owned


def _owners_by_chunk(peers: Sequence[str], chunk_counts: Sequence[int]) -> list[str]:
    """Return the owner of each chunk: the first peer's chunks, then the second's, and so on."""
    return [peer for peer, n in zip(peers, chunk_counts, strict=True) for _chunk in range(n)]


def _runs(by_chunk: Sequence[str]) -> tuple[OwnerRun, ...]:
    return tuple(OwnerRun(peer, len(list(run))) for peer, run in groupby(by_chunk))

"""The plan: every chunk has one owner, and the estimate is that of the chunks as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.collectives.codecs.codecs import get_codec
from holdfast.membership.master.sync.catch_up import CatchUp
from holdfast.membership.planning.bandwidth import Bandwidth, LineCapacities
from holdfast.membership.planning.plan import (
    CHUNK_ALIGNMENT,
    CHUNKS_FINE_MAX,
    LARGE_UNITS,
    SMALL_SHARE,
    PlanEstimate,
    make_plan,
    wire_bytes_per_value,
)
from holdfast.membership.planning.shares import NoReachableOwnerError
from holdfast.membership.spec.spec import CODECS, RunSpec
from holdfast.protocol.messages import FragmentSize, Plan

PEERS = [f"{i:032x}" for i in range(24)]
MBIT = 125_000.0
rates = st.floats(1e4, 1e9)
bandwidths = st.builds(Bandwidth, rates, rates)
SPEC = RunSpec()


def planned(
    size: FragmentSize,
    speeds: Sequence[Bandwidth],
    spares: int = 0,
    spec: RunSpec = SPEC,
    pair_limits: dict[tuple[str, str], float] | None = None,
) -> tuple[Plan, PlanEstimate]:
    """A plan for peers 0, 1, ...; the last ``spares`` of them only receive."""
    peers = PEERS[: len(speeds)]
    lines = LineCapacities(dict(zip(peers, speeds, strict=True)), pair_limits or {})
    return make_plan(size, peers[: len(speeds) - spares], peers, lines, spec)


def owned(plan: Plan) -> dict[str, int]:
    units: Counter[str] = Counter()
    for run in plan.owners:
        units[run.peer] += run.unit_count
    return dict(units)


@given(
    st.integers(0, 5_000_000),
    st.integers(0, 3),
    st.lists(bandwidths, min_size=1, max_size=16),
    st.integers(0, 8),
    st.sampled_from(CODECS),
    st.sampled_from(CODECS),
)
def test_every_chunk_has_one_owner(
    values: int, counters: int, speeds: list[Bandwidth], spares: int, up: str, down: str
) -> None:
    spec = RunSpec.parse(f'[reduce]\ncodec_up = "{up}"\ncodec_down = "{down}"')
    listening = [Bandwidth(1e6, 1e6)] * spares
    size = FragmentSize(values, 0, counters)
    plan, estimate = planned(size, [*speeds, *listening], spares, spec)
    units = -(-values // plan.chunk_elements) + (1 if counters else 0)
    assert sum(run.unit_count for run in plan.owners) == units
    assert all(run.chunk_count > 0 for run in plan.owners)
    assert not plan.owners or plan.owners[-1].chunk_units == 1, "the counters are a chunk"
    owners = list(owned(plan))
    assert owners == [peer for peer in PEERS[: len(speeds)] if peer in owners]
    assert plan.chunk_elements % CHUNK_ALIGNMENT == 0
    most = max((run.chunk_units for run in plan.owners), default=1)
    assert 4 * most * plan.chunk_elements <= SPEC.reduce.chunk_bytes
    assert estimate.predicted_s is not None
    assert estimate.predicted_s >= estimate.bound_s * (1 - 1e-9)


@given(
    st.lists(bandwidths, min_size=3, max_size=8),
    st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=2),
)
def test_a_contributor_that_some_member_cannot_reach_owns_nothing(
    speeds: list[Bandwidth], cut: set[tuple[int, int]]
) -> None:
    count = len(speeds)
    pairs = {(a % count, b % count) for a, b in cut if a % count != b % count}
    cut_off = {PEERS[member] for pair in pairs for member in pair}
    limits = {(PEERS[a], PEERS[b]): 0.0 for a, b in pairs}
    size = FragmentSize(1_000_000, 0, 1)
    if len(cut_off) == count:
        with pytest.raises(NoReachableOwnerError):
            planned(size, speeds, pair_limits=limits)
        return
    plan, estimate = planned(size, speeds, pair_limits=limits)
    assert not cut_off.intersection(owned(plan))
    assert estimate.predicted_s is not None
    assert estimate.predicted_s < float("inf")


def test_equal_lines_own_equally() -> None:
    plan, _ = planned(FragmentSize(4_000_000, 0, 0), [Bandwidth(1e9, 1e9)] * 4)
    assert [run.chunk_count for run in plan.owners] == [4, 4, 4, 4]
    assert [run.peer for run in plan.owners] == PEERS[:4]


def test_over_a_slow_line_chunks_are_large_but_for_the_last_ones() -> None:
    plan, _ = planned(FragmentSize(8_000_000, 0, 1), [Bandwidth(6e6, 6e6)] * 4)
    assert plan.chunk_elements * 4 == 65_536
    for peer in PEERS[:4]:
        large, small = [run for run in plan.owners if run.peer == peer]
        assert (large.chunk_units, small.chunk_units) == (LARGE_UNITS, 1)
        assert SMALL_SHARE <= small.unit_count / (large.unit_count + small.unit_count) < 0.3


def test_of_equals_the_first_member_owns_the_odd_chunk() -> None:
    plan, _ = planned(FragmentSize(2**18 * 16, 0, 3), [Bandwidth(1e9, 1e9)] * 4)
    assert [run.chunk_count for run in plan.owners] == [5, 4, 4, 4], "one is of counters"


def test_the_spec_decides_codecs_and_chunk_size() -> None:
    spec = RunSpec.parse('[reduce]\ncodec_up = "int8"\nchunk_bytes = 65536\n')
    plan, _ = planned(FragmentSize(10_000_000, 0, 0), [Bandwidth(1e6, 1e6)] * 2, spec=spec)
    assert (plan.codec_up, plan.codec_down, plan.chunk_elements) == ("int8", "fp32", 16_384)


@pytest.mark.parametrize(
    ("codec", "bytes_per_s", "elements"),
    [
        ("fp32", 1e6, 16_384),  # 64 KiB on the wire
        ("fp32", 36e6, 63_232),  # 7 ms of 300 Mbit/s, aligned
        ("fp32", 125e6, 218_880),  # 7 ms
        ("fp32", 1e9, 2**20),  # what the spec allows: the processor is the limit
        ("int8", 1e6, 65_280),
        ("int8", 1e9, 262_144),  # what is encoded stays in the cache
    ],
)
def test_chunks_are_short_on_slow_lines(codec: str, bytes_per_s: float, elements: int) -> None:
    spec = RunSpec.parse(f'[reduce]\ncodec_up = "{codec}"\ncodec_down = "{codec}"\n')
    fast, slow = Bandwidth(1e9, 1e9), Bandwidth(bytes_per_s, 1e9)
    plan, _ = planned(FragmentSize(50_000_000, 0, 0), [fast, slow], spec=spec)
    assert 0.9 * elements <= plan.chunk_elements <= elements


@pytest.mark.parametrize(
    ("peers", "elements"), [(2, 2**20), (5, 2**20), (9, 2**19), (17, 2**18), (24, 2**18)]
)
def test_chunks_of_many_fast_peers_are_smaller(peers: int, elements: int) -> None:
    """Each owner buffers some of every contributor: their sum is bounded."""
    plan, _ = planned(FragmentSize(2**30, 0, 0), [Bandwidth(2e9, 2e9)] * peers)
    assert 0.9 * elements <= plan.chunk_elements <= elements


def test_equal_owners_own_equally_many_chunks() -> None:
    """Nine chunks for one and eight for the others would be a tenth more time."""
    plan, _ = planned(FragmentSize(540_672, 0, 0), [Bandwidth(1e6, 1e6)] * 4)
    assert len({run.chunk_count for run in plan.owners}) == 1


def test_a_large_fragment_has_a_limited_number_of_chunks() -> None:
    plan, _ = planned(FragmentSize(250_000_000, 0, 0), [Bandwidth(1e6, 1e6)] * 2)
    assert sum(run.chunk_count for run in plan.owners) <= CHUNKS_FINE_MAX


def test_a_fragment_may_have_codecs_of_its_own() -> None:
    """The codecs decide the plan, its estimate, and whether a tree may carry them."""
    spec = RunSpec.parse(
        "[diloco]\nfragments = 2\n[reduce]\ncodec_up = ['fp32', 'nf4']\ncodec_down = ['bf16',"
        " 'nf4']\n"
    )
    size, speed = FragmentSize(2**20, 0, 0), Bandwidth(1e6, 1e6)
    lines = LineCapacities(dict.fromkeys(PEERS[:2], speed))
    needed = []
    for fragment, codecs in enumerate((("fp32", "bf16"), ("nf4", "nf4"))):
        plan, estimate = make_plan(size, PEERS[:2], PEERS[:2], lines, spec, fragment=fragment)
        assert (plan.codec_up, plan.codec_down) == codecs
        assert estimate.predicted_s is not None
        needed.append(estimate.predicted_s)
    assert needed[0] / needed[1] == pytest.approx((4 + 2) / (2 * (1 / 2 + 2 / 64)))


def test_what_a_joiner_receives_follows_each_fragments_codec() -> None:
    spec = RunSpec.parse("[diloco]\nfragments = 2\n[reduce]\ncodec_down = ['fp32', 'nf4']\n")
    context = SimpleNamespace(
        spec=spec, history=SimpleNamespace(sizes=[FragmentSize(6_400, 0, 0)] * 2)
    )
    catch_up = CatchUp(cast("Any", context))
    assert [catch_up.result_bytes(fragment) for fragment in (0, 1)] == [25_600, 3_400]


def test_the_estimate_of_eight_residential_peers() -> None:
    slow, fast = Bandwidth(20 * MBIT, 300 * MBIT), Bandwidth(1000 * MBIT, 1000 * MBIT)
    plan, estimate = planned(FragmentSize(25_000_000, 0, 0), [*[slow] * 6, *[fast] * 2])
    assert set(owned(plan)) == {PEERS[6], PEERS[7]}
    assert estimate.bound_s == pytest.approx(1e8 / (20 * MBIT))
    assert estimate.predicted_s == pytest.approx(estimate.bound_s)


def test_the_estimate_counts_encoded_bytes_and_whole_chunks() -> None:
    """Three chunks, two owners of equal lines: whoever owns two of them is later."""
    spec = RunSpec.parse('[reduce]\ncodec_up = "int8"\nchunk_bytes = 1048576\n')
    size = FragmentSize(2**18 * 24, 0, 0)
    listener = Bandwidth(1e9, 1e9)
    plan, estimate = planned(size, [Bandwidth(1e6, 1e9)] * 2 + [listener], 1, spec)
    assert list(owned(plan).values()) == [192, 192]
    up, down = 2**18 * 24 * (1 + 2 / 256), 2**18 * 24 * 4
    # Half of a contribution goes out, and half of the result, to two receivers.
    assert estimate.predicted_s == pytest.approx((up / 2 + 2 * down / 2) / 1e6)


def test_an_empty_fragment_has_no_owner() -> None:
    plan, estimate = planned(FragmentSize(0, 0, 0), [Bandwidth(1e6, 1e6)] * 3)
    assert plan.owners == ()
    assert estimate.predicted_s == 0.0


def test_what_a_codec_takes_on_the_wire_is_known_for_all() -> None:
    count = 2**20
    for name in CODECS:
        codec = get_codec(name.partition("+")[0])
        most = codec.encoded_bytes(count) / count  # of topk it is what it never exceeds
        assert wire_bytes_per_value(name) == pytest.approx(
            most, rel={"topk": 0.1, "topk16": 0.1, "topk8": 0.1, "topk4": 0.12}.get(name, 1e-3)
        )

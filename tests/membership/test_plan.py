"""The plan: shares that end the reduction soonest, chunks that add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.membership.plan import (
    CHUNK_ALIGNMENT,
    Bandwidth,
    make_plan,
    owner_shares,
)
from holdfast.membership.spec import RunSpec
from holdfast.protocol.messages import FragmentSize

PEERS = [f"{i:032x}" for i in range(16)]
MBIT = 125_000.0
rates = st.floats(1e4, 1e9)
SPEC = RunSpec()


def seconds_for(shares: list[float], bandwidths: list[Bandwidth], receivers: int) -> float:
    """What the slowest member needs for one byte of the fragment: the plan's own cost model."""
    count = len(bandwidths)
    return max(
        max(
            ((1 - share) + (receivers - 1) * share) / rate.up_bytes_per_s,
            ((1 - share) + (count - 1) * share) / rate.down_bytes_per_s,
        )
        for share, rate in zip(shares, bandwidths, strict=True)
    )


@given(st.lists(rates, min_size=3, max_size=12))
def test_symmetric_links_reach_the_closed_form(speeds: list[float]) -> None:
    bandwidths = [Bandwidth(speed, speed) for speed in speeds]
    count = len(speeds)
    best = max(1 / min(speeds), 2 * (count - 1) / sum(speeds))
    assert seconds_for(owner_shares(bandwidths, count), bandwidths, count) <= best * (1 + 1e-6)


@given(
    st.lists(st.tuples(rates, rates), min_size=1, max_size=10),
    st.integers(0, 6),
    st.lists(st.floats(0.01, 1.0), min_size=10, max_size=10),
)
def test_no_other_shares_are_faster(
    speeds: list[tuple[float, float]], spares: int, guess: list[float]
) -> None:
    bandwidths = [Bandwidth(*pair) for pair in speeds]
    receivers = len(bandwidths) + spares
    shares = owner_shares(bandwidths, receivers)
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= 0.0
    total = sum(guess[: len(bandwidths)])
    other = [part / total for part in guess[: len(bandwidths)]]
    mine = seconds_for(shares, bandwidths, receivers)
    assert mine <= seconds_for(other, bandwidths, receivers) * (1 + 1e-6)


def test_eight_residential_peers() -> None:
    """Six at 20/300 and two at 1000 Mbit/s: the bound is the two big uplinks' (a ring: 1.75 times)."""
    bandwidths = [Bandwidth(20 * MBIT, 300 * MBIT)] * 6 + [Bandwidth(1000 * MBIT, 1000 * MBIT)] * 2
    shares = owner_shares(bandwidths, 8)
    assert seconds_for(shares, bandwidths, 8) == pytest.approx(1 / (20 * MBIT))
    assert sum(shares[6:]) == pytest.approx(1.0)
    assert shares[6] == pytest.approx(shares[7])


def test_without_measurements_shares_are_equal() -> None:
    plan = make_plan(FragmentSize(4_000_000, 0, 0), PEERS[:4], {}, SPEC)
    assert [run.chunk_count for run in plan.owners] == [4, 4, 4, 4]
    assert [run.peer for run in plan.owners] == PEERS[:4]


def test_an_unmeasured_contributor_counts_as_the_median() -> None:
    known = {PEERS[0]: Bandwidth(1e6, 1e6), PEERS[1]: Bandwidth(1e6, 1e6)}
    plan = make_plan(FragmentSize(2**22, 0, 0), PEERS[:3], known, SPEC)
    assert max(r.chunk_count for r in plan.owners) - min(r.chunk_count for r in plan.owners) <= 1


@given(
    st.integers(0, 5_000_000),
    st.integers(0, 3),
    st.integers(1, 16),
    st.dictionaries(st.integers(0, 15), st.tuples(rates, rates), max_size=16),
    st.integers(0, 8),
)
def test_every_chunk_has_one_owner(
    values: int, counters: int, count: int, speeds: dict[int, tuple[float, float]], spares: int
) -> None:
    bandwidths = {PEERS[i]: Bandwidth(*pair) for i, pair in speeds.items()}
    size = FragmentSize(values, 0, counters)
    plan = make_plan(size, PEERS[:count], bandwidths, SPEC, count + spares)
    chunks = -(-values // plan.chunk_elements) + (1 if counters else 0)
    assert sum(run.chunk_count for run in plan.owners) == chunks
    assert all(run.chunk_count > 0 for run in plan.owners)
    owners = [run.peer for run in plan.owners]
    assert owners == [peer for peer in PEERS[:count] if peer in owners]
    assert plan.chunk_elements % CHUNK_ALIGNMENT == 0
    assert 4 * plan.chunk_elements <= SPEC.reduce.chunk_bytes


def test_the_spec_decides_codecs_and_chunk_size() -> None:
    spec = RunSpec.parse('[reduce]\ncodec_up = "int8"\nchunk_bytes = 65536\n')
    plan = make_plan(FragmentSize(10_000_000, 0, 0), PEERS[:2], {}, spec)
    assert (plan.codec_up, plan.codec_down, plan.chunk_elements) == ("int8", "fp32", 16_384)


def test_a_fast_peer_owns_more() -> None:
    speeds = {PEERS[0]: Bandwidth(1e6, 1e6), PEERS[1]: Bandwidth(1e6, 1e6)}
    speeds[PEERS[2]] = Bandwidth(3e6, 3e6)
    plan = make_plan(FragmentSize(2**24, 0, 0), PEERS[:3], speeds, SPEC)
    owned = {run.peer: run.chunk_count for run in plan.owners}
    assert owned[PEERS[2]] > owned.get(PEERS[0], 0)

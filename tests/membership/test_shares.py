"""Owners' shares: nothing is faster, and the textbook's formulas."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.membership.planning.bandwidth import Bandwidth
from holdfast.membership.planning.shares import (
    NoReachableOwnerError,
    Workload,
    best_shares,
    bound_s,
    shares_s,
)

SIZE = 1e8  # bytes; what a fragment of 25 million values takes
rates = st.floats(1e4, 1e9)
bandwidths = st.builds(Bandwidth, rates, rates)
sizes = st.floats(1e5, 1e9)
# A slow uplink that owns nearly all sends what is left of 1 - share: rounding grows that much.
ROUGHLY = 1e-5


def symmetric(speeds: list[float]) -> Workload:
    return Workload(tuple(Bandwidth(b, b) for b in speeds), len(speeds), SIZE, SIZE)


@st.composite
def workloads(draw: st.DrawFn, *, count_min: int = 1, pairs: bool = False) -> Workload:
    """Any lines, any codecs, some who only receive; with ``pairs`` some limited or cut ones."""
    count = draw(st.integers(count_min, 8))
    lines = draw(st.lists(bandwidths, min_size=count, max_size=count + 4))
    limits: dict[tuple[int, int], float] = {}
    if pairs:
        member = st.integers(0, len(lines) - 1)
        pair = st.tuples(member, member).filter(lambda p: p[0] != p[1])
        limits = draw(st.dictionaries(pair, st.just(0.0) | rates, max_size=4))
    return Workload(tuple(lines), count, draw(sizes), draw(sizes), limits)


def guesses(work: Workload, parts: list[float]) -> list[float]:
    """Some other shares, which give nothing to those who can own nothing."""
    barred = work.barred()
    mine = [0.0 if i in barred else parts[i] for i in range(work.contributor_count)]
    return [part / sum(mine) for part in mine]


parts = st.lists(st.floats(0.01, 1.0) | st.just(1e-6), min_size=8, max_size=8)


# ---------------------------------------------------------------- the textbook


@given(st.lists(rates, min_size=3, max_size=12))
def test_symmetric_lines_have_the_closed_form(speeds: list[float]) -> None:
    count = len(speeds)
    best_s = SIZE * max(1 / min(speeds), 2 * (count - 1) / sum(speeds))
    raw = [max(0.0, speed * best_s / SIZE - 1) for speed in speeds]
    work = symmetric(speeds)
    assert bound_s(work) == pytest.approx(best_s)
    shares = best_shares(work)
    assert shares_s(work, shares) == pytest.approx(best_s)
    assert shares == pytest.approx([part / sum(raw) for part in raw], rel=1e-5, abs=1e-5)


def test_one_or_two_peers() -> None:
    alone = Workload((Bandwidth(1e6, 1e6),), 1, SIZE, SIZE)
    assert (best_shares(alone), bound_s(alone)) == ([1.0], 0.0)
    assert shares_s(alone, [1.0]) == 0.0
    two = symmetric([1e6, 4e6])
    assert best_shares(two) == [0.5, 0.5], "both move the same bytes, whoever owns what"
    assert shares_s(two, [0.5, 0.5]) == bound_s(two) == SIZE / 1e6


def test_delays_are_added_to_what_the_bytes_need() -> None:
    work = symmetric([1e6] * 4)
    slow = evolve(work, delay_s=0.1)
    assert bound_s(slow) == pytest.approx(bound_s(work) + 0.2)
    assert best_shares(slow) == best_shares(work)
    assert shares_s(slow, best_shares(slow)) == pytest.approx(bound_s(slow))


# ---------------------------------------------------------------- what holds for all


@given(workloads(), parts)
def test_the_best_shares_are_shares_and_nothing_is_faster(
    work: Workload, guess: list[float]
) -> None:
    shares = best_shares(work)
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= 0.0
    mine = shares_s(work, shares)
    assert mine >= bound_s(work) * (1 - ROUGHLY)
    assert mine <= shares_s(work, guesses(work, guess)) * (1 + ROUGHLY)


@given(workloads(pairs=True), parts)
def test_shares_of_limited_pairs_are_near_the_best(work: Workload, guess: list[float]) -> None:
    assume(len(work.barred()) < work.contributor_count)
    shares = best_shares(work)
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= 0.0
    assert all(shares[member] == 0.0 for member in work.barred())
    mine = shares_s(work, shares)
    assert mine >= bound_s(work) * (1 - ROUGHLY)
    codecs = sorted([work.up_bytes, work.down_bytes])
    most = 1.0 + codecs[1] / codecs[0] if work.pair_limits else 1.0
    assert mine <= most * shares_s(work, guesses(work, guess)) * (1 + ROUGHLY)


@given(workloads(), st.floats(1e-3, 1e3))
def test_everything_scales(work: Workload, factor: float) -> None:
    scaled = evolve(
        work,
        rates=tuple(
            Bandwidth(r.up_bytes_per_s * factor, r.down_bytes_per_s * factor) for r in work.rates
        ),
    )
    shares, again = best_shares(work), best_shares(scaled)
    assert again == pytest.approx(shares, rel=1e-6, abs=1e-6)
    assert shares_s(scaled, again) * factor == pytest.approx(shares_s(work, shares), rel=ROUGHLY)


@given(workloads(), st.integers(0, 11), st.floats(1.0, 100.0), st.floats(1.0, 100.0))
def test_more_bandwidth_is_never_slower(
    work: Workload, member: int, up: float, down: float
) -> None:
    lines = list(work.rates)
    old = lines[member % len(lines)]
    lines[member % len(lines)] = Bandwidth(old.up_bytes_per_s * up, old.down_bytes_per_s * down)
    more = evolve(work, rates=tuple(lines))
    before, after = shares_s(work, best_shares(work)), shares_s(more, best_shares(more))
    assert after <= before * (1 + ROUGHLY)


# ---------------------------------------------------------------- pairs, codecs, listeners


def test_an_owner_must_reach_those_who_only_listen() -> None:
    work = evolve(symmetric([1e6] * 4), contributor_count=3, pair_limits={(0, 3): 0.0})
    assert best_shares(work) == pytest.approx([0.0, 0.5, 0.5])
    listener_sends_nothing = evolve(work, pair_limits={(3, 0): 0.0})
    assert best_shares(listener_sends_nothing) == pytest.approx([1 / 3] * 3)


def test_without_a_possible_owner_there_is_an_error() -> None:
    ring_of_strangers = {(0, 1): 0.0, (1, 2): 0.0, (2, 0): 0.0}
    with pytest.raises(NoReachableOwnerError):
        best_shares(evolve(symmetric([1e6] * 3), pair_limits=ring_of_strangers))


def test_a_relayed_pair_gets_less_to_carry() -> None:
    """Peers 0 and 1 reach each other at a hundredth of their lines' speed."""
    work = evolve(symmetric([1e6] * 6), pair_limits={(0, 1): 1e4, (1, 0): 1e4})
    shares = best_shares(work)
    assert shares_s(work, shares) < shares_s(work, [1 / 6] * 6) / 10
    assert shares_s(work, shares) < 1.5 * bound_s(work)
    assert 0.0 < shares[0] + shares[1] < 0.05
    assert shares[2:] == pytest.approx([shares[2]] * 4), "equal lines, equal shares"


def test_a_fast_enough_pair_changes_nothing() -> None:
    free = symmetric([1e6, 2e6, 3e6, 4e6])
    limited = evolve(free, pair_limits={(1, 2): 1e9})
    assert best_shares(limited) == pytest.approx(best_shares(free), abs=1e-5)


def test_listeners_cost_the_owners_uplinks() -> None:
    free = symmetric([1e6] * 4)
    heard = evolve(free, rates=(*free.rates, *[Bandwidth(1e6, 1e9)] * 4))
    assert shares_s(heard, best_shares(heard)) > shares_s(free, best_shares(free))
    deaf = evolve(free, rates=(*free.rates, Bandwidth(1e6, 1e4)))
    assert shares_s(deaf, best_shares(deaf)) == pytest.approx(SIZE / 1e4)


def test_small_results_make_owning_a_relief() -> None:
    """With a result of a hundredth, a slow uplink is better off owning than contributing."""
    lines = (Bandwidth(1e5, 1e8), Bandwidth(1e6, 1e8), Bandwidth(1e6, 1e8))
    work = Workload(lines, 3, SIZE, SIZE / 100)
    shares = best_shares(work)
    assert shares[0] > 0.5
    assert shares_s(work, shares) < 0.3 * shares_s(work, [0.0, 0.5, 0.5])

"""Estimates of lines, and plans that approach the best one by them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from holdfast.membership.planning.bandwidth import (
    DEFAULT_BYTES_PER_S,
    DELAY_S_MAX,
    RATE_MAX_BYTES_PER_S,
    RATE_MIN_BYTES_PER_S,
    REPORT_S_MAX,
    REPORTS_HALF_LIFE,
    WAITED,
    Bandwidth,
    Bandwidths,
)
from holdfast.membership.planning.shares import (
    Workload,
    best_shares,
    bound_s,
    chosen_shares,
    shares_s,
)
from holdfast.protocol.messages import COUNT_MAX, MEMBERS_MAX, LinkLoad, Measured
from tests.membership.table import (
    FOUNDER,
    SPARE,
    A,
    B,
    C,
    D,
    Table,
    hello_of,
    holding,
    started,
)

MBIT = 125_000.0
PEERS = [f"{number:032x}" for number in range(16)]


def report(up: float, down: float = 0.0, seconds: float = 5.0) -> Measured:
    return Measured(int(up * seconds), seconds, int(down * seconds), seconds if down else 0.0, ())


def test_a_first_report_counts_whole() -> None:
    known = Bandwidths()
    known.measured(A, report(1e6, 4e6))
    assert known.known(A) == Bandwidth(1e6, 4e6)


def test_a_report_counts_half_after_a_half_life_of_others() -> None:
    known = Bandwidths()
    known.measured(A, report(1e6, seconds=1000.0))
    for _ in range(round(REPORTS_HALF_LIFE)):
        known.measured(A, report(3e6, seconds=1000.0))
    kept = [0.5 ** (age / REPORTS_HALF_LIFE) for age in (2, 1, 0)]
    wanted = (1e6 * kept[0] + 3e6 * (kept[1] + kept[2])) / sum(kept)
    rate = known.known(A)
    assert rate is not None
    assert kept[0] == 0.5
    assert rate.up_bytes_per_s == pytest.approx(wanted)


def test_a_long_copy_does_not_outweigh_rounds() -> None:
    known, like_a_round = Bandwidths(), Bandwidths()
    known.measured(A, report(1e6, seconds=1000.0))
    like_a_round.measured(A, report(1e6, seconds=REPORT_S_MAX))
    for one in (known, like_a_round):
        one.measured(A, report(3e6))
    assert known.known(A) == like_a_round.known(A)


def test_a_change_is_believed_after_a_few_reports() -> None:
    known = Bandwidths()
    for _ in range(100):
        known.measured(A, report(1e6))
    for _ in range(16):
        known.measured(A, report(3e6))
    rate = known.known(A)
    assert rate is not None
    assert rate.up_bytes_per_s == pytest.approx(3e6, rel=0.01)


def test_a_line_that_was_hardly_busy_is_not_known() -> None:
    known = Bandwidths()
    known.measured(A, report(1e9, seconds=0.01))
    assert known.known(A) is None
    for _ in range(20):
        known.measured(A, report(1e6, seconds=0.01))
    assert known.known(A) is not None, "little by little it is"


def test_unmeasured_peers_count_as_the_median_and_without_any_as_the_default() -> None:
    known = Bandwidths()
    default = known.lines([A, B], {})
    assert set(default.rates.values()) == {Bandwidth(DEFAULT_BYTES_PER_S, DEFAULT_BYTES_PER_S)}
    assert default.guessed == {A, B}
    known.measured(A, report(1e6))
    known.measured(B, report(3e6, 5e6))
    lines = known.lines([A, B, C], {})
    assert lines.rates[C] == Bandwidth(2e6, 3e6)
    assert lines.guessed == {C}


def test_while_half_of_the_contributors_are_guessed_all_count_alike_but_for_caps() -> None:
    known = Bandwidths()
    known.measured(A, report(1e6))
    known.measured(B, report(9e6))
    half = known.lines([A, B, C, D], {}, sending=[A, B, C, D])
    assert half.guessed == {C, D}
    assert set(half.rates.values()) == {Bandwidth(5e6, 5e6)}
    assert half.cautious == half.rates
    assert known.lines([A, B, C], {}, sending=[A, B]).rates[A] == Bandwidth(1e6, 1e6), "C listens"
    capped = known.lines([A, B, C], {C: Bandwidth(2e6, math.inf)}, sending=[A, B, C])
    assert capped.guessed == frozenset(), "its owner says what it may send"
    assert [capped.rates[peer].up_bytes_per_s for peer in (A, B, C)] == [1e6, 9e6, 2e6]


def test_a_new_contributor_counts_as_the_slowest_and_leaves_the_others_their_lines() -> None:
    known = Bandwidths()
    for _ in range(5):
        known.measured(A, report(1e6))
        known.measured(B, report(9e6))
    lines = known.lines([A, B, C], {}, sending=[A, B, C])
    assert lines.guessed == {C}
    assert lines.rates == {p: Bandwidth(r, r) for p, r in ((A, 1e6), (B, 9e6), (C, 1e6))}
    assert lines.cautious[A].up_bytes_per_s < lines.cautious[C].up_bytes_per_s


def test_a_copy_of_few_bytes_does_not_make_a_line_slow() -> None:
    """Whoever serves it has waited for requests for most of the time."""
    known = Bandwidths()
    known.measured(A, Measured(50_000, 3.0, 0, 0.0, ()))
    known.measured(A, Measured(1_500_000, 0.5, 0, 0.0, ()))
    rate = known.known(A)
    assert rate is not None
    assert rate.up_bytes_per_s == pytest.approx(3e6, rel=0.25)


def test_in_a_small_round_delays_keep_shares_equal() -> None:
    rates = (Bandwidth(4e6, 4e6), Bandwidth(2e6, 2e6), Bandwidth(1e6, 1e6))
    large, small = (Workload(rates, 3, size, size, delay_s=0.1) for size in (1e7, 1e4))
    assert not equal(chosen_shares(large))
    assert equal(chosen_shares(small))


def test_delays_are_half_of_the_longest_known_round_trip_among_those_who_take_part() -> None:
    known = Bandwidths()
    assert known.lines([A, B], {}).delay_s == 0.0
    links = (LinkLoad(B, 1, 1.0, 0.08), LinkLoad(C, 1, 1.0, 0.3), LinkLoad(D, 1, 1.0, 1e300))
    known.measured(A, Measured(3, 1.0, 0, 0.0, links))
    assert known.lines([A, B], {}).delay_s == pytest.approx(0.04)
    assert known.lines([A, B, C], {}).delay_s == pytest.approx(0.15)
    assert known.lines([A, B, C, D], {}).delay_s == DELAY_S_MAX


def test_a_cap_counts_for_its_direction_only_and_for_unmeasured_peers_too() -> None:
    known = Bandwidths()
    known.measured(A, report(5e6, 8e6))
    lines = known.lines([A, B], {A: Bandwidth(1e6, math.inf), B: Bandwidth(math.inf, 2e6)})
    assert lines.rates[A] == Bandwidth(1e6, 8e6)
    assert lines.rates[B] == Bandwidth(5e6, 2e6)


@given(st.integers(0, COUNT_MAX), st.floats(0.0, 1e300))
def test_no_report_makes_an_absurd_rate(count: int, seconds: float) -> None:
    known = Bandwidths()
    known.measured(A, Measured(count, seconds, count, seconds, (LinkLoad(B, count, seconds),)))
    rate = known.lines([A], {}).rates[A]
    assert RATE_MIN_BYTES_PER_S <= rate.up_bytes_per_s <= RATE_MAX_BYTES_PER_S
    assert RATE_MIN_BYTES_PER_S <= rate.down_bytes_per_s <= RATE_MAX_BYTES_PER_S


def test_the_number_of_remembered_peers_is_limited() -> None:
    known = Bandwidths()
    for number in range(MEMBERS_MAX + 5):
        known.measured(f"{number:032x}", report(1e6))
    assert known.known(f"{4:032x}") is None
    assert known.known(f"{5:032x}") is not None
    assert len(known.links) == MEMBERS_MAX


def test_what_plans_show_of_the_lines_leads_to_the_best_plan() -> None:
    """Measured through the plan's own traffic, the fast peers are found among the slow ones.

    A line shows no more than what went through it: the fast peers' downlinks carry, while they are
    busy, just what the slow peers send.
    """
    true = [Bandwidth(20 * MBIT, 300 * MBIT)] * 6 + [Bandwidth(1000 * MBIT, 1000 * MBIT)] * 2
    peers = [f"{number:032x}" for number in range(8)]
    known, size = Bandwidths(), 1e8
    best = bound_s(Workload(tuple(true), 8, size, size))
    took_s = []
    for _round in range(3):
        lines = known.lines(peers, {})
        shares = best_shares(Workload(tuple(lines.rates[p] for p in peers), 8, size, size))
        took_s.append(shares_s(Workload(tuple(true), 8, size, size), shares))
        for peer, rate, share in zip(peers, true, shares, strict=True):
            moved = size * (1 - share + 7 * share)
            sending_s = moved / rate.up_bytes_per_s
            # Something of somebody's is always on its way in, as the slow ones never pause.
            known.measured(peer, Measured(int(moved), sending_s, int(moved), took_s[-1], ()))
    assert took_s[0] == pytest.approx(1.75 * best)
    assert took_s[1] == took_s[2] == pytest.approx(best)


# ---------------------------------------------------------------- lines that waited


def waited(up: float, best: float) -> Measured:
    return evolve(report(up, up), best_bytes_per_s=best)


def test_the_best_second_of_a_line_that_waited_is_its_rate() -> None:
    known = Bandwidths()
    known.measured(A, waited(1e6, WAITED * 1e6))
    known.measured(B, waited(1e6, 0.99 * WAITED * 1e6))
    known.measured(C, waited(1e6, 0.0))
    assert known.known(A) == Bandwidth(WAITED * 1e6, WAITED * 1e6)
    assert known.known(B) == known.known(C) == Bandwidth(1e6, 1e6)


def test_among_unequal_lines_that_all_wait_for_the_slowest_the_fast_ones_are_found() -> None:
    """As long as shares are equal, all send as much in the same time: rates alone tell nothing."""
    true = [300 * MBIT, 20 * MBIT, 20 * MBIT, 15 * MBIT]
    peers, size, known = PEERS[:4], 8e6, Bandwidths()
    work = Workload(tuple(Bandwidth(up, 10 * up) for up in true), 4, size, size)
    took_s = []
    for _round in range(6):
        lines = known.lines(peers, {}, sending=peers)
        learnt = Workload(tuple(lines.rates[p] for p in peers), 4, size, size)
        shares = chosen_shares(learnt, [lines.cautious[p] for p in peers])
        took_s.append(shares_s(work, shares))
        for peer, up, share in zip(peers, true, shares, strict=True):
            moved = size * (1 + 2 * share)
            best = min(up, 3 * moved / took_s[-1])  # what is there is sent at once, then it waits
            sent = Measured(int(moved), took_s[-1], int(moved), took_s[-1], (), best)
            known.measured(peer, sent)
    assert took_s[0] > 1.4 * bound_s(work)
    assert took_s[-1] < 1.1 * bound_s(work)


# ---------------------------------------------------------------- noise

NOISE = 0.15  # of a rate, from one report to the next


class _Learner:
    """Rounds of some seconds over lines whose rates are reported with noise."""

    def __init__(self, seed: int) -> None:
        self.known = Bandwidths()
        self._random = random.Random(seed)

    def shares(self, count: int) -> list[float]:
        """Return the shares that the next round would have."""
        peers = PEERS[:count]
        lines = self.known.lines(peers, {}, sending=peers)
        work = Workload(tuple(lines.rates[p] for p in peers), count, 1e8, 1e8)
        return chosen_shares(work, [lines.cautious[p] for p in peers])

    def round(self, ups: Sequence[float]) -> None:
        for peer, up in zip(PEERS, ups, strict=False):
            up *= max(0.2, self._random.gauss(1.0, NOISE))
            self.known.measured(peer, report(up, 4 * up, seconds=self._random.uniform(1.0, 8.0)))


def equal(shares: Sequence[float]) -> bool:
    return max(shares) == min(shares)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_noise_leaves_the_shares_of_equal_lines_equal(count: int) -> None:
    """Noise of 15 %, a hundred rounds, ten seeds: at least 99 % of the plans."""
    even, all_ = 0, 0
    for seed in range(10):
        learner = _Learner(seed)
        for _ in range(100):
            even += equal(learner.shares(count))
            all_ += 1
            learner.round([1e6] * count)
    assert even >= 0.99 * all_


@pytest.mark.parametrize(
    "ups", [(1, 2, 2, 2), (1, 1, 2, 2), (2, 1, 1, 1), (2, 2, 2, 2, 1, 1, 1, 1)], ids=str
)
def test_lines_that_differ_twofold_are_used_within_three_rounds_until_they_are_equal_again(
    ups: Sequence[float],
) -> None:
    used, kept, again = 0, 0, 0
    for seed in range(100):
        learner = _Learner(seed)
        for _ in range(3):
            learner.round([1e6 * up for up in ups])
        used += not equal(learner.shares(len(ups)))
        for _ in range(9):
            learner.round([1e6 * up for up in ups])
            kept += not equal(learner.shares(len(ups)))
        for _ in range(5):
            learner.round([2e6] * len(ups))
        again += equal(learner.shares(len(ups)))
    assert used >= 85
    assert kept >= 9 * 85
    assert again >= 95


# ---------------------------------------------------------------- through the master


def test_a_round_remembers_what_it_should_have_taken() -> None:
    table = started(A, B, C)
    for peer in (A, B, C):
        table.say(peer, report(1e3, 1e3, seconds=100.0))
    order = table.reduce(A, B, C)
    running = table.status()["rounds"][0]["plan"]
    assert running["predicted_s"] >= running["bound_s"] > 0
    table.wait(1.0, A, B, C)
    table.reduced(order, A, B, C)
    past = table.status()["past_rounds"][-1]["plan"]
    assert past == {**running, "took_s": 1.0}
    assert past["guessed_count"] == 0
    # 16 values in one chunk: its owner takes two contributions and gives two results.
    assert past["predicted_s"] == pytest.approx(2 * 64 / 1e3)
    assert past["bound_s"] == pytest.approx(4 / 3 * 64 / 1e3)


def test_a_round_that_never_reduced_has_no_plan() -> None:
    table = started(A, B, C)
    table.open_round()
    assert table.status()["rounds"][0]["plan"] is None


def test_reports_and_caps_steer_the_plan() -> None:
    table = started(A, B, C)
    table.join(
        "d" * 32,
        SPARE,
        evolve(hello_of("d" * 32), upload_bytes_per_s=5e5, download_bytes_per_s=7e5),
    )
    for peer in (A, C):
        table.say(peer, report(1e4))
    table.say(B, report(1e8))
    table.say("d" * 32, report(4e5, down=9e5))
    order = table.reduce(A, B, C)
    assert [run.peer for run in order.plan.owners] == [B]
    members = {m["peer"]: m["bandwidth"] for m in table.status()["members"]}
    assert members[B]["up_bytes_per_s"] == pytest.approx(1e8)
    assert members["d" * 32]["up_bytes_per_s"] == 4e5
    assert members["d" * 32]["down_bytes_per_s"] == 7e5, "no more than its owner allows"
    assert members["d" * 32]["upload_cap_bytes_per_s"] == 5e5
    assert members["d" * 32]["download_cap_bytes_per_s"] == 7e5


def test_a_capped_contributor_owns_nothing_where_that_holds_nobody_up() -> None:
    """Sixteen values are one chunk; of equals the first owns it."""
    table = Table()
    table.found(A)
    table.join(
        A,
        FOUNDER,
        evolve(holding(A, 0), upload_bytes_per_s=1e3),
    )
    table.join_in_sync(B)
    table.join_in_sync(C)
    table.wait(2.0, A, B, C)  # the round that A's first connection opened was aborted with it
    assert [run.peer for run in table.reduce(A, B, C).plan.owners] == [B]
    equals = started(A, B, C)
    assert [run.peer for run in equals.reduce(A, B, C).plan.owners] == [A]


def test_the_matrix_shows_links_between_those_who_are_here() -> None:
    table = started(A, B, C)
    load = (LinkLoad(B, 1000, 2.0), LinkLoad("e" * 32, 5000, 1.0), LinkLoad(C, 0, 0.0))
    table.say(A, Measured(6000, 2.0, 0, 0.0, load))
    members = {m["peer"]: m["bandwidth"] for m in table.status()["members"]}
    assert members[A]["links"] == {B: 500.0}

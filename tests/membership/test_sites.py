"""Trees of two levels: when they are faster, by how much, and that no estimate is below its bound."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.membership.planning.bandwidth import Bandwidth
from holdfast.membership.planning.shares import (
    SharedLine,
    Workload,
    best_shares,
    bound_s,
    program_shares,
    shares_s,
)
from holdfast.membership.planning.sites import TreePlan, plan_tree, same_site
from holdfast.protocol.errors import LocalProtocolError

MBIT = 125_000.0
SIZE = 1e8
HOME = Bandwidth(20 * MBIT, 300 * MBIT)
LAN = Bandwidth(1000 * MBIT, 1000 * MBIT)
ROUGHLY = 1e-5
rates = st.floats(1e5, 1e9)
bandwidths = st.builds(Bandwidth, rates, rates)


@st.composite
def sited(draw: st.DrawFn) -> tuple[Workload, list[SharedLine]]:
    """Any lines, codecs and listeners; some members, perhaps all, in one or two sites."""
    count = draw(st.integers(2, 7))
    lines = draw(st.lists(bandwidths, min_size=count, max_size=count + 2))
    work = Workload(tuple(lines), count, draw(st.floats(1e5, 1e9)), draw(st.floats(1e5, 1e9)))
    order = draw(st.permutations(range(len(lines))))
    first = draw(st.integers(2, len(order)))
    parts = [order[:first], order[first:]]
    sites = [SharedLine(tuple(part), draw(bandwidths)) for part in parts if len(part) > 1]
    return work, sites[: draw(st.integers(1, 2))]


def tree(work: Workload, sites: list[SharedLine], *, chunk_count: int = 100) -> TreePlan:
    return plan_tree(work, sites, inner_up_bytes=work.up_bytes, chunk_count=chunk_count)


# ---------------------------------------------------------------- when it pays


def test_four_behind_one_uplink_cross_it_once() -> None:
    """Four share 20 Mbit/s, four others have as much each: the star is four times slower."""
    work = Workload((LAN,) * 4 + (HOME,) * 4, 8, SIZE, SIZE)
    planned = tree(work, [SharedLine((0, 1, 2, 3), HOME)])
    assert planned.pays
    # Five members of equal uplinks: 2 (5 - 1) / 5 of everything.
    assert planned.tree_bound_s == pytest.approx(1.6 * SIZE / (20 * MBIT))
    assert planned.tree_s == pytest.approx(planned.tree_bound_s, rel=0.02)
    # The star owns all outside; the site still has to send four contributions.
    assert planned.star_s == pytest.approx(4 * SIZE / (20 * MBIT), rel=0.01)
    assert [site.members for site in planned.sites] == [(0, 1, 2, 3), (4,), (5,), (6,), (7,)]
    assert planned.sites[0].leading == pytest.approx([0.25] * 4)


def test_lines_of_their_own_need_no_tree() -> None:
    """A site whose line is as wide as its members' together gains little or nothing."""
    alone = Bandwidth(20 * MBIT, 20 * MBIT)
    work = Workload((alone,) * 8, 8, SIZE, SIZE)
    wide = Bandwidth(80 * MBIT, 80 * MBIT)
    planned = tree(work, [SharedLine((0, 1, 2, 3), wide)])
    assert not planned.pays


def test_a_site_that_is_slow_within_keeps_the_star() -> None:
    """Its members' own lines are hardly faster than the one they share."""
    slow = Bandwidth(6 * MBIT, 300 * MBIT)
    work = Workload((slow,) * 4 + (HOME,) * 4, 8, SIZE, SIZE)
    assert not tree(work, [SharedLine((0, 1, 2, 3), HOME)]).pays


def test_what_saves_less_than_a_tenth_is_not_done() -> None:
    """Two share a line; the wider it is, the less it matters. The rule has one turning point."""
    work = Workload((LAN,) * 2 + (HOME,) * 6, 8, SIZE, SIZE)
    answers = []
    for mbit in (10, 20, 30, 36, 39, 60, 200):
        line = Bandwidth(mbit * MBIT, 300 * MBIT)
        planned = tree(work, [SharedLine((0, 1), line)])
        assert planned.pays == (planned.tree_s <= 0.9 * planned.star_s)
        answers.append(planned.pays)
    assert answers == sorted(answers, reverse=True)
    assert {True, False} == set(answers)


def test_listeners_of_a_site_get_the_result_over_its_line_once() -> None:
    """Three spares in one home with 30 Mbit/s down; three contributors elsewhere."""
    home = Bandwidth(20 * MBIT, 30 * MBIT)
    work = Workload((LAN,) * 6, 3, SIZE, SIZE)
    planned = tree(work, [SharedLine((3, 4, 5), home)])
    assert planned.star_s == pytest.approx(3 * SIZE / (30 * MBIT), rel=0.01)
    assert planned.tree_s == pytest.approx(SIZE / (30 * MBIT), rel=0.1)
    assert planned.sites[-1].owned == 0.0
    assert planned.sites[-1].leading == pytest.approx((1 / 3, 1 / 3, 1 / 3))


# ---------------------------------------------------------------- what holds for all


@settings(max_examples=80, deadline=None)
@given(sited())
def test_shares_are_shares_and_no_time_is_below_its_bound(
    case: tuple[Workload, list[SharedLine]],
) -> None:
    work, sites = case
    planned = tree(work, sites)
    assert sorted(m for site in planned.sites for m in site.members) == list(range(len(work.rates)))
    assert sum(site.owned for site in planned.sites) == pytest.approx(1.0)
    for site in planned.sites:
        assert len(site.leading) == len(site.members)
        assert sum(site.leading) == pytest.approx(1.0)
        assert min(site.leading) >= 0.0
    assert planned.tree_s >= planned.tree_bound_s * (1 - ROUGHLY)
    assert planned.star_s >= planned.star_bound_s * (1 - ROUGHLY)


@settings(max_examples=80, deadline=None)
@given(sited(), st.lists(st.floats(0.01, 1.0), min_size=9, max_size=9))
def test_no_other_star_is_faster_over_shared_lines(
    case: tuple[Workload, list[SharedLine]], parts: list[float]
) -> None:
    work, sites = case
    work = evolve(work, shared=tuple(sites))
    mine = shares_s(work, best_shares(work))
    guess = parts[: work.contributor_count]
    others = shares_s(work, [part / sum(guess) for part in guess])
    assert bound_s(work) * (1 - ROUGHLY) <= mine <= others * (1 + ROUGHLY)


@settings(max_examples=60, deadline=None)
@given(sited())
def test_a_shared_line_without_a_limit_changes_nothing(
    case: tuple[Workload, list[SharedLine]],
) -> None:
    work, sites = case
    endless = Bandwidth(1e15, 1e15)
    lines = tuple(SharedLine(site.members, endless) for site in sites)
    free, shared = evolve(work, shared=()), evolve(work, shared=lines)
    assert shares_s(shared, program_shares(shared)) == pytest.approx(
        shares_s(free, best_shares(free)), rel=10 * ROUGHLY
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(bandwidths, min_size=3, max_size=8), st.integers(2, 8), st.data())
def test_own_lines_leave_a_tree_nothing_to_gain(
    lines: list[Bandwidth], group: int, data: st.DataObject
) -> None:
    """Whoever are grouped, if only their own lines limit them: that is what a fan-in limit would do."""
    members = data.draw(st.permutations(range(len(lines))))[: min(group, len(lines))]
    work = Workload(tuple(lines), len(lines), SIZE, SIZE)
    endless = Bandwidth(1e15, 1e15)
    planned = tree(work, [SharedLine(tuple(members), endless)], chunk_count=10**6)
    assert planned.tree_s >= planned.star_s * (1 - 10 * ROUGHLY)
    assert not planned.pays


@pytest.mark.parametrize("count", [4, 9, 25])
@pytest.mark.parametrize("line", [Bandwidth(1e6, 1e9), Bandwidth(1e9, 1e6)], ids=["up", "down"])
def test_equal_lines_in_groups_need_what_the_star_needs(count: int, line: Bandwidth) -> None:
    """All lines together move the same bytes, however they are grouped."""
    work = Workload((line,) * count, count, SIZE, SIZE)
    star = 2 * (count - 1) / count * SIZE / 1e6
    for group in (2, count // 2, count):
        planned = tree(
            work, [SharedLine(tuple(range(group)), Bandwidth(1e15, 1e15))], chunk_count=10**6
        )
        assert planned.star_s == pytest.approx(star, rel=ROUGHLY)
        assert planned.tree_s >= star * (1 - ROUGHLY)


def test_contradictory_sites_are_refused() -> None:
    work = Workload((LAN,) * 4, 4, SIZE, SIZE)
    for sites in (
        [SharedLine((0, 1), HOME), SharedLine((1, 2), HOME)],
        [SharedLine((0, 4), HOME)],
        [SharedLine((0,), HOME)],
    ):
        with pytest.raises(LocalProtocolError):
            tree(work, sites)


# ---------------------------------------------------------------- who is where


def test_one_address_is_one_line() -> None:
    hosts = ["198.51.100.7", "203.0.113.1", "198.51.100.7", "", "", "127.0.0.1", "127.0.0.1"]
    assert same_site(hosts) == [(0, 2)]


def test_a_prefix_of_ipv6_is_one_line() -> None:
    hosts = ["2001:db8:0:1::5", "2001:db8:0:2::5", "2001:DB8::1:a:b:c:d", "::1", "::1"]
    assert same_site(hosts) == [(0, 2)]

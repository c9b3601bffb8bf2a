"""Disputes: the members that are left out of a round after reports about each other."""

from __future__ import annotations

import pytest

from holdfast.membership.master.routes.disputes import DISPUTES_MAX, Disputes
from holdfast.protocol.messages import LinkBroken, RouteWanted, SyncFragment
from tests.membership.table import SPARE, TEN_SECONDS, A, B, C, D, E, reducing, started

S = "5" * 32
T = "6" * 32
U = "7" * 32


@pytest.mark.parametrize("word", [RouteWanted, LinkBroken])
def test_who_says_that_it_reaches_nobody_leaves_no_spare_without_results(
    word: type,
) -> None:
    table = started(A, B, C, D, E, spares=[S, T, U])
    for other in (A, B, C, D, S, T, U):
        wanted = word is RouteWanted
        table.say(E, RouteWanted(other, 0, True, "because") if wanted else LinkBroken(other))
    table.wait(5.0, A, B, C, D, E, S, T, U)
    order = table.reduce(A, B, C, D, E)
    assert [c.peer for c in order.contributors] == [A, B, C, D]
    assert order.receivers == (A, B, C, D, S, T, U)


def test_a_spare_that_reports_to_reach_no_member_is_left_out_alone() -> None:
    table = started(A, B, C, spares=[S, T])
    for other in (A, B, C, T):
        table.say(S, RouteWanted(other, 0, True, "because"))
    order = table.reduce(A, B, C)
    assert [c.peer for c in order.contributors] == [A, B, C]
    assert order.receivers == (A, B, C, T)


def test_spares_that_no_contributor_reaches_go_before_contributors() -> None:
    table = started(A, B, spares=[S, T, U])
    for spare in (S, T, U):
        for other in (A, B):
            table.say(spare, RouteWanted(other, 0, True, "because"))
    order = table.reduce(A, B)
    assert [c.peer for c in order.contributors] == [A, B]
    assert order.receivers == (A, B)


def test_the_member_that_many_disputes_have_in_common_is_left_out() -> None:
    disputes = Disputes(10.0)
    disputes.note(E, A, 0.0)
    assert disputes.quarrelsome([A, B, C, D, E], 1.0) == []
    disputes.note(B, E, 1.0)
    assert disputes.quarrelsome([A, B, C, D, E], 2.0) == [E]
    assert disputes.quarrelsome([A, B, C, D, E], 10.5) == [E]  # but nothing was planned since
    disputes.planned([A, E])
    assert disputes.quarrelsome([A, B, C, D, E], 10.5) == []  # the first is over
    assert disputes.quarrelsome([A, E], 2.0) == []  # of two there is no third


def test_the_number_of_disputes_is_bounded() -> None:
    disputes = Disputes(10.0)
    for number in range(2 * DISPUTES_MAX):
        disputes.note(E, f"{number:032x}", 0.0)
    inside = {E, *(f"{number:032x}" for number in range(2 * DISPUTES_MAX))}
    assert len(list(disputes.pairs(inside, 1.0))) == DISPUTES_MAX


def test_a_pair_is_paired_again_though_one_end_takes_no_part_meanwhile() -> None:
    table, first = reducing(A, B, C, spares=[S], toml=TEN_SECONDS)
    table.complete(first, A, B, C, S)
    table.leave(S)
    for other in (A, B, C):
        table.master.routes.disputes.note(other, S, table.now_s)
    table.join(S, SPARE)
    table.forget()
    order = table.reduce(A, B, C)
    assert S not in order.receivers
    table.complete(order, A, B, C)
    assert not table.master.routes.connected(A, S)
    table.wait(11.0, A, B, C, S)
    assert table.master.routes.connected(A, S)


def test_a_pair_in_dispute_copies_though_no_round_can_be_planned() -> None:
    """The round waits for the member that copies, and the copy would wait for the round."""
    table = started(A, B, toml="[membership]\ndeadline_s = 10.0\nmin_members = 2\n")
    table.commit(A, B)
    table.leave(B)
    table.master.routes.disputes.note(A, B, table.now_s)
    table.wait(1.0, A)
    table.join(B)
    table.hears_no(B, SyncFragment)
    table.wait(11.0, A, B)
    assert not table.master.routes.connected(A, B)
    assert table.hear(B, SyncFragment).donors == (A,)

"""A reduction that was under way when the master ended goes on under the next one, or is void."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from holdfast.membership.master.adoption import LISTENERS_WAIT_S
from holdfast.membership.master.coordinator import Grant
from holdfast.membership.master.state.journal import RoundCommitted
from holdfast.protocol import messages as m
from tests.membership.table import (
    CONTRIBUTOR,
    DIGEST,
    SPARE,
    TEN_SECONDS,
    A,
    B,
    C,
    Table,
    holding,
    reducing,
)


def under_way(toml: str = "", spares: Sequence[str] = ()) -> tuple[Table, m.Reduce]:
    """A and B reduce when the master ends, with C or for it. Another one has just begun."""
    contributors = [peer for peer in (A, B, C) if peer not in spares]
    table, order = reducing(*contributors, spares=spares, toml=toml)
    table.restart()
    return table, order


def come_back(
    table: Table,
    order: m.Reduce,
    peer: str,
    digest: bytes = m.NO_DIGEST,
    grant: Grant = CONTRIBUTOR,
) -> m.Welcome:
    held = m.Reduced(order.round, order.attempt, digest)
    table.join(peer, grant, holding(peer, 0, held))
    return table.hear(peer, m.Welcome)


def test_a_reduction_that_is_under_way_goes_on_after_a_restart() -> None:
    table, order = under_way()
    for peer, digest in ((A, DIGEST), (B, m.NO_DIGEST), (C, m.NO_DIGEST)):
        table.hears_no(A, m.View)  # it would cut links to those on their way back
        welcome = come_back(table, order, peer, digest)
        assert (welcome.committed, welcome.going_on) == ((), (order.round,))
        table.reduced(order, peer)  # the first two before it is known that all are back
    for peer in (A, B, C):
        commit = table.hear(peer, m.Commit)
        assert (commit.round, commit.digest, commit.contributors) == (
            order.round,
            DIGEST,
            order.contributors,
        )
    assert [record.commit.round for record in table.records(RoundCommitted)] == [order.round]
    table.applied(order, A, B, C)
    assert table.hear(A, m.Open).version == 1


def test_what_failed_while_the_master_was_away_is_mended_when_it_is_back() -> None:
    table, order = under_way()
    for peer in (A, B, C):
        come_back(table, order, peer)
    table.say(A, m.ReduceFailed(order.round, order.attempt, (C,), False, "its link broke"))
    table.leave(C)
    table.repair(A, B)


def test_a_reduction_is_void_if_somebody_comes_back_without_it() -> None:
    table, order = under_way()
    assert come_back(table, order, A, DIGEST).going_on == (order.round,)
    table.join(B, hello=holding(B, 0))
    assert table.hear(B, m.Welcome).going_on == ()
    assert table.hear(A, m.Abort).round == order.round
    assert come_back(table, order, C).going_on == ()
    assert table.hear(A, m.Open).round == order.round + 1
    assert not table.records(RoundCommitted)


def test_a_reduction_is_void_if_somebody_does_not_come_back_in_time() -> None:
    table, order = under_way(TEN_SECONDS)
    for peer in (A, B):
        come_back(table, order, peer, DIGEST)
        table.reduced(order, peer)
    table.wait(9.9, A, B)
    table.hears_no(A, m.Abort)
    table.hears_no(A, m.View)
    table.wait(0.1, A, B)
    assert table.hear(A, m.Abort).round == order.round
    assert table.roles() == {"a": "contributor*", "b": "contributor*"}
    assert table.hear(A, m.Open).round == order.round + 1


def test_who_leaves_again_before_all_are_back_ends_the_reduction() -> None:
    table, order = under_way()
    for peer in (A, B):
        come_back(table, order, peer, DIGEST)
    table.leave(B)
    assert table.hear(A, m.Abort).round == order.round


def test_an_attempt_that_the_journal_does_not_know_is_void_after_a_restart() -> None:
    """The round was repaired meanwhile: other peers are lost, and other owners make the chunks."""
    table, order = under_way()
    again = attrs.evolve(order, attempt=order.attempt + 1)
    for peer in (A, B, C):
        assert come_back(table, again, peer, DIGEST).going_on == ()
    assert table.hear(A, m.Open).round == order.round + 1
    assert not table.records(RoundCommitted)


def test_a_spare_that_returns_last_gets_the_result_and_copies_nothing() -> None:
    table, order = under_way(spares=[C])
    assert order.receivers == (A, B, C)
    for peer in (A, B):
        come_back(table, order, peer, DIGEST)
        table.reduced(order, peer)
    table.wait(LISTENERS_WAIT_S - 0.1, A, B)
    table.hears_no(A, m.View)  # it would cut the spare's links
    assert come_back(table, order, C, grant=SPARE).going_on == (order.round,)
    for peer in (A, B, C):
        assert table.hear(peer, m.Commit).round == order.round
    table.hears_no(C, m.SyncFragment)


def test_a_spare_that_does_not_return_holds_nobody_up_for_long() -> None:
    table, order = under_way(spares=[C])
    assert order.receivers == (A, B, C)
    for peer in (A, B):
        come_back(table, order, peer, DIGEST)
        table.reduced(order, peer)
    table.hears_no(A, m.Commit)
    table.wait(LISTENERS_WAIT_S, A, B)
    assert table.hear(A, m.Commit).round == order.round

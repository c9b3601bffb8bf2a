"""Pairs without a link: reports to the master, and how long plans avoid the pair."""

from __future__ import annotations

import pytest

from holdfast.membership.master.routes.routes import APART_S
from holdfast.protocol import messages as m
from tests.membership.table import TEN_SECONDS, A, B, C, D, Table, started


def owners(order: m.Reduce) -> set[str]:
    return {run.peer for run in order.plan.owners}


def round_of(table: Table) -> m.Reduce:
    """A whole round."""
    order = table.commit(A, B, C)
    table.forget()
    return order


def test_a_link_that_stays_broken_is_planned_around_until_there_is_one_again() -> None:
    table = started(A, B, C, toml=TEN_SECONDS)
    assert owners(round_of(table)) == {A}
    table.say(A, m.LinkBroken(B))
    assert owners(round_of(table)) == {A}, "most links are made again at once"
    table.wait(table.spec.settle_s, A, B, C)
    order = round_of(table)
    assert owners(order) == {C}
    assert {c.peer for c in order.contributors} == {A, B, C}
    table.say(B, m.RouteWorks(A, 0))
    assert owners(round_of(table)) == {A}


def test_two_ends_that_say_it_late_do_not_leave_a_pair_apart() -> None:
    table = started(A, B, C, toml=TEN_SECONDS)
    table.say(A, m.LinkBroken(B), m.RouteWorks(B, 0))
    table.say(B, m.LinkBroken(A), m.RouteWorks(A, 0))
    table.wait(table.spec.settle_s, A, B, C)
    assert owners(round_of(table)) == {A}


@pytest.mark.fault("one of a pair without a link is removed and comes back")
def test_that_two_had_no_link_outlives_a_return() -> None:
    table = started(A, B, C, toml=TEN_SECONDS)
    table.say(B, m.LinkBroken(A))
    table.say(B, m.RouteWanted(A, 0, True, "no answer"))
    before = table.hear(A, m.Route)
    table.leave(B)
    table.join_in_sync(B)
    for one, other in ((A, B), (B, A)):
        table.hear(one, m.View)
        again = table.hear(one, m.Route)  # not before the view that names the other one
        assert again.peer == other
    assert owners(round_of(table)) == {C}
    table.say(B, m.RouteWorks(A, before.number))  # about a route of its last life here
    assert owners(round_of(table)) == {C}
    table.say(B, m.RouteWorks(A, again.number))
    assert owners(round_of(table)) == {A}


def test_a_member_that_returns_late_starts_with_default_routes() -> None:
    table = started(A, B, C, toml=TEN_SECONDS)
    table.say(B, m.RouteWanted(A, 0, False, "no answer"))
    table.leave(B)
    table.forget()
    table.wait(APART_S, A, C)
    table.join_in_sync(B)
    table.hears_no(A, m.Route)
    assert owners(round_of(table)) == {A}


def test_a_member_with_links_starts_with_default_routes_too() -> None:
    table = started(A, B, C, toml=TEN_SECONDS)
    table.say(A, m.LinkBroken(B))
    table.leave(B)  # it has lost its link to C too, and says so no more
    table.forget()
    table.join_in_sync(B)
    table.hears_no(A, m.Route)
    assert owners(round_of(table)) == {A}


def test_a_pair_that_returns_while_the_other_is_away_waits_for_it() -> None:
    table = started(A, B, C, toml=TEN_SECONDS)
    table.join_in_sync(D)
    table.say(B, m.RouteWanted(A, 0, False, "no answer"))
    table.leave(A)
    table.leave(B)
    table.forget()
    table.join_in_sync(B)
    table.hears_no(B, m.Route)
    table.join_in_sync(A)
    assert table.hear(A, m.Route).peer == B
    assert table.hear(B, m.Route).peer == A


@pytest.mark.parametrize(
    ("masters", "met_at"),
    [
        (("203.0.113.9:29700", "[2001:db8::1]:29700"), "203.0.113.9:40001"),
        (("[2001:db8::1]:29700", "192.168.0.2:29700", "203.0.113.9:29700"), "203.0.113.9:40001"),
        (("192.168.0.2:29700",), "192.168.0.3:40001"),
    ],
    ids=["at the master's address", "at its public one", "nothing better is known"],
)
def test_who_is_behind_the_masters_router_is_met_at_that_routers_address(
    masters: tuple[str, ...], met_at: str
) -> None:
    table = started(A, B, C, toml=TEN_SECONDS)
    table.take(table.master.know_masters(masters, table.now_s))
    hosts = {A: ("192.168.0.3", 40_001), B: ("198.51.100.7", 40_002)}
    for peer, (host, port) in hosts.items():
        connection = table.master.context.roster.members[peer].connection
        connection.host, connection.port, connection.reachable = host, port, peer == A
    table.say(B, m.RouteWanted(A, 0, True, "no answer"))
    routes = {peer: table.hear(peer, m.Route) for peer in (A, B)}
    assert {route.kind for route in routes.values()} == {m.RouteKind.PUNCHED}
    assert routes[A].addresses == ("198.51.100.7:40002",)
    assert routes[B].addresses == (met_at,)

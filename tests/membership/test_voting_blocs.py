"""Voting blocs: votes count by invite and line, and many votes of one bloc do not help it."""

from __future__ import annotations

import pytest

from holdfast.membership.master.coordinator import Grant
from holdfast.membership.master.state.journal import RootKnown, RoundCommitted
from holdfast.membership.master.state.voting_blocs import Election, elect, line_of
from holdfast.protocol import messages as m
from tests.membership.table import (
    DIGEST,
    LAYOUT,
    OTHER_DIGEST,
    A,
    B,
    C,
    D,
    E,
    Table,
    head_of,
    hello_of,
)

S, T = "5" * 32, "6" * 32
OURS, THEIRS = "1111AAAA", "2222BBBB"  # invites
HOSTS = {A: "198.51.100.1", B: "198.51.100.2", C: "198.51.100.3"}  # of the sybils: one line
SYBILS = (D, E, S, T)


def seven() -> Table:
    """Three machines of three lines, and four that came by one invite from one line."""
    table = Table()
    table.found(A, host=HOSTS[A])
    for peer in (B, C, *SYBILS):
        invite = THEIRS if peer in SYBILS else OURS
        host = HOSTS.get(peer, "203.0.113.9")
        table.join(peer, Grant(m.Role.CONTRIBUTOR, invite=invite), hello_of(peer), host)
        table.sync(peer)
    table.forget()
    return table


def test_four_of_one_invite_and_line_do_not_outvote_three_about_a_result() -> None:
    table = seven()
    order = table.reduce(A, B, C, *SYBILS)
    table.reduced(order, A, B, C)
    table.reduced(order, *SYBILS, digest=OTHER_DIGEST)
    table.diagnosed(order, A, B, C, *SYBILS)
    (record,) = table.records(RoundCommitted)
    assert record.commit.digest == DIGEST


def test_four_of_one_invite_and_line_do_not_replace_everybodys_weights() -> None:
    table = seven()
    order = table.reduce(A, B, C, *SYBILS)
    table.reduced(order, A, B, C, *SYBILS)
    for peer in SYBILS:
        table.say(peer, m.Applied(order.round, head_of(0, 1, b"W" * 32)))
    table.applied(order, A, B, C)
    heads = [record.head for record in table.records(RootKnown)]
    assert heads[-1] == head_of(0, 1)
    for peer in (A, B, C):
        table.hears_no(peer, m.SyncFragment)


def test_two_of_one_invite_and_line_do_not_get_an_update_refused() -> None:
    table = seven()
    order = table.reduce(A, B, C, *SYBILS)
    table.forget()
    for peer in (D, E):
        table.say(peer, m.ReduceFailed(order.round, 1, (A,), True, "not finite"))
    table.hears_no(B, m.Abort)
    assert A not in table.master.scheduler.rounds[order.round].distrust.refused
    table.say(B, m.ReduceFailed(order.round, 1, (A,), True, "not finite"))
    assert A in table.master.scheduler.rounds[order.round].distrust.refused


ONE, OTHER = ("x", "1"), ("y", "2")


@pytest.mark.parametrize(
    ("votes", "voices", "winner", "majority"),
    [
        ("1112", [ONE] * 4, "1", True),  # a lab behind one router: one vote each
        ("1122", [ONE] * 4, "1", False),
        ("12222", [ONE] + [OTHER] * 4, "1", False),  # a volunteer was here before the lab
        ("11112", [OTHER] * 4 + [ONE], "1", True),  # the lab was
        ("1112222", [("x", "1"), ("x", "2"), ("x", "3"), *[OTHER] * 4], "1", True),
        ("2222111", [*[OTHER] * 4, ("x", "1"), ("x", "2"), ("x", "3")], "2", True),
        ("1.2", [ONE, ONE, OTHER], "1", False),
        ("111", [ONE, OTHER, ("z", "3")], "1", True),
        ("...2222", [("x", "1"), ("x", "2"), ("x", "3"), *[OTHER] * 4], "2", False),
        ("111....", [("x", "1"), ("x", "2"), ("x", "3"), *[OTHER] * 4], "1", False),
    ],
)
def test_who_wins(votes: str, voices: list[tuple[str, str]], winner: str, majority: bool) -> None:
    said = {str(at): vote for at, vote in enumerate(votes) if vote != "."}
    found = elect(said, {str(at): voice for at, voice in enumerate(voices)})
    assert found == Election(winner, majority)


def test_an_address_or_a_prefix_of_ipv6_is_one_line() -> None:
    assert line_of("198.51.100.7") == "198.51.100.7" != line_of("198.51.100.8")
    assert line_of("2001:db8:0:1::5") == line_of("2001:DB8::1:a:b:c:d")
    assert line_of("2001:db8:0:1::5") != line_of("2001:db8:0:2::5")


def test_of_those_who_came_by_one_invite_the_first_one_founds() -> None:
    grant = Grant(m.Role.CONTRIBUTOR, founder=True, invite=OURS)
    table = Table()
    table.join(A, grant, hello_of(A, layout=None))
    table.join(B, grant)
    table.hears_no(B, m.SupplyWeights)
    assert "waiting for the trainer of a (aaaaaaaa)" in table.status()["why_waiting"]
    table.say(A, m.TrainerAttached(LAYOUT))
    table.hear(A, m.SupplyWeights)
    table.say(A, m.TrainerLost("crash"))
    table.hears_no(B, m.SupplyWeights)
    table.leave(A)  # who is gone stands in nobody's way
    table.hear(B, m.SupplyWeights)


def test_the_owner_is_told_of_an_invite_that_holds_a_third_of_the_places() -> None:
    table = Table()
    table.found(A)
    table.join_in_sync(B, Grant(m.Role.CONTRIBUTOR, invite=OURS))
    assert table.status()["warnings"] == []  # one machine by one invite
    table.join_in_sync(C, Grant(m.Role.CONTRIBUTOR, invite=OURS))
    (warning,) = table.status()["warnings"]
    assert f"2 contributors came by one invite ({OURS})" in warning
    texts = [event.text for event in table.master.context.events]
    assert texts.count(warning) == 1


def test_an_invite_by_which_all_came_is_no_cause_for_a_warning() -> None:
    """The first run of a newcomer: the invite that the master printed, for each machine."""
    table = Table()
    table.found(A, grant=Grant(m.Role.CONTRIBUTOR, founder=True, invite=OURS))
    for peer in (B, C):
        table.join_in_sync(peer, Grant(m.Role.CONTRIBUTOR, invite=OURS))
    assert len(table.status()["members"]) == 3
    assert table.status()["warnings"] == []


def test_a_known_root_is_not_voted_on() -> None:
    table = seven()
    order = table.commit(A, B, C, *SYBILS)
    for peer in SYBILS:
        table.say(peer, m.Applied(order.round, head_of(0, 1, b"W" * 32)))
    assert table.records(RootKnown)[-1].head == head_of(0, 1)

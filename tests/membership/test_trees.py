"""Trees, as conversations: who counts as a site, when its members are planned as one, what a loss does."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from attrs import evolve

from holdfast.membership.master.state.roster import sites_of
from holdfast.protocol.messages import (
    Commit,
    Flush,
    LinkLoad,
    Measured,
    Reduce,
    Reduced,
    ReduceFailed,
    Repair,
    SyncFragment,
)
from tests.membership.table import CONTRIBUTOR, DIGEST, SPARE, A, B, C, D, E, Table, hello_of
from tests.plain import describe

F, G = "f" * 32, "9" * 32
LAB = (A, B, C, D)
OUTSIDE = (E, F)
HOME = "203.0.113.7"


def lab_table(hosts: Mapping[str, str] | None = None, site: str = "lab", toml: str = "") -> Table:
    """Four whose site has a name, or who come from these hosts, and two others; all in sync."""
    table = Table(toml)
    for peer in (*LAB, *OUTSIDE):
        hello = evolve(hello_of(peer), site=site if peer in LAB else "")
        host = hosts.get(peer, "") if hosts else ""
        if peer == A:
            table.found(A, hello, host)
        else:
            table.join(peer, CONTRIBUTOR, hello, host)
            table.sync(peer)
    table.forget()
    return table


def measure(table: Table) -> None:
    """All of the lab get 1 kB/s out, and a thousand times that to each other."""
    for peer in LAB:
        mates = tuple(LinkLoad(mate, 1_000_000, 1.0) for mate in LAB if mate != peer)
        loads = (*mates, LinkLoad(E, 20_000, 20.0))
        table.say(peer, Measured(3_020_000, 20.0, 3_000_000, 20.0, loads))
    for peer in OUTSIDE:
        table.say(peer, Measured(80_000, 20.0, 80_000, 20.0, (LinkLoad(A, 80_000, 20.0),)))


def a_tree(toml: str = "") -> tuple[Table, Reduce]:
    table = lab_table(toml=toml)
    measure(table)
    order = table.reduce(*LAB, *OUTSIDE)
    assert [site.members for site in order.plan.sites] == [LAB]
    table.forget()
    return table, order


def plan_said(table: Table) -> Mapping[str, object]:
    (round_,) = describe(table.master, table.now_s)["rounds"]
    plan: Mapping[str, object] = round_["plan"]
    return plan


# ---------------------------------------------------------------- who is a site


def test_a_name_makes_a_site_and_an_address_does_where_there_is_none() -> None:
    table = lab_table({E: HOME, F: HOME, D: HOME})
    members = table.master.context.roster.by_number()
    assert sites_of(members) == [LAB, OUTSIDE]  # D says that it is in the lab
    assert sites_of(members[:1]) == []


@pytest.mark.parametrize(
    ("host", "trees"), [(HOME, True), ("127.0.0.1", False), ("::1", False), ("", False)]
)
def test_who_comes_from_one_address_is_behind_one_line(host: str, trees: bool) -> None:
    table = lab_table(dict.fromkeys(LAB, host), site="")
    measure(table)
    order = table.reduce(*LAB, *OUTSIDE)
    assert bool(order.plan.sites) == trees
    assert plan_said(table)["tree"] == trees


def test_before_the_lines_are_known_everything_is_a_star() -> None:
    table = lab_table()
    assert table.reduce(*LAB, *OUTSIDE).plan.sites == ()
    assert plan_said(table)["tree_s"] is None


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_codec_that_needs_its_senders_feedback_gets_stars(direction: str) -> None:
    table = lab_table(toml=f'[reduce]\ncodec_{direction} = "topk"\n')
    measure(table)
    assert table.reduce(*LAB, *OUTSIDE).plan.sites == ()


def test_the_status_says_what_the_tree_should_need_and_what_the_star() -> None:
    table, _order = a_tree()
    said = plan_said(table)
    assert (said["tree"], said["sites"]) == (True, [list(LAB)])
    tree_s, star_s = said["tree_s"], said["star_s"]
    assert isinstance(tree_s, float)
    assert isinstance(star_s, float)
    assert tree_s < 0.9 * star_s


# ---------------------------------------------------------------- losses


@pytest.mark.fault("a peer dies in a tree", "as any peer", "the round runs again as a star")
def test_a_loss_in_a_tree_runs_the_round_again_as_a_star() -> None:
    table, first = a_tree()
    table.leave(B)
    assert "starts over with 5 contributors, as a star: a tree cannot be" in table.announced()
    for peer in (A, C, D, E, F):
        table.hears_no(peer, Flush)
        again = table.hear(peer, Reduce)
        assert again.attempt == first.attempt + 1
        assert again.plan.sites == ()
        assert [c.peer for c in again.contributors] == [A, C, D, E, F]
    table.say(A, Reduced(first.round, first.attempt, DIGEST))  # of the tree: void
    table.hears_no(A, Commit)
    table.reduced(again, A, C, D, E, F)
    assert table.hear(A, Commit).attempt == again.attempt


def test_an_accused_leader_is_removed_and_the_round_runs_again() -> None:
    table, order = a_tree()
    for accuser in (C, D):
        table.say(accuser, ReduceFailed(order.round, order.attempt, (B,), False, "it is silent"))
    table.hears_no(A, Reduce)
    table.wait(table.spec.settle_s, A, B, C, D, E, F)
    assert table.hear(A, Reduce).plan.sites == ()
    table.hears_no(A, Flush)


def test_a_loss_in_the_star_that_follows_is_repaired() -> None:
    table, _order = a_tree()
    table.leave(B)
    table.hear(A, Reduce)
    table.leave(C)
    table.hear(A, Flush)


def test_a_loss_after_all_others_have_the_result_costs_nothing() -> None:
    """A listener that lacks the lost peer's frames is synced again."""
    table = lab_table()
    table.join_in_sync(G, SPARE)
    measure(table)
    order = table.reduce(*LAB, *OUTSIDE)
    assert order.plan.sites
    table.hear(G, Reduce)
    table.master.scheduler.rounds[order.round].running().owners = [B]
    table.reduced(order, A, C, D, E, F)
    table.leave(B)
    assert table.hear(A, Commit).attempt == order.attempt
    table.hears_no(A, Reduce)
    table.hears_no(A, Repair)
    table.hear(G, Commit)
    table.say(G, ReduceFailed(order.round, order.attempt, (B,), False, "it is gone"))
    table.applied(order, A, C, D, E, F)
    assert table.hear(G, SyncFragment).head.version == order.version + 1

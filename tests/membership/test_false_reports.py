"""False and stale reports of a member: old roots, another lineage, messages sent twice."""

from __future__ import annotations

import pytest

from holdfast.membership.master.state.journal import RootKnown, RoundCommitted
from holdfast.protocol import messages as m
from tests.membership.table import (
    DIGEST,
    LINEAGE,
    OTHER_DIGEST,
    A,
    B,
    C,
    Table,
    head_of,
    hello_of,
    root_of,
)

PEERS = (A, B, C)


def a_table() -> Table:
    table = Table()
    table.start(*PEERS)
    return table


class Parrot(Table):
    """A table at which everything is said again, at once and once more much later.

    Attributes:
      said: by whom and what, so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[str, m.Message]] = []

    def say(self, peer: str, *messages: m.Message) -> None:
        for message in messages:
            super().say(peer, message, message)
            self.said.append((peer, message))

    def say_all_again(self, *, backwards: bool = False) -> None:
        for peer, message in reversed(self.said) if backwards else list(self.said):
            super().say(peer, message)


@pytest.mark.parametrize("backwards", [False, True])
def test_what_is_said_twice_or_long_after_changes_nothing(backwards: bool) -> None:
    plain, parrot = Table(), Parrot()
    for table in (plain, parrot):
        table.start(*PEERS)
        if isinstance(table, Parrot):
            table.said.clear()  # a run is founded once: see ``test_nobody_founds_a_run_twice``
        for _round in range(3):
            table.commit(*PEERS)
            if isinstance(table, Parrot):
                table.say_all_again(backwards=backwards)
        order = table.reduce(*PEERS)
        if isinstance(table, Parrot):
            table.say_all_again(backwards=backwards)  # in the middle of the next round
        table.reduced(order, *PEERS)
        table.applied(order, *PEERS)
    assert parrot.journal == plain.journal
    assert parrot.roles() == plain.roles() == dict.fromkeys("abc", "contributor*")


def test_a_result_of_an_earlier_round_is_none_of_this_one() -> None:
    table = a_table()
    first = table.commit(*PEERS)
    order = table.reduce(*PEERS)
    stale = m.Reduced(first.round, first.attempt, DIGEST)
    for peer in PEERS:
        table.say(peer, stale, m.Held(first.round, 2, b"\x01"), m.Audited(first.round, 1, 7))
    table.hears_no(A, m.Commit)
    table.reduced(order, *PEERS)
    assert len(table.records(RoundCommitted)) == 2


def test_a_ready_of_an_earlier_round_is_none_of_this_one() -> None:
    table = a_table()
    first = table.commit(*PEERS)
    for peer in PEERS:
        table.say(peer, m.Ready(first.round, 10, 1.0, root_of(0, 0), 1))
    assert table.master.scheduler.rounds[table.open_round()].answers.ready == {}


def test_a_stale_root_under_a_new_version_is_healed_and_counts_for_nothing() -> None:
    """It says that it applied the round, and still has what was before."""
    table = a_table()
    order = table.reduce(*PEERS)
    table.reduced(order, *PEERS)
    table.say(C, m.Applied(order.round, head_of(0, 1, root_of(0, 0))))
    table.applied(order, A, B)
    assert RootKnown(head_of(0, 1)) in table.journal
    assert table.hear(C, m.SyncFragment).head == head_of(0, 1)
    assert table.roles()["c"] == "contributor"


def test_a_stale_root_in_a_ready_keeps_its_sender_out_of_the_round() -> None:
    table = a_table()
    table.commit(*PEERS)
    table.ready(A)
    table.ready(B)
    round_ = table.master.scheduler.rounds[table.open_round()]
    table.say(C, m.Ready(round_.number, 10, 1.0, root_of(0, 0), round_.at_step))
    assert C not in round_.answers.invited
    assert table.hear(C, m.SyncFragment).head == head_of(0, 1)


@pytest.mark.parametrize("version", [2, 99])
def test_a_version_that_there_never_was_ends_who_names_it(version: int) -> None:
    table = a_table()
    order = table.commit(*PEERS)
    table.say(C, m.Applied(order.round, head_of(0, version)))
    assert table.dropped(C) is m.RefusalCode.PROTOCOL
    assert table.master.context.history.versions == [1]


def test_synced_is_nothing_that_one_may_say_unasked() -> None:
    """A copy that differs is not made right by calling it a transfer."""
    table = a_table()
    table.say(C, m.Synced(head_of(0, 0, OTHER_DIGEST), 64))
    assert not any(member.in_sync for member in [table.master.context.roster.members[C]])
    assert table.hear(C, m.SyncFragment).head == head_of(0, 0)


@pytest.mark.parametrize("lineage", [b"", b"W" * 32])
def test_of_another_lineage_nothing_counts_whatever_its_version(lineage: bytes) -> None:
    table = a_table()
    table.commit(*PEERS)
    table.leave(C)
    table.forget()
    table.join(C, hello=hello_of(C, heads=[head_of(0, 1)], lineage=lineage))
    assert table.hear(C, m.SyncFragment).head == head_of(0, 1)
    table.leave(C)
    table.join(C, hello=hello_of(C, heads=[head_of(0, 7)], lineage=lineage))
    assert C in table.master.context.roster  # what it has is of no run that we know
    table.leave(C)
    table.join(C, hello=hello_of(C, heads=[head_of(0, 1)], lineage=LINEAGE))
    table.hears_no(C, m.ReduceFailed)
    assert table.roles()["c"].endswith("*")


def test_of_two_with_one_identity_one_is_a_member_and_counts_once() -> None:
    """The newer connection wins, each time; a round needs two who are two."""
    table = Table("[membership]\nmin_members = 2\n")
    order = table.reducing(A, B)
    for incarnation in (7, 8, 7, 8):
        table.join(
            B, hello=hello_of(B, incarnation=incarnation, heads=[head_of(0, 0)], lineage=LINEAGE)
        )
        assert len(table.master.context.roster) == 2
        table.say(B, m.Reduced(order.round, order.attempt, DIGEST))
    table.say(A, m.Reduced(order.round, order.attempt, DIGEST))
    assert table.records(RoundCommitted) == []

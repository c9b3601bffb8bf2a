"""False and stale reports of a member: old roots, another lineage, messages sent twice."""

from __future__ import annotations

import pytest

from holdfast.membership.master.state.journal import RoundCommitted
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
    holding,
    reducing,
    started,
)

PEERS = (A, B, C)


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
        table.complete(order, *PEERS)
    assert parrot.journal == plain.journal
    assert parrot.roles() == plain.roles() == dict.fromkeys("abc", "contributor*")


def test_synced_is_nothing_that_one_may_say_unasked() -> None:
    """A copy that differs is not made right by calling it a transfer."""
    table = started(*PEERS)
    table.say(C, m.Synced(head_of(0, 0, OTHER_DIGEST), 64))
    assert not any(member.in_sync for member in [table.master.context.roster.members[C]])
    assert table.hear(C, m.SyncFragment).head == head_of(0, 0)


@pytest.mark.parametrize("lineage", [b"", b"W" * 32])
def test_of_another_lineage_nothing_counts_whatever_its_version(lineage: bytes) -> None:
    table = started(*PEERS)
    table.commit(*PEERS)
    table.leave(C)
    table.forget()
    table.join(C, hello=hello_of(C, heads=[head_of(0, 1)], lineage=lineage))
    assert table.hear(C, m.SyncFragment).head == head_of(0, 1)
    table.leave(C)
    table.join(C, hello=hello_of(C, heads=[head_of(0, 7)], lineage=lineage))
    assert C in table.master.context.roster  # what it has is of no run that we know
    table.leave(C)
    table.join(C, hello=holding(C, 1))
    table.hears_no(C, m.ReduceFailed)
    assert table.roles()["c"].endswith("*")


def test_of_two_with_one_identity_one_is_a_member_and_counts_once() -> None:
    """The newer connection wins, each time; a round needs two who are two."""
    table, order = reducing(A, B, toml="[membership]\nmin_members = 2\n")
    for incarnation in (7, 8, 7, 8):
        table.join(
            B, hello=hello_of(B, incarnation=incarnation, heads=[head_of(0, 0)], lineage=LINEAGE)
        )
        assert len(table.master.context.roster) == 2
        table.say(B, m.Reduced(order.round, order.attempt, DIGEST))
    table.say(A, m.Reduced(order.round, order.attempt, DIGEST))
    assert table.records(RoundCommitted) == []

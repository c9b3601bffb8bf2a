"""The sentence about equal copies, from the digests that members report in rounds."""

from __future__ import annotations

from holdfast.membership.master.coordinator import Grant
from holdfast.membership.master.status.copy_agreement import copy_agreement
from holdfast.membership.shared.run_status import CopyAgreement
from holdfast.protocol.messages import Role
from tests.membership.table import (
    CONTRIBUTOR,
    OTHER_DIGEST,
    SPARE,
    A,
    B,
    C,
    D,
    E,
    Table,
    hello_of,
    holding,
    reducing,
    started,
)


def agreement(table: Table) -> CopyAgreement:
    return copy_agreement(table.master, table.now_s)


def said(table: Table) -> str:
    return agreement(table).text


def test_an_empty_run_has_no_copies() -> None:
    table = Table()
    table.join(A)
    told = agreement(table)
    assert (told.text, told.all, told.versions, told.compared_s) == ("", 0, (), None)
    table = started(A)
    assert said(table) == "1 copy, at version 0"


def test_all_copies_are_equal_at_the_version_that_all_have_reported() -> None:
    table = started(A, B, C)
    assert said(table) == "all 3 copies equal at version 0"
    order = table.reduce(A, B, C)
    table.reduced(order, A, B, C)
    table.now_s += 5
    assert said(table) == "all 3 copies equal at version 0", "they are applying the commit"
    table.applied(order, A, B)
    told = agreement(table)
    assert told.text == "all 3 copies equal at version 0", "the third has not reported yet"
    assert told.compared_s == 5, "the last report on version 0 is that old"
    table.applied(order, C)
    told = agreement(table)
    assert told.text == "all 3 copies equal at version 1"
    assert (told.all, told.equal, told.versions, told.unequal) == (3, 3, (1,), ())
    assert told.compared_s == 0
    table.now_s += 7
    assert agreement(table).compared_s == 7


def test_a_copy_that_differs_is_named_until_it_is_healed() -> None:
    table, order = reducing(A, B, C)
    table.reduced(order, A, B, C)
    table.applied(order, A, B)
    table.applied(order, C, root=OTHER_DIGEST)
    told = agreement(table)
    assert told.text == "2 of 3 copies equal at version 1; c is being healed"
    assert (told.all, told.equal) == (3, 2)
    (row,) = told.unequal
    assert (row.peer, row.name) == (C, "c")
    assert row.why == "its version 1 of fragment 0 differs from the run's"
    table.sync(C)
    assert said(table) == "all 3 copies equal at version 1"


def test_newcomers_copy_the_state_and_those_in_line_or_without_state_do_not_count() -> None:
    table = started(A, B, toml="[membership]\ncontributors = 2\nspares = 1\n")
    table.join(C, SPARE)
    assert said(table) == "2 of 3 copies equal at version 0; c is copying the state"
    table.join(D, SPARE)
    table.join(E, Grant(Role.RELAY), hello_of(E))
    assert agreement(table).all == 3, "d waits in line, and e only forwards"
    table.sync(C)
    assert said(table) == "all 3 copies equal at version 0"


def test_many_are_counted_not_named() -> None:
    table = started(A)
    for peer in "bcdef":
        table.join(peer * 32)
    assert said(table) == (
        "1 of 6 copies equal at version 0; b is copying the state, c is copying the state, "
        "d is copying the state, 2 more"
    )


def test_fragments_have_versions_of_their_own() -> None:
    table = started(A, B, fragments=2)
    assert said(table) == "all 2 copies equal at version 0"
    order = table.commit(A, B)
    told = agreement(table)
    assert told.text == "all 2 copies equal at versions 0 to 1"
    assert told.versions == tuple(int(n == order.fragment) for n in range(2))


def test_a_restarted_master_knows_what_its_members_report_again() -> None:
    table = started(A, B)
    table.commit(A, B)
    table.restart()
    assert said(table) == ""
    for peer in (A, B):
        table.join(peer, CONTRIBUTOR, holding(peer, 1))
    assert said(table) == "all 2 copies equal at version 1"

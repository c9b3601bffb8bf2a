"""Views as differences: whatever changes, the other end has the same view."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from holdfast.membership.shared.views import ViewWriter, changed_view
from holdfast.protocol import wire
from holdfast.protocol.errors import RemoteProtocolError
from holdfast.protocol.messages import MemberInfo, Role, View, ViewChange

NUMBERS = st.sets(st.integers(0, 9))


def member(number: int, *, role: Role = Role.SPARE, in_sync: bool = False) -> MemberInfo:
    return MemberInfo(f"{number:032x}", f"n{number}", number, (f"h{number}:1",), role, in_sync)


def view(number: int, *members: MemberInfo) -> View:
    return View(number, members, step=10 * number)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=5))
def test_every_sequence_of_views_comes_out_as_it_went_in(
    shapes: list[tuple[set[int], set[int], set[int]]],
) -> None:
    writer = ViewWriter()
    told = known = view(1, member(3))
    for at, (numbers, contributing, synced) in enumerate(shapes, 2):
        roles = {n: Role.CONTRIBUTOR if n in contributing else Role.SPARE for n in numbers}
        members = [member(n, role=roles[n], in_sync=n in synced) for n in sorted(numbers)]
        after = view(at, *members)
        change = wire.decode(wire.encode(writer.difference(told, after)))
        assert isinstance(change, ViewChange)
        known = changed_view(known, change)
        assert known == after
        told = after


def test_a_join_tells_the_others_one_member() -> None:
    crowd = [member(n) for n in range(500)]
    change = ViewWriter().difference(view(1, *crowd), view(2, *crowd, member(500)))

    assert [m.number for m in change.changed] == [500]
    assert len(wire.encode(change)) < 300


def test_the_same_difference_is_made_once_for_all() -> None:
    writer, before, after = ViewWriter(), view(1), view(2, member(1))

    assert writer.difference(before, after) is writer.difference(before, after)


def test_a_change_of_another_view_than_the_known_one_is_refused() -> None:
    change = ViewWriter().difference(view(2), view(3, member(1)))

    for known in (None, view(1)):
        with pytest.raises(RemoteProtocolError, match="is based on view 2"):
            changed_view(known, change)
    with pytest.raises(RemoteProtocolError, match="removes member 7"):
        changed_view(view(2), evolve(change, gone=(7,)))

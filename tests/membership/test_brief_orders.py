"""Orders that name members by number: whatever the order, what comes out is what went in, or an
error.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from holdfast.membership.shared.brief_orders import OrderReader, OrderWriter
from holdfast.protocol import messages as m
from holdfast.protocol import wire
from holdfast.protocol.errors import RemoteProtocolError

NUMBERS = st.sets(st.integers(1, 3_000), min_size=1, max_size=40)


def peer_of(number: int) -> str:
    return f"{number * 2_654_435_761 % 2**32:08x}" + "ab" * 12


def view_of(numbers: Sequence[int], number: int = 7) -> m.View:
    members = tuple(
        m.MemberInfo(peer_of(each), f"n{each}", each, (), m.Role.CONTRIBUTOR, True)
        for each in sorted(numbers)
    )
    return m.View(number, members, 0)


@st.composite
def orders(draw: st.DrawFn) -> tuple[m.View, m.Reduce]:
    members = sorted(draw(NUMBERS))
    contributors = sorted(draw(st.sets(st.sampled_from(members), min_size=1)))
    receivers = sorted({*contributors, *draw(st.sets(st.sampled_from(members)))})
    counts = st.integers(0, 2**63 - 1) | st.integers(6_000, 7_000)
    units = st.integers(1, m.CHUNK_UNITS_MAX)
    scales = st.just(1.0) | st.floats(0.0, 1.0)
    owners = draw(st.lists(st.sampled_from(receivers), min_size=1, max_size=30))
    runs = tuple(m.OwnerRun(peer_of(owner), draw(counts), draw(units)) for owner in owners)
    plan = m.Plan(1_024, runs, "fp32", "int8")
    order = m.Reduce(
        draw(counts),
        1,
        0,
        draw(counts),
        7,
        tuple(m.Contributor(peer_of(n), draw(counts), draw(scales)) for n in contributors),
        tuple(map(peer_of, receivers)),
        plan,
    )
    return view_of(members), order


def over_the_wire(message: m.Message) -> m.Message:
    return wire.decode(wire.encode(message))


@given(orders())
def test_a_reduction_and_its_commit_come_as_they_were(case: tuple[m.View, m.Reduce]) -> None:
    view, order = case
    commit = m.Commit(
        order.round, 3, 0, 5, 9, order.contributors, b"d" * 32, (m.ContributorRun(b"\x01", 4),)
    )
    writer, reader = OrderWriter(), OrderReader()
    sent: dict[int, m.Reduce] = {}
    for message, brief in ((order, m.BriefReduce), (commit, m.BriefCommit)):
        out = writer.brief(message, view, sent)
        assert isinstance(out, brief)
        assert reader.whole(over_the_wire(out), view) == message


def full(count: int) -> tuple[m.View, m.Reduce]:
    members = range(1, count + 1)
    contributors = tuple(m.Contributor(peer_of(n), 6_400 + 37 * n % 500, 1.0) for n in members)
    plan = m.Plan(2**18, tuple(m.OwnerRun(peer_of(n), 1) for n in members), "fp32", "fp32")
    order = m.Reduce(3, 1, 0, 2, 7, contributors, tuple(map(peer_of, members)), plan)
    return view_of(members), order


def test_a_member_takes_five_bytes_and_the_commit_none() -> None:
    count = m.MEMBERS_MAX
    view, order = full(count)
    sent: dict[int, m.Reduce] = {}
    writer = OrderWriter()
    brief = writer.brief(order, view, sent)
    assert len(wire.encode(brief)) < 5 * count + 500
    assert len(wire.encode(order)) > 100 * count
    commit = m.Commit(3, 1, 0, 2, 9, order.contributors, b"d" * 32)
    assert len(wire.encode(writer.brief(commit, view, sent))) < 200


def test_what_most_members_get_is_made_and_encoded_once() -> None:
    view, order = full(20)
    writer = OrderWriter()
    assert writer.brief(order, view, {}) is writer.brief(order, view, {})
    commit = m.Commit(3, 1, 0, 2, 9, order.contributors, b"d" * 32)
    assert writer.brief(commit, view, {0: order}) is writer.brief(commit, view, {0: order})


def test_an_order_that_does_not_fit_is_sent_as_it_is() -> None:
    view, order = full(5)
    writer = OrderWriter()
    stranger = evolve(order, receivers=(*order.receivers, peer_of(99)))
    backwards = evolve(order, contributors=order.contributors[::-1])
    for each in (stranger, backwards):
        sent: dict[int, m.Reduce] = {}
        assert writer.brief(each, view, sent) is each
        assert writer.brief(order, None, sent) is order
    reader, sent = OrderReader(), {}
    assert writer.brief(backwards, view, sent) is backwards
    assert reader.whole(backwards, view) is backwards
    commit = m.Commit(3, 1, 0, 2, 9, backwards.contributors, b"d" * 32)
    out = writer.brief(commit, view, sent)
    assert isinstance(out, m.BriefCommit)
    assert reader.whole(out, view) == commit
    other = evolve(commit, contributors=order.contributors[:3])
    assert writer.brief(other, view, sent) is other, "a repair left somebody out"
    assert writer.brief(evolve(commit, round=4), view, sent).round == 4  # type: ignore[attr-defined]
    assert writer.brief(commit, view, {}) is commit, "it was no receiver"


def test_what_refers_to_nothing_is_refused() -> None:
    view, order = full(5)
    writer = OrderWriter()
    sent: dict[int, m.Reduce] = {}
    brief = writer.brief(order, view, sent)
    assert isinstance(brief, m.BriefReduce)
    for wrong, text in (
        (evolve(brief, base=6), "view 6"),
        (evolve(brief, contributors=b"\x01\x06"), "member 6"),
        (evolve(brief, contributors=b"\x01"), "half a run"),
        (evolve(brief, contributors=b"\x01\xff\xff\x7f"), "too many members"),
        (evolve(brief, receivers=b"\x80"), "cut off"),
        (evolve(brief, weights=brief.weights[:-1]), "cut off|differ in number"),
        (evolve(brief, scales=(1.0, 0.5)), "differ in number"),
        (evolve(brief, owners=b"\x02"), "differ in number"),
        (evolve(brief, weights=b"\xff" * 30 + b"\x01"), "too large"),
    ):
        with pytest.raises(RemoteProtocolError, match=text):
            OrderReader().whole(wrong, view)
    with pytest.raises(RemoteProtocolError, match="none"):
        OrderReader().whole(brief, None)
    commit = writer.brief(m.Commit(3, 1, 0, 2, 9, order.contributors, b"d" * 32), view, sent)
    with pytest.raises(RemoteProtocolError, match="no such order"):
        OrderReader().whole(commit, view)


@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60))
def test_no_bytes_do_anything_but_raise(runs: bytes, weights: bytes, owners: bytes) -> None:
    view, order = full(9)
    brief = OrderWriter().brief(order, view, {})
    assert isinstance(brief, m.BriefReduce)
    try:
        found = OrderReader().whole(
            evolve(brief, contributors=runs, weights=weights, owners=owners), view
        )
    except RemoteProtocolError:
        return
    assert isinstance(found, m.Reduce)

"""Packed orders: whatever was said before, what comes out is what went in, or an error."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import zstandard
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol import messages as m
from holdfast.protocol import wire
from holdfast.protocol.errors import RemoteProtocolError
from holdfast.protocol.message_limits import FRAME_BYTES_MAX
from holdfast.protocol.packed_orders import Heard, OrderReader, OrderWriter

NUMBERS = st.sets(st.integers(1, 3_000), min_size=1, max_size=20)


def peer_of(number: int) -> str:
    return f"{number * 2_654_435_761 % 2**32:08x}" + "ab" * 12


def view_of(numbers: Sequence[int], number: int = 7) -> m.View:
    members = tuple(
        m.MemberInfo(
            peer_of(each), f"n{each}", each, (f"h{each}:1",), m.Role.CONTRIBUTOR, in_sync=True
        )
        for each in sorted(numbers)
    )
    return m.View(number, members, 0)


def order_of(numbers: Sequence[int], number: int, weights: Sequence[int] = (6_400,)) -> m.Reduce:
    ids = [peer_of(each) for each in sorted(numbers)]
    contributors = tuple(
        m.Contributor(peer, weights[at % len(weights)], 1.0) for at, peer in enumerate(ids)
    )
    plan = m.Plan(2**18, tuple(m.OwnerRun(peer, 1) for peer in ids), "fp32", "int8")
    return m.Reduce(number, 1, 0, number, 7, contributors, tuple(ids), plan)


def commit_of(order: m.Reduce) -> m.Commit:
    return m.Commit(order.round, 1, 0, order.version, 9, order.contributors, b"d" * 32)


@st.composite
def said(draw: st.DrawFn) -> list[m.Message]:
    messages: list[m.Message] = []
    for number in range(draw(st.integers(1, 6))):
        members = sorted(draw(NUMBERS))
        order = order_of(members, number, draw(st.lists(st.integers(0, 2**63 - 1), min_size=1)))
        one = st.sampled_from([view_of(members, number), order, commit_of(order), m.Heartbeat(1)])
        messages += draw(st.lists(one, max_size=3))
    return messages


def over_the_wire(message: m.Message) -> m.Message:
    return wire.decode(wire.encode(message))


@given(said())
def test_all_that_is_said_in_a_session_comes_as_it_was(messages: list[m.Message]) -> None:
    writer, reader, heard = OrderWriter(), OrderReader(), Heard()
    for message in messages:
        sent, heard = writer.pack(message, heard)
        assert isinstance(sent, m.Heartbeat | m.Packed)
        assert reader.unpack(over_the_wire(sent)) == message


def test_what_hardly_differs_takes_a_few_bytes_for_each_member() -> None:
    everybody = range(1, m.MEMBERS_MAX + 1)
    weights = [6_400 + 37 * each % 500 for each in everybody]
    first, second = order_of(everybody, 3, weights), order_of(everybody, 4, weights[::-1])
    writer, heard, sizes = OrderWriter(), Heard(), []
    views = view_of(everybody[:-1]), view_of(everybody, 8)
    for message in (*views, first, second, commit_of(second)):
        sent, heard = writer.pack(message, heard)
        sizes.append(len(wire.encode(sent)))
    assert sizes[0] < 60 * m.MEMBERS_MAX, "the whole view"
    assert sizes[1] < 300, "one joined"
    assert sizes[2] < 15 * m.MEMBERS_MAX
    assert sizes[3] < 5 * m.MEMBERS_MAX
    assert sizes[4] < 300


def test_what_most_members_get_is_made_once() -> None:
    writer, view, order = OrderWriter(), view_of(range(20)), order_of(range(20), 3)
    _, heard = writer.pack(view, Heard())
    _, too = writer.pack(evolve(view), Heard())
    assert writer.pack(order, heard) == writer.pack(order, too)
    assert writer.pack(order, heard)[0] is writer.pack(order, too)[0]


def test_who_has_heard_something_else_is_not_misled() -> None:
    """The dictionaries differ in what the message takes from them, and in nothing else."""
    writer = OrderWriter()
    sent, _ = writer.pack(view_of([1, 2, 3]), Heard(view=wire.encode(view_of([1, 2, 3]))))
    reader = OrderReader()
    reader.unpack(writer.pack(view_of([1, 2, 4]), Heard())[0])
    with pytest.raises(RemoteProtocolError, match="cannot be unpacked"):
        reader.unpack(sent)


@given(st.binary(max_size=60))
def test_no_bytes_do_anything_but_raise(data: bytes) -> None:
    for junk in (data, zstandard.compress(data)):
        with pytest.raises(RemoteProtocolError):
            OrderReader().unpack(m.Packed(junk))


def test_a_message_of_another_kind_or_length_is_refused() -> None:
    for data, text in (
        (wire.encode(m.Heartbeat(1)), "Heartbeat instead of"),
        (bytes(FRAME_BYTES_MAX + 1), "too long"),
    ):
        with pytest.raises(RemoteProtocolError, match=text):
            OrderReader().unpack(m.Packed(zstandard.compress(data)))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    with pytest.raises(RemoteProtocolError, match="does not say its size"):
        OrderReader().unpack(m.Packed(silent))

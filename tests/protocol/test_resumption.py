"""A session over many connections: nothing is lost, nothing comes twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.errors import RemoteProtocolError
from holdfast.protocol.messages import Heartbeat, Message, Notice
from holdfast.protocol.network.resumption import KEPT_MAX, Conversation


@pytest.mark.fault("the connection to the master breaks")
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.booleans()), max_size=40))
def test_whatever_breaks_each_message_comes_once_and_in_order(
    story: list[tuple[bool, int, bool]],
) -> None:
    near, far = Conversation(), Conversation()
    sent: list[Message] = []
    came: list[Message] = []
    wire: list[Message] = []

    def deliver(count: int) -> None:
        for message in wire[:count]:
            far.hears(message)
            came.append(message)
        del wire[:count]

    for breaks, count, confirms in story:
        message = Notice(str(len(sent)))
        assert near.sends(message)
        sent.append(message)
        wire.append(message)
        deliver(count)
        if confirms:
            near.hears(Heartbeat(far.received))
        if breaks:  # what is on the wire is lost; each says what it has
            near.confirm(far.received)
            wire[:] = near.missing()
    deliver(len(wire))
    assert came == sent


def test_more_than_was_sent_cannot_have_come() -> None:
    conversation = Conversation()
    conversation.sends(Notice("one"))
    conversation.hears(Heartbeat(1))
    for count in (0, 2):
        with pytest.raises(RemoteProtocolError):
            conversation.hears(Heartbeat(count))


def test_who_confirms_nothing_is_not_kept_for_without_end() -> None:
    conversation = Conversation()
    assert all(conversation.sends(Notice("x")) for _ in range(KEPT_MAX))
    assert not conversation.sends(Notice("x"))

"""A member that floods a control stream is cut off and named; nobody honest comes near."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from holdfast.protocol import quota
from holdfast.protocol.errors import RemoteProtocolError
from holdfast.protocol.messages import Heartbeat, Told
from holdfast.protocol.quota import BYTES_MAX, BYTES_PER_S, MESSAGES_MAX, MESSAGES_PER_S, Quota
from holdfast.protocol.stream import MessageStream


def test_messages_run_out_and_come_back_with_time() -> None:
    left = Quota(0.0)
    for _ in range(int(MESSAGES_MAX)):
        assert left.take(1, 0.0) == ""
    assert "messages a second" in left.take(1, 0.0)
    assert "messages a second" in left.take(1, 0.5 / MESSAGES_PER_S)
    assert left.take(1, 10.0) == ""
    assert all(left.take(1, 10.0 + n / MESSAGES_PER_S) == "" for n in range(100_000)), "for ever"


def test_bytes_run_out_and_come_back_with_time() -> None:
    left = Quota(0.0)
    assert left.take(int(BYTES_MAX), 0.0) == ""
    assert "4 MiB a second" in left.take(1, 0.0)
    assert left.take(int(BYTES_PER_S), 2.0) == ""


async def test_who_floods_is_cut_off_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "MESSAGES_MAX", 50.0)
    monkeypatch.setattr(quota, "MESSAGES_PER_S", 10.0)
    ours, theirs = trio.testing.memory_stream_pair()
    hearing = MessageStream(ours, quota=Quota(trio.current_time()))
    speaking = MessageStream(theirs)
    for number in range(500):  # as an honest one does, for long
        await speaking.send(Heartbeat(number))
        assert await hearing.receive() == Heartbeat(number)
        await trio.sleep(0.11)
    for _ in range(40):
        await speaking.send(Told("flood"))
        await hearing.receive()
    for _ in range(20):
        await speaking.send(Told("flood"))
    with pytest.raises(RemoteProtocolError, match="over its quota"):
        await hear(hearing, 20)


async def hear(stream: MessageStream, count: int) -> None:
    for _ in range(count):
        await stream.receive()

"""Quotas: a member that sends too much is read more slowly; honest members stay far below the
limit.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
import trio.testing

from holdfast.protocol import message_quota, wire
from holdfast.protocol import messages as m
from holdfast.protocol.errors import RemoteProtocolError
from holdfast.protocol.message_quota import (
    BYTES_MAX,
    BYTES_PER_S,
    ITEMS_AT_ONCE,
    ITEMS_PER_S,
    MESSAGE_ITEMS,
    Quota,
    Quotas,
)
from holdfast.protocol.network.stream import MessageStream


def test_items_run_out_and_come_back_with_time() -> None:
    left = Quota(0.0)
    left.spend(int(ITEMS_AT_ONCE) - MESSAGE_ITEMS, 1, 0.0)
    assert left.wait_s(0.0) == 0.0
    left.spend(int(ITEMS_PER_S), 1, 0.0)
    assert left.wait_s(0.0) == pytest.approx(1.0 + MESSAGE_ITEMS / ITEMS_PER_S)
    assert left.wait_s(1.0) == pytest.approx(MESSAGE_ITEMS / ITEMS_PER_S)
    assert left.wait_s(2.0) == 0.0


def test_bytes_run_out_and_come_back_with_time() -> None:
    left = Quota(0.0)
    left.spend(0, int(BYTES_MAX), 0.0)
    assert left.wait_s(0.0) == 0.0
    left.spend(0, int(BYTES_PER_S), 0.0)
    assert left.wait_s(0.0) == pytest.approx(1.0)
    assert left.wait_s(2.0) == 0.0


def test_of_members_the_one_that_spoke_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_quota, "QUOTAS_MAX", 2)
    known = Quotas()
    first = known.of("a", 0.0)
    known.of("b", 0.0)
    assert known.of("a", 0.0) is first
    known.of("c", 0.0)
    assert known.of("a", 0.0) is first
    assert len(known._by_peer) == 2


async def test_who_floods_is_heard_at_the_rate_that_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_quota, "ITEMS_AT_ONCE", 5_000.0)
    ours, theirs = trio.testing.memory_stream_pair()
    hearing = MessageStream(ours, quota=Quota(trio.current_time(), 1_000.0, 5_000.0))
    speaking = MessageStream(theirs)
    for number in range(500):  # as an honest one does, for long
        await speaking.send(m.Heartbeat(number))
        assert await hearing.receive() == m.Heartbeat(number)
        await trio.sleep(1.0)
    assert not hearing.slowed
    began_s = trio.current_time()
    for _ in range(100):
        await speaking.send(m.Notice("flood"))
    for _ in range(100):
        await hearing.receive()
    assert hearing.slowed
    spent = 99 * (MESSAGE_ITEMS + 9) - 5_000
    assert trio.current_time() - began_s == pytest.approx(spent / 1_000.0, rel=0.01)


async def counted(data: bytes) -> float:
    """Return the items that a message costs its sender."""
    ours, theirs = trio.testing.memory_stream_pair()
    left = Quota(trio.current_time())
    await theirs.send_all(len(data).to_bytes(4, "big") + data)
    with suppress(RemoteProtocolError):
        await MessageStream(ours, quota=left).receive()
    return ITEMS_AT_ONCE - left._items - MESSAGE_ITEMS


async def test_a_message_counts_by_its_items() -> None:
    tensor = m.TensorSpec("x" * 100, (2, 3), "float32", "parameter")
    attached = m.TrainerAttached(m.ModelLayout((tensor,) * 5_000))
    assert await counted(wire.encode(attached)) == 5_000 * (1 + 2 * 5 + 2) + 4 + 2


async def test_a_short_one_counts_by_its_bytes_for_half_of_what_it_could_have() -> None:
    items = await counted(wire.encode(m.BlocksRequest(0, 0, 0, (0,) * 60_000)))
    assert 0 <= items - 60_000 / 2 < 50


async def test_what_is_no_message_counts_as_much_as_it_could_be() -> None:
    assert await counted(bytes(1_000)) == 1_004

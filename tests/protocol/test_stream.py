"""Messages over byte streams: framing, limits, ends, cancellation."""

from __future__ import annotations

import struct

import pytest
import trio
import trio.testing

from holdfast.protocol import connection_phases, message_limits, wire
from holdfast.protocol import messages as m
from holdfast.protocol.connection_phases import ANY, ConnectionPhase
from holdfast.protocol.errors import HoldfastError, LocalProtocolError, RemoteProtocolError
from holdfast.protocol.network.stream import MessageStream, run_handler


def one_message_end(phase: ConnectionPhase = ANY) -> tuple[MessageStream, trio.abc.Stream]:
    near, far = trio.testing.memory_stream_pair()
    return MessageStream(near, phase), far


def two_message_ends() -> tuple[MessageStream, MessageStream]:
    near, far = one_message_end()
    return near, MessageStream(far)


def framed(message: m.Message) -> bytes:
    body = wire.encode(message)
    return struct.pack(">I", len(body)) + body


async def test_messages_arrive_whole_and_in_order() -> None:
    near, far = two_message_ends()
    sent = [m.Heartbeat(number) for number in range(50)]
    for message in sent:
        await near.send(message)
    assert [await far.receive() for _ in sent] == sent
    assert near.sent_bytes == far.received_bytes > 0
    await near.aclose()
    with pytest.raises(trio.EndOfChannel):
        await far.receive()


async def test_a_message_may_come_byte_by_byte() -> None:
    near, far = one_message_end()

    async def trickle() -> None:
        for byte in framed(m.Notice("slowly")) * 2:
            await far.send_all(bytes([byte]))
            await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        assert await near.receive() == m.Notice("slowly")
        assert await near.receive() == m.Notice("slowly")


async def test_a_cancelled_receive_loses_nothing() -> None:
    near, far = one_message_end()
    frame = framed(m.Notice("patience"))
    for start in range(0, len(frame), 3):
        with trio.move_on_after(1) as scope:
            await near.receive()
        assert scope.cancelled_caught
        await far.send_all(frame[start : start + 3])
    assert await near.receive() == m.Notice("patience")


async def test_many_tasks_may_send_at_once() -> None:
    near, far = two_message_ends()
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(near.send, m.Heartbeat(number))
        received = {(await far.receive_expected(m.Heartbeat)).received for _ in range(20)}
    assert received == set(range(20))


async def test_after_a_cancelled_send_the_stream_is_broken() -> None:
    near_raw, far_raw = trio.testing.lockstep_stream_pair()
    near = MessageStream(near_raw)
    with trio.move_on_after(1) as scope:
        await near.send(m.Heartbeat(1))  # nobody reads
    assert scope.cancelled_caught
    with pytest.raises(trio.BrokenResourceError):
        await near.send(m.Heartbeat(2))
    assert near.sent_bytes == 0
    await far_raw.aclose()


async def test_a_send_that_was_cancelled_before_it_began_tears_nothing() -> None:
    near, far = two_message_ends()
    with trio.CancelScope() as scope:
        scope.cancel()
        await near.send(m.Heartbeat(1))
    assert scope.cancelled_caught
    await near.send(m.Heartbeat(2))
    assert await far.receive() == m.Heartbeat(2)


async def test_a_message_that_cannot_travel_breaks_nothing() -> None:
    near, far = two_message_ends()
    small = MessageStream(trio.testing.memory_stream_pair()[0], ConnectionPhase(None, 100))
    with pytest.raises(LocalProtocolError):
        await small.send(m.Notice("x" * 200))
    with pytest.raises(LocalProtocolError):
        await near.send(m.Message())
    await near.send(m.Heartbeat(1))
    assert await far.receive() == m.Heartbeat(1)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", message_limits.FRAME_BYTES_MAX + 1),
        struct.pack(">I", 0),
        struct.pack(">I", 4) + b"\xc1\xc1\xc1\xc1",
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
        framed(m.Notice("whole"))[:-1],
        b"\x00\x00",
    ],
    ids=["over-long", "empty", "not msgpack", "http", "truncated", "truncated length"],
)
async def test_junk_is_the_other_sides_fault(data: bytes) -> None:
    near, far = one_message_end()
    await far.send_all(data)
    await far.aclose()
    with pytest.raises(RemoteProtocolError):
        await near.receive()


@pytest.mark.parametrize(
    ("phase", "frame_bytes", "first", "said"),
    [
        (ConnectionPhase(None, 1_000), 1_001, b"", "1001 bytes"),
        (ANY, 2**20, wire.encode(m.Heartbeat(1)), "a Heartbeat of 1048576 bytes is over-long"),
        (
            connection_phases.GREETING,
            2**20,
            wire.encode(m.TrainerAttached(m.ModelLayout(())))[:20],
            "TrainerAttached instead of",
        ),
    ],
    ids=["of the phase", "of its type", "may not come yet"],
)
async def test_a_frame_is_refused_by_its_first_bytes(
    phase: ConnectionPhase, frame_bytes: int, first: bytes, said: str
) -> None:
    near, far = one_message_end(phase)
    # And no more of it.
    await far.send_all(struct.pack(">I", frame_bytes) + first.ljust(wire.HEAD_BYTES_MAX))
    with pytest.raises(RemoteProtocolError, match=said):
        await near.receive()


async def test_another_message_than_expected_is_refused() -> None:
    near, far = two_message_ends()
    await near.send(m.Heartbeat(1))
    with pytest.raises(RemoteProtocolError, match="Heartbeat instead of Notice or Refused"):
        await far.receive_expected(m.Notice, m.Refused)


async def test_a_final_message_waits_for_its_reader_but_not_for_ever() -> None:
    farewell = m.Refused(m.RefusalCode.FULL, "no room")
    near, far = two_message_ends()
    await far.send(m.Heartbeat(1))  # not read by anybody
    async with trio.open_nursery() as nursery:
        nursery.start_soon(near.send_final, farewell)
        assert await far.receive() == farewell
        await far.aclose()
    assert trio.current_time() == 0
    near, far = two_message_ends()
    await near.send_final(farewell)
    assert 0 < trio.current_time() < 10
    assert await far.receive() == farewell


@pytest.mark.parametrize(
    "error",
    [
        RemoteProtocolError("junk"),
        trio.BrokenResourceError("gone"),
        trio.EndOfChannel(),
        OSError("reset"),
        ExceptionGroup("both", [RemoteProtocolError("junk"), trio.EndOfChannel()]),
    ],
)
async def test_what_the_other_side_causes_ends_its_handler_only(error: Exception) -> None:
    near, far = trio.testing.memory_stream_pair()

    async def handler(_: object) -> None:
        raise error

    await run_handler(handler, None, near, "there")
    assert await far.receive_some() == b""


@pytest.mark.parametrize(
    "error", [KeyError("bug"), ExceptionGroup("mixed", [KeyError("bug"), HoldfastError("theirs")])]
)
async def test_a_bug_propagates_and_the_stream_is_closed_all_the_same(error: Exception) -> None:
    near, far = trio.testing.memory_stream_pair()

    async def handler(_: object) -> None:
        raise error

    with pytest.raises((KeyError, ExceptionGroup)) as raised:
        await run_handler(handler, None, near, "there")
    assert "bug" in repr(raised.value)
    assert "theirs" not in repr(raised.value)
    assert await far.receive_some() == b""


async def test_a_cancelled_handlers_stream_is_closed() -> None:
    near, far = trio.testing.memory_stream_pair()

    async def handler(_: object) -> None:
        await trio.sleep_forever()

    with trio.move_on_after(1):
        await run_handler(handler, None, near, "there")
    assert await far.receive_some() == b""

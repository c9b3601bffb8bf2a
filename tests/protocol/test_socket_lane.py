"""Lanes in threads, over real sockets: the same records, and nothing that blocks for ever."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from holdfast.protocol.errors import LocalProtocolError, RemoteProtocolError
from holdfast.protocol.network.lane import PIECE_BYTES, Lane
from holdfast.protocol.network.socket_lane import SocketLane
from tests.background import background
from tests.protocol.test_lane import KEYS, anywhere, header

SIZES = (0, 1, 1_000, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2**21 + 5)

pytestmark = pytest.mark.real_time


@asynccontextmanager
async def lane_pair() -> AsyncIterator[tuple[Lane, SocketLane]]:
    """Make an open lane: this end for trio, the other one for threads."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    near_stream = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
    far_stream = await listener.accept()
    near, far = Lane(near_stream, *KEYS), Lane(far_stream, KEYS[1], KEYS[0])
    await near.open()
    await far.open()
    await near.wait_open()
    await far.wait_open()
    threaded = SocketLane(far_stream, far)
    try:
        yield near, threaded
    finally:
        threaded.release()
        for stream in (near_stream, far_stream, listener):
            await stream.aclose()


def receive(lane: SocketLane) -> bytes | None:
    frame = lane.receive_header(1.0)
    if frame is None:
        return None
    room = memoryview(bytearray(frame.payload_bytes))
    lane.receive_payload(frame, room)
    return bytes(room)


async def test_frames_of_all_sizes_pass_between_a_task_and_a_thread() -> None:
    payloads = [os.urandom(size) for size in SIZES]
    async with lane_pair() as (near, far), trio.open_nursery() as nursery:

        async def send() -> None:
            for index, payload in enumerate(payloads):
                await near.send(header(payload, index), payload)

        def send_back() -> None:
            for index, payload in enumerate(payloads):
                far.send(header(payload, index), payload)

        nursery.start_soon(send)
        for payload in payloads:
            assert await trio.to_thread.run_sync(receive, far) == payload
        nursery.start_soon(trio.to_thread.run_sync, send_back)
        for payload in payloads:
            assert bytes((await near.receive(anywhere))[1]) == payload


async def test_a_frame_that_trickles_in_is_received_to_its_end_and_so_is_the_next() -> None:
    payload = os.urandom(100_000)
    async with lane_pair() as (near, far), trio.open_nursery() as nursery:

        async def trickle() -> None:
            for record in near.sealer.seal(header(payload), payload):
                for start in range(0, len(record), 1_000):
                    await near._stream.send_all(bytes(record[start : start + 1_000]))

        nursery.start_soon(trickle)
        assert await trio.to_thread.run_sync(receive, far) == payload
        await near.send(header(b"next", 1), b"next")
        assert await trio.to_thread.run_sync(receive, far) == b"next"


async def test_an_idle_lane_gives_its_thread_back_and_loses_nothing() -> None:
    async with lane_pair() as (near, far):
        assert await trio.to_thread.run_sync(far.receive_header, 0.01) is None
        await near.send(header(b"later"), b"later")
        assert await trio.to_thread.run_sync(receive, far) == b"later"


async def test_a_payload_without_a_place_is_checked_and_dropped() -> None:
    async with lane_pair() as (near, far):
        await near.send(header(b"dropped"), b"dropped")
        await near.send(header(b"kept"), b"kept")
        frame = far.receive_header(1.0)
        assert frame is not None
        far.receive_payload(frame, None)
        assert receive(far) == b"kept"
        await near.send(header(b"four"), b"four")
        frame = far.receive_header(1.0)
        assert frame is not None
        with pytest.raises(LocalProtocolError):
            far.receive_payload(frame, memoryview(bytearray(3)))


async def test_a_changed_record_is_refused_wherever_it_is_in_its_frame() -> None:
    payload = bytes(2 * PIECE_BYTES + 7)
    for at in (40, 32 + PIECE_BYTES + 16 + 5, 32 + 2 * (PIECE_BYTES + 16) + 1):
        async with lane_pair() as (near, far), background() as nursery:
            wire = bytearray(b"".join(bytes(r) for r in near.sealer.seal(header(payload), payload)))
            wire[at] ^= 1
            nursery.start_soon(near._stream.send_all, wire)
            with pytest.raises(RemoteProtocolError, match="not authentic"):
                await trio.to_thread.run_sync(receive, far)


async def test_records_of_a_frame_cannot_change_places() -> None:
    payload = bytes(2 * PIECE_BYTES)
    async with lane_pair() as (near, far), background() as nursery:
        first, second = (bytes(r) for r in near.sealer.seal(header(payload), payload))
        wire = first[:32] + second + first[32:]
        nursery.start_soon(near._stream.send_all, wire)
        with pytest.raises(RemoteProtocolError, match="not authentic"):
            await trio.to_thread.run_sync(receive, far)


FOR_EVER_S = 10_000.0  # if closing waited for it, pytest would end the test


async def test_closing_wakes_a_thread_that_receives_and_one_that_sends() -> None:
    big = bytes(2**23)

    def for_ever(function: Callable[[], object]) -> None:
        while True:
            function()

    def until_closed(function: Callable[[], object]) -> None:
        with pytest.raises(trio.ClosedResourceError):
            for_ever(function)

    async with lane_pair() as (_near, far), trio.open_nursery() as nursery:
        for blocking in (
            partial(far.receive_header, FOR_EVER_S),
            partial(far.send, header(big), big),
        ):
            nursery.start_soon(trio.to_thread.run_sync, until_closed, blocking)
        await trio.sleep(0.1)
        far.close()


async def test_closing_wakes_a_thread_in_the_middle_of_a_frame() -> None:
    async with lane_pair() as (near, far), trio.open_nursery() as nursery:
        (record,) = near.sealer.seal(header(b"torn"), b"torn")
        await near._stream.send_all(bytes(record)[:-1])

        def torn() -> None:
            with pytest.raises(trio.ClosedResourceError):
                receive(far)

        nursery.start_soon(trio.to_thread.run_sync, torn)
        await trio.sleep(0.1)
        far.close()


@pytest.mark.parametrize("torn", [b"", b"torn", bytes(100_000)])
@pytest.mark.parametrize("lacking", [1, 50_000])
async def test_how_the_other_side_ends_is_told_apart(torn: bytes, lacking: int) -> None:
    async with lane_pair() as (near, far):
        if torn:
            (record,) = near.sealer.seal(header(torn), torn)
            await near._stream.send_all(bytes(record)[: max(1, len(record) - lacking)])
        await near._stream.aclose()
        expected = trio.BrokenResourceError if torn else trio.EndOfChannel
        with pytest.raises(expected):
            await trio.to_thread.run_sync(receive, far)


async def test_a_reset_is_a_broken_connection() -> None:
    async with lane_pair() as (near, far):
        near._stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # type: ignore[attr-defined]
        await near._stream.aclose()
        with pytest.raises(trio.BrokenResourceError):
            await trio.to_thread.run_sync(receive, far)


async def test_a_frame_in_pieces_waits_for_the_turn_of_each() -> None:
    payload = os.urandom(PIECE_BYTES + 100_000)
    turns: list[int] = []
    async with lane_pair() as (near, far), trio.open_nursery() as nursery:
        nursery.start_soon(
            trio.to_thread.run_sync,
            partial(far.send, header(payload), payload, turns.append, 64 * 1024),
        )
        assert bytes((await near.receive(anywhere))[1]) == payload
    assert max(turns) == 64 * 1024
    assert sum(turns) == far.sent_bytes > len(payload)


async def test_closing_wakes_a_thread_that_pauses_in_a_frame() -> None:
    async with lane_pair() as (_near, far), trio.open_nursery() as nursery:

        def pausing() -> None:
            with pytest.raises(trio.ClosedResourceError):
                far.send(header(b"held"), b"held", lambda _count: far.pause(FOR_EVER_S))

        nursery.start_soon(trio.to_thread.run_sync, pausing)
        await trio.sleep(0.1)
        far.close()

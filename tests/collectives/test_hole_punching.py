"""Both ends of a punched route: what is asked for, answered and refused."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import trio
import trio.testing

from holdfast.collectives.links.dialling.hole_punching import (
    MEET_S,
    STREAMS_MAX,
    HolePuncher,
    answer,
)
from holdfast.protocol.addresses import Address
from holdfast.protocol.errors import RemoteProtocolError


class FakeHole:
    port = 7
    dialled: list[Address]

    async def connect(self, address: Address) -> trio.abc.Stream:
        self.dialled.append(address)
        return trio.testing.memory_stream_pair()[0]

    def close(self) -> None:
        pass


class FakeNetwork:
    holes = 0

    def __init__(self) -> None:
        self.dialled: list[Address] = []

    async def open_hole(self, _towards: Address, port: int = 0) -> FakeHole:
        self.holes += 1
        hole = FakeHole()
        hole.dialled = self.dialled
        return hole


async def test_a_peer_that_asks_for_more_streams_than_a_link_has_is_refused() -> None:
    network: Any = FakeNetwork()
    near, far = trio.testing.memory_stream_pair()
    ended = 0

    async def met(_stream: trio.abc.Stream) -> None:
        nonlocal ended
        await trio.sleep(100.0)
        ended += 1

    async with trio.open_nursery() as nursery:
        for port in range(1, 3 * STREAMS_MAX):
            await far.send_all(struct.pack(">H", port))
        with pytest.raises(RemoteProtocolError, match="more than"):
            await answer(network, near, "203.0.113.7", nursery, met)
        assert (network.holes, trio.current_time()) == (STREAMS_MAX, MEET_S)
    assert ended == STREAMS_MAX, "those that it has go on"


async def test_streams_that_have_ended_make_room() -> None:
    network: Any = FakeNetwork()
    near, far = trio.testing.memory_stream_pair()

    async def met(_stream: trio.abc.Stream) -> None:
        await trio.sleep(1.0)

    async with trio.open_nursery() as nursery:
        for port in range(1, 2 * STREAMS_MAX + 1):
            await far.send_all(struct.pack(">H", port))
        await far.send_eof()
        with pytest.raises(OSError, match="hung up"):
            await answer(network, near, "203.0.113.7", nursery, met)
    assert network.holes == 2 * STREAMS_MAX


async def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    network: Any = FakeNetwork()
    near, far = trio.testing.memory_stream_pair()
    caller = HolePuncher(network, near, "203.0.113.7")
    with pytest.raises(TimeoutError):
        await caller.connect()
    await far.send_all(b"\x00")  # half of the late answer, at which the next request is given up
    with pytest.raises(TimeoutError):
        await caller.connect()
    await far.send_all(struct.pack(">H", 1)[1:] + struct.pack(">HH", 2, 3))
    await caller.connect()
    assert network.dialled == [Address("203.0.113.7", 3)]

"""Lanes: frames arrive unchanged and in order, or the lane ends."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.errors import LocalProtocolError, RemoteProtocolError
from holdfast.protocol.network import lane as lanes
from holdfast.protocol.network.lane import (
    HEADER_BYTES,
    OPEN,
    PAYLOAD_BYTES_MAX,
    TAG_BYTES,
    FrameHeader,
    FrameKind,
    Lane,
    LanePreamble,
    derive_lane_keys,
)

KEYS = derive_lane_keys(b"d" * 32, b"a" * 32, b"l" * 16, 3)
RECORD_BYTES = HEADER_BYTES + TAG_BYTES


def header(payload: bytes, index: int = 0) -> FrameHeader:
    return FrameHeader(FrameKind.CONTRIBUTION, 2**40, 1, index, 2, len(payload))


async def anywhere(frame: FrameHeader) -> memoryview:
    return memoryview(bytearray(frame.payload_bytes))


async def nowhere(_: FrameHeader) -> None:
    return None


class Wiretap:
    """A sender's records, and a receiver that gets them as a test changed them."""

    def __init__(self) -> None:
        near, self._tap = trio.testing.memory_stream_pair()
        self._feed, far = trio.testing.memory_stream_pair()
        self.sender = Lane(near, KEYS[0], KEYS[1])
        self.receiver = Lane(far, KEYS[1], KEYS[0])

    async def record(self, payload: bytes, index: int = 0) -> bytes:
        await self.sender.send(header(payload, index), payload)
        return await self.take(len(payload))

    async def opening(self) -> bytes:
        await self.sender.open()
        return await self.take(0)

    async def take(self, payload_bytes: int) -> bytes:
        data = b""
        while len(data) < RECORD_BYTES + payload_bytes:
            data += await self._tap.receive_some(RECORD_BYTES + payload_bytes - len(data))
        return data

    async def feed(self, *records: bytes, end: bool = False) -> None:
        for record in records:
            await self._feed.send_all(record)
        if end:
            await self._feed.aclose()

    @classmethod
    async def opened(cls) -> Wiretap:
        tap = cls()
        await tap.open()
        return tap

    async def open(self) -> None:
        await self.feed(await self.opening())
        await self.receiver.wait_open()


def test_a_mebibyte_is_two_records() -> None:
    sealer, payload = lanes.RecordSealer(KEYS[0]), bytes(2**20)
    assert [len(record) for record in sealer.seal(OPEN, b"")] == [RECORD_BYTES]
    lengths = [len(record) for record in sealer.seal(header(payload), payload)]
    assert lengths == [HEADER_BYTES + 2**19 + TAG_BYTES, 2**19 + TAG_BYTES]


async def test_a_payload_without_a_place_is_checked_and_dropped() -> None:
    tap = await Wiretap.opened()
    first, second = await tap.record(b"dropped", 1), await tap.record(b"kept", 2)
    await tap.feed(first, second)
    frame, data = await tap.receiver.receive(nowhere)
    assert (frame.index, bytes(data)) == (1, b"")
    frame, data = await tap.receiver.receive(anywhere)
    assert (frame.index, bytes(data)) == (2, b"kept")
    broken = bytearray(await tap.record(b"dropped", 3))
    broken[-1] ^= 1
    await tap.feed(bytes(broken))
    with pytest.raises(RemoteProtocolError, match="not authentic"):
        await tap.receiver.receive(nowhere)


@pytest.mark.fault("bytes of a lane are changed")
@pytest.mark.parametrize("at", range(HEADER_BYTES + 5 + TAG_BYTES))
async def test_a_record_with_any_byte_changed_is_refused(at: int) -> None:
    tap = await Wiretap.opened()
    record = bytearray(await tap.record(b"bytes"))
    record[at] ^= 0x01
    await tap.feed(bytes(record), end=True)
    # Where the length was changed, the rest of a longer frame is waited for.
    with pytest.raises((RemoteProtocolError, trio.BrokenResourceError)):
        await tap.receiver.receive(anywhere)


async def test_a_replayed_record_is_refused() -> None:
    tap = await Wiretap.opened()
    record = await tap.record(b"once")
    await tap.feed(record, record)
    await tap.receiver.receive(anywhere)
    with pytest.raises(RemoteProtocolError):
        await tap.receiver.receive(anywhere)


async def test_reordered_and_dropped_records_are_refused() -> None:
    tap = await Wiretap.opened()
    _first, second = await tap.record(b"1"), await tap.record(b"2")
    await tap.feed(second)
    with pytest.raises(RemoteProtocolError):
        await tap.receiver.receive(anywhere)


async def test_a_record_sent_back_to_its_author_is_refused() -> None:
    near, far = trio.testing.memory_stream_pair()
    lane = Lane(near, KEYS[0], KEYS[1])
    await lane.open()
    await far.send_all(await far.receive_some())
    with pytest.raises(RemoteProtocolError):
        await lane.wait_open()


@pytest.mark.parametrize("kept", [1, HEADER_BYTES - 1, HEADER_BYTES, RECORD_BYTES + 3])
async def test_a_truncated_record_is_refused(kept: int) -> None:
    tap = await Wiretap.opened()
    record = await tap.record(b"bytes")
    await tap.feed(record[:kept], end=True)
    with pytest.raises(trio.BrokenResourceError, match="ended in the middle"):
        await tap.receiver.receive(anywhere)


async def test_the_first_record_proves_the_keys_and_nothing_else() -> None:
    tap = Wiretap()
    with pytest.raises(LocalProtocolError):
        await tap.sender.send(header(b"early"), b"early")
    await tap.open()
    with pytest.raises(LocalProtocolError):
        await tap.sender.open()
    other = derive_lane_keys(b"d" * 32, b"x" * 32, b"l" * 16, 3)
    near, far = trio.testing.memory_stream_pair()
    await Lane(near, *other).open()
    with pytest.raises(RemoteProtocolError, match="not authentic"):
        await Lane(far, KEYS[1], KEYS[0]).wait_open()


async def test_a_lane_that_starts_with_another_record_is_refused() -> None:
    tap = Wiretap()
    await tap.opening()
    await tap.feed(await tap.record(b"not an opening"))
    with pytest.raises(RemoteProtocolError, match="OPEN"):
        await tap.receiver.receive(anywhere)


async def test_a_receive_that_still_waits_may_be_cancelled() -> None:
    tap = await Wiretap.opened()
    with trio.move_on_after(1) as scope:
        await tap.receiver.receive(anywhere)
    assert scope.cancelled_caught
    record = await tap.record(b"later")
    await tap.feed(record)
    _, data = await tap.receiver.receive(anywhere)
    assert bytes(data) == b"later"
    await tap.feed((await tap.record(b"torn"))[:-1])
    with trio.move_on_after(1) as scope:
        await tap.receiver.receive(anywhere)
    assert scope.cancelled_caught
    with pytest.raises(trio.BrokenResourceError):
        await tap.receiver.receive(anywhere)


async def test_a_buffer_of_the_wrong_size_is_a_local_error() -> None:
    async def cramped(_: FrameHeader) -> memoryview:
        return memoryview(bytearray(3))

    tap = await Wiretap.opened()
    await tap.feed(await tap.record(b"four"))
    with pytest.raises(LocalProtocolError):
        await tap.receiver.receive(cramped)
    with pytest.raises(LocalProtocolError):
        await tap.sender.send(header(b"four"), b"five!")


def test_one_key_for_both_directions_is_a_local_error() -> None:
    with pytest.raises(LocalProtocolError):
        Lane(trio.testing.memory_stream_pair()[0], KEYS[0], KEYS[0])


def test_every_lane_and_direction_has_its_own_key() -> None:
    keys = {
        key
        for link_id in (b"l" * 16, b"m" * 16)
        for number in range(8)
        for key in derive_lane_keys(b"d" * 32, b"a" * 32, link_id, number)
    }
    keys.update(derive_lane_keys(b"a" * 32, b"d" * 32, b"l" * 16, 0))
    assert len(keys) == 2 * 8 * 2 + 2
    with pytest.raises(LocalProtocolError):
        derive_lane_keys(b"short", b"a" * 32, b"l" * 16, 0)


def test_keys_of_a_known_link_stay_what_they_are() -> None:
    """Two versions of holdfast must derive the same keys."""
    forward, back = KEYS
    assert forward.hex()[:16] == "0b69a23c6f6035eb"
    assert back.hex()[:16] == "5dff76fed278b290"


headers = st.builds(
    FrameHeader,
    st.sampled_from(FrameKind),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, PAYLOAD_BYTES_MAX),
)


@given(headers)
def test_headers_round_trip(frame: FrameHeader) -> None:
    data = frame.pack()
    assert len(data) == HEADER_BYTES
    assert FrameHeader.unpack(data) == frame
    assert FrameHeader.unpack(bytearray(data)) == frame


@pytest.mark.parametrize("at", [1, 2, 3, HEADER_BYTES - 1])
def test_padding_is_zero(at: int) -> None:
    data = bytearray(header(b"x").pack())
    data[at] = 1
    with pytest.raises(RemoteProtocolError, match="padding"):
        FrameHeader.unpack(data)


def test_preambles_round_trip_and_start_with_the_magic() -> None:
    preamble = LanePreamble(b"0123456789abcdef", 2**32 - 1)
    assert LanePreamble.unpack(preamble.pack()) == preamble
    assert preamble.pack()[0] == lanes.MAGIC == 0x48
    with pytest.raises(RemoteProtocolError, match="version"):
        LanePreamble.unpack(b"H\x02" + preamble.pack()[2:])
    assert OPEN.payload_bytes == 0

"""Blocks over the links that peers use: compressed on a slow line, as they are on a fast one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import trio
import zstandard

from holdfast.checkpoint.block_compression import CompressionGain, LineRate
from holdfast.checkpoint.blocks import BLOCK_BYTES
from holdfast.checkpoint.byte_shuffle import squeeze
from holdfast.checkpoint.donor import Donor, _Batch
from holdfast.checkpoint.joiner import Joiner
from holdfast.checkpoint.shared_state import SharedState
from holdfast.checkpoint.state_transfer import FetchFailedError, FetchReport
from holdfast.collectives.links.rate_limiter import RateLimiter
from holdfast.protocol.messages import (
    BlocksRefused,
    BlocksRequest,
    Index,
    IndexRequest,
    Message,
    SyncFragment,
)
from holdfast.simulation.memory_network import MemoryWorld
from tests.checkpoint.test_transfer_links import SIZE, make_state, peer_of, start
from tests.collectives.test_lane_threads import nodes

PLAIN_BYTES = 4 * SIZE.value_count + 8 * SIZE.counter_count  # momentum is zero and does not travel
OVERHEAD = 0.01  # of headers, tags, messages


def random_bits() -> SharedState:
    """Nothing that any compression could find."""
    state = make_state(founded=False)
    bits = np.random.default_rng(0).integers(0, 2**32, SIZE.value_count, np.uint32)
    state.load_initial(0, bits.view(np.float32), np.array([1, 2, 3]))
    return state


async def outcome_of(
    source: SharedState, target: SharedState, bytes_per_s: float
) -> tuple[FetchReport | FetchFailedError, int]:
    """Copy it over one line; returns what came of it, and the bytes on the line."""
    world = MemoryWorld(random.Random(1), delay_s=0.02, bytes_per_s=bytes_per_s)
    async with trio.open_nursery() as nursery:
        peers = await start(nursery, world, [target, source])
        before = world.sent_bytes["host1", "host0"]
        outcome: FetchReport | FetchFailedError
        try:
            order = SyncFragment(source.heads()[0], (peer_of(1),))
            outcome = await peers[0].joiner.fetch(order)
        except FetchFailedError as error:
            outcome = error
        line_bytes = world.sent_bytes["host1", "host0"] - before
        nursery.cancel_scope.cancel()
    return outcome, line_bytes


async def copied(source: SharedState, bytes_per_s: float) -> tuple[FetchReport, int]:
    target = make_state(founded=False)
    report, line_bytes = await outcome_of(source, target, bytes_per_s)
    assert isinstance(report, FetchReport)
    assert target.heads() == source.heads()
    assert target.values(0).tobytes() == source.values(0).tobytes()
    assert report.received_bytes == PLAIN_BYTES
    return report, line_bytes


async def test_a_slow_line_carries_less_than_the_state() -> None:
    report, line_bytes = await copied(make_state(founded=True), 4e6)
    # All but the blocks of the first second, by which the line is known.
    assert 0.08 * PLAIN_BYTES < report.saved_bytes < 0.17 * PLAIN_BYTES
    assert line_bytes == pytest.approx(PLAIN_BYTES - report.saved_bytes, rel=OVERHEAD)


async def test_a_fast_line_carries_the_state_as_it_is() -> None:
    with mock.patch("holdfast.checkpoint.donor.squeeze", side_effect=AssertionError):
        report, line_bytes = await copied(make_state(founded=True), 200e6)
    assert report.saved_bytes == 0
    assert line_bytes == pytest.approx(PLAIN_BYTES, rel=OVERHEAD)


async def test_what_does_not_give_way_is_tried_and_let_be() -> None:
    with mock.patch("holdfast.checkpoint.donor.squeeze", side_effect=squeeze) as tried:
        report, _line_bytes = await copied(random_bits(), 4e6)
    assert tried.call_count == 4
    assert report.saved_bytes < 100  # of the counters


def cut(data: bytes) -> bytes:
    return data[:-1]


def flipped(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]


def of_other_bytes(_data: bytes) -> bytes:
    return squeeze(np.random.default_rng(5).standard_normal(BLOCK_BYTES // 4, np.float32).data, 4)


def bomb(_data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(bytes(64 * BLOCK_BYTES))


@pytest.mark.fault("a donor's compressed block is damaged, too short, or a bomb")
@pytest.mark.parametrize("harm", [cut, flipped, of_other_bytes, bomb])
async def test_a_donor_of_damaged_compressed_blocks_is_named(
    harm: Callable[[bytes], bytes],
) -> None:
    def harmful(data: memoryview, element_bytes: int) -> bytes:
        return harm(squeeze(data, element_bytes))

    target = make_state(founded=False)
    with mock.patch("holdfast.checkpoint.donor.squeeze", side_effect=harmful):
        error, _line_bytes = await outcome_of(make_state(founded=True), target, 4e6)
    assert isinstance(error, FetchFailedError)
    assert error.bad_donors == (peer_of(1),)
    (reason,) = error.reasons.values()
    assert reason.startswith("block ")
    assert target.heads() == ()


async def test_a_block_that_is_sent_again_is_the_same_frame() -> None:
    state, line = make_state(founded=True), LineRate()
    request = BlocksRequest(fragment=0, version=0, transfer=7, blocks=(0, 1))
    batch = _Batch(state, request, line, CompressionGain())
    plain = batch.next_frame()
    assert plain is not None
    first = plain()
    line.bytes_per_s = 1e6  # known only now
    compressed = batch.next_frame()
    assert compressed is not None
    second = compressed()
    assert first is not None
    assert second is not None
    assert (len(first[1]), len(second[1]) < BLOCK_BYTES) == (BLOCK_BYTES, True)
    for bytes_per_s in (1e6, 1e9):
        line.bytes_per_s = bytes_per_s
        assert (plain(), compressed()) == (first, second)


@pytest.mark.real_time
async def test_lanes_threads_compress_and_make_whole(tmp_path: Path) -> None:
    """Over a link whose first transfer has shown how slow it is, by then on any machine."""
    source = make_state(founded=True)
    targets = [make_state(founded=False) for _ in range(2)]
    async with (
        nodes(tmp_path, upload=RateLimiter(20e6)) as (giver, taker),
        trio.open_nursery() as nursery,
    ):
        here = MemoryWorld(random.Random(0)).host("here", giver.hub.me)  # only to work in place
        donor = Donor(source, giver.hub, here)
        joiners = [Joiner(target, taker.hub, here) for target in targets]

        async def asked(peer: str, message: Message) -> None:
            assert isinstance(message, IndexRequest | BlocksRequest)
            donor.receive(peer, message)

        async def answered(peer: str, message: Message) -> None:
            assert isinstance(message, Index | BlocksRefused)
            for joiner in joiners:
                joiner.receive(peer, message)

        giver.hub.on_message, taker.hub.on_message = asked, answered
        await nursery.start(donor.run)
        order = SyncFragment(source.heads()[0], (giver.hub.me,))
        await joiners[0].fetch(order)
        # Counted where they arrive: whoever sends may get to count when all has been taken.
        before_bytes = taker.hub.received_bytes
        report = await joiners[1].fetch(order)
        carried_bytes = taker.hub.received_bytes - before_bytes
        nursery.cancel_scope.cancel()
    for target in targets:
        assert target.heads() == source.heads()
        assert target.values(0).tobytes() == source.values(0).tobytes()
    assert (report.received_bytes, report.bad_donors) == (PLAIN_BYTES, ())
    assert report.saved_bytes > 0.1 * PLAIN_BYTES
    assert carried_bytes == pytest.approx(PLAIN_BYTES - report.saved_bytes, rel=OVERHEAD)

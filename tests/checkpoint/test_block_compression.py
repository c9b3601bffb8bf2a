"""Compression by a donor: on slow lines, and for fragments that compress well."""

from __future__ import annotations

import math

import pytest
import trio

from holdfast.checkpoint.block_compression import (
    MEASURED_BYTES,
    MEASURED_S,
    PAYS_BELOW_BYTES_PER_S,
    RECENT_BLOCKS,
    REST_BLOCKS,
    CompressionGain,
    LineRate,
)

MIB = 2**20


async def send(line: LineRate, count: int, bytes_per_s: float) -> None:
    line.begin()
    await trio.sleep(count / bytes_per_s)
    line.end(count)


async def test_a_line_that_nobody_knows_is_not_slow() -> None:
    line = LineRate()
    assert line.bytes_per_s == math.inf
    await send(line, MEASURED_BYTES - 1, 0.9 * MEASURED_BYTES / MEASURED_S * 2)
    assert not line.slow, "too little has gone to say"


@pytest.mark.parametrize(("rate", "slow"), [(0.9, True), (1.1, False)])
async def test_a_line_is_slow_below_the_limit(rate: float, slow: bool) -> None:
    line = LineRate()
    for _ in range(9):
        await send(line, MIB, rate * PAYS_BELOW_BYTES_PER_S)
        await trio.sleep(3)  # nothing to send
    assert line.slow is slow
    assert line.bytes_per_s == pytest.approx(rate * PAYS_BELOW_BYTES_PER_S)


async def test_a_very_slow_line_is_known_after_its_first_blocks() -> None:
    line = LineRate()
    await send(line, MIB, MIB / MEASURED_S)
    assert line.slow


async def test_requests_that_are_served_at_once_share_their_time() -> None:
    line = LineRate()
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(send, line, 8 * MIB, 20e6)
    assert line.bytes_per_s > PAYS_BELOW_BYTES_PER_S


async def test_a_line_that_changes_is_measured_again() -> None:
    line = LineRate()
    await send(line, MEASURED_BYTES, 1e6)
    assert line.slow
    await send(line, MEASURED_BYTES, 1e9)
    assert not line.slow


def test_a_fragment_that_gives_way_is_compressed_all_the_time() -> None:
    savings = CompressionGain()
    for _ in range(10 * REST_BLOCKS):
        assert savings.worth_trying()
        savings.note(100, 84)


def test_one_that_does_not_is_let_be_and_tried_now_and_then() -> None:
    savings, tried = CompressionGain(), 0
    for _ in range(10 * (REST_BLOCKS + RECENT_BLOCKS)):
        if savings.worth_trying():
            tried += 1
            savings.note(100, 99)
    assert tried == 10 * RECENT_BLOCKS


def test_a_few_stubborn_blocks_among_others_change_nothing() -> None:
    savings = CompressionGain()
    for number in range(100):
        assert savings.worth_trying()
        savings.note(100, 100 if number % 2 else 84)

"""Send queues serve sources in turn; buffers are used again."""

from __future__ import annotations

import gc
import random
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from holdfast.collectives.links.buffer_pool import PERIODS_KEPT, BufferPool
from holdfast.collectives.links.send_queue import FrameSource, Load, SendQueue, TakenFrame
from holdfast.protocol.network.lane import FrameHeader, FrameKind
from tests.background import background, until
from tests.collectives.net import OneFrame


class Source:
    """A number of frames of a round, of which some are ready."""

    def __init__(self, round_: int, count: int, ready: int) -> None:
        self.round, self.count, self.ready, self.position = round_, count, ready, 0

    def next_frame(self) -> Load | None:
        if self.position == min(self.ready, self.count):
            return None
        self.position += 1
        header = FrameHeader(FrameKind.BLOCK, self.round, 0, self.position - 1, 0, 0)
        return lambda: (header, b"")

    def left(self) -> int:
        return self.count - self.position


def header_of(taken: TakenFrame) -> FrameHeader:
    frame = taken.load()
    assert frame is not None
    return frame[0]


async def drain(send_queue: SendQueue, source: FrameSource, drained: list[bool]) -> None:
    drained.append(await send_queue.drain(source))


async def take(send_queue: SendQueue, count: int) -> list[tuple[int, int]]:
    order = []
    for _ in range(count):
        taken = await send_queue.take()
        order.append((header_of(taken).round, header_of(taken).index))
        send_queue.finish(taken)
    return order


async def test_sources_take_turns_and_one_that_has_nothing_ready_holds_up_no_other() -> None:
    send_queue = SendQueue()
    a, b = Source(1, 4, 4), Source(2, 4, 1)
    drained: list[bool] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain, send_queue, a, drained)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(drain, send_queue, b, drained)
        await trio.testing.wait_all_tasks_blocked()
        assert await take(send_queue, 5) == [(1, 0), (2, 0), (1, 1), (1, 2), (1, 3)]
        await trio.testing.wait_all_tasks_blocked()
        assert drained == [True]
        with trio.move_on_after(1) as scope:
            await send_queue.take()
        assert scope.cancelled_caught
        b.ready = 4
        send_queue.wake()
        assert await take(send_queue, 3) == [(2, 1), (2, 2), (2, 3)]
    assert drained == [True, True]


class Counted(Source):
    """A source that counts how often it is asked."""

    asked = 0

    def next_frame(self) -> Load | None:
        self.asked += 1
        return super().next_frame()


@pytest.mark.real_time
async def test_a_frame_wakes_one_idle_lane_and_many_frames_wake_as_many() -> None:
    """Were all lanes woken for each frame, 24 of them would ask 24 times for one frame."""
    send_queue = SendQueue()
    source, lanes = Counted(1, 40, 0), 24
    taken: list[int] = []

    async def in_task() -> None:
        while True:
            taken.append(header_of(frame := await send_queue.take()).index)
            send_queue.finish(frame)

    def in_thread() -> None:
        while (frame := send_queue.take_in_thread(60.0)) is not None:
            taken.append(header_of(frame).index)
            send_queue.finish(frame)

    limiter = trio.CapacityLimiter(lanes)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_queue.drain, source)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(lanes):
            if number % 2:
                nursery.start_soon(in_task)
            else:
                nursery.start_soon(partial(trio.to_thread.run_sync, in_thread, limiter=limiter))
        try:
            await until(lambda: source.asked >= lanes)  # each asks once before it waits
            await trio.sleep(0.1)
            source.asked = 0
            source.ready = 1
            send_queue.wake()
            await until(lambda: len(taken) >= 1, 0.001)
            await trio.sleep(0.1)
            # By the lane that takes it, by the same one afterwards, and by the one that it wakes.
            assert source.asked <= 3
            source.ready = 40
            send_queue.wake()
            await until(lambda: len(taken) >= 40, 0.001)
            assert sorted(taken) == list(range(40))
        finally:
            send_queue.close()
            nursery.cancel_scope.cancel()


async def test_the_oldest_rounds_sources_go_first() -> None:
    send_queue = SendQueue()
    younger, older, mate = Source(1, 2, 2), Source(2, 3, 2), Source(3, 2, 2)
    async with trio.open_nursery() as nursery:
        for source, age in ((younger, 8), (older, 7), (mate, 7)):
            nursery.start_soon(partial(send_queue.drain, source, age=age))
            await trio.testing.wait_all_tasks_blocked()
        # The third frame of the older one is not ready yet, and no lane waits for it.
        assert await take(send_queue, 5) == [(2, 0), (3, 0), (2, 1), (3, 1), (1, 0)]
        older.ready = 3
        assert await take(send_queue, 2) == [(2, 2), (1, 1)]


async def test_a_frame_that_comes_back_goes_first_and_counts_once() -> None:
    send_queue = SendQueue()
    drained: list[bool] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain, send_queue, Source(1, 3, 3), drained)
        await trio.testing.wait_all_tasks_blocked()
        sent, unsent = await send_queue.take(), await send_queue.take()
        send_queue.finish(sent)
        send_queue.put_back([sent, unsent])
        again = [await send_queue.take() for _ in range(3)]
        assert [header_of(taken).index for taken in again] == [0, 1, 2]
        for taken in again[:2]:
            send_queue.finish(taken)
        await trio.testing.wait_all_tasks_blocked()
        assert drained == []
        send_queue.finish(again[2])
    assert drained == [True]
    assert all(taken.feed is None for taken in again)  # which would keep the source


async def test_a_closed_queue_wakes_all_callers() -> None:
    send_queue = SendQueue()
    drained: list[bool] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain, send_queue, Source(1, 4, 0), drained)
        await trio.testing.wait_all_tasks_blocked()
        send_queue.close()
    assert drained == [False]
    assert not await send_queue.drain(OneFrame(FrameHeader(FrameKind.BLOCK, 0, 0, 0, 0, 0), b""))
    assert send_queue.take_in_thread(0) is None


@pytest.mark.real_time
async def test_threads_and_the_event_loop_wake_each_other() -> None:
    send_queue = SendQueue()
    count = 2_000
    source = Source(1, count, 0)
    seen: list[int] = []

    def work() -> None:
        while (taken := send_queue.take_in_thread(0.5)) is not None:
            seen.append(header_of(taken).index)
            send_queue.finish(taken)

    async def work_in_task() -> None:
        while True:
            taken = await send_queue.take()
            seen.append(header_of(taken).index)
            send_queue.finish(taken)
            await trio.sleep(0)

    def feed() -> None:
        rng = random.Random(0)
        while source.ready < count:
            source.ready += rng.randint(1, 5)
            send_queue.wake()

    async with background() as nursery:
        nursery.start_soon(work_in_task)
        for _ in range(2):
            nursery.start_soon(trio.to_thread.run_sync, work)
        nursery.start_soon(trio.to_thread.run_sync, feed)
        assert await send_queue.drain(source)
    assert sorted(seen) == list(range(count))


def test_a_buffer_comes_back_when_nothing_refers_to_any_part_of_it() -> None:
    pool = BufferPool()
    first = pool.take(1_000)
    address = np.frombuffer(first, np.uint8).ctypes.data
    part = np.frombuffer(first, np.float32)[10:20]
    del first
    second = pool.take(1_000)
    assert np.frombuffer(second, np.uint8).ctypes.data != address
    del part
    assert np.frombuffer(pool.take(1_000), np.uint8).ctypes.data == address
    assert len(pool.take(999)) == 999


@pytest.mark.parametrize("size_bytes", [0, 1, 2**21 - 1, 2**21, 4_000_000, 2**22 + 1, 2**22])
def test_a_buffer_has_the_size_that_was_asked_for(size_bytes: int) -> None:
    """Whether in huge pages or not; and it comes back."""
    pool = BufferPool()
    for _ in range(2):
        buffer = pool.take(size_bytes)
        assert (len(buffer), pool.lent_bytes) == (size_bytes, size_bytes)
        buffer[:] = bytes([7]) * size_bytes
        assert bytes(buffer[-3:]) == bytes([7]) * min(3, size_bytes)
        del buffer
        assert pool.lent_bytes == 0


def alive(arrays: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return [array() is not None for array in arrays].count(True)


def test_a_pool_keeps_what_was_lent_at_one_time() -> None:
    pool = BufferPool()
    buffers = [pool.take(1_000) for _ in range(5)]
    arrays = [weakref.ref(buffer.obj.base) for buffer in buffers]  # type: ignore[attr-defined]
    del buffers
    assert (alive(arrays), pool.lent_bytes) == (5, 0)
    buffers = [pool.take(1_000), pool.take(1_000), pool.take(2_500)]  # 5,000 in all
    assert (alive(arrays), pool.lent_bytes) == (2, 4_500)
    del buffers
    assert (alive(arrays), pool.lent_bytes) == (2, 0)


@pytest.mark.slow
def test_memory_that_some_periods_did_not_need_is_free_again() -> None:
    pool = BufferPool()
    buffers = [pool.take(1_000) for _ in range(5)]
    arrays = [weakref.ref(buffer.obj.base) for buffer in buffers]  # type: ignore[attr-defined]
    del buffers
    for _period in range(PERIODS_KEPT):
        assert alive(arrays) == 5
        lent = pool.take(1_000)
        del lent
    assert alive(arrays) == 1

"""Rounds' frames go before copies, on all links of a node together; a copy never stands still."""

from __future__ import annotations

import pytest
import trio

from holdfast.collectives.links.send_priority import WAIT_S_MAX, SendPriority, SendRank
from holdfast.collectives.links.send_queue import Load, SendQueue
from holdfast.protocol.network.lane import FrameHeader, FrameKind

MIB = 2**20
LINE = 10.0 * MIB  # bytes per second


class Endless:
    """Frames without end, of 1 MiB."""

    def next_frame(self) -> Load | None:
        header = FrameHeader(FrameKind.BLOCK, 0, 0, 0, 0, 0)
        return lambda: (header, b"")

    def exhausted(self) -> bool:
        return False


class Line:
    """A node's line with two links; each frame takes the whole of it for a tenth of a second."""

    def __init__(self, share: float) -> None:
        self.send_priority = SendPriority(share)
        self.rounds, self.copies = SendQueue(self.send_priority), SendQueue(self.send_priority)
        self.sent = dict.fromkeys(SendRank, 0)
        self.busy = trio.Lock()

    async def lane(self, send_queue: SendQueue) -> None:
        while True:
            taken = await send_queue.take()
            async with self.busy:
                await trio.sleep(MIB / LINE)
            self.sent[taken.rank] += 1
            send_queue.finish(taken, MIB)


async def carry(line: Line, seconds: float) -> dict[SendRank, int]:
    before = dict(line.sent)
    await trio.sleep(seconds)
    return {rank: line.sent[rank] - before[rank] for rank in SendRank}


@pytest.mark.fault(
    "copies and rounds want the same line", "frames of rounds under way", "rounds first"
)
@pytest.mark.parametrize("share", [0.1, 0.25])
async def test_copies_get_their_share_beside_rounds_and_all_without_them(share: float) -> None:
    line = Line(share)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.copies.drain, Endless(), SendRank.COPY)
        for send_queue in (line.rounds, line.copies):
            nursery.start_soon(line.lane, send_queue)
        alone = await carry(line, 30)
        assert alone[SendRank.COPY] >= 299
        assert line.send_priority.line_bytes_per_s == pytest.approx(LINE, rel=0.11)
        scope = trio.CancelScope()
        nursery.start_soon(drain_in, scope, line.rounds, SendRank.ROUND)
        beside = await carry(line, 30)
        scope.cancel()
        assert 0.8 * share < beside[SendRank.COPY] / 300 < 1.2 * share
        assert beside[SendRank.ROUND] > 0.95 * (1 - share) * 300
        assert (await carry(line, 10))[SendRank.COPY] >= 98, "all of the line again"
        nursery.cancel_scope.cancel()


async def drain_in(scope: trio.CancelScope, send_queue: SendQueue, rank: SendRank) -> None:
    with scope:
        await send_queue.drain(Endless(), rank)


async def test_without_any_share_a_copy_is_still_not_taken_for_dead() -> None:
    line = Line(0.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.rounds.drain, Endless(), SendRank.ROUND)
        nursery.start_soon(line.copies.drain, Endless(), SendRank.COPY)
        for send_queue in (line.rounds, line.copies):
            nursery.start_soon(line.lane, send_queue)
        sent = await carry(line, 10 * WAIT_S_MAX)
        assert 7 <= sent[SendRank.COPY] <= 11
        nursery.cancel_scope.cancel()


async def test_on_one_link_results_for_listeners_go_before_blocks() -> None:
    line = Line(0.1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.copies.drain, Endless(), SendRank.COPY)
        nursery.start_soon(line.lane, line.copies)
        await carry(line, 1)
        scope = trio.CancelScope()
        nursery.start_soon(drain_in, scope, line.copies, SendRank.LISTENER)
        sent = await carry(line, 10)
        assert sent[SendRank.COPY] <= 1 < 98 <= sent[SendRank.LISTENER]
        scope.cancel()
        assert (await carry(line, 10))[SendRank.COPY] >= 98
        nursery.cancel_scope.cancel()


async def test_a_frame_that_is_lost_with_its_link_holds_nobody_up() -> None:
    line = Line(0.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.rounds.drain, Endless(), SendRank.ROUND)
        await trio.testing.wait_all_tasks_blocked()
        await line.rounds.take()  # and its lane dies with it
        nursery.start_soon(line.copies.drain, Endless(), SendRank.COPY)
        nursery.start_soon(line.lane, line.copies)
        assert (await carry(line, 4))[SendRank.COPY] == 0
        line.rounds.close()
        assert (await carry(line, 4))[SendRank.COPY] >= 38
        nursery.cancel_scope.cancel()

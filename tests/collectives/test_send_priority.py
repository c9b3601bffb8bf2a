"""Rounds' frames go before copies, on all links of a node together; a copy never stands still."""

from __future__ import annotations

import pytest
import trio

from holdfast.collectives.links.rates.rate_limiter import RateLimiter
from holdfast.collectives.links.rates.send_priority import WAIT_S_MAX, SendPriority, SendRank
from holdfast.collectives.links.send_queue import Load, SendQueue
from holdfast.protocol.network.lane import FrameHeader, FrameKind
from tests.background import background
from tests.collectives.net import OneFrame

MIB = 2**20
LINE = 10.0 * MIB  # bytes per second


class Endless:
    """Frames without end, of 1 MiB."""

    def next_frame(self) -> Load | None:
        header = FrameHeader(FrameKind.BLOCK, 0, 0, 0, 0, 0)
        return lambda: (header, b"")

    def left(self) -> int:
        return 1


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
    async with background() as nursery:
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


async def drain_in(scope: trio.CancelScope, send_queue: SendQueue, rank: SendRank) -> None:
    with scope:
        await send_queue.drain(Endless(), rank)


async def test_without_any_share_a_copy_is_still_not_taken_for_dead() -> None:
    line = Line(0.0)
    async with background() as nursery:
        nursery.start_soon(line.rounds.drain, Endless(), SendRank.ROUND)
        nursery.start_soon(line.copies.drain, Endless(), SendRank.COPY)
        for send_queue in (line.rounds, line.copies):
            nursery.start_soon(line.lane, send_queue)
        sent = await carry(line, 10 * WAIT_S_MAX)
        assert 7 <= sent[SendRank.COPY] <= 11


async def test_on_one_link_results_for_listeners_go_before_blocks() -> None:
    line = Line(0.1)
    async with background() as nursery:
        nursery.start_soon(line.copies.drain, Endless(), SendRank.COPY)
        nursery.start_soon(line.lane, line.copies)
        await carry(line, 1)
        scope = trio.CancelScope()
        nursery.start_soon(drain_in, scope, line.copies, SendRank.LISTENER)
        sent = await carry(line, 10)
        assert sent[SendRank.COPY] <= 1 < 98 <= sent[SendRank.LISTENER]
        scope.cancel()
        assert (await carry(line, 10))[SendRank.COPY] >= 98


async def test_a_frame_that_is_lost_with_its_link_holds_nobody_up() -> None:
    line = Line(0.0)
    async with background() as nursery:
        nursery.start_soon(line.rounds.drain, Endless(), SendRank.ROUND)
        await trio.testing.wait_all_tasks_blocked()
        await line.rounds.take()  # and its lane dies with it
        nursery.start_soon(line.copies.drain, Endless(), SendRank.COPY)
        nursery.start_soon(line.lane, line.copies)
        assert (await carry(line, 4))[SendRank.COPY] == 0
        line.rounds.close()
        assert (await carry(line, 4))[SendRank.COPY] >= 38


# ------------------------------------------------------------ what rounds leave

STEP_S = 0.005
PIECE = 64 * 1024


class Home:
    """A node whose lanes take from one bucket, in steps of time: a round beside a copy.

    Args:
      round_share: of the line, what the round sends at most, for its receivers take no more.
      paced: whether there is a bucket.
    """

    def __init__(self, round_share: float, *, paced: bool = True) -> None:
        self.bucket = RateLimiter(LINE, burst_s=0.02, slice_s=0.005)
        self.priority = SendPriority(0.05, lambda now_s: paced and self.bucket.debt_s(now_s) <= 0)
        self.round_share = round_share
        self.sent = dict.fromkeys(("round", "copy"), 0.0)
        self.free_s = dict.fromkeys(("round", "copy"), 0.0)  # when its last bytes had passed
        self.due = 0.0  # bytes that the round's receivers can take
        self.now_s = 0.0
        for _ in range(20):  # what the line carries is learnt
            self.priority.begin(SendRank.COPY, self.now_s)
            self.now_s += 0.1
            self.priority.end(SendRank.COPY, int(LINE / 10), self.now_s)
        self.now_s += 1.0
        self.priority.begin(SendRank.ROUND, self.now_s)
        self.priority.begin(SendRank.COPY, self.now_s)

    def run(self, seconds: float) -> dict[str, float]:
        """Go on for some time; returns the rates of both, as shares of the line."""
        before, end_s = dict(self.sent), self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += STEP_S
            self.due = min(self.due + self.round_share * LINE * STEP_S, LINE)
            while self.due >= PIECE and self._takes("round"):
                self.due -= PIECE
            while self._takes("copy"):
                pass
        return {who: (self.sent[who] - before[who]) / seconds / LINE for who in self.sent}

    def _takes(self, who: str) -> bool:
        if self.now_s < self.free_s[who]:
            return False
        if who == "copy" and self.priority.piece_wait_s(PIECE, self.now_s):
            return False
        wait_s = max(0.0, self.bucket.reserve(PIECE, self.now_s))
        self.free_s[who] = self.now_s + wait_s
        self.sent[who] += PIECE
        return True


@pytest.mark.fault(
    "copies and rounds want the same line", "frames of rounds under way", "rounds first"
)
@pytest.mark.parametrize("round_share", [0.1, 0.4, 0.7])
def test_copies_take_what_a_round_leaves_of_the_line(round_share: float) -> None:
    home = Home(round_share)
    home.run(5)
    rates = home.run(20)
    assert rates["round"] == pytest.approx(round_share, rel=0.05)
    assert rates["copy"] > (1 - round_share) / 1.5


def test_a_round_that_fills_the_line_leaves_its_share_to_copies() -> None:
    home = Home(2.0)
    home.run(5)
    rates = home.run(20)
    assert rates["copy"] < 1.5 * 0.05
    assert rates["round"] > 0.9


def test_where_nothing_is_paced_copies_get_their_share() -> None:
    home = Home(0.2, paced=False)
    assert home.run(10)["copy"] == pytest.approx(0.05, rel=0.1)


def one() -> OneFrame:
    return OneFrame(FrameHeader(FrameKind.BLOCK, 0, 0, 0, 0, 0), b"")


async def test_a_frame_waits_in_its_middle_for_a_round_but_not_for_long() -> None:
    priority = SendPriority(0.0)
    rounds, copies = SendQueue(priority), SendQueue(priority)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(copies.drain, one(), SendRank.COPY)
        taken = await copies.take()
        assert copies.turn_wait_s(taken, PIECE) == 0.0, "nobody else sends"
        nursery.start_soon(rounds.drain, one())
        of_round = await rounds.take()
        assert rounds.turn_wait_s(of_round, PIECE) == 0.0
        assert copies.turn_wait_s(taken, PIECE) > 0.0
        await trio.sleep(WAIT_S_MAX - 0.1)
        assert copies.turn_wait_s(taken, PIECE) > 0.0
        await trio.sleep(0.2)
        assert copies.turn_wait_s(taken, PIECE) == 0.0, "its receiver waits"
        copies.finish(taken)
        rounds.finish(of_round)


async def test_a_frame_does_not_hold_the_lane_that_a_round_needs() -> None:
    priority = SendPriority(0.0)
    rounds, link = SendQueue(priority), SendQueue(priority)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.drain, one(), SendRank.COPY)
        taken = await link.take()
        nursery.start_soon(rounds.drain, one())
        of_round = await rounds.take()
        assert link.turn_wait_s(taken, PIECE) > 0.0
        nursery.start_soon(link.drain, one())
        await trio.testing.wait_all_tasks_blocked()
        assert link.turn_wait_s(taken, PIECE) == 0.0, (
            "a round's frame waits for a lane of this link"
        )
        link.finish(taken)
        for send_queue, frame in ((rounds, of_round), (link, await link.take())):
            send_queue.finish(frame)

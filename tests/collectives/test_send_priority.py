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


# ------------------------------------------------------------ what rounds leave

ROUND_TRIP_S = 0.1
STEP_S = 0.005
PIECE = 64 * 1024


class Home:
    """A node at a line with a queue, in steps of time: a round beside a copy, each to its own receiver.

    Args:
      round_share: of the line, what the round sends at most.
      elastic_s: the delay of the queue that the round keeps up by sending more; 0: it sends no more than
        its share.
    """

    def __init__(self, round_share: float, elastic_s: float = 0.0, share: float = 0.05) -> None:
        self.priority = SendPriority(share)
        self.round_share, self.elastic_s = round_share, elastic_s
        self.links = (Endless(), Endless())  # the round's, the copy's; any objects
        self.receiver_queue_s = 0.0  # on the round's link
        self.round_trip_s = ROUND_TRIP_S
        self.known = True
        self.queued = dict.fromkeys(("round", "copy"), 0.0)
        self.sent = dict.fromkeys(("round", "copy"), 0.0)
        self.queue_s_max = 0.0
        self.frame_bytes = 0  # that the copy has sent of its frame
        self.now_s = 0.0
        self._learn_the_line()

    def _learn_the_line(self) -> None:
        for _ in range(20):
            self.priority.begin(SendRank.COPY, self.now_s)
            self.now_s += 0.1
            self.priority.end(SendRank.COPY, int(LINE / 10), self.now_s)
        self.now_s += 1.0
        self.priority.begin(SendRank.ROUND, self.now_s)
        self.priority.begin(SendRank.COPY, self.now_s)

    @property
    def queue_s(self) -> float:
        return sum(self.queued.values()) / LINE

    def run(self, seconds: float) -> dict[str, float]:
        """Go on for some time; returns the rates of both, as shares of the line."""
        before, end_s = dict(self.sent), self.now_s + seconds
        while self.now_s < end_s:
            self._step()
        return {who: (self.sent[who] - before[who]) / seconds / LINE for who in self.sent}

    def _step(self) -> None:
        self.now_s += STEP_S
        self.queued["round"] += self.round_share * LINE * STEP_S
        if self.elastic_s:
            self.queued["round"] += max(0.0, self.elastic_s - self.queue_s) * LINE
        while self.priority.piece_wait_s(PIECE, self.now_s) == 0.0:
            self.queued["copy"] += PIECE
            self.frame_bytes += PIECE
            if self.frame_bytes == MIB:
                self.priority.end(SendRank.COPY, MIB, self.now_s, self.frame_bytes)
                self.priority.begin(SendRank.COPY, self.now_s)
                self.frame_bytes = 0
        whole = sum(self.queued.values())
        for who, queued in self.queued.items():  # first in, first out, nearly
            sent = queued * min(1.0, LINE * STEP_S / whole) if whole else 0.0
            self.queued[who] -= sent
            self.sent[who] += sent
        self.queue_s_max = max(self.queue_s_max, self.queue_s)
        if self.known:
            for link, more_s in zip(self.links, (self.receiver_queue_s, 0.0), strict=True):
                round_trip_s = self.round_trip_s + self.queue_s + more_s
                self.priority.note_round_trip(link, round_trip_s, self.round_trip_s, self.now_s)


@pytest.mark.fault(
    "copies and rounds want the same line", "frames of rounds under way", "rounds first"
)
@pytest.mark.parametrize("round_share", [0.1, 0.4, 0.7])
def test_copies_take_what_a_round_leaves_of_the_line(round_share: float) -> None:
    home = Home(round_share)
    home.run(5)
    rates = home.run(20)
    assert rates["round"] == pytest.approx(round_share, rel=0.02)
    assert rates["copy"] > (1 - round_share) / 1.5
    assert home.queue_s_max < ROUND_TRIP_S, "no more than a router holds"


def test_a_round_that_comes_to_fill_the_line_gets_it_at_once() -> None:
    home = Home(0.1)
    assert home.run(5)["copy"] > 0.3
    home.elastic_s = 0.08
    assert home.run(1)["copy"] < 0.3
    assert home.run(10)["copy"] < 1.3 * 0.05, "its share"


def test_a_queue_at_a_rounds_receiver_is_not_the_lines() -> None:
    home = Home(0.2)
    home.receiver_queue_s = 0.2
    home.run(5)
    assert home.run(10)["copy"] > 0.8 / 1.5


@pytest.mark.parametrize("known", [True, False])
def test_without_round_trips_that_tell_copies_get_their_share(known: bool) -> None:
    home = Home(0.2)
    home.known, home.round_trip_s = known, 0.001
    assert home.run(10)["copy"] == pytest.approx(0.05, rel=0.1)


def test_what_no_copy_used_is_not_taken_for_left() -> None:
    home = Home(0.2)
    home.priority.end(SendRank.COPY, 0, home.now_s)
    for _ in range(2_000):
        home.now_s += STEP_S
        home.priority.note_round_trip(home.links[0], ROUND_TRIP_S, ROUND_TRIP_S, home.now_s)
    home.priority.begin(SendRank.COPY, home.now_s)
    assert home.run(0.2)["copy"] < 0.4


def test_a_longer_route_counts_as_a_queue_for_a_while_only() -> None:
    home = Home(0.2)
    home.run(5)
    home.priority.note_round_trip(home.links[1], 0.02, 0.02, home.now_s)
    home.priority.note_round_trip(home.links[0], 0.02, 0.02, home.now_s)
    assert home.run(30)["copy"] < 0.15
    home.run(50)
    assert home.run(10)["copy"] > 0.8 / 1.5


class One:
    """A single frame."""

    def __init__(self) -> None:
        self._left = 1

    def next_frame(self) -> Load | None:
        self._left -= 1
        return lambda: None

    def exhausted(self) -> bool:
        return not self._left


async def test_a_frame_waits_in_its_middle_for_a_round_but_not_for_long() -> None:
    priority = SendPriority(0.0)
    rounds, copies = SendQueue(priority), SendQueue(priority)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(copies.drain, One(), SendRank.COPY)
        taken = await copies.take()
        assert copies.turn_wait_s(taken, PIECE) == 0.0, "nobody else sends"
        nursery.start_soon(rounds.drain, One())
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
        nursery.start_soon(link.drain, One(), SendRank.COPY)
        taken = await link.take()
        nursery.start_soon(rounds.drain, One())
        of_round = await rounds.take()
        assert link.turn_wait_s(taken, PIECE) > 0.0
        nursery.start_soon(link.drain, One())
        await trio.testing.wait_all_tasks_blocked()
        assert link.turn_wait_s(taken, PIECE) == 0.0, (
            "a round's frame waits for a lane of this link"
        )
        link.finish(taken)
        for send_queue, frame in ((rounds, of_round), (link, await link.take())):
            send_queue.finish(frame)

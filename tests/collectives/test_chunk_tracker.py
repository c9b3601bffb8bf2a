"""The chunk tracker, frame by frame: the frames that it accepts, and the memory that they get."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.collectives.arithmetic import ChunkLayout
from holdfast.collectives.chunk_tracker import ChunkTracker, FrameDuty, UnwantedFrameError
from holdfast.collectives.links.buffer_pool import BufferPool
from holdfast.collectives.result import RoundResult
from holdfast.protocol.errors import RemoteProtocolError
from holdfast.protocol.messages import Assignment, FragmentSize, OwnerRun, Plan
from holdfast.protocol.network.lane import FrameHeader, FrameKind

A, B, C, LISTENER = (letter * 32 for letter in "abcd")
CHUNK_BYTES = 400
CONTRIBUTION, RESULT, PARTIAL = FrameKind.CONTRIBUTION, FrameKind.RESULT, FrameKind.PARTIAL


def a_tracker(me: str) -> ChunkTracker:
    """Three contributors own two chunks each: a 0 and 1, b 2 and 3, c 4 and 5."""
    plan = Plan(100, tuple(OwnerRun(peer, 2) for peer in (A, B, C)), "fp32", "fp32")
    layout = ChunkLayout.of(plan, FragmentSize(600, 0, 0))
    result = RoundResult(layout, 3, BufferPool())
    return ChunkTracker(layout, [A, B, C], me, 1, 7, result, BufferPool())


def header(
    kind: FrameKind, index: int, attempt: int = 1, payload_bytes: int = CHUNK_BYTES
) -> FrameHeader:
    return FrameHeader(kind, 5, attempt, index, 7, payload_bytes)


def give(tracker: ChunkTracker, peer: str, head: FrameHeader) -> FrameDuty:
    view = tracker.place(peer, head)
    assert view is not None
    view[:] = bytes(len(view))
    return tracker.deliver(peer, head, view)[0]


def share_memory(one: memoryview | None, other: memoryview | None) -> bool:
    assert one is not None
    assert other is not None
    return np.shares_memory(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


def test_owners_are_counted_before_they_are_laid_out() -> None:
    plan = Plan(100, (OwnerRun(A, 2), OwnerRun(B, 2**62)), "fp32", "fp32")
    with pytest.raises(RemoteProtocolError, match=r"the plan has \d+ chunks, the fragment 6"):
        ChunkLayout.of(plan, FragmentSize(600, 0, 0))


def test_chunks_of_several_units_follow_each_other_and_the_counters_come_last() -> None:
    runs = (OwnerRun(A, 1, 4), OwnerRun(A, 1), OwnerRun(B, 1, 2), OwnerRun(C, 2))
    layout = ChunkLayout.of(Plan(100, runs, "fp32", "int8"), FragmentSize(720, 0, 3))
    assert [(cut.values.start, cut.values.stop) for cut in layout.cuts] == [
        *((0, 400), (400, 500), (500, 700), (700, 720)),
        (720, 720),
    ]
    assert [cut.owner for cut in layout.cuts] == [A, A, B, C, C]
    assert [cut.is_counters for cut in layout.cuts] == [False] * 4 + [True]
    joined = Plan(100, (OwnerRun(A, 1), OwnerRun(B, 2, 4)), "fp32", "fp32")
    with pytest.raises(RemoteProtocolError, match="joins the counters with values"):
        ChunkLayout.of(joined, FragmentSize(720, 0, 3))


def test_the_last_contribution_begins_a_chunk_and_its_result_is_held() -> None:
    tracker = a_tracker(A)
    assert sorted(tracker.owing()) == [B, C]
    assert give(tracker, B, header(CONTRIBUTION, 0)) is FrameDuty.NOTHING
    assert give(tracker, C, header(CONTRIBUTION, 0)) is FrameDuty.ADD_UP
    assert tracker.begin_complete([0, 1]) == []
    assert set(tracker.contributions(0)) == {B, C}
    assert tracker.held() == b"\x00"
    tracker.added_up(0)
    assert tracker.held() == b"\x01"
    assert give(tracker, B, header(RESULT, 2)) is FrameDuty.DECODE
    assert tracker.held() == b"\x05"


def test_a_peer_that_has_sent_everything_owes_nothing() -> None:
    tracker = a_tracker(LISTENER)
    view = tracker.place(B, header(RESULT, 2))
    assert view is not None
    assert tracker.deliver(B, header(RESULT, 2), view) == (FrameDuty.DECODE, False)
    view = tracker.place(B, header(RESULT, 3))
    assert view is not None
    assert tracker.deliver(B, header(RESULT, 3), view) == (FrameDuty.DECODE, True)
    assert sorted(tracker.owing()) == [A, C]


@pytest.mark.parametrize(
    ("peer", "head", "said"),
    [
        (B, FrameHeader(RESULT, 5, 1, 2, 8, CHUNK_BYTES), "fragment 8"),
        (B, header(RESULT, 6), "does not exist"),
        (B, header(RESULT, 4), "not its to send"),
        (B, header(RESULT, 2, attempt=2), "under attempt 2, 1 was due"),
        (B, header(RESULT, 2, payload_bytes=399), "399 bytes"),
        (B, header(PARTIAL, 2), "399 bytes"),
        (B, header(CONTRIBUTION, 0, payload_bytes=396), "sent 396 bytes for a chunk of 400"),
        (B, header(CONTRIBUTION, 0, payload_bytes=404), "sent 404 bytes for a chunk of 400"),
        (B, header(CONTRIBUTION, 4), "does not owe"),
        (LISTENER, header(CONTRIBUTION, 0), "does not owe"),
    ],
)
def test_a_wrong_frame_is_dropped_and_named(peer: str, head: FrameHeader, said: str) -> None:
    tracker = a_tracker(A)
    junk = tracker.place(peer, head)
    assert junk is not None
    with pytest.raises(UnwantedFrameError, match=said) as caught:
        tracker.deliver(peer, head, junk)
    assert caught.value.owing == (peer == B)
    assert tracker.held() == b"\x00"


def test_a_frame_comes_once() -> None:
    tracker = a_tracker(A)
    give(tracker, B, header(CONTRIBUTION, 0))
    give(tracker, B, header(RESULT, 2))
    for head in (header(CONTRIBUTION, 0), header(RESULT, 2)):
        with pytest.raises(UnwantedFrameError, match="twice"):
            give(tracker, B, head)


def test_a_frame_whose_lane_broke_may_come_again() -> None:
    tracker = a_tracker(A)
    for head in (header(CONTRIBUTION, 0), header(RESULT, 2)):
        first = tracker.place(B, head)
        assert first is not None
        address = np.frombuffer(first, np.uint8).ctypes.data
        tracker.abandon(B, head, first)
        del first  # its lane has ended
        again = tracker.place(B, head)
        assert again is not None
        assert np.frombuffer(again, np.uint8).ctypes.data == address
        tracker.deliver(B, head, again)


def test_chunks_stop_waiting_for_the_lost_and_keep_what_they_gave() -> None:
    tracker = a_tracker(A)
    give(tracker, C, header(CONTRIBUTION, 0))
    give(tracker, B, header(CONTRIBUTION, 0))
    give(tracker, C, header(CONTRIBUTION, 1))
    assert tracker.shut_out([B]) == [1]
    assert tracker.shut_out([B]) == []
    assert set(tracker.contributions(0)) == {B, C}
    assert set(tracker.contributions(1)) == {C}
    assert tracker.owing() == [C]
    assert tracker.place(B, header(RESULT, 2)) is None


def test_memory_that_a_lost_peer_may_write_to_is_not_used_again() -> None:
    """A lane's thread goes on writing what it began to receive before the flush."""
    tracker = a_tracker(A)
    late_result = tracker.place(B, header(RESULT, 2))
    late_contribution = tracker.place(B, header(CONTRIBUTION, 0))
    tracker.shut_out([B])
    tracker.take_over(Assignment(2, 2, C, True, b""), 2)
    assert not share_memory(late_result, tracker.place(C, header(RESULT, 2, attempt=2)))
    for index in (0, 1):
        assert not share_memory(late_contribution, tracker.place(C, header(CONTRIBUTION, index)))
    assert late_result is not None
    assert tracker.deliver(B, header(RESULT, 2), late_result) == (FrameDuty.NOTHING, False)
    assert tracker.held() == b"\x00"


def test_a_successor_waits_for_the_contributors_that_are_left() -> None:
    tracker = a_tracker(A)
    tracker.shut_out([B])
    assert list(tracker.take_over(Assignment(2, 2, A, True, b""), 2)) == [2, 3]
    assert tracker.attempt_of(2) == 2
    assert tracker.begin_complete([2, 3]) == []
    assert give(tracker, C, header(CONTRIBUTION, 2, attempt=2)) is FrameDuty.ADD_UP
    tracker.added_up(2)
    with pytest.raises(UnwantedFrameError, match="under attempt 1, 2 was due"):
        give(tracker, C, header(CONTRIBUTION, 3))


def test_a_result_spread_again_is_dropped_where_it_is_held() -> None:
    tracker = a_tracker(A)
    give(tracker, B, header(RESULT, 2))
    tracker.shut_out([B])
    tracker.take_over(Assignment(2, 2, C, False, b""), 2)
    assert tracker.place(C, header(RESULT, 2, attempt=2)) is None
    assert give(tracker, C, header(RESULT, 3, attempt=2)) is FrameDuty.DECODE


def test_a_result_that_is_held_is_never_made_again() -> None:
    tracker = a_tracker(A)
    give(tracker, B, header(RESULT, 2))
    tracker.shut_out([B])
    with pytest.raises(RemoteProtocolError, match="made again"):
        tracker.take_over(Assignment(2, 1, C, True, b""), 2)

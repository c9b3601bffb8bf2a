"""The books of a reduction, frame by frame: what is accepted, and where it may land."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.collectives.arithmetic import Layout
from holdfast.collectives.chunk_tracker import Duty, Ledger, UnwantedFrameError
from holdfast.collectives.gather_tree import Tree
from holdfast.collectives.links.buffer_pool import BufferPool
from holdfast.collectives.result import Result
from holdfast.protocol.errors import RemoteProtocolError
from holdfast.protocol.messages import Assignment, FragmentSize, OwnerRun, Plan
from holdfast.protocol.network.lane import FrameHeader, FrameKind

A, B, C, LISTENER = (letter * 32 for letter in "abcd")
CHUNK_BYTES = 400
CONTRIBUTION, RESULT, PARTIAL = FrameKind.CONTRIBUTION, FrameKind.RESULT, FrameKind.PARTIAL


def a_ledger(me: str) -> Ledger:
    """Three contributors own two chunks each: a 0 and 1, b 2 and 3, c 4 and 5."""
    plan = Plan(100, tuple(OwnerRun(peer, 2) for peer in (A, B, C)), "fp32", "fp32")
    layout = Layout.of(plan, FragmentSize(600, 0, 0))
    result = Result(layout, 3, BufferPool(2))
    tree = Tree(plan, [cut.owner for cut in layout.cuts], [A, B, C], [A, B, C, LISTENER], me)
    return Ledger(layout, layout, tree, me, me != LISTENER, 1, 7, result, BufferPool(8))


def header(
    kind: FrameKind, index: int, attempt: int = 1, payload_bytes: int = CHUNK_BYTES
) -> FrameHeader:
    return FrameHeader(kind, 5, attempt, index, 7, payload_bytes)


def give(ledger: Ledger, peer: str, head: FrameHeader) -> Duty:
    view = ledger.place(peer, head)
    assert view is not None
    view[:] = bytes(len(view))
    return ledger.deliver(peer, head, view)[0]


def share_memory(one: memoryview | None, other: memoryview | None) -> bool:
    assert one is not None
    assert other is not None
    return np.shares_memory(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


def test_the_last_contribution_begins_a_chunk_and_its_result_is_held() -> None:
    ledger = a_ledger(A)
    assert sorted(ledger.owing()) == [B, C]
    assert give(ledger, B, header(CONTRIBUTION, 0)) is Duty.NOTHING
    assert give(ledger, C, header(CONTRIBUTION, 0)) is Duty.ADD_UP
    assert ledger.begin_complete([0, 1]) == []
    assert set(ledger.contributions(0)) == {B, C}
    assert ledger.held() == b"\x00"
    ledger.added_up(0)
    assert ledger.held() == b"\x01"
    assert give(ledger, B, header(RESULT, 2)) is Duty.DECODE
    assert ledger.held() == b"\x05"


def test_who_has_sent_everything_owes_nothing() -> None:
    ledger = a_ledger(LISTENER)
    view = ledger.place(B, header(RESULT, 2))
    assert view is not None
    assert ledger.deliver(B, header(RESULT, 2), view) == (Duty.DECODE, False)
    view = ledger.place(B, header(RESULT, 3))
    assert view is not None
    assert ledger.deliver(B, header(RESULT, 3), view) == (Duty.DECODE, True)
    assert sorted(ledger.owing()) == [A, C]


@pytest.mark.parametrize(
    ("peer", "head", "said"),
    [
        (B, FrameHeader(RESULT, 5, 1, 2, 8, CHUNK_BYTES), "fragment 8"),
        (B, header(RESULT, 6), "does not exist"),
        (B, header(RESULT, 4), "not its to send"),
        (B, header(RESULT, 2, attempt=2), "under attempt 2, 1 was due"),
        (B, header(RESULT, 2, payload_bytes=399), "399 bytes"),
        (B, header(PARTIAL, 2), "399 bytes"),
        (B, header(CONTRIBUTION, 4), "nobody asked"),
        (LISTENER, header(CONTRIBUTION, 0), "nobody asked"),
    ],
)
def test_what_is_wrong_lands_nowhere_and_is_named(peer: str, head: FrameHeader, said: str) -> None:
    ledger = a_ledger(A)
    junk = ledger.place(peer, head)
    assert junk is not None
    with pytest.raises(UnwantedFrameError, match=said) as caught:
        ledger.deliver(peer, head, junk)
    assert caught.value.owing == (peer == B)
    assert ledger.held() == b"\x00"


def test_a_frame_comes_once() -> None:
    ledger = a_ledger(A)
    give(ledger, B, header(CONTRIBUTION, 0))
    give(ledger, B, header(RESULT, 2))
    for head in (header(CONTRIBUTION, 0), header(RESULT, 2)):
        with pytest.raises(UnwantedFrameError, match="twice"):
            give(ledger, B, head)


def test_a_frame_whose_lane_broke_may_come_again() -> None:
    ledger = a_ledger(A)
    for head in (header(CONTRIBUTION, 0), header(RESULT, 2)):
        first = ledger.place(B, head)
        assert first is not None
        ledger.abandon(B, head, first)
        again = ledger.place(B, head)
        assert share_memory(first, again)
        assert again is not None
        ledger.deliver(B, head, again)


def test_chunks_stop_waiting_for_the_lost_and_keep_what_they_gave() -> None:
    ledger = a_ledger(A)
    give(ledger, C, header(CONTRIBUTION, 0))
    give(ledger, B, header(CONTRIBUTION, 0))
    give(ledger, C, header(CONTRIBUTION, 1))
    assert ledger.shut_out([B]) == [1]
    assert ledger.shut_out([B]) == []
    assert set(ledger.contributions(0)) == {B, C}
    assert set(ledger.contributions(1)) == {C}
    assert ledger.owing() == [C]
    assert ledger.place(B, header(RESULT, 2)) is None


def test_what_the_lost_may_still_write_to_is_nobody_elses() -> None:
    """A lane's thread goes on writing what it began to receive before the flush."""
    ledger = a_ledger(A)
    late_result = ledger.place(B, header(RESULT, 2))
    late_contribution = ledger.place(B, header(CONTRIBUTION, 0))
    ledger.shut_out([B])
    ledger.take_over(Assignment(2, 2, C, True, b""), 2)
    assert not share_memory(late_result, ledger.place(C, header(RESULT, 2, attempt=2)))
    for index in (0, 1):
        assert not share_memory(late_contribution, ledger.place(C, header(CONTRIBUTION, index)))
    assert late_result is not None
    assert ledger.deliver(B, header(RESULT, 2), late_result) == (Duty.NOTHING, False)
    assert ledger.held() == b"\x00"


def test_an_heir_waits_for_those_that_are_left() -> None:
    ledger = a_ledger(A)
    ledger.shut_out([B])
    assert list(ledger.take_over(Assignment(2, 2, A, True, b""), 2)) == [2, 3]
    assert ledger.attempt_of(2) == 2
    assert ledger.begin_complete([2, 3]) == []
    assert give(ledger, C, header(CONTRIBUTION, 2, attempt=2)) is Duty.ADD_UP
    ledger.added_up(2)
    with pytest.raises(UnwantedFrameError, match="under attempt 1, 2 was due"):
        give(ledger, C, header(CONTRIBUTION, 3))


def test_what_is_spread_again_is_dropped_where_it_is_held() -> None:
    ledger = a_ledger(A)
    give(ledger, B, header(RESULT, 2))
    ledger.shut_out([B])
    ledger.take_over(Assignment(2, 2, C, False, b""), 2)
    assert ledger.place(C, header(RESULT, 2, attempt=2)) is None
    assert give(ledger, C, header(RESULT, 3, attempt=2)) is Duty.DECODE


def test_a_result_that_is_held_is_never_made_again() -> None:
    ledger = a_ledger(A)
    give(ledger, B, header(RESULT, 2))
    ledger.shut_out([B])
    with pytest.raises(RemoteProtocolError, match="made again"):
        ledger.take_over(Assignment(2, 1, C, True, b""), 2)

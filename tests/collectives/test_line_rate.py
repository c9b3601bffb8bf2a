"""The rate that a node learns of its line: a pure rule, tried on a line with a queue in front of
it.
"""

from __future__ import annotations

import math
import random
from collections import deque

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.collectives.links.rates.line_rate import LineSample, PaceRule

LOOK_S = 0.1
TICK_S = 0.01
MBIT = 125_000.0


class Line:
    """A node that always has something to send, through a queue that drops what does not fit.

    Attributes:
      carries: bytes per second of the line.
      offers: what the node's lanes would send if nobody paced them.
      others: what another program sends over the line.
      dropped: bytes.
    """

    def __init__(self, carries: float, rtt_s: float = 0.1, queue_s: float = 0.1) -> None:
        self.carries, self.rtt_s, self.queue_max_s = carries, rtt_s, queue_s
        self.rule = PaceRule()
        self.offers, self.others = 2 * carries, 0.0
        self.now_s = self.queued = self.dropped = self.sent = 0.0
        self.jitter = random.Random(0)
        self._under_way: deque[tuple[float, float, float]] = deque()  # (when, bytes, queued for)

    def run(self, seconds: float, *, idle: bool = False, slow_start: bool = False) -> float:
        """Let time pass; returns the bytes per second that this node's lanes delivered.

        Args:
          slow_start: what lanes would send is doubled with each round trip, from next to nothing.
        """
        began, delivered_all = self.now_s, 0.0
        delivered, waits = 0.0, math.inf
        for tick in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            if slow_start:
                doublings = tick * TICK_S / self.rtt_s
                self.offers = self.carries * min(2.0, 0.01 * 2**doublings)
            wanted = 0.0 if idle else min(self.offers, self.rule.bytes_per_s)
            self.queued += (wanted + self.others) * TICK_S
            out = min(self.queued, self.carries * TICK_S)
            own = out * wanted / (wanted + self.others) if wanted else 0.0
            self.queued -= out
            most = self.queue_max_s * self.carries
            self.dropped += max(0.0, self.queued - most)
            self.queued = min(self.queued, most)
            self._under_way.append((self.now_s + self.rtt_s, own, self.queued / self.carries))
            while self._under_way and self._under_way[0][0] <= self.now_s:
                _, count, waited = self._under_way.popleft()
                delivered, waits = delivered + count, waited
            if tick % round(LOOK_S / TICK_S) == 0 and delivered:
                seen = delivered * max(0.0, self.jitter.gauss(1, 0.05))
                self.rule.sample(LineSample(self.now_s, int(seen), self.rtt_s, waits))
                delivered_all, delivered = delivered_all + delivered, 0.0
        return delivered_all / (self.now_s - began)


@pytest.mark.parametrize("mbit", [2, 50, 300, 5_000])
@pytest.mark.parametrize("rtt_s", [0.02, 0.1, 0.6])
def test_the_line_is_used_and_its_queue_stays_short(mbit: float, rtt_s: float) -> None:
    line = Line(mbit * MBIT, rtt_s, queue_s=max(rtt_s, 0.05))
    line.run(10)
    line.dropped = 0.0
    assert line.run(20) >= 0.9 * line.carries
    assert line.dropped <= 0.01 * 20 * line.carries


@pytest.mark.parametrize("rtt_s", [0.03, 0.1, 0.3])
def test_the_slow_start_of_connections_is_not_taken_for_what_the_line_carries(rtt_s: float) -> None:
    """Before the first queue, lanes delivered less than the line carries, and ever more."""
    line = Line(50 * MBIT, rtt_s)
    line.run(10 * rtt_s + 0.5, slow_start=True)
    assert line.rule.bytes_per_s < math.inf
    assert line.run(1) >= 0.8 * line.carries


def test_a_single_late_packet_is_no_queue() -> None:
    """A machine that was busy elsewhere answers late once; a line that is full does so all the
    time.
    """
    rule = PaceRule()
    for look in range(100):
        waits_s = 0.05 if look % 3 == 0 else 0.0
        rule.sample(LineSample(look * LOOK_S, int(MBIT), 0.1, waits_s))
    assert rule.bytes_per_s == math.inf


def test_a_burst_after_a_rest_does_not_count_as_what_the_line_carries() -> None:
    """Each round begins with what the line's router takes at once; then its queue must get short
    again.
    """
    line = Line(50 * MBIT)
    for _round in range(4):
        line.carries, line.offers = 100 * MBIT, 200 * MBIT
        line.run(1)
        line.carries = 50 * MBIT
        line.run(12)
        line.dropped = 0.0
        line.run(3)
        assert line.dropped <= 0.01 * 3 * line.carries
        line.run(3, idle=True)


def test_a_line_that_gets_slower_is_followed() -> None:
    line = Line(100 * MBIT)
    line.run(20)
    line.carries = 50 * MBIT
    line.run(40)  # what was seen lately is forgotten
    assert line.rule.bytes_per_s == pytest.approx(50 * MBIT, rel=0.15)


def test_a_line_that_gets_faster_is_used_within_seconds() -> None:
    line = Line(20 * MBIT)
    line.run(20)
    line.carries, line.offers = 100 * MBIT, 200 * MBIT
    line.run(3)
    assert line.run(5) >= 0.85 * line.carries


def test_rounds_shorter_than_their_pauses_are_enough_to_learn() -> None:
    line = Line(50 * MBIT)
    for _round in range(4):
        line.run(1.5)
        line.run(3, idle=True)
    assert line.rule.bytes_per_s == pytest.approx(50 * MBIT, rel=0.15)


def test_it_yields_to_others_but_does_not_starve() -> None:
    """A program that sends without regard for the queue takes what is left, never all of it."""
    line = Line(50 * MBIT)
    line.run(10)
    line.others = 25 * MBIT
    assert 15 * MBIT <= line.run(30) <= 40 * MBIT


def test_while_there_is_no_queue_nothing_is_paced() -> None:
    line = Line(100 * MBIT)
    line.offers = 50 * MBIT
    line.run(30)
    assert line.rule.bytes_per_s == math.inf
    assert line.rule.has_room


def test_over_a_short_path_nothing_is_paced() -> None:
    line = Line(1_000 * MBIT, rtt_s=0.001)
    line.run(10)
    assert line.rule.bytes_per_s == math.inf


@example([(0.0, 0, 0.0, 1.0), (1.0, 0, 1.0, 1.0)])
@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 5.0), st.integers(0, 2**40), st.floats(0.0, 2.0), st.floats(0.0, 5.0)
        ),
        max_size=60,
    )
)
def test_whatever_is_sampled_there_is_a_rate(
    samples: list[tuple[float, int, float, float]],
) -> None:
    rule, now_s = PaceRule(), 0.0
    for after_s, delivered, rtt_s, queue_s in samples:
        now_s += after_s
        assert rule.sample(LineSample(now_s, delivered, rtt_s, queue_s)) > 0

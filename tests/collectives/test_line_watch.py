"""What the kernel says of the lanes' paths, made into the node's pace."""

from __future__ import annotations

import math
from typing import cast

import pytest
from attrs import define

from holdfast.collectives.links.rates.line_rate import ROUND_TRIP_S_MIN
from holdfast.collectives.links.rates.line_watch import LOOK_S, RECENT_S, SLICE_S, LineWatch
from holdfast.protocol.network.socket_lane import UNSENT_BYTES, SocketLane
from holdfast.protocol.network.socket_options import PathNow

ROUND_TRIP_S = 0.05
RATE = 5e6  # bytes per second that each lane delivers


@define(eq=False)
class Lane:
    """A lane of which the kernel says what a test wants."""

    waits_s: float = 0.0
    delivered_bytes: int = 0
    shortest_s: float = ROUND_TRIP_S

    def path(self) -> PathNow:
        return PathNow(self.shortest_s + self.waits_s, self.shortest_s, self.delivered_bytes)


def watch_of(lanes: dict[str, Lane]) -> LineWatch:
    watch = LineWatch()
    for peer, lane in lanes.items():
        watch.add(cast(SocketLane, lane), peer)
    return watch


def let_pass(watch: LineWatch, seconds: float, *sending: Lane) -> None:
    now_s = 0.0
    for _look in range(round(seconds / LOOK_S)):
        now_s += LOOK_S
        for lane in sending:
            lane.delivered_bytes += int(RATE * LOOK_S)
        watch.look(now_s)


@pytest.mark.parametrize(
    ("waits_s", "sending", "most"),
    [
        ((0.2, 0.2), 2, 2 * RATE),
        ((0.2, 0.0), 2, math.inf),
        ((0.2, 0.0), 1, math.inf),
        ((0.2,), 1, RATE),
        ((0.2,) * 8, 8, 8 * RATE),
    ],
    ids=["all receivers", "one of two", "the only one that receives now", "the only one", "many"],
)
def test_what_all_receivers_wait_for_is_the_nodes_own_queue(
    waits_s: tuple[float, ...], sending: int, most: float
) -> None:
    lanes = {peer: Lane(waits_s=each) for peer, each in zip("abcdefgh", waits_s, strict=False)}
    watch = watch_of(lanes)
    let_pass(watch, 3.0, *list(lanes.values())[:sending])
    assert watch.rate.bytes_per_s <= most
    assert (watch.rate.bytes_per_s == math.inf) == (watch.slice_bytes == 0) == (most == math.inf)
    short = 0 if most == math.inf else int(watch.rate.bytes_per_s * SLICE_S)
    assert watch.slice_bytes == max(short, min(2 * short, UNSENT_BYTES)), "taken at once if longer"


def test_without_a_queue_copies_may_go_where_one_would_have_shown() -> None:
    """Over a short path a full line and a busy processor look like an idle one."""
    for shortest_s, spare in ((ROUND_TRIP_S, True), (ROUND_TRIP_S_MIN / 2, False)):
        lanes = {"a": Lane(shortest_s=shortest_s), "b": Lane(shortest_s=shortest_s)}
        watch = watch_of(lanes)
        assert not watch.spare(0.0)
        let_pass(watch, 3.0, *lanes.values())
        assert watch.spare(3.0) is spare
        assert not watch.spare(3.0 + 2 * RECENT_S), "nothing was looked at lately"


def test_a_line_is_to_be_found_until_its_rate_is_known_or_its_paths_are_short() -> None:
    assert not LineWatch().learns, "there is nothing to look at"
    for waits_s, shortest_s, learns in (
        (0.0, ROUND_TRIP_S, True),
        (0.2, ROUND_TRIP_S, False),
        (0.0, ROUND_TRIP_S_MIN / 2, False),
    ):
        lanes = {"a": Lane(waits_s, shortest_s=shortest_s), "b": Lane(waits_s, 0, shortest_s)}
        watch = watch_of(lanes)
        assert watch.learns
        let_pass(watch, 3.0, *lanes.values())
        assert watch.learns is learns


def test_the_best_second_is_of_those_since_the_last_call() -> None:
    lanes = {"a": Lane(), "b": Lane()}
    watch = watch_of(lanes)
    assert watch.take_best_rate() == 0.0
    now_s = 0.0
    for rate in (RATE, 4 * RATE, 2 * RATE):
        for _look in range(round(2.0 / LOOK_S)):
            now_s += LOOK_S
            lanes["a"].delivered_bytes += int(rate * LOOK_S)
            watch.look(now_s)
        if rate == 4 * RATE:
            assert watch.take_best_rate() == pytest.approx(4 * RATE, rel=0.01)
    assert 2 * RATE <= watch.take_best_rate() < 3.5 * RATE, "a window may begin before a call"
    assert watch.take_best_rate() == 0.0

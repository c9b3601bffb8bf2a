"""Predictions: the formulas against the planner, a plain queue, and the figures that papers
give.
"""

from __future__ import annotations

import math

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.membership.planning.bandwidth import Bandwidth, LineCapacities
from holdfast.membership.planning.plan import make_plan, wire_bytes_per_value
from holdfast.membership.planning.predict import (
    AHEAD_BYTES,
    FRAME_BYTES,
    PROGRAM_BYTES,
    Conditions,
    RoundCost,
    memory_bytes,
    predict,
)
from holdfast.membership.spec.spec import DilocoTable, ReduceTable, RunSpec
from holdfast.protocol.messages import FragmentSize
from holdfast.protocol.network.lane import HEADER_BYTES, TAG_BYTES

HOME = Conditions(10_000_000, 0.1, 4, Bandwidth(6.25e6, 6.25e6), 0.025)


def spec_of(
    steps: int, fragments: int = 1, overlap: int = 0, up: str = "fp32", down: str = ""
) -> RunSpec:
    return RunSpec(
        diloco=DilocoTable(sync_every=steps, fragments=fragments, overlap=overlap),
        reduce=ReduceTable(codec_up=up, codec_down=down or up),
    )


@pytest.mark.parametrize("peers", [2, 3, 8, 50])
@pytest.mark.parametrize("values", [10_000, 1_000_000, 30_000_001])
@pytest.mark.parametrize("line", [Bandwidth(1e6, 1e6), Bandwidth(1e6, 2e7), Bandwidth(3e7, 1e6)])
@pytest.mark.parametrize("codecs", [("fp32", "fp32"), ("nf4", "bf16")])
def test_the_time_is_that_of_the_masters_own_plan(
    peers: int, values: int, line: Bandwidth, codecs: tuple[str, str]
) -> None:
    spec = spec_of(100, 1, 0, *codecs)
    conditions = Conditions(values, 0.1, peers, line)
    names = [f"{number:032x}" for number in range(peers)]
    lines = LineCapacities(rates=dict.fromkeys(names, line))
    plan, estimate = make_plan(FragmentSize(values, values, 0), names, names, lines, spec)
    # The plan's time leaves out headers, which count where chunks are small; and where shares are
    # not whole chunks, somebody owns up to one more, which every other contributor sends and is
    # sent.
    chunk_bytes = plan.chunk_elements * sum(map(wire_bytes_per_value, codecs))
    chunk_s = (peers - 1) * chunk_bytes / min(line.up_bytes_per_s, line.down_bytes_per_s)
    found = RoundCost.of(spec, conditions).transfer_s
    assert estimate.predicted_s is not None
    assert found == pytest.approx(estimate.predicted_s, rel=0.03)
    assert found >= estimate.predicted_s - chunk_s


def test_a_frames_header_is_what_lanes_send() -> None:
    assert HEADER_BYTES + TAG_BYTES == FRAME_BYTES


def test_nf4_at_100_steps_moves_370_times_fewer_bytes_than_data_parallel() -> None:
    found = predict(spec_of(100, 1, 0, "nf4"), HOME)
    assert 370 < found.times_fewer_bytes < 377
    assert found.bytes_per_step * 100 == pytest.approx(2 * 3 / 4 * 10e6 * 0.53125, rel=1e-3)


def test_fragments_make_rounds_shorter_and_bytes_the_same() -> None:
    whole, cut = (predict(spec_of(100, fragments), HOME) for fragments in (1, 10))
    assert cut.round_bytes == pytest.approx(whole.round_bytes / 10, rel=1e-3)
    assert cut.bytes_per_step == pytest.approx(whole.bytes_per_step, rel=1e-3)


@given(
    steps=st.integers(2, 12),
    overlap=st.integers(0, 80),
    in_flight=st.integers(1, 6),
    mbit=st.floats(0.5, 50.0),
    delay_s=st.floats(0.0, 0.3),
)
def test_the_time_between_rounds_is_that_of_a_queue(
    steps: int, overlap: int, in_flight: int, mbit: float, delay_s: float
) -> None:
    """Rounds one by one: a post waits for its step, for its turn, and ``overlap`` steps on for its
    end; the line carries one after the other."""
    # What a line is a hundredth too slow for piles up for some hundred rounds before anybody waits.
    # Then rounds come in cycles of up to seven: they are counted over a multiple of all of these.
    fragments, settled, counted = 8, 700, 420
    overlap = min(overlap, 7 * steps - 1)
    spec = spec_of(steps * fragments, fragments, overlap)
    line = Bandwidth(mbit * 1e6 / 8, mbit * 1e6 / 8)
    conditions = Conditions(1_000_000, HOME.step_s, 4, line, delay_s, rounds_in_flight=in_flight)
    cost = RoundCost.of(spec, conditions)
    moves_s, takes_s = cost.transfer_s, cost.took_s
    now_s, line_free_s = 0.0, 0.0
    posted_s: list[float] = []
    ends_s: list[float] = []
    step = 0
    waits_at: dict[int, int] = {}  # step -> the round whose end is waited for
    while len(posted_s) <= settled + counted:
        now_s += HOME.step_s
        step += 1
        if step % steps == 0:
            number = len(posted_s)
            if number:  # it opens when the one before is closed
                now_s = max(now_s, posted_s[-1] + 2 * delay_s)
            if number >= in_flight:
                now_s = max(now_s, ends_s[number - in_flight])
            before_s = (takes_s - moves_s) / 2  # of the line's turn: the way to it
            line_free_s = max(line_free_s, now_s + before_s) + moves_s
            posted_s.append(now_s)
            ends_s.append(line_free_s + (takes_s - moves_s) - before_s)
            waits_at[step + overlap] = number
        if step in waits_at:
            now_s = max(now_s, ends_s[waits_at[step]])
    queue_s = (posted_s[-1] - posted_s[settled]) / counted
    assert cost.period_s(overlap) == pytest.approx(queue_s, rel=0.01)


@given(
    steps=st.integers(1, 50),
    fragments=st.integers(1, 10),
    overlap=st.integers(1, 12),
    values=st.integers(10_000, 10**9),
    delay_s=st.floats(0.0, 0.05),
    in_flight=st.integers(1, 3),
)
def test_on_the_needed_line_no_trainer_waits_and_on_a_slower_line_trainers_do(
    steps: int, fragments: int, overlap: int, values: int, delay_s: float, in_flight: int
) -> None:
    spec = spec_of(
        steps * fragments, fragments, max(0, min(overlap, steps * in_flight, steps * fragments - 1))
    )
    # Where delays take just as long as the overlap, rounding decides whether any line will do.
    assume(all(abs(spec.diloco.overlap_steps * HOME.step_s - n * delay_s) > 1e-3 for n in (5, 6)))
    conditions = evolve(HOME, value_count=values, delay_s=delay_s, rounds_in_flight=in_flight)
    needed = predict(spec, conditions).needed_bits_per_s
    if math.isinf(needed):
        fast = evolve(conditions, line=Bandwidth(1e15, 1e15))
        assert predict(spec, fast).utilisation < 1
        return
    for times, busy in ((1.0001, True), (0.99, False)):
        rate = times * needed / 8
        on_it = predict(spec, evolve(conditions, line=Bandwidth(rate, rate)))
        assert (on_it.waited_s <= 1e-9) is busy


def test_one_peer_moves_nothing_and_needs_no_line() -> None:
    found = predict(spec_of(10, 2, 1), evolve(HOME, peers=1))
    assert (found.round_bytes, found.needed_bits_per_s, found.peak_bits_per_s) == (0, 0, 0)


def test_several_rounds_in_flight_allow_what_one_does_not() -> None:
    """Far apart, on lines that carry a round in the time of a few steps."""
    far = evolve(HOME, line=Bandwidth(5e7, 5e7), delay_s=0.15)
    spec = spec_of(20, 10, 8)
    one, several = (predict(spec, evolve(far, rounds_in_flight=count)) for count in (1, 4))
    assert several.utilisation > one.utilisation


def test_memory_is_that_of_models_and_fragments() -> None:
    spec = RunSpec()
    model = 4 * 100_000_000
    one = memory_bytes(spec, 100_000_000)
    assert one == 5 * model + AHEAD_BYTES + PROGRAM_BYTES
    eight = memory_bytes(
        evolve(spec, diloco=evolve(spec.diloco, fragments=8, overlap=1)), 100_000_000
    )
    assert eight == (3 + 3 / 8 + 1 / 16) * model + PROGRAM_BYTES
    lossy = evolve(spec, reduce=evolve(spec.reduce, codec_up="int8"))
    more = memory_bytes(lossy, 100_000_000) - one
    assert 1.25 * model < more < 1.26 * model, "what codecs leave out is kept, and what was sent"

"""Copies that end some steps later, as from and to a GPU: nothing is lost, doubled or torn by
that.
"""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.client.attach import attach
from holdfast.client.state import arenas
from holdfast.client.state.copier import CudaCopier
from holdfast.protocol.arena import STEP_SLOT
from holdfast.protocol.messages import Finished, Posted
from tests.client import plain_model
from tests.client.fake_daemon import FakeDaemon, settled, talking, wait_for
from tests.client.replica_bench import ReplicaBench
from tests.client.slow_copier import Slow, Work


class Bench(ReplicaBench):
    """A model with a counter and statistics."""

    def __init__(
        self, copier: CudaCopier | None, dtype: torch.dtype = torch.float32, overlap: bool = True
    ) -> None:
        model = nn.Module()
        self.weight = nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
        self.seen = torch.tensor(0)
        model.weight = self.weight
        model.register_buffer("statistics", torch.zeros(2))
        model.register_buffer("seen", self.seen)
        super().__init__(model, overlap, copier)

    def train(self, amount: float) -> None:
        self.weight.add_(amount)
        self.seen += 1

    def move(self, change: float) -> None:
        """Share the next version, whose weights differ by ``change``."""
        values = self.shared.values(0).copy()
        values[:4] += np.float32(change)
        self.share(values, [self.version])

    def now(self) -> list[float]:
        values: list[float] = self.weight.tolist()
        return values


@pytest.mark.parametrize("overlap", [True, False])
def test_a_post_is_of_the_step_at_which_it_was_asked_for(overlap: bool) -> None:
    slow = Slow()
    bench = Bench(slow, overlap=overlap)
    bench.train(1.0)
    bench.replica.post()
    bench.train(0.5)
    bench.replica.advance()
    assert not bench.replica.written
    assert bench.replica.under_way
    slow.end()
    bench.replica.advance()
    assert bench.replica.written
    assert not bench.replica.under_way
    assert bench.posted.values(0).tolist() == [-1.0] * 4 + [0.0] * 2
    assert bench.posted.counters(0).tolist() == [1]
    assert slow.waited_count == 0


def merging(slow: Slow) -> Bench:
    bench = Bench(slow)
    bench.train(1.0)
    bench.replica.post()
    bench.replica.finish()
    bench.train(0.5)
    bench.move(8.0)
    bench.replica.merge(contributed=True)
    assert bench.replica.version == 1
    return bench


def test_a_merge_applies_to_the_tensors_as_they_are_when_it_has_come() -> None:
    bench = merging(slow := Slow())
    bench.train(0.25)
    bench.replica.advance()
    assert bench.now() == [1.75] * 4, "not yet"
    slow.end()
    bench.replica.advance()
    assert bench.now() == [8.75] * 4
    assert bench.seen.item() == 3
    bench.replica.post()
    bench.replica.finish()
    assert bench.posted.values(0).tolist() == [-0.75] * 4 + [0.0] * 2


@pytest.mark.parametrize("work", ["early", "late"])
def test_a_load_waits_for_the_thread_that_reads_the_anchor(work: Work) -> None:
    slow = Slow(work)
    bench = Bench(slow)
    bench.train(1.0)
    bench.replica.post()
    slow.end()
    bench.replica.advance()  # the tensors are here: the thread subtracts them from the anchor
    bench.move(8.0)
    bench.replica.load()
    assert bench.posted.values(0).tolist() == [-1.0] * 4 + [0.0] * 2, "as of the anchor before"
    slow.end()
    bench.replica.advance()
    assert not bench.replica.written
    assert bench.now() == [8.0] * 4


def test_a_merge_whose_version_is_replaced_meanwhile_takes_the_newer_one() -> None:
    bench = merging(slow := Slow("late"))
    with bench.shared.writing(0, 2):  # the daemon writes while the thread reads
        slow.end()
        bench.shared.values(0)[:4] += np.float32(8)
    bench.replica.finish()
    assert bench.replica.version == 2
    assert bench.now() == [16.5] * 4


def test_a_merge_whose_fragment_is_fetched_meanwhile_is_given_up() -> None:
    slow = Slow("late")
    bench = Bench(slow)
    bench.train(1.0)
    bench.move(8.0)
    bench.replica.merge(contributed=False)
    with pytest.raises(OSError, match="transfer"), bench.shared.writing(0, 2):
        raise OSError("a transfer failed")
    bench.replica.finish()
    assert bench.replica.lost
    assert bench.replica.version == 0, "the anchor's"
    assert bench.now() == [1.0] * 4
    bench.move(8.0)
    bench.replica.load()
    assert not bench.replica.lost
    assert bench.now() == [16.0] * 4


class Threaded(CudaCopier):
    """The copier's own thread, for tensors in the host's memory."""

    def defers(self, tensor: torch.Tensor) -> bool:
        return True


def test_the_thread_does_what_is_done_at_once() -> None:
    benches = [Bench(Threaded()), Bench(None)]
    for round_number in range(1, 21):
        for bench in benches:
            bench.train(round_number / 64)
            bench.replica.post()
            bench.train(0.5)
            bench.replica.advance()
            bench.replica.finish()
            bench.move(0.25)
            bench.replica.merge(contributed=round_number % 3 != 0)
            if round_number % 5 == 0:
                bench.replica.load()
        for bench in benches:
            bench.replica.finish()
    assert benches[0].now() == benches[1].now()
    assert benches[0].posted.values(0).tolist() == benches[1].posted.values(0).tolist()


# A round's moves in an order that a run may have; "end" is the end of all copies under way.
MOVES = st.lists(
    st.sampled_from(["train", "train", "post", "commit", "exclude", "abort", "load", "end"]),
    max_size=40,
)


@pytest.mark.parametrize("work", ["at once", "early", "late"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(moves=MOVES, chance=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_late_copies_change_nothing_but_the_time(
    dtype: torch.dtype, work: Work, moves: list[str], chance: object
) -> None:
    """All values are small multiples of 1/64, so that no order of sums rounds in float32; those of
    the tensors in 16 bits are such multiples because 64 steps of 1/64 are one."""
    slow = Slow(work)
    late, direct = Bench(slow, dtype), Bench(None, dtype)
    amounts = itertools.cycle([1 / 64, -1 / 32, 3 / 64])
    is_posted = False
    for move in moves:
        amount = next(amounts)
        if move == "end":
            slow.end()
        elif move == "post":
            is_posted = True
        contributed = move == "commit" and is_posted
        for bench in (late, direct):
            if move == "train":
                bench.train(amount)
            elif move == "post":
                bench.replica.post()
            elif move == "load":
                bench.replica.load()
            elif move in ("commit", "exclude", "abort"):
                if is_posted and not contributed:
                    bench.replica.withdraw()
                if move != "abort":
                    bench.move(amount)
                    bench.replica.merge(contributed=contributed)
            bench.replica.advance()
        if move in ("commit", "exclude", "abort", "load"):
            is_posted = False
    for bench in (late, direct):
        bench.replica.finish()
        bench.replica.post()
        bench.replica.finish()
    assert late.now() == direct.now()
    assert late.posted.values(0).tolist() == direct.posted.values(0).tolist()
    assert late.replica.version == direct.replica.version


# ---------------------------------------------------------------- through the hook


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    slow = Slow()
    monkeypatch.setattr(arenas, "CudaCopier", lambda: slow)
    return slow


def test_the_daemon_is_told_when_the_copy_has_come_of_the_step_that_it_is_of(slow: Slow) -> None:
    model = plain_model.line(count=2)
    arrived, arrived_again = threading.Event(), threading.Event()

    def script(daemon: FakeDaemon) -> None:
        daemon.start(overlap_steps=50, step_limit=2)
        daemon.open_round(1, at_step=2, step_limit=10)
        settled(lambda: daemon.posted.slots[STEP_SLOT] >= 5)
        assert daemon.hears_nothing()
        arrived.set()
        assert daemon.hear_posted() == Posted(1, 0, 0, tokens=20, step=2)
        assert daemon.posted.values(0).tolist() == [-2.0, -2.0]
        daemon.commit(1, np.full(2, 64, np.float32), step=2, step_limit=20)
        settled(lambda: daemon.posted.slots[STEP_SLOT] >= 12)
        arrived_again.set()
        settled(lambda: daemon.posted.slots[STEP_SLOT] == 20)
        daemon.say(Finished())

    seen: dict[int, float] = {}
    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        while not run.finished:
            plain_model.move(model, 1.0)
            if run.global_step in (5, 12):
                wait_for(arrived if run.global_step == 5 else arrived_again)
                slow.end()
            run.step(tokens=10)
            seen[run.global_step] = model.weight[0, 0].item()
        assert (seen[10], seen[12], seen[13]) == (10, 12, 64 + 13 - 2)
        assert slow.waited_count == 0


def test_who_must_wait_for_the_round_waits_for_the_copy_first(slow: Slow) -> None:
    model = plain_model.line(count=2)

    def script(daemon: FakeDaemon) -> None:
        daemon.start(overlap_steps=3, step_limit=2)
        daemon.open_round(1, at_step=2, step_limit=9)
        assert daemon.hear_posted() == Posted(1, 0, 0, tokens=2, step=2)
        assert daemon.posted.slots[STEP_SLOT] == 5
        daemon.end_round(1, committed=False, step_limit=6)
        settled(lambda: daemon.posted.slots[STEP_SLOT] == 6)
        daemon.say(Finished())

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        while not run.finished:
            run.step()
    assert slow.waited_count == 1


def test_a_round_that_ended_before_the_copy_came_is_not_spoken_of_any_more(slow: Slow) -> None:
    model = plain_model.line(count=2)
    ended = threading.Event()

    def script(daemon: FakeDaemon) -> None:
        daemon.start(overlap_steps=50, step_limit=2)
        daemon.open_round(1, at_step=2, step_limit=9)
        settled(lambda: daemon.posted.slots[STEP_SLOT] >= 3)
        daemon.end_round(1, committed=False, step_limit=9)
        ended.set()
        settled(lambda: daemon.posted.slots[STEP_SLOT] == 9)
        daemon.open_round(2, at_step=9, step_limit=9)
        assert daemon.hear_posted() == Posted(2, 0, 0, tokens=9, step=9)
        assert daemon.posted.values(0).tolist() == [-9.0, -9.0]
        daemon.end_round(2, committed=False, step_limit=9)
        daemon.say(Finished())

    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        while not run.finished:
            plain_model.move(model, 1.0)
            run.step()
            if run.global_step == 5:
                wait_for(ended)
            if run.global_step == 9:
                slow.end()

"""The boundary machine: which rounds are posted, awaited and applied at which step; no tensors, no
torch.
"""

from __future__ import annotations

from attrs import evolve

from holdfast.client.boundary import BoundaryMachine, EndedRound
from holdfast.protocol.messages import COUNT_MAX, Posted, RoundEnded, RoundOpened

LIMIT = 100


def attached(step: int = 0) -> BoundaryMachine:
    machine = BoundaryMachine()
    machine.move_to(step, LIMIT)
    machine.load()
    return machine


def opened(number: int, at_step: int, fragment: int = 0, step_limit: int = LIMIT) -> RoundOpened:
    return RoundOpened(number, fragment, 3, at_step, step_limit)


def committed(number: int, step: int, fragment: int = 0) -> RoundEnded:
    return RoundEnded(number, fragment, True, True, 4, step, LIMIT)


def train(machine: BoundaryMachine, count: int = 1, tokens: int = 10) -> None:
    machine.step += count
    machine.tokens += count * tokens


def test_a_round_is_posted_at_its_step_and_awaited_when_no_overlap_is_left() -> None:
    machine = attached()
    machine.open_round(opened(1, at_step=2))
    train(machine)
    assert machine.next_to_post() is None
    assert machine.next_due_step(1) == 2
    train(machine)
    assert machine.next_to_post() == 0
    machine.post(0)
    assert machine.unannounced_fragments() == [0]
    assert machine.announce_post(0, 3, 0.5) == Posted(1, 0, 3, 20, 2, 0.5)
    assert machine.unannounced_fragments() == []
    assert machine.must_wait(0)
    assert not machine.must_wait(1)
    train(machine)
    assert machine.must_wait(1)
    assert machine.end_round(committed(1, step=2)) == EndedRound(posted=True, contributed=True)
    assert not machine.must_wait(1)


def test_a_round_is_posted_again_for_a_new_offer_only() -> None:
    machine = attached()
    machine.open_round(opened(1, at_step=2))
    train(machine, 2)
    machine.post(0)
    machine.announce_post(0, 3, 0.5)
    train(machine)
    machine.open_round(opened(1, at_step=0))
    assert machine.next_to_post() is None, "the others wait for what it has posted"
    machine.open_round(evolve(opened(1, at_step=2), offer=1))
    assert machine.next_to_post() == 0
    machine.post(0)
    assert machine.announce_post(0, 3, 0.5) == Posted(1, 0, 3, 30, 3, 0.5, offer=1)


def test_tokens_count_from_the_last_contribution_of_the_fragment() -> None:
    machine = attached()
    for number, step in ((1, 2), (2, 5)):
        machine.open_round(opened(number, step))
        train(machine, step - machine.step)
        machine.post(0)
        assert machine.announce_post(0, 3, 0.5).tokens == {1: 20, 2: 30}[number]
        machine.end_round(committed(number, step))


def test_a_load_forgets_posted_rounds_and_keeps_the_others() -> None:
    machine = attached()
    machine.open_round(opened(1, at_step=1))
    machine.open_round(opened(2, at_step=9, fragment=1))
    train(machine)
    machine.post(0)
    machine.move_to(5, LIMIT)
    machine.load()
    assert machine.posted_fragments == []
    assert machine.end_round(committed(1, step=5)) == EndedRound(posted=False, contributed=False)
    assert machine.next_due_step(0) == 9
    assert machine.own_step == 1


def test_nothing_is_posted_before_one_more_step_when_nothing_was_trained() -> None:
    machine = attached(step=4)
    machine.open_round(opened(1, at_step=3))
    assert machine.next_to_post() is None
    train(machine, tokens=0)
    assert machine.next_to_post() == 0


def test_the_step_limit_holds_until_the_round_that_it_waits_for() -> None:
    machine = attached()
    machine.open_round(opened(1, at_step=9, fragment=1, step_limit=3))
    assert not machine.must_wait(0)
    machine.end_round(RoundEnded(1, 1, False, False, 3, 0, 3))
    train(machine, 3)
    assert machine.must_wait(0)
    machine.open_round(opened(2, at_step=3, step_limit=3))
    assert machine.next_to_post() == 0


def test_without_a_master_it_trains_on_and_posts_nothing() -> None:
    machine = attached()
    machine.open_round(opened(1, at_step=1, step_limit=1))
    train(machine)
    machine.extend_limit(4)
    assert machine.next_to_post() is None
    assert not machine.must_wait(0)
    assert machine.next_due_step(0) == 4
    train(machine, 3)
    assert machine.must_wait(0)
    machine.open_round(opened(1, at_step=1))
    assert machine.next_to_post() == 0, "the master is back, and the round is due"


def test_skipped_steps_do_not_shorten_an_overlap() -> None:
    machine = attached()
    machine.open_round(opened(1, at_step=1))
    machine.open_round(opened(2, at_step=50, fragment=1))
    train(machine)
    machine.post(0)
    machine.announce_post(0, 3, 0.5)
    machine.end_round(committed(2, step=8, fragment=1))
    assert machine.step == 8
    assert not machine.must_wait(2)
    assert machine.next_due_step(2) == 10


def test_spares_and_finished_trainers_have_no_steps_to_take() -> None:
    machine = attached()
    machine.contributing = False
    assert machine.must_wait(5)
    assert machine.next_due_step(5) == 0
    machine.finished = True
    assert machine.next_due_step(5) == COUNT_MAX


def test_ranks_post_at_the_same_step_whatever_tokens_each_of_them_counts() -> None:
    for tokens in (0, 8):
        machine = BoundaryMachine(by_steps=True)
        machine.load()
        machine.open_round(RoundOpened(1, 0, 0, 2, 10))
        for step in (1, 2):
            assert machine.next_to_post() is None
            machine.step, machine.tokens = step, machine.tokens + tokens
        assert machine.next_to_post() == 0

"""All ranks of a trainer handle the same messages at the same steps, whenever memory shows what was
written.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest
from attrs import Factory, define

from holdfast.membership.peer.rank_gate import Effect, HandOut, Name, PassOn, RankGate

SEEDS = 400
MESSAGES = 12
TURNS_MAX = 100_000
LATE = 0.1  # how often a write is not seen at once
OVERLAP_STEPS = 3  # after a "hold" a rank trains this far and then must wait

Message = tuple[int, str]


@define(eq=False)
class Rank:
    """A rank of a trainer; ``shown`` and ``named`` are what the other side's memory shows of the
    writes.

    Attributes:
      begun: steps that it has begun; with collectives, no rank ends one that another has not begun.
      handled: messages, and the step of each.
    """

    number: int
    step: int = 0
    begun: int = 0
    shown: int = 0
    named: int | None = None
    computing: bool = False
    wait_at: int | None = 0
    inbox: deque[PassOn | tuple[Message, ...]] = Factory(deque)
    said: deque[tuple[str, int, bool]] = Factory(deque)
    handled: list[tuple[Message, int]] = Factory(list)

    def must_wait(self) -> bool:
        return self.wait_at is not None and self.step >= self.wait_at

    def wait_or_train_on(self) -> None:
        self.computing = not self.must_wait()
        self.begun += self.computing
        self.said.append(("trains on" if self.computing else "waits", self.step, True))


class World:
    """A gate, ranks that run at will, and messages that come at any time."""

    def __init__(self, seed: int, gate: type[RankGate[Message]]) -> None:
        self.random = random.Random(seed)
        self.ranks = [Rank(number) for number in range(1 + seed % 5)]
        self.collectives = bool(seed % 2)
        self.gate = gate(len(self.ranks))
        self.name: int | None = None
        kinds = self.random.choices(("note", "hold", "go"), k=MESSAGES - 2)
        self.coming = deque(enumerate(("go", *kinds, "go")))
        self.speeds = [self.random.choice((1, 1, 5, 20)) for _ in self.ranks]

    def run(self) -> None:
        for _turn in range(TURNS_MAX):
            chance = self.random.random()
            if chance < 0.01 and self.coming:
                self.obey(self.gate.push(self.coming.popleft(), self.steps))
            elif chance < 0.1:
                self.obey(self.gate.look(self.steps))
            else:
                self.move(self.random.choices(self.ranks, weights=self.speeds)[0])
            if all(len(rank.handled) == MESSAGES for rank in self.ranks):
                break
        assert all(rank.handled == self.ranks[0].handled for rank in self.ranks), "they differ"
        assert len(self.ranks[0].handled) == MESSAGES, "they stand still"

    @property
    def steps(self) -> list[int]:
        return [rank.shown for rank in self.ranks]

    def obey(self, effects: Sequence[Effect[Message]]) -> None:
        for effect in effects:
            match effect:
                case Name():
                    self.name = effect.step
                case PassOn():
                    self.ranks[effect.rank].inbox.append(effect)
                case HandOut():
                    for rank in self.ranks:
                        rank.inbox.append(effect.messages)

    def move(self, rank: Rank) -> None:
        """Let a rank do one thing, or let a message or a write of its arrive."""
        self.show(rank)
        if rank.said and self.random.random() < 0.5:
            what, step, must = rank.said.popleft()
            if what == "waits":
                self.obey(self.gate.waits(rank.number, step, self.steps, must=must))
            else:
                self.obey(self.gate.trains_on(rank.number, self.steps))
        elif rank.computing:
            if not self.collectives or all(other.begun >= rank.begun for other in self.ranks):
                self.end_step(rank)
        elif rank.inbox:
            self.handle(rank, rank.inbox.popleft())

    def show(self, rank: Rank) -> None:
        if self.random.random() > LATE:
            rank.shown = rank.step
        if self.random.random() > LATE:
            rank.named = self.name

    def end_step(self, rank: Rank) -> None:
        rank.step += 1
        self.show(rank)
        if rank.must_wait() or (rank.named is not None and rank.step >= rank.named):
            rank.computing = False
            rank.said.append(("waits", rank.step, rank.must_wait()))
        else:
            rank.begun += 1

    def handle(self, rank: Rank, given: PassOn | tuple[Message, ...]) -> None:
        if isinstance(given, PassOn):
            rank.computing = True
            rank.begun += 1
            return
        for message in given:
            rank.handled.append((message, rank.step))
            if message[1] == "go":
                rank.wait_at = None
            elif message[1] == "hold":
                rank.wait_at = rank.step + OVERLAP_STEPS
        rank.wait_or_train_on()


@pytest.mark.parametrize("seed", range(0, SEEDS, 50))
def test_all_ranks_handle_the_same_messages_at_the_same_steps(seed: int) -> None:
    for each in range(seed, seed + 50):
        World(each, RankGate[Message]).run()


class NeverLooks(RankGate[Message]):
    def look(self, steps: Sequence[int]) -> list[Effect[Message]]:
        return []


class ForgetsTheStep(RankGate[Message]):
    def _all_wait_at_one_step(self) -> bool:
        return all(rank.doing.value == "waiting" for rank in self._ranks)


class HandsOutAtOnce(RankGate[Message]):
    def _all_wait_at_one_step(self) -> bool:
        return True


@pytest.mark.parametrize("wrong", [NeverLooks, ForgetsTheStep, HandsOutAtOnce])
def test_a_wrong_rule_is_found(wrong: type[RankGate[Message]]) -> None:
    with pytest.raises(AssertionError, match="they"):
        run_all(wrong)


def run_all(gate: type[RankGate[Message]]) -> None:
    for seed in range(SEEDS):
        World(seed, gate).run()


def test_while_there_is_nothing_to_hand_out_no_step_is_named() -> None:
    gate = RankGate[str](2)
    assert gate.push("load", [0, 0]) == [Name(None), HandOut(("load",))]
    assert gate.trains_on(0, [1, 0]) == gate.trains_on(1, [5, 1]) == []
    assert gate.look([5, 5]) == []
    assert gate.push("round", [7, 6]) == [Name(8)]


def test_a_rank_that_must_wait_is_not_passed_on() -> None:
    gate = RankGate[str](2)
    gate.push("load", [0, 0])
    gate.trains_on(0, [0, 0])
    gate.trains_on(1, [0, 0])
    assert gate.push("a", [3, 5]) == [Name(6)]
    assert gate.waits(0, 4, [4, 5], must=True) == []
    assert gate.waits(1, 4, [4, 5], must=True) == [Name(None), HandOut(("a",))]

"""What owners find in updates, over rounds: who is named, when, and by whose word."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from attrs import evolve
from numpy.typing import NDArray

from holdfast.collectives.norm_report import NormSums
from holdfast.membership.master.rounds.norms import Report, makes_sense
from holdfast.membership.master.rounds.update_history import (
    EXPONENT,
    ODD_ROUNDS,
    REPORTS_MAX,
    OwnerFindings,
    UpdateHistory,
)
from holdfast.protocol import messages as m
from tests.membership.table import DIGEST, A, B, C, D, E, owners_of, started

Values = NDArray[np.float32]
PEERS = (A, B, C, D, E, "f" * 32)
HONEST, BAD = PEERS[:-1], PEERS[-1]
COUNT = 1_000  # values of one owner's chunk
TOKENS = 100


class Rounds:
    """Rounds of six members, of whom each owns a chunk."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.history = UpdateHistory()
        self.number = 0

    def noise(self) -> Values:
        return self.random.standard_normal(len(PEERS) * COUNT).astype(np.float32)

    def updates(self, signal: float = 0.7) -> dict[str, Values]:
        """Honest ones: their cosines are a third at this signal."""
        common = np.float32(signal) * self.noise()
        return {peer: common + self.noise() for peer in PEERS}

    def reports(self, updates: Mapping[str, Values], momentum: Values) -> dict[str, Report]:
        order = [m.Contributor(peer, TOKENS, 1.0) for peer in updates]
        reports = {}
        for place, owner in enumerate(PEERS):
            where = slice(place * COUNT, (place + 1) * COUNT)
            sums = NormSums(order, momentum[where])
            for peer, values in updates.items():
                sums.take(peer, 0, values[where])
            sums.take_result(np.mean([values[where] for values in updates.values()], axis=0))
            reports[owner] = sums.norm_sums(), sums.momentum_square
        return reports

    def note(
        self,
        updates: Mapping[str, Values],
        tokens: Mapping[str, int] | None = None,
        momentum: Values | None = None,
        lies: Mapping[str, Report] | None = None,
        makers: Sequence[str] = PEERS,
    ) -> None:
        momentum = self.noise() if momentum is None else momentum
        reports = {k: v for k, v in self.reports(updates, momentum).items() if k in makers}
        order = [m.Contributor(peer, TOKENS, 1.0) for peer in updates]
        self.history.note(
            reports | dict(lies or {}), makers, order, tokens or dict.fromkeys(updates, TOKENS)
        )
        self.number += 1

    def said(self, peer: str) -> str:
        return self.history.suspicion(peer, lambda other: other[0])

    def named(self) -> list[str]:
        return [peer for peer in PEERS if self.said(peer)]


def bad_update(kind: str, updates: Mapping[str, Values], rounds: Rounds) -> Values:
    own = updates[BAD]
    return {
        "flipped": -own,
        "noise": rounds.noise() * np.float32(1.2),
        "lazy": np.float32(0.3) * own,
        "copier": updates[A] + np.float32(0.1) * rounds.noise(),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("flipped", "its updates point against the others'"),
        ("noise", "its updates do not point where the others' do"),
        ("lazy", "much less work than its tokens say"),
        ("copier", "its updates are nearly those of a"),
    ],
)
@pytest.mark.fault(
    "a member works little, copies, or sends noise",
    "what chunk owners find in its updates, over ten rounds",
    "the operator is told; nothing is done",
)
def test_who_is_odd_for_ten_rounds_is_named_and_nobody_else(kind: str, words: str) -> None:
    rounds = Rounds()
    while not rounds.said(BAD):
        assert rounds.number < 15
        updates = rounds.updates()
        rounds.note(updates | {BAD: bad_update(kind, updates, rounds)})
    assert rounds.number >= ODD_ROUNDS
    assert rounds.said(BAD) == f"{words}, for {ODD_ROUNDS} rounds"
    assert rounds.named() == ([A, BAD] if kind == "copier" else [BAD])


@pytest.mark.parametrize("signal", [0.05, 0.7, 3.0])
def test_nobody_honest_is_named_in_200_rounds(signal: float) -> None:
    rounds = Rounds()
    for _ in range(200):
        rounds.note(rounds.updates(signal))
        assert not rounds.named()


@pytest.mark.parametrize("kind", ["flipped", "noise"])
def test_where_two_resemble_nobody_the_others_are_no_copies(kind: str) -> None:
    rounds = Rounds()
    for _ in range(ODD_ROUNDS + 2):
        updates = rounds.updates(signal=2.0)
        for bad in (E, BAD):
            updates[bad] = -updates[bad] if kind == "flipped" else 3 * rounds.noise()
        rounds.note(updates)
    assert rounds.named() == [E, BAD]


def test_a_bad_week_is_forgotten() -> None:
    """Odd rounds count in a row, and the average follows."""
    rounds = Rounds()
    for number in range(60):
        updates = rounds.updates()
        odd = number % 15 < ODD_ROUNDS - 4
        rounds.note(updates | ({BAD: -updates[BAD]} if odd else {}))
        assert not rounds.named()


def test_honest_data_may_be_unlike_the_others() -> None:
    rounds = Rounds()
    for _ in range(30):
        updates = rounds.updates()
        updates[BAD] = np.float32(0.5) * updates[BAD] + np.float32(0.8) * rounds.noise()
        rounds.note(updates)
    assert not rounds.named()


# ---------------------------------------------------------------- whose word counts


def slander(rounds: Rounds, updates: dict[str, Values], victim: str) -> Report:
    """One owner's report: that a member opposes, copies and does nothing."""
    lies = updates | {victim: np.float32(-1e-3) * updates[BAD]}
    return rounds.reports(lies, rounds.noise())[BAD]


@pytest.mark.parametrize("owner_count", [1, 2, 3, 6])
def test_one_owners_word_names_nobody(owner_count: int) -> None:
    rounds = Rounds()
    for _ in range(2 * ODD_ROUNDS):
        updates = rounds.updates()
        makers = [*PEERS[1:owner_count], BAD]
        lies = {BAD: slander(rounds, updates, A)}
        rounds.note(updates, lies=lies, makers=makers)
        assert not rounds.named()


def test_nobody_is_heard_about_itself() -> None:
    """Of four owners one is bad, and another one its friend: two are left, and one is wrong."""
    rounds = Rounds()
    for _ in range(ODD_ROUNDS + 2):
        updates = rounds.updates()
        lies = rounds.reports(updates, rounds.noise())
        lies = {friend: lies[friend] for friend in (E, BAD)}
        rounds.note(updates | {BAD: -updates[BAD]}, lies=lies, makers=(A, B, E, BAD))
    assert rounds.named() == [BAD]


def test_the_owners_of_the_most_chunks_are_heard() -> None:
    rounds = Rounds()
    updates = rounds.updates()
    many = [*PEERS[1:], *PEERS[1:], A]
    for _ in range(2 * ODD_ROUNDS):
        rounds.note(updates | {BAD: -updates[BAD]}, makers=many)
    assert len(PEERS) - 1 == REPORTS_MAX
    assert rounds.named() == [BAD]


def test_figures_that_cannot_be_are_left_out() -> None:
    """Sums of which no vectors have such: nothing of them is a square root of less than zero."""
    lie = struct.pack("<9f", *[1.0, 1.0, 9.0] * 2, 1.0, 0.5, 0.0) + bytes(16)
    assert makes_sense(lie, 2)
    found = OwnerFindings.of(A, lie, [1.0, 1.0])
    assert found.agreement == [None, None]


# ---------------------------------------------------------------- effort


@pytest.mark.parametrize("exponent", [0.5, 0.9])
def test_who_has_trained_less_and_says_so_is_not_lazy(exponent: float) -> None:
    rounds = Rounds()
    tokens = dict(zip(PEERS, (100, 60, 150, 40, 100, 25), strict=True))
    for _ in range(30):
        updates = {
            peer: np.float32((tokens[peer] / 100) ** exponent) * values
            for peer, values in rounds.updates().items()
        }
        rounds.note(updates, tokens)
    assert not rounds.named()
    assert rounds.history.exponent == pytest.approx(exponent, abs=0.05)


def test_two_liars_do_not_fit_the_exponent() -> None:
    """They claim five times the others' tokens, with the others' norms."""
    rounds = Rounds()
    tokens = dict.fromkeys(PEERS, TOKENS) | {E: 5 * TOKENS, BAD: 5 * TOKENS}
    for _ in range(ODD_ROUNDS + 2):
        rounds.note(rounds.updates(), tokens)
    assert rounds.history.exponent == EXPONENT
    assert rounds.named() == [E, BAD]


# ---------------------------------------------------------------- at the master


def test_the_operator_is_told_once_and_sees_figures_and_reason() -> None:
    table, rounds = started(A, B, C, D, E), Rounds()
    said = f"e: its updates point against the others', for {ODD_ROUNDS} rounds"
    for number in range(ODD_ROUNDS + 3):
        order = table.reduce(A, B, C, D, E)
        owners_of(table, A, B, C, D, E)
        updates = {peer: each for peer, each in rounds.updates().items() if peer in HONEST}
        updates[E] = -updates[E]
        for peer, (sums, square) in rounds.reports(updates, rounds.noise()).items():
            if peer in HONEST:
                table.say(peer, m.Reduced(order.round, 1, DIGEST, (), sums, square))
        assert (said in table.announced()) == (number == ODD_ROUNDS - 1), "it is news once"
        table.applied(order, A, B, C, D, E)
        table.forget()
    progress = m.Progress(1, 1, 1.0, None, "training", 0, 0, 0, {"x": m.LoggedFigure(1.0, 1)})
    many = {f"x{n}": m.LoggedFigure(1.0, 1) for n in range(m.METRICS_MAX - 1)}
    table.say(E, evolve(progress, metrics=many | {"agreement": m.LoggedFigure(1.0, 1)}))
    status = table.status()
    row = status["members"][-1]
    assert row["suspicion"] == f"its updates point against the others', for {ODD_ROUNDS + 3} rounds"
    assert [text for text in status["warnings"] if "point against" in text] == [
        f"e: {row['suspicion']}"
    ]
    assert row["metrics"]["agreement"] < 0, "its own word for it does not count"
    assert math.isclose(row["metrics"]["effort"], 1.0, abs_tol=0.1)
    assert not any(each["suspicion"] for each in status["members"][:-1])

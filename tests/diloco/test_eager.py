"""A trainer's estimate of the outer optimizer, from the fragment's versions alone."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.diloco.eager import SEEN_ROUNDS_MIN, OuterEstimate
from holdfast.diloco.outer import outer_step

Values = NDArray[np.float32]

COUNT = 50
SETTINGS = [(0.7, 0.9, True), (0.4, 0.9, True), (0.7, 0.7, False), (1.0, 0.0, True)]


class Run:
    """The shared state, with contributors whose pseudo-gradients are correlated, as real ones are."""

    def __init__(self, lr: float, mu: float, nesterov: bool, peers: int) -> None:
        self.chance = np.random.default_rng(3)
        self.settings = (lr, mu, nesterov)
        self.theta = self.chance.standard_normal(COUNT).astype(np.float32)
        self.momentum = np.zeros(COUNT, np.float32)
        self.common = self.noise()
        self.peers = peers

    def noise(self) -> Values:
        return (self.chance.standard_normal(COUNT) * 1e-2).astype(np.float32)

    def deltas(self) -> list[Values]:
        self.common += self.noise() * np.float32(0.1)
        return [self.common + self.noise() * np.float32(0.3) for _ in range(self.peers)]

    def commit(self, deltas: list[Values]) -> None:
        outer_step(self.theta, self.momentum, self.mean(deltas), *self.settings)

    @staticmethod
    def mean(deltas: list[Values]) -> Values:
        mean: Values = np.mean(deltas, axis=0, dtype=np.float32)
        return mean

    def outlook(self, version: int = 0) -> OuterEstimate:
        outlook = OuterEstimate(COUNT, *self.settings)
        outlook.loaded(self.theta, version)
        return outlook


@pytest.mark.parametrize(("lr", "mu", "nesterov"), SETTINGS)
def test_a_preview_is_the_papers_update(lr: float, mu: float, nesterov: bool) -> None:
    run = Run(lr, mu, nesterov, peers=4)
    outlook = run.outlook()
    before: list[Values] = []
    off = off_without = 0.0
    for number in range(8):
        deltas = run.deltas()
        preview = outlook.preview(deltas[0])
        if number == 0:
            assert preview is None, "nothing is known of the others yet"
        else:
            assert preview is not None
            expected = run.theta.copy()
            estimate = run.mean(before) + (deltas[0] - before[0]) / np.float32(4)
            outer_step(expected, run.momentum.copy(), estimate, lr, mu, nesterov)
            np.testing.assert_allclose(preview, expected, atol=3e-6)
        local = run.theta - deltas[0]
        run.commit(deltas)
        if preview is not None:
            off += float(np.linalg.norm(preview - run.theta))
            off_without += float(np.linalg.norm(local - run.theta))
        outlook.committed(run.theta, 1, deltas[0], 0.25)
        before = deltas
    assert off < 0.9 * off_without, "it is nearer to what comes than to train on from our own"


@pytest.mark.parametrize(("lr", "mu", "nesterov"), SETTINGS)
def test_alone_the_preview_is_the_commit(lr: float, mu: float, nesterov: bool) -> None:
    run = Run(lr, mu, nesterov, peers=1)
    outlook = run.outlook()
    for number in range(20):
        deltas = run.deltas()
        preview = outlook.preview(deltas[0])
        run.commit(deltas)
        if number > 0:
            assert preview is not None
            np.testing.assert_allclose(preview, run.theta, rtol=0, atol=1e-6)  # a rounding or two
        outlook.committed(run.theta, 1, deltas[0], 1.0)


@pytest.mark.parametrize(("lr", "mu", "nesterov"), SETTINGS)
def test_who_joins_learns_the_momentum_and_looks_ahead_then(
    lr: float, mu: float, nesterov: bool
) -> None:
    run = Run(lr, mu, nesterov, peers=2)
    for _ in range(10):
        run.commit(run.deltas())
    outlook = run.outlook(version=10)
    for number in range(SEEN_ROUNDS_MIN + 10):
        deltas = run.deltas()
        preview = outlook.preview(deltas[0])
        assert (preview is None) == (number < SEEN_ROUNDS_MIN)
        theta = run.theta.copy()
        run.commit(deltas)
        if preview is not None:
            moved = np.linalg.norm(run.theta - theta)
            assert np.linalg.norm(preview - run.theta) < 0.3 * moved
        outlook.committed(run.theta, 1, deltas[0], 0.5)


def test_without_a_part_of_its_own_in_the_last_mean_it_does_not_guess() -> None:
    run = Run(0.7, 0.9, True, peers=2)
    outlook = run.outlook()
    for own in (True, False, True):
        deltas = run.deltas()
        run.commit(deltas)
        outlook.committed(run.theta, 1, deltas[0] if own else None, 0.5 if own else 0.0)
        assert (outlook.preview(deltas[0]) is not None) == own


def test_after_a_version_that_it_has_not_seen_it_learns_from_scratch() -> None:
    run = Run(0.7, 0.9, True, peers=2)
    outlook = run.outlook()
    for number in range(3 + SEEN_ROUNDS_MIN + 1):
        deltas = run.deltas()
        run.commit(deltas)
        outlook.committed(run.theta, 2 if number == 3 else 1, deltas[0], 0.5)
        known = outlook.preview(deltas[0]) is not None
        assert known == (number < 3 or number >= 3 + SEEN_ROUNDS_MIN)

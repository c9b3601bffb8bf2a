"""Eager updates: a trainer trains on from its own estimate of a round's outcome while the round runs.

The paper (arXiv 2502.12996) avoids waiting by replacing the mean pseudo-gradient D of a round, which is
not known yet, by an estimate that is partly fresh. With M contributors and this trainer's own d:

    D~(t) = D(t-1) + (d(t) - d(t-1)) / M

In the paper each replica's parameters drift by their own estimates. Here the shared state takes the true
means only, so it stays equal everywhere, and D~ makes a *preview*: the parameters from which the trainer
trains on until the round ends, when the preview is taken back. Instead of 1/M stands the trainer's share
of the weights.

A trainer does not get D nor the momentum b: it sees the parameters of one version after the other.
Both follow from their steps, s = (theta_old - theta_new) / lr:

    with Nesterov's look-ahead   b' = (s + mu * b) / (1 + mu)     D = s - mu * b'
    without                      b' = s                           D = b' - mu * b

A late joiner starts from b = 0. That is wrong, but the error shrinks each round by the factor mu / (1 + mu)
with the look-ahead, and is gone after one round without it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .outer import outer_step

Values = NDArray[np.float32]

FOUNDING_VERSION = 0  # the initial weights: their momentum is known to be zero
SEEN_ROUNDS_MIN = 4  # after these, at most a sixteenth of the momentum is unknown


class OuterEstimate:
    """One trainer's estimate of a fragment's outer optimizer: three vectors of its parameters.

    Args:
      parameter_count: elements that have an outer momentum; later elements are ignored.
      lr: outer learning rate, above 0; with ``mu`` and ``nesterov`` as for ``outer_step``.
    """

    def __init__(self, parameter_count: int, lr: float, mu: float, nesterov: bool) -> None:
        self._lr, self._mu, self._nesterov = lr, mu, nesterov
        self._theta: Values = np.zeros(parameter_count, np.float32)
        self._momentum: Values = np.zeros(parameter_count, np.float32)
        # The other trainers' part of the last mean; None: this trainer was not in it.
        self._others: Values | None = None
        self._share = 0.0
        self._seen_count = 0

    def loaded(self, theta: Values, version: int) -> None:
        """Start again from a loaded version of the fragment."""
        np.copyto(self._theta, theta[: len(self._theta)])
        self._momentum[:] = 0
        self._others = None
        self._seen_count = SEEN_ROUNDS_MIN if version == FOUNDING_VERSION else 0

    def committed(
        self, theta: Values, version_count: int, own: Values | None, share: float
    ) -> None:
        """Update the estimate after the fragment has moved by ``version_count`` versions.

        Args:
          own: this trainer's pseudo-gradient in the last of them; None without one.
          share: this trainer's part of the sum of weights, from 0 to 1.
        """
        if version_count != 1:
            self.loaded(theta, FOUNDING_VERSION + 1)
            return
        new = theta[: len(self._theta)]
        mu = np.float32(self._mu)
        step = (self._theta - new) / np.float32(self._lr)
        if self._nesterov:
            np.multiply(self._momentum, mu, out=self._momentum)
            self._momentum += step
            self._momentum /= np.float32(1.0 + self._mu)
            mean = step - mu * self._momentum
        else:
            mean = step - mu * self._momentum
            self._momentum = step
        np.copyto(self._theta, new)
        self._seen_count += 1
        self._share, self._others = share, None
        if own is not None and share > 0.0:
            mean -= np.float32(share) * own[: len(new)]
            if share >= 1.0:
                mean[:] = 0.0  # no other trainers contributed; the rest is rounding
            self._others = mean

    def preview(self, own: Values) -> Values | None:
        """Return the parameters after the round by the expected mean, or None if too little is known.

        Args:
          own: this trainer's pseudo-gradient, measured from the last version given here.
        """
        if self._others is None or self._seen_count < SEEN_ROUNDS_MIN:
            return None
        expected = self._others + np.float32(self._share) * own[: len(self._theta)]
        theta, momentum = self._theta.copy(), self._momentum.copy()
        outer_step(theta, momentum, expected, self._lr, self._mu, self._nesterov)
        return theta

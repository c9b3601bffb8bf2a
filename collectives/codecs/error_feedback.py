"""Error feedback: the error of a lossy codec in one contribution is added to the next.

With ``e`` the residual (0 at first), ``delta`` a round's pseudo-gradient, ``Q`` the codec and ``beta``
the decay, all in float32, every operation rounded by itself:

    a = beta * e + delta   what is encoded instead of delta
    s = decode(Q(a))       what owners add up
    e <- a - s             when the round commits and this peer is among its contributors

A round that does not commit, or commits without this peer, leaves ``e`` as it was: the delta is
still in the trainer's weights and comes again with the next round, and the residual with it. So
without decay (``beta`` is 1) the sent values and the residual add up to what was trained:
``sum of s + e = sum of delta``, exactly where these sums are exact in float32, and otherwise up to one
rounding of ``a`` and ``e`` a round. With decay the residual counts less the longer it waits, as in
SparseLoCo (arXiv 2508.15706), where it stands in for outer momentum.

Memory: one vector as long as the fragment, and a second one while a round of it is in flight (the
trainer may have overwritten ``delta`` by the time the round commits). Nothing is stored on disk: a
peer that restarts begins with a residual of 0, and so loses the error of its last encoding.
"""

from __future__ import annotations

import numpy as np

from .codec_base import Bytes, Codec, Values


class Residual:
    """The residual of one fragment. One round at a time uses it: a new one makes earlier ones void.

    Attributes:
      values: shape ``(n,)``, float32.
      decay: factor of the residual in each round, from 0 to 1.
      open: the use of the round in flight.
    """

    def __init__(self, count: int, decay: float = 1.0) -> None:
        self.values: Values = np.zeros(count, np.float32)
        self.decay = np.float32(decay)
        self.open: ResidualUse | None = None

    def carried(self, where: slice) -> Values:
        """Return what is added to the next contribution."""
        return self.values[where] * self.decay

    def begin(self) -> ResidualUse:
        """Return a new round's correction; the residual changes when that is settled."""
        self.open = ResidualUse(self)
        return self.open


class ResidualUse:
    """One round's use of a residual. Chunks may be encoded in any order, by several threads.

    Attributes:
      left: shape ``(n,)``, float32: the next residual, where chunks were encoded already.
    """

    def __init__(self, residual: Residual) -> None:
        self._residual = residual
        self._before = residual.values
        self.left: Values = np.empty_like(residual.values)

    @property
    def count(self) -> int:
        """The number of values in the fragment."""
        return self._before.size

    def corrected(self, where: slice, delta: Values) -> Values:
        """Return one chunk's ``delta`` plus residual; perhaps not finite, which codecs refuse."""
        with np.errstate(over="ignore", invalid="ignore"):
            corrected = self._before[where] * self._residual.decay
            corrected += delta
        return corrected

    def encode(self, codec: Codec, where: slice, delta: Values, out: memoryview) -> int:
        """Encode one chunk's ``delta`` plus residual, once; otherwise as ``Codec.encode``.

        Raises:
          ValueError: as the codec; also if the sum of delta and residual is not finite.
        """
        left, corrected = self.left[where], self.corrected(where, delta)
        length = codec.encode(corrected, out)
        sent: Bytes = out[:length]
        codec.decode(sent, left)
        np.subtract(corrected, left, out=left)
        return length

    def settle(self) -> None:
        """Make ``left`` the residual: the round committed with our contribution.

        Does nothing the second time, or after a later round of the fragment began.
        """
        if self._residual.open is self:
            self._residual.open, self._residual.values = None, self.left

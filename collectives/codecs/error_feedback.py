"""Error feedback: the error of a lossy codec in one contribution is added to the next.

With ``e`` the residual (0 at first), ``delta`` a round's pseudo-gradient, ``Q`` the codec and
``beta`` the decay, all in float32, every operation rounded by itself:

    a = beta * e + delta   what is encoded instead of delta
    s = decode(Q(a))       what owners add up
    e <- a - s             when the round commits and this peer is among its contributors

A round that does not commit, or commits without this peer, leaves ``e`` as it was: the delta is
still in the trainer's weights and comes again with the next round, and the residual with it. So
without decay (``beta`` is 1) the sent values and the residual add up to what was trained:
``sum of s + e = sum of delta``, exactly where these sums are exact in float32, and otherwise up to
one rounding of ``a`` and ``e`` a round. With decay the residual counts less the longer it waits, as
in SparseLoCo (arXiv 2508.15706), where it stands in for outer momentum.

Memory: one vector as long as the fragment. While a round of it is in flight its encodings are kept,
too: the residual is made of them and of ``delta`` when the round commits, chunk by chunk, in place.
Nothing is stored on disk: a peer that restarts begins with a residual of 0, and so loses the error
of its last encoding.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .codec_base import Bytes, Codec, Values


class Residual:
    """The residual of one fragment. One round at a time uses it: a new one makes earlier ones void.

    Chunks may be corrected in any order, by several threads.

    Attributes:
      values: shape ``(n,)``, float32.
      decay: factor of the residual in each round, from 0 to 1.
    """

    def __init__(self, count: int, decay: float = 1.0) -> None:
        self.values: Values = np.zeros(count, np.float32)
        self.decay = np.float32(decay)
        self._turn = 0  # of the round in flight

    def begin(self) -> int:
        """Begin a new round, and return its turn: ``settle`` takes no other from now on."""
        self._turn += 1
        return self._turn

    def carried(self, where: slice) -> Values:
        """Return what is added to the next contribution."""
        return self.values[where] * self.decay

    def corrected(self, where: slice, delta: Values) -> Values:
        """Return one chunk's ``delta`` plus residual; perhaps not finite, which codecs refuse."""
        with np.errstate(over="ignore", invalid="ignore"):
            corrected = self.carried(where)
            corrected += delta
        return corrected

    def settle(self, turn: int, codec: Codec, sent: Iterable[tuple[slice, Values, Bytes]]) -> None:
        """Make a new residual of what was sent: the round committed with our contribution. Heavy.

        Does nothing the second time, or after a later round of the fragment began.

        Args:
          sent: of every chunk its place, its ``delta`` and the encoding of both.
        """
        if turn != self._turn:
            return
        self._turn += 1
        for where, delta, encoded in sent:
            corrected, left = self.corrected(where, delta), self.values[where]
            codec.decode(encoded, left)
            np.subtract(corrected, left, out=left)

"""How a trainer takes over a committed fragment while it keeps training on it.

``anchor`` are the local tensors at the time of the round's pseudo-gradient, ``local`` the tensors
now, some steps later, and ``shared`` the fragment after the round. Operators only, so it works on
numpy arrays and on torch tensors, on any device.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]


def merged(shared: Values, local: Values, anchor: Values) -> Values:
    """Return ``shared + (local - anchor)``: steps since the anchor are kept, counted once.

    It is computed as ``shared - (anchor - local)``: the rounding is the same, but where ``local``
    and ``anchor`` have the same bits the result has exactly those of ``shared``, even of -0.0.
    """
    return shared - (anchor - local)

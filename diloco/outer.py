"""The outer optimizer, which applies a committed round to a fragment of the shared state; and how
a trainer takes the new version up (``merged``).

With outer rate ``lr``, momentum ``mu``, and ``D`` the contributors' mean pseudo-gradient (shared
minus local, so that it acts as a gradient; arXiv 2311.08105):

    b     <- mu * b + D
    theta <- theta - lr * (D + mu * b)     with Nesterov's look-ahead
    theta <- theta - lr * b                without

This is ``torch.optim.SGD(momentum=mu, nesterov=...)``: torch starts its momentum buffer with the
first gradient, and so does this, because a buffer of zeros gives ``mu * 0 + D = D``. torch may fuse
the multiplications and additions of ``theta``. Here each is rounded to float32 on its own, so that
every processor gives the same bits; the two differ by roundings only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]

# Elements per block: four float32 arrays of this length fit a core's L2 cache, and the one
# temporary array stays this small whatever the model's size.
BLOCK_ELEMENTS = 65_536


def outer_step(
    values: Values, momentum: Values, mean: Values, lr: float, mu: float, nesterov: bool
) -> None:
    """Apply a round's mean pseudo-gradient to a fragment, in place.

    The elements of ``values`` beyond ``len(momentum)`` are buffers: they become
    ``values - mean``, which is the contributors' plain average.

    Args:
      values: ``(n,)`` float32, parameters first, then buffers. Overwritten.
      momentum: ``(m,)`` float32, ``m <= n``: of the parameters. Overwritten unless ``mu`` is 0.
      mean: ``(n,)`` float32, weighted mean of the contributors' pseudo-gradients. Only read.
      lr: outer learning rate; rounded to float32 once.
      mu: outer momentum; rounded to float32 once.
      nesterov: look ahead along the new momentum.

    Raises:
      ValueError: shapes or dtypes do not fit; nothing was changed.

    Cost:
      ``BLOCK_ELEMENTS`` of scratch; memory traffic of one pass over the arguments.
    """
    _check(values, momentum, mean)
    rate, decay = np.float32(lr), np.float32(mu)
    parameter_count = len(momentum)
    scratch = np.empty(min(BLOCK_ELEMENTS, parameter_count), np.float32)
    for start in range(0, parameter_count, BLOCK_ELEMENTS):
        stop = min(start + BLOCK_ELEMENTS, parameter_count)
        theta, d, s = values[start:stop], mean[start:stop], scratch[: stop - start]
        if mu == 0:
            np.multiply(d, rate, out=s)
        else:
            b = momentum[start:stop]
            np.multiply(b, decay, out=b)
            np.add(b, d, out=b)
            if nesterov:
                np.multiply(b, decay, out=s)
                np.add(d, s, out=s)
                np.multiply(s, rate, out=s)
            else:
                np.multiply(b, rate, out=s)
        np.subtract(theta, s, out=theta)
    buffers = values[parameter_count:]
    np.subtract(buffers, mean[parameter_count:], out=buffers)


def _check(values: Values, momentum: Values, mean: Values) -> None:
    for name, array in (("values", values), ("momentum", momentum), ("mean", mean)):
        if array.dtype != np.float32 or array.ndim != 1:
            raise ValueError(f"{name} must be a float32 vector, got {array.dtype} {array.shape}")
    if values.shape != mean.shape or len(momentum) > len(values):
        raise ValueError(
            f"{len(values)} values, {len(momentum)} momenta and a mean of {len(mean)} do not fit"
        )


def merged(shared: Values, local: Values, anchor: Values) -> Values:
    """Return ``shared + (local - anchor)``: steps since the anchor are kept, counted once.

    A trainer takes up a new version with it and trains on. ``anchor`` are the local tensors at the
    time of the round's pseudo-gradient, ``local`` those now, some steps later, and ``shared`` the
    fragment after the round. Operators only, so it works on numpy arrays and torch tensors.

    It is computed as ``shared - (anchor - local)``: the rounding is the same, but where ``local``
    and ``anchor`` have the same bits the result has exactly those of ``shared``, even of -0.0.
    """
    return shared - (anchor - local)

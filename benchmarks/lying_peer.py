"""A peer that serves one block of state in a hundred with a wrong bit: ``holdfast``, but for that.

python -m benchmarks.lying_peer join INVITE -- python train.py
"""

from __future__ import annotations

import itertools
import os
import sys

from holdfast.checkpoint.shared_state import SharedState
from holdfast.daemon.cli.command_line import main

EVERY = int(os.environ.get("LIE_EVERY", "100"))  # less for a small state

_served = itertools.count(1)
_block = SharedState.block


def block(self: SharedState, fragment: int, version: int, index: int) -> memoryview:
    honest = _block(self, fragment, version, index)
    if next(_served) % EVERY:
        return honest
    changed = bytearray(honest)
    changed[len(changed) // 2] ^= 1
    return memoryview(bytes(changed))


if __name__ == "__main__":
    SharedState.block = block  # type: ignore[method-assign]
    sys.exit(main())

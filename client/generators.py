"""Random number generators for a trainer's data: no two trainers or starts draw the same.

A generator's seed is the hash of the peer, the run's step at ``attach``, the start of the trainer's
process, and how many generators this process has made (BLAKE2b, RFC 7693).
"""

from __future__ import annotations

import hashlib
import os
import zlib

import numpy as np
import torch

MEMBER_VARIABLE = "HOLDFAST_MEMBER"  # set by the daemon: the peer's id
START_VARIABLE = "HOLDFAST_START"  # set by the daemon: differs at every start of a trainer
SEED_BYTES = 8


class Generators:
    """Makes the generators of one trainer process.

    Args:
      peer: the peer's id.
      start: differs at every start of the trainer; by default the daemon's, from the environment.
      data_rank: of this process within the peer; ranks with the same one draw the same samples.
    """

    def __init__(self, peer: str, start: str | None = None, data_rank: int = 0) -> None:
        self._peer = f"{peer}.{data_rank}" if data_rank else peer
        self._start = os.environ.get(START_VARIABLE, "") if start is None else start
        self._count = 0

    def make(self, kind: str, step: int) -> torch.Generator | np.random.Generator:
        """Make the process's next generator, on the CPU; raises ValueError for an unknown kind."""
        if kind not in ("torch", "numpy"):
            raise ValueError(f"there is no generator {kind!r}: give 'torch' or 'numpy'")
        self._count += 1
        text = "\0".join((self._peer, self._start, str(step), str(self._count)))
        digest = hashlib.blake2b(text.encode(), digest_size=SEED_BYTES).digest()
        seed = int.from_bytes(digest, "big")
        if kind == "numpy":
            return np.random.default_rng(seed)
        return torch.Generator().manual_seed(seed)


def seed_of(data_rank: int) -> int:
    """Return the number of a data rank of the peer; without a daemon, this process's id."""
    text = os.environ.get(MEMBER_VARIABLE)
    if text is None:
        return os.getpid()
    if data_rank:
        text = f"{text}.{data_rank}"
    return int(text) if text.isdecimal() else zlib.crc32(text.encode())

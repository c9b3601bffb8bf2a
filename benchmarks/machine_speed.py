"""What a machine's memory, disk and cores take for a model, when nothing else is done."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Self

import numpy as np
from attrs import frozen
from blake3 import blake3

from holdfast.checkpoint.blocks import BLOCK_BYTES
from holdfast.diloco.outer import outer_step

VALUES_MAX = 2**26  # that are copied at a time: large against all caches


@frozen
class MachineSpeed:
    """Seconds that one thread takes for one float32 model.

    Attributes:
      copy_s: to copy it in memory.
      fresh_s: to copy it into memory that this process has not used yet.
      write_s: to write it to disk, synced.
      digest_s: for the BLAKE3 digests of its blocks.
    """

    copy_s: float
    fresh_s: float
    write_s: float
    digest_s: float

    @classmethod
    def measure(cls, folder: Path, params: int) -> Self:
        """Measure with a model of so many parameters; a file in the folder is written and deleted."""
        part = np.ones(min(params, VALUES_MAX), np.float32)
        times = params / len(part)
        other = np.empty_like(part)
        began_s = time.monotonic()
        np.copyto(other, part)
        fresh_s = times * (time.monotonic() - began_s)
        began_s = time.monotonic()
        np.copyto(other, part)
        copy_s = times * (time.monotonic() - began_s)
        octets = part.view(np.uint8)
        began_s = time.monotonic()
        for start in range(0, len(octets), BLOCK_BYTES):
            blake3(octets[start : start + BLOCK_BYTES].data).digest()
        digest_s = times * (time.monotonic() - began_s)
        began_s = time.monotonic()
        with (folder / "reference").open("wb") as file:
            for _ in range(round(times)):
                file.write(part.data)
            file.flush()
            os.fsync(file.fileno())
        write_s = time.monotonic() - began_s
        (folder / "reference").unlink()
        return cls(copy_s, fresh_s, write_s, digest_s)

    def carried_s(self, peers: int, fragments: int) -> dict[str, float]:
        """Return what pieces of work with a model take if nothing but their bytes counts, by name.

        Founding copies the model into fresh memory: the founder's two arenas, and each other founder's; a
        join does so with the model and its momentum. A round copies a fragment twice. The outer
        step reads three arrays and writes two. A checkpoint is two models.
        """
        return {
            "founding": peers * self.fresh_s,
            "join": 2 * self.fresh_s,
            "round": 2 * self.copy_s / fragments,
            "outer step": 2.5 * self.copy_s,
            "checkpoint": 2 * self.write_s,
            "export": 2 * self.copy_s + self.write_s,
        }


def outer_step_s(count: int) -> float:
    """Return the seconds of the outer step, for each value."""
    values, momentum, mean = (np.ones(count, np.float32) for _ in range(3))
    outer_step(values, momentum, mean, lr=0.7, mu=0.9, nesterov=True)
    began_s = time.monotonic()
    outer_step(values, momentum, mean, lr=0.7, mu=0.9, nesterov=True)
    return (time.monotonic() - began_s) / count

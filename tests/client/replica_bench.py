"""A model as one fragment, with both sides of its arenas and no socket."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from holdfast.client.state.box_views import fragment_size
from holdfast.client.state.copier import CudaCopier
from holdfast.client.state.fragment_replica import FragmentReplica
from holdfast.client.state.tensors import SharedTensor, find_shared
from holdfast.protocol.arena import Arena, arena_bytes


def arenas_of(tensors: Sequence[SharedTensor]) -> tuple[Arena, Arena]:
    """Return the shared and the posted arena of these tensors as one fragment."""
    size = fragment_size(tensors)
    buffers = (bytearray(arena_bytes([size])) for _ in range(2))
    shared, posted = (Arena(buffer, [size]) for buffer in buffers)
    return shared, posted


class ReplicaBench:
    """A replica at the model's own weights, and the daemon's side: ``share`` and what is posted."""

    def __init__(
        self, model: nn.Module, overlap: bool = False, copier: CudaCopier | None = None
    ) -> None:
        tensors = find_shared(model)
        self.shared, self.posted = arenas_of(tensors)
        self.replica = FragmentReplica(0, tensors, self.shared, self.posted, overlap, copier)
        self.version = 0  # of the next ``share``
        self.replica.post_present()
        self.share(self.posted.values(0), self.posted.counters(0))
        self.replica.load()

    def share(self, values: object, counters: object = None) -> None:
        with self.shared.writing(0, self.version):
            self.shared.values(0)[:] = np.asarray(values, np.float32)
            if counters is not None:
                self.shared.counters(0)[:] = np.asarray(counters, np.int64)
        self.version += 1

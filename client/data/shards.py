"""``run.shards``: leased shards of iterable data, such as files, which a script reads in order.

    for shard in run.shards(names):      the next leased one; the one before is used up
        for batch in read(shard):
            ...
            run.step(...)                what is used up counts as trained

A shard is what a sample is to ``run.sampler``: leased, in committed work once an epoch, and, if its
trainer dies in the middle, given out again as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import torch

from ..attach_errors import MisuseError
from .sampler import DrawRule, SampleStream

ShardT = TypeVar("ShardT")

# A shard takes long, so each is drawn when it is needed, and one is leased ahead of it.
OF_SHARDS = DrawRule(first=1, most=1, early=False, ahead=1)


class LeasedShards(Generic[ShardT]):
    """Shards that are leased to this trainer; iterate over it in the training process.

    Each shard is used once an epoch in the run's committed work. A shard is used up when the next
    one is asked for, and counts with the next ``run.step``. A new iteration begins with the shard
    that was not used up.

    Args:
      endless: one iteration goes on over all epochs; False: it ends with the epoch.
    """

    def __init__(self, stream: SampleStream, shards: Sequence[ShardT], *, endless: bool) -> None:
        self._stream = stream
        self._shards = shards
        self._endless = endless

    @property
    def epoch(self) -> int:
        """The epoch of the shard that was given last."""
        return self._stream.drawn_epoch

    def __iter__(self) -> Iterator[ShardT]:
        if torch.utils.data.get_worker_info() is not None:
            raise MisuseError(
                "run.shards was used in a worker process of a DataLoader",
                hint=(
                    "go over run.shards in the training process, and make a DataLoader with workers"
                    " of each shard"
                ),
            )
        return self._iterate()

    def _iterate(self) -> Iterator[ShardT]:
        stream = self._stream
        iteration = stream.begin_iteration()
        epoch = stream.next_epoch(iteration)
        while self._endless or stream.next_epoch(iteration) == epoch:
            yield self._shards[stream.draw(iteration)]
            stream.use_up(iteration)

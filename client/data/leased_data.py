"""What the run shares out to this trainer: samples or shards, and how many of them are trained."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Generic, SupportsIndex, TypeVar

import torch

from ...protocol.messages import SAMPLES_MAX
from ..attach_errors import MisuseError
from .sampler import OF_SAMPLES, DrawRule, SampleStream, Source

# A shard takes long, so each is drawn when it is needed, and one is leased ahead of it.
OF_SHARDS = DrawRule(first=1, most=1, early=False, ahead=1)
WHOLE_MAX = 2**40  # of one step: sums of millions of steps are numbers of a message
ShardT = TypeVar("ShardT")


def whole(name: str, value: SupportsIndex) -> int:
    """Return a count as a plain int, which numpy's and torch's integers become."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from None
    if count < 0:
        raise ValueError(f"{name} must not be negative, got {count}")
    if count > WHOLE_MAX:
        raise ValueError(f"{name} must be of one step, and at most 2**40, got {count}")
    return count


class LeasedData:
    """The stream of one trainer, if it has asked for any.

    Attributes:
      stream: None: this trainer chooses its samples itself.
    """

    def __init__(self) -> None:
        self.stream: SampleStream | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the last sample or shard that was trained."""
        return 0 if self.stream is None else self.stream.epoch

    def open(
        self, name: str, data: Sized | int, rule: DrawRule, source: Callable[[int, int], Source]
    ) -> SampleStream:
        """Return the stream, which is made for the first caller.

        Args:
          name: of the caller's method of ``Run``.
          source: makes the source of positions, of the length of the data and ``rule.ahead``.

        Raises:
          TypeError, ValueError: ``data`` has no length, another one than before, or nothing in it.
          AttachRefused: the run's data has another length.
        """
        length = _length_of(name, data)
        if self.stream is None:
            self.stream = SampleStream(source(length, rule.ahead), length, rule)
        elif (self.stream.length, self.stream.rule) != (length, rule):
            kind = "samples" if self.stream.rule is OF_SAMPLES else "shards"
            raise ValueError(
                f"this trainer draws from {self.stream.length} {kind} already; run.{name} got"
                f" {length}"
            )
        return self.stream

    def train(self, samples: SupportsIndex | None) -> int:
        """Note that a step was done; return how many samples, or shards, it has trained.

        Args:
          samples: as ``run.step`` was told.

        Raises:
          MisuseError: it was told of no samples, of more than were drawn, or of those of shards.
        """
        stream = self.stream
        if stream is None:
            return 0
        if stream.rule is not OF_SAMPLES:
            if samples is not None:
                raise MisuseError(
                    "run.step was told of samples, and run.shards shares out whole shards",
                    hint=(
                        "call run.step without samples: shards that are used up count by themselves"
                    ),
                )
            return stream.train_used()
        if samples is None:
            raise MisuseError(
                "run.step was not told how many samples this step took",
                hint="with run.sampler, call run.step(samples=len(batch), ...)",
            )
        count = whole("samples", samples)
        stream.train(count)
        return count


def _length_of(name: str, data: Sized | int) -> int:
    try:
        length = len(data) if isinstance(data, Sized) else operator.index(data)
    except TypeError:
        raise TypeError(
            f"run.{name} takes data with a length, or the number of samples; got {data!r}"
        ) from None
    if not 1 <= length <= SAMPLES_MAX:
        raise ValueError(f"run.{name} takes from 1 to {SAMPLES_MAX} samples, got {length}")
    return length


class LeasedShards(Generic[ShardT]):
    """Shards that are leased to this trainer; iterate over it in the training process.

    A shard is what a sample is to ``run.sampler``: if its trainer dies in the middle, it is given
    out again as a whole.

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

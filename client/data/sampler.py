"""Leased samples of the run's data set, and ``run.sampler``, which gives them to a ``DataLoader``.

    DataLoader --next--> Sampler --> SampleStream --Draw--> daemon --Drawn--> positions, permuted
                                                                              to samples
    run.step(samples=n) ------------> the first n that were drawn are trained

A loader draws ahead of training. What it drew and the script has not trained yet stays in the
stream: a new iteration begins with it. Positions come over a connection of the stream's own, so
drawing never touches the messages that ``run.step`` handles, and may happen on another thread. Of
``run.shards`` (``shards``) a sample is a whole shard.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from attrs import frozen

from ...diloco.permutation import permuted
from ...protocol import messages as m
from ...protocol.errors import RemoteProtocolError
from ..attach_errors import AttachRefused, DaemonGone, MisuseError
from ..daemon_connection import DaemonConnection

DRAW_FIRST = 32  # samples of the first draw; each one doubles it
DRAW_MAX = 512  # what is drawn and not trained when a trainer has to start afresh is lost time
# Samples that were drawn and are not trained, beyond which ``run.step`` must have been told too
# few. Loaders with many workers and large batches hold a quarter of it.
UNTRAINED_MAX = 65_536


@frozen
class DrawRule:
    """How many samples a stream draws.

    Attributes:
      first: in the first draw; each one doubles it.
      most: in any draw.
      early: whether the next draw is asked for before its samples are needed.
      ahead: samples that the daemon leases before it knows the trainer's speed.
    """

    first: int = DRAW_FIRST
    most: int = DRAW_MAX
    early: bool = True
    ahead: int = m.SAMPLES_AHEAD


OF_SAMPLES = DrawRule()


class Source(Protocol):
    """Where positions come from."""

    def begin(self) -> bytes:
        """Return the key of the order of samples."""
        ...

    def request(self, index: int, count: int) -> None:
        """Ask for the samples from ``index`` on."""
        ...

    def receive(self) -> tuple[m.LeaseRange, ...]:
        """Wait for the positions that were asked for."""
        ...


class DaemonSource:
    """Leased positions from the daemon, over a connection of their own.

    Args:
      path: of the daemon's socket.
      ahead: see ``DrawRule``.
      waiting: a context in which this thread waits.
    """

    def __init__(
        self,
        path: str,
        data_rank: int,
        length: int,
        ahead: int,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._connection = DaemonConnection.open(path)
        self._hello = m.DrawHello(m.VERSION_MAX, data_rank, length, ahead)
        self._waiting = waiting

    def begin(self) -> bytes:
        self._connection.send(self._hello)
        return self._receive().key

    def request(self, index: int, count: int) -> None:
        self._connection.send(m.Draw(index, count))

    def receive(self) -> tuple[m.LeaseRange, ...]:
        return self._receive().ranges

    def _receive(self) -> m.Drawn:
        message = self._connection.receive_nowait()
        if message is None:
            with self._waiting():
                message = self._connection.receive()
        if isinstance(message, m.Rejected):
            raise AttachRefused(f"the run gives this trainer no samples: {message.reason}")
        if not isinstance(message, m.Drawn):
            raise RemoteProtocolError(f"the daemon sent a {type(message).__name__}")
        return message


class LocalSource:
    """All positions, one after the other, for a run without a daemon."""

    def __init__(self) -> None:
        self._asked = (0, 0)

    def begin(self) -> bytes:
        return b"standalone"

    def request(self, index: int, count: int) -> None:
        self._asked = (index, count)

    def receive(self) -> tuple[m.LeaseRange, ...]:
        index, count = self._asked
        return (m.LeaseRange(index, index + count),)


class SampleStream:
    """The samples that this process draws, in order; those that are not trained yet are kept.

    Args:
      length: samples of the data set.
      rule: how many are drawn at a time.

    Attributes:
      epoch: of the last sample that was trained.
    """

    def __init__(self, source: Source, length: int, rule: DrawRule = OF_SAMPLES) -> None:
        self.length = length
        self.epoch = 0
        self.rule = rule
        self._source = source
        self._key = source.begin()
        # (sample, epoch), the first untrained one first.
        self._kept: deque[tuple[int, int]] = deque()
        self._next = 0  # of ``_kept``: to be drawn by the iterator
        self._trained_count = 0
        self._used_count = 0  # of ``_kept``: the first ones, see ``use_up``
        self._count = rule.first  # of the next request
        self._iteration = 0
        self._gone = False
        self._lock = threading.Lock()
        if rule.early:
            self._request()

    @property
    def drawn_epoch(self) -> int:
        """The epoch of the last sample that was drawn."""
        with self._lock:
            return self._kept[self._next - 1][1] if self._next else self.epoch

    def begin_iteration(self) -> int:
        """Begin with the first sample that is not used up; return the iteration's number."""
        with self._lock:
            self._next = self._used_count
            self._iteration += 1
            return self._iteration

    def next_epoch(self, iteration: int) -> int:
        """Return the epoch of the next sample, which waits until it is there."""
        with self._lock:
            self._prepare(iteration)
            return self._kept[self._next][1]

    def draw(self, iteration: int) -> int:
        """Return the next sample; wait for it if necessary.

        Raises:
          MisuseError: another iteration has begun, or too many samples are not reported.
          AttachRefused: the run has another data set.
        """
        with self._lock:
            self._prepare(iteration)
            sample = self._kept[self._next][0]
            self._next += 1
            return sample

    def _prepare(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise MisuseError(
                "an iterator of run.sampler was used after a newer one had begun",
                hint="use one DataLoader iterator at a time",
            )
        if self._next < len(self._kept):
            return
        if len(self._kept) > UNTRAINED_MAX:
            raise MisuseError(
                f"{len(self._kept)} samples were drawn and not reported as trained",
                hint=(
                    "give run.step the number of samples of each step: run.step(samples=len(batch))"
                ),
            )
        self._receive()

    def _request(self) -> None:
        try:
            self._source.request(self._trained_count + len(self._kept), self._count)
        except DaemonGone:
            self._gone = True

    def _receive(self) -> None:
        """Take the positions that were asked for, and ask for the next ones.

        Without a daemon any samples will do: the next ``run.step`` finds that the run is over or
        the daemon gone, and what is trained until then counts nowhere.
        """
        if not self.rule.early:
            self._request()
        ranges: tuple[m.LeaseRange, ...] = (m.LeaseRange(0, 1),)
        if not self._gone:
            try:
                ranges = self._source.receive()
            except DaemonGone:
                self._gone = True
        for each in ranges:
            samples = permuted(self._key, self.length, each.start, each.stop).tolist()
            places = range(each.start, each.stop)
            self._kept.extend(
                (sample, place // self.length)
                for sample, place in zip(samples, places, strict=True)
            )
        self._count = min(2 * self._count, self.rule.most)
        if self.rule.early and not self._gone:
            self._request()

    def train(self, count: int) -> None:
        """Note that ``count`` samples more are trained; raises MisuseError if fewer were drawn."""
        with self._lock:
            if count > self._next:
                raise MisuseError(
                    f"run.step was told of {count} samples, and {self._next} were drawn and not"
                    " trained",
                    hint="give run.step the number of samples that run.sampler gave for this step",
                )
            for _ in range(count):
                self.epoch = self._kept.popleft()[1]
            self._next -= count
            self._used_count = max(0, self._used_count - count)
            self._trained_count += count

    def use_up(self, iteration: int) -> None:
        """Note that what an iteration has drawn is read no more: ``train_used`` counts it."""
        with self._lock:
            if iteration == self._iteration:
                self._used_count = self._next

    def train_used(self) -> int:
        """Note that what is used up is trained; return how many samples that are."""
        count = self._used_count
        self.train(count)
        return count


class LeasedSampler(torch.utils.data.Sampler[int]):
    """Samples that are leased to this trainer: give it to a ``DataLoader`` as its ``sampler``.

    Each sample of the data set is used once an epoch in the run's committed work, whatever joins,
    leaves or dies. An iteration begins with what was drawn and not trained; it has no length.

    Args:
      endless: one iteration goes on over all epochs, in whole batches; False: it ends with one.
    """

    def __init__(self, stream: SampleStream, *, endless: bool) -> None:
        self._stream = stream
        self._endless = endless
        self._epoch = -1  # of the last iteration, if it is not endless

    def __iter__(self) -> Iterator[int]:
        iteration = self._stream.begin_iteration()
        self._epoch += 1
        first = True
        while True:
            if not self._endless:
                epoch = self._stream.next_epoch(iteration)
                self._epoch = max(self._epoch, epoch) if first else self._epoch
                if epoch > self._epoch:
                    return
            first = False
            yield self._stream.draw(iteration)

"""Leased samples and shards in the training process: what is drawn, kept, trained, and drawn
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import holdfast
from holdfast.client.attach_errors import DaemonGone, MisuseError
from holdfast.client.data import sampler as sampler_module
from holdfast.client.data.leased_data import OF_SHARDS, LeasedShards
from holdfast.client.data.sampler import (
    DRAW_FIRST,
    DRAW_MAX,
    LeasedSampler,
    SampleStream,
)
from holdfast.client.hook import Run
from holdfast.membership.peer.lease_book import LeaseBook
from holdfast.protocol.messages import Leased, LeaseRange
from tests.processes.leases_trainer import Numbers

LENGTH = 100


class BookSource:
    """Positions out of a peer's real book, which has been given any number of leases."""

    def __init__(self, length: int = LENGTH) -> None:
        self.book = LeaseBook()
        assert self.book.begin(length)
        self.book.leased(Leased((LeaseRange(0, 100 * length),), length=length))
        self.counts: list[int] = []
        self.gone = False
        self._asked = (0, 0)

    def begin(self) -> bytes:
        return b"test"

    def request(self, index: int, count: int) -> None:
        if self.gone:
            raise DaemonGone("gone")
        self.counts.append(count)
        self._asked = (index, count)

    def receive(self) -> tuple[LeaseRange, ...]:
        if self.gone:
            raise DaemonGone("gone")
        return tuple(self.book.draw(0, *self._asked, leased=True))


@pytest.fixture
def source() -> BookSource:
    return BookSource()


@pytest.fixture
def stream(source: BookSource) -> SampleStream:
    return SampleStream(source, LENGTH)


@pytest.fixture
def alone() -> Iterator[Run]:
    model = nn.Linear(1, 1)
    with holdfast.attach(
        model, torch.optim.SGD(model.parameters(), 0.1), standalone=True, total_steps=1_000
    ) as run:
        yield run


# ---------------------------------------------------------------- samples


def test_each_sample_comes_once_an_epoch_in_another_order_each_time(stream: SampleStream) -> None:
    drawn = iter(LeasedSampler(stream, endless=True))
    epochs = []
    for epoch in range(3):
        samples = list(islice(drawn, LENGTH))
        stream.train(LENGTH)
        assert sorted(samples) == list(range(LENGTH))
        assert stream.epoch == epoch
        epochs.append(samples)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_what_was_drawn_and_not_trained_begins_the_next_iteration(stream: SampleStream) -> None:
    sampler = LeasedSampler(stream, endless=True)
    samples = list(islice(sampler, 50))
    stream.train(20)
    assert list(islice(sampler, 50))[:30] == samples[20:]
    assert [sample for sample, _epoch in stream._kept][:30] == samples[20:]


def test_an_iteration_that_is_not_endless_ends_with_the_epoch(stream: SampleStream) -> None:
    sampler = LeasedSampler(stream, endless=False)
    for _epoch in range(3):
        assert sorted(sampler) == list(range(LENGTH))
        stream.train(LENGTH)


def test_a_batch_that_a_loader_leaves_out_is_drawn_first_by_the_next_iteration(
    stream: SampleStream,
) -> None:
    sampler = LeasedSampler(stream, endless=False)
    loader: DataLoader[int] = DataLoader(
        Numbers(LENGTH),
        30,
        sampler=sampler,
        drop_last=True,
    )
    seen: list[int] = []
    for _iteration in range(10):
        for batch in loader:
            stream.train(len(batch))
            seen += batch.tolist()
    # Three whole batches of each of the first epochs; the ten that remain go first afterwards.
    assert Counter(Counter(seen[:90]).values()) == {1: 90}
    assert set(range(LENGTH)) - set(seen[:90]) == set(seen[90:100])


def test_workers_of_a_loader_draw_ahead_and_batches_come_as_drawn(stream: SampleStream) -> None:
    loader: DataLoader[int] = DataLoader(
        Numbers(LENGTH),
        10,
        sampler=LeasedSampler(stream, endless=True),
        num_workers=1,
    )
    for batch in islice(loader, 12):
        assert batch.tolist() == [sample for sample, _epoch in islice(stream._kept, 10)]
        stream.train(10)


def test_draws_grow_up_to_a_limit(source: BookSource, stream: SampleStream) -> None:
    for _ in islice(LeasedSampler(stream, endless=True), 20 * LENGTH):
        pass
    assert source.counts[:3] == [DRAW_FIRST, 2 * DRAW_FIRST, 4 * DRAW_FIRST]
    assert max(source.counts) == source.counts[-1] == DRAW_MAX


def test_an_iterator_ends_when_a_newer_one_begins(stream: SampleStream) -> None:
    sampler = LeasedSampler(stream, endless=True)
    older = iter(sampler)
    next(older)
    next(iter(sampler))
    with pytest.raises(MisuseError, match="one DataLoader iterator at a time"):
        next(older)


def test_more_cannot_be_trained_than_was_drawn(stream: SampleStream) -> None:
    list(islice(LeasedSampler(stream, endless=True), 5))
    with pytest.raises(MisuseError, match="told of 6 samples, and 5 were drawn"):
        stream.train(6)


def test_samples_that_no_step_names_come_to_an_end(
    stream: SampleStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "UNTRAINED_MAX", LENGTH)
    with pytest.raises(MisuseError, match=r"run.step\(samples=len\(batch\)\)"):
        for _sample in LeasedSampler(stream, endless=True):
            pass


def test_a_loader_goes_on_without_a_daemon_until_a_step_finds_it_gone(
    source: BookSource, stream: SampleStream
) -> None:
    drawn = iter(LeasedSampler(stream, endless=True))
    list(islice(drawn, 10))
    source.gone = True
    assert all(0 <= sample < LENGTH for sample in islice(drawn, 10 * LENGTH))


def test_a_step_must_name_its_samples(alone: Run) -> None:
    loader: DataLoader[int] = DataLoader(Numbers(LENGTH), 8, sampler=alone.sampler(LENGTH))
    batch = next(iter(loader))
    with pytest.raises(MisuseError, match="not told how many samples"):
        alone.step()
    alone.step(samples=len(batch))
    with pytest.raises(MisuseError, match="told of 9 samples"):
        alone.step(samples=9)


@pytest.mark.parametrize("name", ["sampler", "shards"])
def test_data_needs_a_length_that_stays(alone: Run, name: str) -> None:
    make = getattr(alone, name)
    with pytest.raises(TypeError, match=f"run.{name} takes data with a length"):
        make(iter("abc"))
    with pytest.raises(ValueError, match="from 1 to"):
        make([])
    make(["a", "b"])
    with pytest.raises(ValueError, match="draws from 2"):
        make(["a", "b", "c"])
    other = {"sampler": "shards", "shards": "sampler"}[name]
    with pytest.raises(ValueError, match=f"draws from 2 .* already; run.{other} got 2"):
        getattr(alone, other)(["a", "b"])


# ---------------------------------------------------------------- shards

NAMES = [f"shard-{number}" for number in range(7)]


@pytest.fixture
def shard_source() -> BookSource:
    return BookSource(len(NAMES))


@pytest.fixture
def shard_stream(shard_source: BookSource) -> SampleStream:
    return SampleStream(shard_source, len(NAMES), OF_SHARDS)


def test_each_shard_comes_once_an_epoch_and_is_drawn_when_it_is_needed(
    shard_source: BookSource, shard_stream: SampleStream
) -> None:
    shards = LeasedShards(shard_stream, NAMES, endless=True)
    assert shard_source.counts == []
    seen = []
    for number, shard in enumerate(islice(shards, 3 * len(NAMES)), 1):
        assert shard_source.counts == [1] * number
        assert shard_stream.train_used() == (number > 1)
        seen.append(shard)
    for epoch in range(3):
        assert sorted(seen[epoch * 7 : epoch * 7 + 7]) == NAMES


def test_a_shard_that_was_left_begins_the_next_iteration(shard_stream: SampleStream) -> None:
    shards = LeasedShards(shard_stream, NAMES, endless=True)
    drawn = list(islice(shards, 3))  # the third one is not used up: nobody asked for a fourth
    for trained in (0, 2):  # whether a step has counted the first two or not
        assert next(iter(shards)) == drawn[2]
        assert shard_stream.train_used() == 2 - trained


def test_an_iteration_over_shards_ends_with_the_epoch_and_has_used_up_the_last(
    shard_stream: SampleStream,
) -> None:
    shards = LeasedShards(shard_stream, NAMES, endless=False)
    for epoch in range(3):
        assert sorted(shards) == NAMES
        assert shard_stream.train_used() == len(NAMES)
        assert shard_stream.epoch == epoch


def test_an_older_iteration_uses_up_nothing_of_a_newer_one(shard_stream: SampleStream) -> None:
    shards = LeasedShards(shard_stream, NAMES, endless=True)
    older = iter(shards)
    next(older)
    next(iter(shards))
    with pytest.raises(MisuseError):
        next(older)
    assert shard_stream.train_used() == 0


def test_steps_count_shards_by_themselves(alone: Run) -> None:
    assert alone.epoch == 0
    seen = []
    for shard in islice(alone.shards(NAMES), 2 * len(NAMES)):
        seen.append(shard)
        for _batch in range(3):
            alone.step()
    assert Counter(seen) == dict.fromkeys(NAMES, 2)
    assert alone.epoch == 1
    with pytest.raises(MisuseError, match=r"call run\.step without samples"):
        alone.step(samples=1)


class Workers(IterableDataset[str]):
    def __init__(self, shards: LeasedShards[str]) -> None:
        self.shards = shards

    def __iter__(self) -> Iterator[str]:
        yield from self.shards


def test_workers_cannot_draw_shards_and_are_told_what_can(alone: Run) -> None:
    data = Workers(alone.shards(NAMES))
    assert len(next(iter(DataLoader(data, 2)))) == 2
    with pytest.raises(MisuseError, match="in the training process"):
        next(iter(DataLoader(data, 2, num_workers=1)))

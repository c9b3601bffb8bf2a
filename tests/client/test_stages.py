"""Stages of a pipeline: they declare the whole model's layout, and hold their own tensors alone."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.client.attach_errors import ModelError
from holdfast.client.ranks import part_of
from holdfast.client.state.fragment_replica import FragmentReplica
from holdfast.client.state.tensors import NOTHING, find_shared, layout_of
from holdfast.client.state.trained_parameters import TrainedParameters
from holdfast.membership.peer.rank_parts import RankPartsError, writers
from holdfast.protocol import messages as m
from tests.client.replica_bench import arenas_of

STAGES = 3


class Net(nn.Module):
    """A model of three layers, tied at its ends, or a stage of it; a counter in each layer."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        numbers = range(STAGES) if stage is None else [stage]
        if stage in (None, 0):
            self.embedding = nn.Embedding(5, 2)
        self.layers = nn.ModuleDict({str(each): nn.BatchNorm1d(2) for each in numbers})
        if stage in (None, STAGES - 1):
            self.head = nn.Linear(2, 5)
        if stage is None:
            self.head.weight = self.embedding.weight


def whole() -> nn.Module:
    with torch.device("meta"):
        return Net()


def test_every_stage_declares_the_layout_of_a_plain_peer() -> None:
    plain = layout_of(find_shared(Net()))
    assert plain.tensors[0].aliases == ("head.weight",)
    for stage in range(STAGES):
        assert layout_of(find_shared(Net(stage), whole())) == plain
    assert layout_of(find_shared(Net(), whole())) == plain
    assert layout_of(find_shared(Net(1), Net())) == plain, "the whole may have values"


def test_empty_tensors_of_equal_shapes_on_the_meta_device_are_not_tied() -> None:
    tensors = find_shared(Net(), whole())
    assert [each.spec.name for each in tensors if each.spec.aliases] == ["embedding.weight"]


def parts(*stages: int) -> list[m.RankPart]:
    held = []
    for rank, stage in enumerate(stages):
        boxes = []
        for tensor in find_shared(Net(stage), whole()):
            shape = tensor.spec.shape
            boxes.append(m.TensorBox((0,) * len(shape), shape) if tensor.box is None else NOTHING)
        held.append(m.RankPart(rank, len(stages), 0, tuple(boxes)))
    return held


def test_together_the_stages_write_each_tensor_once() -> None:
    layout = layout_of(find_shared(Net()))
    written = writers(layout, parts(0, 1, 2))
    assert sorted(itertools.chain(*written)) == list(range(len(layout.tensors)))
    names = [layout.tensors[index].name for index in written[1]]
    assert all(name.startswith("layers.1.") for name in names)
    assert len(names) == 5


def test_a_stage_that_is_missing_is_told_by_a_tensor_of_it() -> None:
    with pytest.raises(RankPartsError, match=r"'layers\.1\.weight' is in no rank: the stages"):
        writers(layout_of(find_shared(Net())), parts(0, 2))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stage_reads_and_writes_its_own_tensors_alone(overlap: bool) -> None:
    """The replicas of all stages fill the posted arena as one of the whole model does."""
    plain = find_shared(Net())
    ranks = [find_shared(Net(stage), whole()) for stage in range(STAGES)]
    layout = layout_of(plain)
    shared, posted = arenas_of(plain)
    sizes = shared.sizes[0]
    start = np.arange(sizes.value_count, dtype=np.float32)
    with shared.writing(0, 0):
        shared.values(0)[:], shared.counters(0)[:] = start, np.arange(sizes.counter_count)
    written = writers(layout, parts(0, 1, 2))
    with torch.no_grad():
        for tensors, indices in zip(ranks, written, strict=True):
            writes = [tensors[index] for index in indices]
            replica = FragmentReplica(0, tensors, shared, posted, overlap, writes=writes)
            replica.load()
            for tensor in tensors:
                if not tensor.absent and tensor.spec.kind != "counter":
                    tensor.tensor.sub_(0.5)
            replica.post()
            assert replica.written
        assert posted.values(0).tolist() == [0.5] * sizes.value_count
        assert posted.counters(0).tolist() == list(range(sizes.counter_count))
        with shared.writing(0, 1):
            shared.values(0)[:] = start + 1
        replica.merge(contributed=True)
    head = next(each for each in ranks[2] if each.spec.name == "embedding.weight")
    assert head.key == "weight"
    assert head.read().tolist() == (start[:10] + 1).tolist(), "the copy of a tied tensor follows"
    assert sum(each.count for each in ranks[1] if each.spec.kind != "counter") == 8


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("apart", "far"), [(0.0, False), (1e-3, False), (0.1, False), (0.1, True)])
def test_copies_that_are_trained_differently_are_named(
    overlap: bool, apart: float, far: bool
) -> None:
    """``apart``: of a tied weight's gradient, which two stages should have added up.

    ``far``: the rank that writes is on another host, and has posted in another arena.
    """
    ranks = [find_shared(Net(stage), whole()) for stage in (0, STAGES - 1)]
    shared, posted = arenas_of(ranks[0])
    with shared.writing(0, 0):
        shared.values(0)[:] = 1.0
    first, last = (
        FragmentReplica(0, tensors, shared, posted, overlap, writes=writes)
        for tensors, writes in zip(ranks, ([ranks[0][0]], []), strict=True)
    )
    with torch.no_grad(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for replica, tensors, gradient in ((first, ranks[0], 0.5), (last, ranks[1], 0.5 + apart)):
            replica.load()
            tensors[0].tensor.sub_(gradient)
            replica.post()
        if far:
            posted.values(0)[:] = 0.0
        with shared.writing(0, 1):
            shared.values(0)[:] = 0.0
        for replica in (first, last):
            replica.merge(contributed=True)
    words = "copies of 'embedding.weight' that they train differently"
    found = [words in str(each.message) for each in warned]
    assert found == ([True] if apart == 0.1 and not far else [])


def renamed() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.Linear(2, 2)})


def in_16_bits() -> nn.Module:
    return Net(1).to(torch.bfloat16)


def of_another_shape() -> nn.Module:
    stage = Net(2)
    stage.head.bias = nn.Parameter(torch.zeros(6))
    return stage


def tied_otherwise() -> nn.Module:
    stage = Net(2)
    stage.layers["2"].bias = stage.layers["2"].weight
    return stage


def untied() -> nn.Module:
    stage = Net()
    stage.head.weight = nn.Parameter(torch.zeros(5, 2))
    return stage


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (renamed, r"'blocks\.weight' of this stage is not in the whole model"),
        (
            in_16_bits,
            r"'layers\.1\.weight' .* in bfloat16, and .* in float32",
        ),
        (of_another_shape, r"'head\.bias' .* parameter of \(6,\) .* parameter of \(5,\)"),
        (tied_otherwise, r"'layers\.2\.weight' is tied otherwise in this stage"),
        (untied, r"'head\.weight' is tied otherwise in this stage"),
        (whole, "is on the meta device and has no values"),
    ],
    ids=["renamed", "dtype", "shape", "tied", "untied", "meta"],
)
def test_a_stage_that_is_none_of_the_whole_is_refused(
    make: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        find_shared(make(), whole())


def test_a_process_alone_must_hold_all_stages() -> None:
    stage = Net(1)
    with pytest.raises(ModelError, match=r"alone and its stage lacks 'embedding\.weight'") as error:
        part_of(stage, find_shared(stage, whole()))
    assert "as many processes" in str(error.value.hint)
    assert part_of(stage, find_shared(Net(), whole())) == m.RankPart()


def test_stages_train_on_the_same_samples_and_copies_of_a_stage_do_not(
    group_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four processes this is the last: two copies of each of two stages."""
    copied = nn.parallel.DistributedDataParallel(Net(2))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 3 if group is None else 1)

    def data_rank(model: nn.Module, *, stage: bool, given: int | None = None) -> int:
        tensors = find_shared(model, whole() if stage else None)
        return part_of(model, tensors, given, stage=stage).data_rank

    assert data_rank(Net(2), stage=True) == 0
    assert data_rank(copied, stage=True) == 1
    assert data_rank(Net(2), stage=True, given=2) == 2
    assert data_rank(copied, stage=False) == 3


def test_a_stages_tensors_are_checked_as_a_models_are() -> None:
    stage = Net(0)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    trained = TrainedParameters(stage, optimizer, whole())
    trained.check()
    stage.layers["9"] = nn.Linear(1, 1)
    with pytest.raises(ModelError, match=r"'layers\.9\.weight' came after attach"):
        trained.check()


def test_a_stage_is_tried_without_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_SOCKET", raising=False)
    stage = Net(1)
    with holdfast.attach(stage, whole=whole(), standalone=True, total_steps=2) as run:
        while not run.finished:
            run.step()
    with pytest.raises(TypeError, match=r"whole must be a torch\.nn\.Module, got str"):
        holdfast.attach(stage, whole="Net", standalone=True)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="not in the whole model"):
        holdfast.attach(renamed(), whole=whole(), standalone=True)

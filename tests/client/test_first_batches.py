"""The digest of a trainer's first batches."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.client.attach import attach
from holdfast.client.data.first_batches import BATCH_COUNT, FirstBatches
from holdfast.protocol.messages import Posted
from tests.client.fake_daemon import FakeDaemon, talking

Call = Callable[[nn.Module, torch.Tensor], object]


def digest_of(seed: int, call: Call = lambda model, batch: model(batch)) -> bytes:
    model = nn.Linear(3, 2)
    batches = FirstBatches(model)
    with torch.no_grad():
        model(torch.ones(1, 3))  # a dummy does not count
    generator = torch.Generator().manual_seed(seed)
    for _ in range(BATCH_COUNT):
        assert not batches.digest
        call(model, torch.randn(4, 3, generator=generator))
    assert not model._forward_pre_hooks
    return batches.digest


@pytest.mark.parametrize(
    "call", [lambda model, batch: model(batch), lambda model, batch: model(input=batch)]
)
def test_the_same_batches_have_the_same_digest(call: Call) -> None:
    assert digest_of(1, call) == digest_of(1, call) != digest_of(2, call)


def test_equal_batches_have_none() -> None:
    """The script calls the model with a dummy, or trains on a small data set as a whole."""
    assert digest_of(1, lambda model, batch: model(torch.zeros(4, 3))) == b""


def test_batches_that_cannot_be_read_do_not_end_the_script() -> None:
    batches = FirstBatches(nn.Linear(3, 3))
    for _ in range(BATCH_COUNT):
        batches.take({"x": [torch.eye(3).to_sparse()]})
    assert batches.digest == b""


def test_a_watched_model_is_copied_pickled_and_compiled() -> None:
    model = nn.Linear(3, 2)
    FirstBatches(model)
    copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))
    torch.compile(model, fullgraph=True, backend="eager")(torch.ones(1, 3))


def test_a_post_carries_it() -> None:
    posts: list[Posted] = []

    def script(daemon: FakeDaemon) -> None:
        daemon.start(step_limit=BATCH_COUNT)
        posts.append(daemon.round(1, BATCH_COUNT, 0.0))

    model = nn.Linear(3, 2)
    with talking(script, stay=True) as socket_path, attach(model, socket_path=socket_path) as run:
        generator = torch.Generator().manual_seed(3)
        for _ in range(BATCH_COUNT):
            model(torch.randn(4, 3, generator=generator))
            run.step()
    assert posts[0].first_batches == digest_of(3)

"""The algorithm's parts, with a chunk owner's mean, train as textbook DiLoCo does."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from holdfast.collectives.arithmetic import MeanFactors, SumTerm, reduce_values
from holdfast.collectives.codecs.codecs import get_codec
from holdfast.diloco.fragments import Fragment, TensorShape, split
from holdfast.diloco.merge import merged
from holdfast.diloco.outer import outer_step
from holdfast.protocol.messages import Contributor

Values = NDArray[np.float32]


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def batches(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    inputs = torch.randn(32, 8, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin()


def pack(model: torch.nn.Module, fragment: Fragment) -> Values:
    parameters = list(model.parameters())
    flat = [parameters[index].detach().reshape(-1) for index in fragment.tensors]
    result: Values = torch.cat(flat).numpy().copy()
    return result


def unpack(values: Values, model: torch.nn.Module, fragment: Fragment) -> None:
    parameters = list(model.parameters())
    with torch.no_grad():
        for place in fragment.places:
            piece = torch.from_numpy(values[place.offset : place.offset + place.count])
            parameters[place.index].copy_(piece.view_as(parameters[place.index]))


def mean_of(deltas: list[Values]) -> Values:
    """Return the mean as a chunk owner makes it, with equal weights."""
    fp32 = get_codec("fp32")
    peers = [f"{number:032x}" for number in range(len(deltas))]
    factors = MeanFactors.of([Contributor(peer, 160, 1.0) for peer in peers])
    terms = [
        SumTerm(peer, memoryview(delta.tobytes()), factor, fp32)
        for peer, delta, factor in zip(peers, deltas, factors.factors, strict=True)
    ]
    mean = np.empty_like(deltas[0])
    reduce_values(terms, factors.divisor, fp32, mean, memoryview(bytearray(mean.nbytes)))
    return mean


@pytest.mark.parametrize("fragment_count", [1, 2])
def test_the_parts_train_as_the_textbook_does(textbook: Any, fragment_count: int) -> None:
    """Fragments that are all synchronised at the same steps are DiLoCo without fragments."""
    start, rounds = make_model(), 10
    expected = textbook.run(start, batches, rounds)

    layout = [
        TensorShape(name, tuple(parameter.shape), "parameter")
        for name, parameter in start.named_parameters()
    ]
    fragments = split(layout, fragment_count)
    shared = [pack(start, fragment) for fragment in fragments]
    momentum = [np.zeros(fragment.momentum_count, np.float32) for fragment in fragments]
    workers = [copy.deepcopy(start) for _ in range(textbook.worker_count)]
    inners = [textbook.inner(worker) for worker in workers]
    for round_ in range(rounds):
        for number, (worker, inner) in enumerate(zip(workers, inners, strict=True)):
            textbook.train(worker, inner, batches, number, round_)
        for number, fragment in enumerate(fragments):
            local = [pack(worker, fragment) for worker in workers]
            mean = mean_of([shared[number] - values for values in local])
            outer_step(
                shared[number],
                momentum[number],
                mean,
                textbook.outer_lr,
                textbook.outer_momentum,
                True,
            )
            for worker, values in zip(workers, local, strict=True):
                unpack(merged(shared[number], values, values), worker, fragment)
    for number, fragment in enumerate(fragments):
        assert np.allclose(shared[number], pack(expected, fragment), rtol=1e-3, atol=1e-4)
        assert not np.allclose(shared[number], pack(start, fragment), atol=1e-2)
        for worker in workers:
            assert pack(worker, fragment).tobytes() == shared[number].tobytes()

"""Ranks that hold boxes of a fragment do together what one process does that holds all of it, bit
for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
import torch
from attrs import define, evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.client.state.fragment_replica import FragmentReplica
from holdfast.client.state.tensors import SharedTensor, find_shared
from holdfast.protocol.messages import FragmentSize, TensorBox
from tests.client.replica_bench import arenas_of

pytestmark = pytest.mark.usefixtures("without_gradients")

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@define(eq=False)
class Part:
    """What a ``DTensor`` is to this code: the whole's shape, and the part in this process's
    memory.
    """

    shape: tuple[int, ...]
    local: torch.Tensor

    def detach(self) -> Part:
        return self

    def to_local(self) -> torch.Tensor:
        return self.local


class Model(nn.Module):
    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.arange(rows * 3.0).reshape(rows, 3).to(dtype))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.cube = nn.Parameter(torch.linspace(-1, 1, 2 * rows * 2).reshape(2, rows, 2))
        self.register_buffer("mask", torch.tensor([1.0, -math.inf, 0.25]))
        self.register_buffer("seen", torch.arange(4))


def cut(tensor: SharedTensor, dimension: int, count: int) -> list[SharedTensor]:
    """Return a tensor's parts for so many ranks, which FSDP2 would give: the last ones smaller, or
    empty.
    """
    whole = tensor.tensor
    if whole.dim() <= dimension:
        return [own(tensor, whole.clone()) for _ in range(count)]
    length = -(-whole.shape[dimension] // count)
    parts = []
    for rank in range(count):
        start = min(rank * length, whole.shape[dimension])
        end = min(start + length, whole.shape[dimension])
        local = whole.narrow(dimension, start, end - start).clone()
        at = tuple(start if each == dimension else 0 for each in range(whole.dim()))
        shape = tuple(local.shape)
        part = Part(tuple(whole.shape), local)
        holder = cast("dict[str, torch.Tensor | None]", {"it": part})
        parts.append(evolve(tensor, holder=holder, key="it", box=TensorBox(at, shape)))
    return parts


def own(tensor: SharedTensor, copy: torch.Tensor) -> SharedTensor:
    """Return a tensor that a rank holds whole, as others do."""
    return evolve(tensor, holder={"it": copy}, key="it")


class Side:
    """One process, or several ranks, with the memory that they share with their daemon."""

    def __init__(
        self,
        ranks: Sequence[Sequence[SharedTensor]],
        overlap: bool,
    ) -> None:
        self.ranks = ranks
        self.shared, self.posted = arenas_of(ranks[0])
        several = len(ranks) > 1
        written: set[object] = set()
        self.replicas = []
        for tensors in ranks:
            writes = []
            for index, tensor in enumerate(tensors):
                box = (index, tensor.box)
                if box not in written:  # of equal parts the first rank writes
                    written.add(box)
                    writes.append(tensor)
            self.replicas.append(
                FragmentReplica(
                    0,
                    tensors,
                    self.shared,
                    self.posted,
                    overlap,
                    writes=writes if several else None,
                )
            )

    def weights(self, like: Sequence[SharedTensor]) -> list[torch.Tensor]:
        """Return the whole tensors, made of what the ranks hold."""
        whole = [torch.full_like(tensor.tensor, 77) for tensor in like]
        for tensors in self.ranks:
            for tensor, into in zip(tensors, whole, strict=True):
                box = tensor.box or TensorBox((0,) * into.dim(), tuple(into.shape))
                pairs = zip(box.start, box.shape, strict=True)
                into[tuple(slice(a, a + n) for a, n in pairs)] = tensor.tensor
        return whole


def train(side: Side, seed: int) -> None:
    """Add numbers to every element, each depending on its place in the whole tensor only."""
    for tensors in side.ranks:
        for index, tensor in enumerate(tensors):
            if tensor.spec.kind == "counter":
                tensor.tensor.add_(seed % 3)
                continue
            chance = np.random.default_rng([seed, index])
            whole = torch.from_numpy(chance.normal(size=tensor.spec.shape)).to(tensor.tensor.dtype)
            box = tensor.box or TensorBox((0,) * whole.dim(), tuple(whole.shape))
            pairs = zip(box.start, box.shape, strict=True)
            tensor.tensor.add_(whole[tuple(slice(a, a + n) for a, n in pairs)] * 0.1)


@given(
    st.integers(1, 7),
    st.integers(2, 5),
    st.integers(0, 2),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.lists(
        st.sampled_from(["train", "post", "commit", "without", "load", "withdraw"]), max_size=12
    ),
)
@settings(deadline=None, max_examples=150)
def test_ranks_do_what_one_process_does(
    rows: int, count: int, dimension: int, dtype: torch.dtype, overlap: bool, actions: list[str]
) -> None:
    whole = find_shared(Model(rows, dtype))
    cuts = [cut(tensor, dimension, count) for tensor in whole]
    one = Side([whole], overlap)
    many = Side([list(rank) for rank in zip(*cuts, strict=True)], overlap)
    assert many.shared.sizes == one.shared.sizes == (FragmentSize(7 * rows + 4, 7 * rows + 1, 4),)
    version, posted = 0, False

    def share(values: np.ndarray[tuple[int], np.dtype[np.float32]], counters: object) -> None:
        nonlocal version
        for side in (one, many):
            with side.shared.writing(0, version):
                side.shared.values(0)[:] = values
                side.shared.counters(0)[:] = np.asarray(counters)
        version += 1

    for side in (one, many):
        for replica in side.replicas:
            replica.post_present()
    same_posted(one, many)
    share(one.posted.values(0).copy(), one.posted.counters(0).copy())
    for side in (one, many):
        for replica in side.replicas:
            replica.load()
    for number, action in enumerate(actions):
        if action == "train":
            if posted and not overlap:
                continue  # a trainer waits for the round then
            for side in (one, many):
                train(side, number)
        elif action in ("commit", "without"):
            contributed = posted and action == "commit"
            share(one.shared.values(0) * np.float32(0.9), one.shared.counters(0) + 1)
            for side in (one, many):
                for replica in side.replicas:
                    if posted and not contributed:
                        replica.withdraw()
                    replica.merge(contributed=contributed)
            posted = False
        elif action == "post":
            for side in (one, many):
                for replica in side.replicas:
                    replica.post()
            posted = True
            same_posted(one, many)
        else:
            for side in (one, many):
                for replica in side.replicas:
                    replica.load() if action == "load" else replica.withdraw()
            posted = False
        for ours, theirs in zip(one.weights(whole), many.weights(whole), strict=True):
            assert torch.equal(ours, theirs), action


def same_posted(one: Side, many: Side) -> None:
    np.testing.assert_array_equal(one.posted.values(0), many.posted.values(0))
    np.testing.assert_array_equal(one.posted.counters(0), many.posted.counters(0))

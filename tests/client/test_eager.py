"""Previews: a trainer trains on from its own estimate, and posts exactly its own training."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from holdfast.client.attach import attach
from holdfast.client.fragment_replica import FragmentReplica
from holdfast.client.tensors import find_shared
from holdfast.diloco.eager import OuterEstimate
from holdfast.diloco.merge import merged
from holdfast.diloco.outer import outer_step
from holdfast.protocol.arena import STEP_SLOT, Arena, arena_bytes
from holdfast.protocol.messages import Finished, FragmentSize, Posted
from tests.client.fake_daemon import FakeDaemon, settled, talking
from tests.client.slow_copier import Slow, Work

Values = NDArray[np.float32]

COUNT = 8
BUFFERS = 2
LR, MU = 0.7, 0.9


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Peer:
    """A trainer's fragment; ``trained`` and ``counted`` keep the books in float64."""

    def __init__(self, theta: Values, dtype: torch.dtype, slow: Slow | None, chance: int) -> None:
        model = nn.Module()
        self.weight = nn.Parameter(torch.zeros(COUNT, dtype=dtype), requires_grad=False)
        model.weight = self.weight
        model.register_buffer("statistics", torch.zeros(BUFFERS))
        size = FragmentSize(COUNT + BUFFERS, COUNT, 0)
        self.shared, self.posted = (Arena(bytearray(arena_bytes([size])), [size]) for _ in range(2))
        outlook = OuterEstimate(COUNT, LR, MU, True)
        tensors = find_shared(model)
        self.replica = FragmentReplica(0, tensors, self.shared, self.posted, True, slow, outlook)
        self.chance = np.random.default_rng(chance)
        self.drift = self.chance.standard_normal(COUNT) * 0.1
        self.load(theta, 0)

    def share(self, theta: Values, version: int) -> None:
        with self.shared.writing(0, version):
            self.shared.values(0)[:] = theta

    def load(self, theta: Values, version: int) -> None:
        self.share(theta, version)
        self.replica.load()
        self.trained, self.counted = np.zeros(COUNT), np.zeros(COUNT)

    def local(self) -> NDArray[np.float64]:
        values: NDArray[np.float64] = self.weight.double().numpy().copy()
        return values

    def train(self) -> None:
        before = self.local()
        step = self.drift + self.chance.standard_normal(COUNT) * 0.1
        self.weight.add_(torch.from_numpy(step).to(self.weight.dtype))
        self.trained += self.local() - before

    def post(self) -> None:
        self.replica.post()

    def pending(self) -> Values:
        self.replica.finish()
        return self.posted.values(0).copy()


OUTCOMES = st.lists(
    st.tuples(
        st.sampled_from(["commit", "commit", "commit", "abort"]),
        st.lists(st.booleans(), min_size=3, max_size=3),  # who is in it
        st.sampled_from([None, None, None, None, 0, 1, 2]),  # who is given the state anew
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("work", [None, "early", "late"])
@given(outcomes=OUTCOMES)
@settings(deadline=None, max_examples=25)
def test_what_is_posted_is_what_was_trained_whatever_becomes_of_the_rounds(
    work: Work | None, dtype: torch.dtype, outcomes: list[tuple[str, list[bool], int | None]]
) -> None:
    theta = np.random.default_rng(1).standard_normal(COUNT + BUFFERS).astype(np.float32)
    momentum, version = np.zeros(COUNT, np.float32), 0
    slows = [None if work is None else Slow(work) for _ in range(3)]
    peers = [Peer(theta, dtype, slow, number) for number, slow in enumerate(slows)]
    for end, members, loaded in outcomes:
        for peer in peers:
            peer.train()
            peer.post()
            peer.train()
        own = [peer.pending() for peer in peers]
        for peer in peers:
            peer.train()
        share = 1.0 / max(1, sum(members))
        committed = end == "commit" and any(members)
        if committed:
            posts = [delta for delta, member in zip(own, members, strict=True) if member]
            mean: Values = np.mean(posts, axis=0, dtype=np.float32)
            outer_step(theta, momentum, mean, LR, MU, nesterov=True)
            version += 1
        for peer, delta, member in zip(peers, own, members, strict=True):
            if not (committed and member):
                peer.replica.withdraw()
            if committed:
                peer.share(theta, version)
                peer.replica.merge(merged, contributed=member, share=share * member)
                if member:
                    peer.counted -= delta[:COUNT]
        if loaded is not None:
            peers[loaded].load(theta, version)
        for slow in slows:
            if slow is not None:
                slow.end()
        for peer in peers:
            peer.replica.advance()
    for peer in peers:
        peer.train()
        peer.post()
        delta = peer.pending()
        # A rounding of float32 for each time that the weights moved. Tensors in 16 bits round far
        # more when they are written, and that is nobody's training.
        np.testing.assert_allclose(peer.counted - delta[:COUNT], peer.trained, atol=2e-5)
        assert np.abs(delta[COUNT:]).max() < 1e-5


@pytest.mark.parametrize("late", [False, True])
def test_alone_the_preview_is_the_commit_and_the_merge_changes_nothing(late: bool) -> None:
    theta = np.random.default_rng(1).standard_normal(COUNT + BUFFERS).astype(np.float32)
    momentum = np.zeros(COUNT, np.float32)
    peer = Peer(theta, torch.float32, Slow() if late else None, 5)
    for version in range(1, 15):
        peer.train()
        before = peer.local()
        peer.post()
        delta = peer.pending()
        moved = np.abs(peer.local() - before).max()
        assert (moved > 0.01) == (version > 1), "the preview, once something is known"
        outer_step(theta, momentum, delta, LR, MU, nesterov=True)
        if version > 1:
            np.testing.assert_allclose(peer.local(), theta[:COUNT], rtol=0, atol=4e-6)
        peer.train()
        before = peer.local()
        peer.share(theta, version)
        peer.replica.merge(merged, contributed=True, share=1.0)
        peer.replica.finish()
        if version > 1:
            np.testing.assert_allclose(peer.local(), before, rtol=0, atol=4e-6)


def test_through_the_hook_a_preview_is_taken_back_when_its_round_is_not_committed() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    theta, momentum = np.zeros(2, np.float32), np.zeros(2, np.float32)
    previews: list[Values] = []

    def script(daemon: FakeDaemon) -> None:
        daemon.open_arenas(overlap_steps=4, preview=(0.5, 0.5))
        daemon.found()
        daemon.load(step_limit=2)
        daemon.open_round(1, at_step=2, step_limit=4)
        daemon.hear(Posted)
        settled(lambda: daemon.posted.slots[STEP_SLOT] == 4)
        outer_step(theta, momentum, daemon.posted.values(0), 0.5, 0.5, nesterov=True)
        daemon.share(0, 1, theta)
        daemon.end_round(1, step=2, step_limit=6, share=1.0)
        daemon.open_round(2, at_step=6, step_limit=8)
        daemon.hear(Posted)
        settled(lambda: daemon.posted.slots[STEP_SLOT] == 8)
        expected, ahead = theta.copy(), momentum.copy()
        outer_step(expected, ahead, daemon.posted.values(0), 0.5, 0.5, nesterov=True)
        previews.append(expected)
        daemon.end_round(2, committed=False, step_limit=8)
        daemon.open_round(3, at_step=8, step_limit=8)
        assert daemon.hear(Posted).tokens == 6
        assert daemon.posted.values(0).tolist() == [-6.0, -6.0]
        daemon.end_round(3, committed=False, step_limit=8)
        daemon.say(Finished())

    seen: dict[int, float] = {}
    with talking(script, stay=True) as path, attach(model, socket_path=path) as run:
        while not run.finished:
            model.weight += 1
            run.step()
            seen.setdefault(run.global_step, model.weight[0, 0].item())
    assert seen[2] == 2.0, "the first round has nothing to go by"
    assert seen[4] == 1.5 + 2, "the commit of its own two steps, and two more"
    assert seen[6] == pytest.approx(previews[0][0], abs=1e-6), "the preview"
    assert seen[7] == pytest.approx(previews[0][0] + 1, abs=1e-6)

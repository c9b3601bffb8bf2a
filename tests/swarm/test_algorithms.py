"""Outer algorithms in whole runs: the orders to trainers and the resulting shared state."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.collectives.codecs.codecs import get_codec
from holdfast.protocol.messages import ArenaOpened, Message
from holdfast.simulation.drifting_trainer import SimTrainer, small_layout
from tests.swarm.test_swarm import a_swarm

Values = NDArray[np.float32]

SPEC = """
[run]
rounds = {rounds}
[diloco]
{diloco}
sync_every = 4
pace = "lockstep"
[membership]
contributors = 2
min_members = 2
deadline_s = 3
grace_s = 1
[reduce]
{reduce}
"""
COUNT = 300
ROUNDS = 5


def drawn(peer: str, round_: int, count: int) -> Values:
    """A pseudo-gradient; peers are numbered from 1 in the first digits of their ids."""
    rng = np.random.default_rng((int(peer[:8], 16), round_))
    return rng.standard_normal(count).astype(np.float32)


async def trained(diloco: str, reduce: str = "", rounds: int = ROUNDS) -> Values:
    """Values and momentum that a run of two peers ends with, the same at both."""
    toml = SPEC.format(diloco=diloco, reduce=reduce, rounds=rounds)
    async with a_swarm("ab", toml=toml, layout=small_layout((COUNT,)), delta=drawn) as swarm:
        await swarm.until(lambda: swarm.committed == rounds)
        await swarm.come_to_rest("ab")
        swarm.check_final("ab")
        state = swarm.peers["a"].service.state
        assert state is not None
        assert state.heads()[0].version == rounds
        return np.concatenate((state.fragments[0].parts.values, state.fragments[0].parts.momentum))


@pytest.mark.parametrize(("overlap", "steps"), [("0", 0), ("'auto'", 3), ("4", 4)])
async def test_trainers_are_told_how_far_they_may_train_on(
    overlap: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the whole phase between two rounds: then a result is one phase late."""
    told: list[ArenaOpened] = []
    tell = SimTrainer.tell

    def overhear(trainer: SimTrainer, message: Message) -> None:
        if isinstance(message, ArenaOpened):
            told.append(message)
        tell(trainer, message)

    monkeypatch.setattr(SimTrainer, "tell", overhear)
    await trained(f"overlap = {overlap}", rounds=2)
    assert [each.overlap_steps for each in told] == [steps, steps]


@pytest.mark.parametrize("reduce", ["feedback_decay = 0", "codec_up = 'fp32+zstd'"])
async def test_the_identity_codec_changes_nothing(reduce: str) -> None:
    assert (await trained("")).tobytes() == (await trained("", reduce)).tobytes()


async def test_each_fragment_is_its_group_and_has_its_codecs() -> None:
    """A small value beside a large one is lost in int8, so what is left of it is kept."""
    groups = 'groups = [["*1.weight", "steps"], ["*0.weight"]]'
    toml = SPEC.format(diloco=groups, reduce="codec_up = ['fp32', 'int8']", rounds=4)
    async with a_swarm("ab", toml=toml, layout=small_layout((COUNT, 5)), delta=drawn) as swarm:
        await swarm.until(lambda: swarm.committed == 4)
        await swarm.come_to_rest("ab")
        swarm.check_final("ab")
        for name in "ab":
            service = swarm.peers[name].service
            sizes = service.state_service.state.sizes
            assert [size.value_count for size in sizes] == [5, COUNT]
            assert [size.counter_count for size in sizes] == [1, 0]
            assert list(service.reducer._residuals) == [1]
            assert service.reducer._residuals[1].values.any()


async def test_sparse_is_the_papers_formula() -> None:
    """SparseLoCo, algorithm 1: e <- beta e + delta; s = Q(e); e <- e - s; theta <- theta - mean
    s.
    """
    found = await trained(
        "outer_lr = 1.0\nouter_momentum = 0.0", "codec_up = 'topk'\nfeedback_decay = 0.95"
    )
    theta = np.arange(COUNT, dtype=np.float64)
    codec = get_codec("topk")
    for peer in ("00000001", "00000002"):
        left = np.zeros(COUNT, np.float32)
        for round_ in range(1, ROUNDS + 1):
            error = np.float32(0.95) * left + drawn(peer, round_, COUNT)
            encoded = memoryview(bytearray(codec.encoded_bytes(COUNT)))
            sent = np.empty(COUNT, np.float32)
            codec.decode(encoded[: codec.encode(error, encoded)], sent)
            left = error - sent
            theta -= sent / 2
    np.testing.assert_allclose(found[:COUNT], theta, rtol=0, atol=1e-3)
    assert not found[COUNT:].any()

"""Norm reports: norms of contributions and their direction, measured where they are added up."""

from __future__ import annotations

import math
import random
import struct

import numpy as np
import pytest
import trio

from holdfast.collectives.arithmetic import PIECE_VALUES, Values, all_finite, product
from holdfast.collectives.norm_report import SAMPLE_VALUES, NormSums
from holdfast.diloco.outer import outer_step
from holdfast.membership.master.rounds.norms import Totals, added_up, found_in, makes_sense
from holdfast.membership.master.rounds.outer_momentum import outer_motion
from holdfast.membership.spec.spec import DilocoTable
from holdfast.protocol.messages import FragmentSize, Reduce
from holdfast.simulation.memory_network import MemoryWorld
from tests.collectives.swarm import Node, Swarm, a_swarm, give_input, reduction_at, run

SIZE = FragmentSize(3_000, 2_500, 1)


async def reports_of(swarm: Swarm, order: Reduce, momentum: Values) -> tuple[Totals, Values]:
    """Reduce; return the sums of what the nodes report, and the result."""
    reports, results = [], []

    async def reduce(node: Node) -> None:
        result = await run(reduction_at(node, order, SIZE, momentum=momentum))
        reports.append((result.norm_sums, result.momentum_square))
        results.append(result.values)

    for node in swarm.nodes:
        swarm.nursery.start_soon(reduce, node)
    while len(reports) < len(swarm.nodes):
        await trio.sleep(0.01)
    return added_up(reports, len(reports)), results[0]


@pytest.mark.parametrize(
    ("codec", "rule", "rel"),
    [("fp32", "mean", 1e-5), ("fp32", "clipped", 1e-5), ("int8+zstd", "clipped", 1e-2)],
)
async def test_all_chunks_together_are_the_contribution(codec: str, rule: str, rel: float) -> None:
    async with a_swarm(4, MemoryWorld(random.Random(0), jitter_s=0.02)) as swarm:
        give_input(swarm.nodes, SIZE, 1)
        everyone = [(node, 64, 0.5) for node in swarm.nodes]  # clipping is not what was sent
        order = swarm.order(
            SIZE, everyone, chunk_elements=300, codecs=(codec, "fp32"), combine=rule
        )
        momentum = np.ones(SIZE.momentum_count, np.float32)
        totals, _mean = await reports_of(swarm, order, momentum)
        found = found_in(totals, [contributor.peer for contributor in order.contributors])
        for node in swarm.nodes:
            assert node.values is not None
            wide = node.values.astype(np.float64)
            with_momentum = wide[: SIZE.momentum_count]
            assert found[node.peer].norm == pytest.approx(float(np.linalg.norm(wide)), rel=rel)
            cosine = float(
                with_momentum.sum() / np.linalg.norm(with_momentum) / math.sqrt(SIZE.momentum_count)
            )
            assert found[node.peer].cosine == pytest.approx(cosine, abs=rel)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", ["mean", "clipped"])
async def test_the_gain_is_how_far_the_outer_step_goes_along_the_mean_gradient(
    nesterov: bool, rule: str
) -> None:
    diloco = DilocoTable(outer_momentum=0.8, nesterov=nesterov)
    async with a_swarm(4, MemoryWorld(random.Random(0), jitter_s=0.02)) as swarm:
        give_input(swarm.nodes, SIZE, 1)
        everyone = [(node, 64, 1.0) for node in swarm.nodes]
        order = swarm.order(SIZE, everyone, chunk_elements=300, combine=rule)
        momentum = np.linspace(-2.0, 1.0, SIZE.momentum_count, dtype=np.float32)
        totals, mean = await reports_of(swarm, order, momentum)
    gradient = mean[: SIZE.momentum_count].astype(np.float64)
    cosine = gradient @ momentum / np.linalg.norm(gradient) / np.linalg.norm(momentum)
    weights = np.zeros(SIZE.value_count, np.float32)
    outer_step(weights, momentum, mean, 0.5, 0.8, nesterov)
    gain = -(weights[: SIZE.momentum_count] @ gradient) / (gradient @ gradient) / 0.5
    motion = outer_motion(totals, diloco)
    assert motion is not None
    assert motion.cosine == pytest.approx(cosine, abs=1e-5)
    assert motion.gain == pytest.approx(gain, rel=1e-4)


async def test_without_an_outer_momentum_there_is_no_gain() -> None:
    async with a_swarm(2, MemoryWorld(random.Random(0), jitter_s=0.02)) as swarm:
        give_input(swarm.nodes, SIZE, 1)
        order = swarm.order(SIZE, [(node, 64, 1.0) for node in swarm.nodes], chunk_elements=300)
        totals, _mean = await reports_of(swarm, order, np.zeros(SIZE.momentum_count, np.float32))
    assert totals.sums
    assert outer_motion(totals, DilocoTable()) is None


def test_long_chunks_are_compared_by_their_beginning() -> None:
    count = 2 * SAMPLE_VALUES + 77
    values, momentum = np.ones(count, np.float32), np.full(count, 2, np.float32)
    sums = NormSums(momentum)
    for start in range(0, count, 50_000):
        sums.take("a" * 32, start, values[start : start + 50_000])
    sums.take_result(3 * values)
    assert struct.unpack("<6f", sums.norm_sums(["a" * 32])) == (
        *(count, SAMPLE_VALUES, 2 * SAMPLE_VALUES),
        *(9 * SAMPLE_VALUES, 9 * SAMPLE_VALUES, 6 * SAMPLE_VALUES),
    )
    assert sums.momentum_square == 4 * SAMPLE_VALUES


@pytest.mark.parametrize("count", [0, 1, PIECE_VALUES - 1, PIECE_VALUES, 3 * PIECE_VALUES + 5])
def test_products_of_any_length(count: int) -> None:
    assert product(np.full(count, 2, np.float32), np.full(count, 3, np.float32)) == 6.0 * count


@pytest.mark.parametrize("count", [1, PIECE_VALUES, PIECE_VALUES + 5])
@pytest.mark.parametrize("value", [3e38, -3e38, math.inf, -math.inf, math.nan])
def test_one_value_that_is_not_finite_is_found_and_no_large_one_is_taken_for_it(
    count: int, value: float
) -> None:
    for place in {0, count // 2, count - 1}:
        values = np.zeros(count, np.float32)
        values[place] = value
        with np.errstate(over="ignore", invalid="ignore"):
            assert all_finite(values) == math.isfinite(value)


def test_what_is_too_large_to_square_can_still_be_told() -> None:
    sums = NormSums(np.full(3, -1e30, np.float32))
    with np.errstate(over="ignore", invalid="ignore"):
        sums.take("a" * 32, 0, np.full(3, 1e30, np.float32))
        sums.take("b" * 32, 0, np.array([1e30, 1e30, -1e30], np.float32))
    norm_sums = sums.norm_sums(["a" * 32, "b" * 32])
    assert makes_sense(norm_sums, 2)
    assert (
        min(found.norm for found in found_in(added_up([(norm_sums, 1.0)], 2), ["a", "b"]).values())
        > 1e19
    )

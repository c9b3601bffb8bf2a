"""Norm reports: what is measured of contributions where they are added up."""

from __future__ import annotations

import math
import random
import struct

import numpy as np
import pytest

from holdfast.collectives.arithmetic import PIECE_VALUES, Values, all_finite, product
from holdfast.collectives.norm_report import SAMPLE_VALUES, NormSums
from holdfast.diloco.outer import outer_step
from holdfast.membership.master.rounds.norms import Totals, added_up, makes_sense, sketches_of
from holdfast.membership.master.rounds.outer_momentum import outer_motion
from holdfast.membership.spec.spec import DilocoTable
from holdfast.protocol.messages import Contributor, FragmentSize, Reduce
from holdfast.simulation.memory_network import MemoryWorld
from tests.background import until
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
    await until(lambda: len(reports) == len(swarm.nodes))
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
        inputs = {node.peer: node.values for node in swarm.nodes if node.values is not None}
        rows = np.array([inputs[each.peer] for each in order.contributors], np.float64)
        samples = rows[:, : SIZE.momentum_count]
        together = 0.5 * samples.sum(0)
        expected = [(rows**2).sum(1), (samples**2).sum(1), samples @ together]
        found = np.array(totals.sums).T
        assert found[:, :-1] == pytest.approx(np.array(expected), rel=rel, abs=100 * rel)
        assert found[1, -1] == pytest.approx(together @ together, rel=rel)


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
    sums = NormSums([Contributor("a" * 32, 1, 0.5)], momentum)
    for start in range(0, count, 10_000):
        sums.take("a" * 32, start, values[start : start + 10_000])
    sums.take_result(3 * values)
    assert struct.unpack_from("<6f", sums.norm_sums()) == (
        *(count, SAMPLE_VALUES, SAMPLE_VALUES / 2),
        *(9 * SAMPLE_VALUES, SAMPLE_VALUES / 4, 6 * SAMPLE_VALUES),
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
    sums = NormSums(order_of("ab"), np.full(3, -1e30, np.float32))
    with np.errstate(over="ignore", invalid="ignore"):
        sums.take("a" * 32, 0, np.full(3, 1e30, np.float32))
        sums.take("b" * 32, 0, np.array([1e30, 1e30, -1e30], np.float32))
    sums.take_result(np.full(3, 1e30, np.float32))
    norm_sums = sums.norm_sums()
    assert makes_sense(norm_sums, 2)
    totals = added_up([(norm_sums, 1.0)], 2)
    assert min(square for square, _, _ in totals.sums[:-1]) > 1e38


# ---------------------------------------------------------------- sketches


def order_of(names: str) -> list[Contributor]:
    return [Contributor(name * 32, 1, 1.0) for name in names]


def sketches(rows: dict[str, Values]) -> dict[str, int]:
    """What an owner of some chunks reports."""
    whole = NormSums(order_of("".join(rows)))
    for places in np.array_split(np.arange(next(iter(rows.values())).size), 4):
        sums = NormSums(order_of("".join(rows)), np.zeros(places.size, np.float32))
        for name, values in rows.items():
            sums.take(name * 32, 0, values[places])
        sums.take_result(np.zeros(places.size, np.float32))
        whole.add(sums)
    return dict(zip(rows, sketches_of(whole.norm_sums(), len(rows)), strict=True))


@pytest.mark.parametrize("angle", [0.0, 0.1, 0.5, 1.0])
def test_as_many_signs_are_unlike_as_the_angle_is_of_half_a_turn(angle: float) -> None:
    rng, unlike = np.random.default_rng(1), []
    for _ in range(40):
        one, other = rng.standard_normal((2, 8_000)).astype(np.float32)
        turned = math.cos(math.pi * angle) * one + math.sin(math.pi * angle) * other
        found = sketches({"a": one, "b": turned.astype(np.float32)})
        unlike.append((found["a"] ^ found["b"]).bit_count() / 64)
    assert np.mean(unlike) == pytest.approx(angle, abs=0.02)


def test_nobody_knows_the_signs_that_does_not_know_all_contributions() -> None:
    """A sketch depends on all others: so nobody can send what looks unlike to it alone."""
    rng = np.random.default_rng(1)
    one, two, three = rng.standard_normal((3, 8_000)).astype(np.float32)
    first, again = (sketches({"a": one, "b": each})["a"] for each in (two, three))
    assert 16 < (first ^ again).bit_count() < 48

"""Combining rules: equal to the formula to the bit, and bounded by the honest values."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast.collectives.arithmetic import ChunkLayout
from holdfast.collectives.combine import combine_chunk, combined, radius_of
from holdfast.collectives.robust_rules import CLIP_STEPS, exchanges, middle_places, sum_of_squares
from holdfast.protocol.errors import BadContributionError, RemoteProtocolError
from holdfast.protocol.messages import Contributor, FragmentSize, OwnerRun, Plan
from holdfast.simulation.memory_network import MemoryWorld
from holdfast.simulation.virtual_time import run_virtually
from tests.collectives.net import peer_id
from tests.collectives.swarm import a_swarm, encode_all, give_input

Values = NDArray[np.float32]
HONEST = 6  # of eight


def combine(
    rows: list[Values],
    combine: str,
    weights: list[int] | None = None,
) -> Values:
    """The result of one chunk, as its owner has it."""
    count = rows[0].size
    plan = Plan(max(1, count), (OwnerRun(peer_id(0), 1),), "fp32", "fp32", combine=combine)
    layout = ChunkLayout.of(plan, FragmentSize(count, 0, 0))
    contributors = [
        Contributor(peer_id(at), 64 if weights is None else weights[at], 1.0)
        for at in range(len(rows))
    ]
    encoded = {peer_id(at): memoryview(row.tobytes()) for at, row in enumerate(rows)}
    out = np.empty(count, np.float32)
    room = memoryview(bytearray(layout.cuts[0].down_bytes))
    length = combine_chunk(contributors, encoded, layout, radius_of(plan), out, room)
    shuffled = dict(random.Random(count).sample(list(encoded.items()), len(encoded)))
    again = combined(contributors, shuffled, layout, 0, radius_of(plan))
    assert again == bytes(room[:length])
    layout.codec_down.decode(again, out)
    return out


# ---------------------------------------------------------------- the formulas

finite = st.floats(-1e6, 1e6, width=32)
tables = st.integers(1, 9).flatmap(
    lambda n: st.integers(1, 12).flatmap(
        lambda count: st.lists(
            st.lists(finite, min_size=count, max_size=count), min_size=n, max_size=n
        )
    )
)


@settings(max_examples=100)
@given(tables, st.sampled_from([0.5, 1.0, 2.0]))
def test_clipped_is_the_formula(table: list[list[float]], radius: float) -> None:
    rows = [np.array(row, np.float32) for row in table]
    found = combine(rows, f"clipped:{radius}")
    wide = np.array(table, np.float64)
    centre = np.median(wide, axis=0)
    for _ in range(CLIP_STEPS):
        distances = np.linalg.norm(wide - centre, axis=1)
        bound = radius * statistics.median(distances)
        shares = [1.0 if d <= bound else (bound / d) ** 2 for d in distances]
        centre = centre + np.mean(np.array(shares)[:, np.newaxis] * (wide - centre), axis=0)
    largest = float(np.abs(wide).max())
    np.testing.assert_allclose(found, centre, rtol=1e-4, atol=1e-4 * largest + 1e-30)


@pytest.mark.parametrize("count", range(1, 11))
def test_the_network_finds_the_middle_of_everything(count: int) -> None:
    """A network that sorts all zeros and ones sorts anything."""
    low, high = middle_places(count)
    for bits in itertools.product((0, 1), repeat=count):
        values = list(bits)
        for i, j in exchanges(count):
            values[i], values[j] = sorted((values[i], values[j]))
        assert (values[low], values[high]) == (sorted(bits)[low], sorted(bits)[high])


def test_squares_are_added_exactly_where_that_is_possible() -> None:
    for count in (0, 1, 2, 3, 65_535, 65_536, 65_537, 200_003):
        assert sum_of_squares(np.full(count, 3, np.float32)) == 9.0 * count


def test_a_claimed_weight_counts_up_to_the_median() -> None:
    rows = [np.full(3, value, np.float32) for value in (1, 2, 4, 8)]
    modest = combine(rows, "clipped", [64, 64, 64, 64])
    assert combine(rows, "clipped", [64, 64, 10**15, 64]).tobytes() == modest.tobytes()
    assert combine(rows, "mean", [64, 64, 10**15, 64])[0] > 3.9
    assert combine(rows, "clipped", [64, 64, 32, 64])[0] < modest[0], "less counts less"


# ---------------------------------------------------------------- lies


@pytest.mark.fault(
    "some contributors post lies of a usual length",
    'none, under `combine = "mean"`; `clipped` bounds them',
    "what the others say decides",
)
def test_the_farther_two_of_eight_go_the_less_they_move_a_clipped_mean() -> None:
    rng = np.random.default_rng(0)
    honest = [rng.standard_normal(1_000).astype(np.float32) for _ in range(HONEST)]
    spread = math.sqrt(1_000)  # of each from their middle
    moved = []
    for lie in (1.0, 3.0, 10.0, 1e30):
        rows = [*honest, np.full(1_000, lie, np.float32), np.full(1_000, lie, np.float32)]
        moved.append(float(np.linalg.norm(combine(rows, "clipped") - np.mean(honest, axis=0))))
    assert max(moved) < 0.4 * spread
    assert moved[1] > moved[2] > moved[3]
    assert moved[3] < 0.03 * spread
    plain = combine(rows, "mean")
    assert float(plain.max()) > 1e29


@pytest.mark.parametrize("rule", ["mean", "clipped"])
def test_what_is_not_finite_is_refused_and_named(rule: str) -> None:
    rows = [np.ones(5, np.float32) for _ in range(4)]
    rows[2][3] = np.nan
    with pytest.raises(BadContributionError) as raised:
        combine(rows, rule)
    assert raised.value.peer == peer_id(2)


@pytest.mark.parametrize("rule", ["mean", "clipped"])
def test_a_contributor_without_weight_changes_nothing(rule: str) -> None:
    rng = np.random.default_rng(5)
    rows = list(rng.standard_normal((4, 1_000)).astype(np.float32))
    with_it = combine([*rows[:2], 1e3 * rows[0], *rows[2:]], rule, [64, 32, 0, 64, 50])
    assert with_it.tobytes() == combine(rows, rule, [64, 32, 64, 50]).tobytes()
    with pytest.raises(RemoteProtocolError, match="without any weight"):
        combine(rows, rule, [0] * 4)


# ---------------------------------------------------------------- rules


def test_a_rule_has_a_radius() -> None:
    def rule(text: str) -> float:
        return radius_of(Plan(1, (), "fp32", "fp32", combine=text))

    assert rule("mean") == 0.0
    assert rule("clipped") == rule("clipped:1") == 1.0
    for text in ("", "median", "mean:1", "clipped:x", "clipped:0", "clipped:nan", "clipped:inf"):
        with pytest.raises(RemoteProtocolError, match="combines by"):
            rule(text)


# ---------------------------------------------------------------- the same bits everywhere


@pytest.mark.parametrize("codecs", [("fp32", "fp32"), ("int8+zstd", "nf4"), ("topk4", "bf16")])
def test_the_order_of_arrival_does_not_change_the_owners_bytes(codecs: tuple[str, str]) -> None:
    size = FragmentSize(1_500, 0, 2)

    async def main(seed: int) -> str:
        async with a_swarm(5, MemoryWorld(random.Random(seed), jitter_s=0.05)) as swarm:
            give_input(swarm.nodes, size, 1)
            everyone = [(node, 64 + node.number, 1.0) for node in swarm.nodes]
            order = swarm.order(
                size, everyone, chunk_elements=300, codecs=codecs, combine="clipped"
            )
            await swarm.reduce(order, size, swarm.nodes)
            layout, inputs = ChunkLayout.of(order.plan, size), {}
            for node in swarm.nodes:
                assert node.encoded_input is not None
                encode_all(node.encoded_input)
                inputs[node.peer] = node.encoded_input
            values = np.empty(size.value_count, np.float32)
            for index, cut in enumerate(layout.cuts[:-1]):
                encoded = {peer: given.encode(index) for peer, given in inputs.items()}
                made = combined(order.contributors, encoded, layout, index, radius_of(order.plan))
                layout.codec_down.decode(made, values[cut.values])
            for node in swarm.nodes:
                assert node.result is not None
                assert node.result.values.tobytes() == values.tobytes()
            return hashlib.sha256(values.tobytes()).hexdigest()

    found = {run_virtually(partial(main, seed), seed=seed) for seed in range(4)}
    assert len(found) == 1


HASHES = """
import hashlib, json, sys
import numpy as np
from tests.collectives.test_combine import combine
rng = np.random.default_rng(0)
rows = [(rng.standard_normal(70_001) * 1e-3).astype(np.float32) for _ in range(7)]
for row in rows:
    row[rng.integers(70_001, size=20_000)] = rng.choice([0.0, -0.0])
found = [combine(rows, rule, [5, 9, 64, 7, 7, 8, 3]) for rule in ("mean", "clipped")]
print(json.dumps([hashlib.sha256(each.tobytes()).hexdigest() for each in found]))
"""


def test_an_old_processor_makes_the_same_bits() -> None:
    config = np.show_config(mode="dicts")
    assert isinstance(config, dict)
    features = " ".join(config["SIMD Extensions"].get("found", []))
    found = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", HASHES],
                env={**os.environ, "NPY_DISABLE_CPU_FEATURES": each},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for each in ("", features)
    ]
    assert found[0] == found[1]

"""Error feedback: what was sent and what is left add up to what was trained."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.collectives.codecs.codecs import CODECS
from holdfast.collectives.codecs.error_feedback import Residual
from holdfast.collectives.encoded_input import EncodedInput
from holdfast.collectives.links.buffer_pool import BufferPool
from holdfast.protocol.errors import LocalProtocolError
from holdfast.protocol.messages import FragmentSize, OwnerRun, Plan
from tests.collectives.swarm import encode_all

Values = NDArray[np.float32]

COUNT = 700
CHUNK = 256
OWNER = f"{1:032x}"
NO_COUNTERS = np.empty(0, np.int64)

every_lossy = pytest.mark.parametrize("name", sorted(set(CODECS) - {"fp32"}))


def make_input(name: str, delta: Values, residual: Residual) -> EncodedInput:
    plan = Plan(CHUNK, (OwnerRun(OWNER, -(-delta.size // CHUNK)),), name, "fp32")
    size = FragmentSize(delta.size, 0, 0)
    return EncodedInput(plan, size, delta, NO_COUNTERS, BufferPool(), residual)


def sent(name: str, encoded: EncodedInput, count: int) -> Values:
    values = np.empty(count, np.float32)
    for index in range(-(-count // CHUNK)):
        part = values[index * CHUNK : (index + 1) * CHUNK]
        CODECS[name].decode(encoded.encode(index), part)
    return values


def drawn(seed: int, round_: int) -> Values:
    rng = np.random.default_rng((seed, round_))
    return (rng.standard_normal(COUNT) * 10.0 ** rng.integers(-4, 1)).astype(np.float32)


@every_lossy
def test_over_many_rounds_only_roundings_are_lost(name: str) -> None:
    residual = Residual(COUNT)
    all_sent, all_deltas = np.zeros(COUNT), np.zeros(COUNT)
    largest = 0.0
    rounds = 200
    for round_ in range(rounds):
        delta = drawn(1, round_)
        encoded = make_input(name, delta, residual)
        encode_all(encoded)
        encoded.settle()
        all_sent += sent(name, encoded, COUNT)
        all_deltas += delta
        largest = max(largest, float(np.abs(residual.values).max() + np.abs(delta).max()))
    lost = np.abs(all_sent + residual.values - all_deltas).max()
    assert lost <= 2 * rounds * 2.0**-24 * largest
    without = np.zeros(COUNT)
    for round_ in range(rounds):
        encoded = make_input(name, drawn(1, round_), Residual(COUNT))
        encode_all(encoded)
        without += sent(name, encoded, COUNT)
    with_feedback = np.linalg.norm(all_sent - all_deltas)
    assert with_feedback < 0.7 * np.linalg.norm(without - all_deltas)


@every_lossy
@pytest.mark.parametrize("decay", [1.0, 0.95, 0.0])
def test_the_formula_bit_for_bit(name: str, decay: float) -> None:
    residual = Residual(COUNT, decay)
    left = np.zeros(COUNT, np.float32)
    for round_ in range(3):
        delta = drawn(2, round_)
        encoded = make_input(name, delta, residual)
        for index in random.Random(round_).sample(range(3), 3):  # in whatever order
            encoded.encode(index)
        corrected = np.float32(decay) * left + delta
        plain = make_input(name, corrected, Residual(COUNT))
        encode_all(plain)
        for index in range(3):
            assert bytes(encoded.encode(index)) == bytes(plain.encode(index))
        encoded.settle()
        left = corrected - sent(name, plain, COUNT)
        assert residual.values.tobytes() == left.tobytes()


@every_lossy
def test_a_round_that_does_not_count_changes_nothing(name: str) -> None:
    residual = Residual(COUNT)
    first = make_input(name, drawn(3, 0), residual)
    encode_all(first)
    first.settle()
    before = residual.values.copy()
    aborted = make_input(name, drawn(3, 1), residual)
    encode_all(aborted)
    assert residual.values.tobytes() == before.tobytes()
    again = make_input(name, drawn(3, 1), residual)
    encode_all(again)
    assert [bytes(again.encode(i)) for i in range(3)] == [
        bytes(aborted.encode(i)) for i in range(3)
    ]
    aborted.settle()  # a later round of the fragment began: too late
    assert residual.values.tobytes() == before.tobytes()
    again.settle()
    after = residual.values.copy()
    assert after.tobytes() != before.tobytes()
    again.settle()
    first.settle()
    assert residual.values.tobytes() == after.tobytes()


def test_an_input_that_was_never_whole_does_not_count() -> None:
    residual = Residual(COUNT)
    encoded = make_input("nf4", drawn(4, 0), residual)
    encoded.encode(0)
    encoded.settle()
    assert not residual.values.any()


@every_lossy
def test_a_chunk_that_is_sent_again_is_encoded_to_the_same_bytes(name: str) -> None:
    residual = Residual(COUNT, 0.95)
    residual.values[:] = drawn(6, 0)
    encoded = make_input(name, drawn(6, 1), residual)
    first = [bytes(encoded.encode(index)) for index in range(3)]
    assert [bytes(encoded.encode(index)) for index in range(3)] == first
    encoded.settle()
    left = residual.values.copy()
    # A lane broke while the next round of the fragment reads what this one left.
    assert [bytes(encoded.encode(index)) for index in range(3)] == first
    assert residual.values.tobytes() == left.tobytes()


@pytest.mark.parametrize("name", ["bf16", "topk"])
def test_a_sum_beyond_float32_is_refused(name: str) -> None:
    residual = Residual(COUNT)
    residual.values[300] = 3e38
    delta = np.full(COUNT, 3e38, np.float32)
    encoded = make_input(name, delta, residual)
    encoded.encode(0)
    with pytest.raises(ValueError, match="not finite"):
        encoded.encode(1)


def test_a_residual_of_another_fragment_is_our_own_fault() -> None:
    with pytest.raises(LocalProtocolError, match=r"residual: .* wanted"):
        make_input("nf4", drawn(8, 0), Residual(5))

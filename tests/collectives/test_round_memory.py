"""A reduction holds one encoded result; what is encoded, sent, summed or read by chunk is never whole."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio
from attrs import evolve

from holdfast.collectives import chunk_sender
from holdfast.collectives.arithmetic import ChunkLayout
from holdfast.collectives.codecs.error_feedback import Residual
from holdfast.collectives.encoded_input import EncodedInput
from holdfast.collectives.links.send_queue import Load
from holdfast.collectives.reduction import ReduceResult, Reduction
from holdfast.protocol.messages import FragmentSize
from tests.collectives.swarm import Node, Swarm, a_swarm, give_input, make_order

SIZE = FragmentSize(40_000, 0, 1)
CHUNK = 1_000


@contextmanager
def no_collection() -> Iterator[None]:
    """Memory must not wait until a cycle is found."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Rounds:
    """Rounds of all nodes of a swarm, one after the other."""

    def __init__(self, swarm: Swarm, codecs: tuple[str, str]) -> None:
        self.swarm = swarm
        self.results: dict[str, ReduceResult] = {}
        self.inputs: dict[str, EncodedInput | None] = {}
        self.loads: dict[str, list[Load]] = {}
        contributors = [(node, 1, 1.0) for node in swarm.nodes]
        self.order = make_order(
            SIZE, contributors, swarm.nodes, chunk_elements=CHUNK, codecs=codecs
        )
        self.layout = ChunkLayout.of(self.order.plan, SIZE)
        # An idle lane that is no socket may refer to what it received last.
        self.idle_bytes = (len(swarm.nodes) - 1) * self.layout.cuts[0].down_bytes

    async def run(self) -> None:
        self.order = evolve(self.order, round=self.order.round + 1)
        async with trio.open_nursery() as nursery:
            for node in self.swarm.nodes:
                nursery.start_soon(self._reduce, node)

    async def _reduce(self, node: Node) -> None:
        given = (node.values, node.counters)
        reduction = Reduction(
            self.order, node.peer, SIZE, node.hub, node.network, *given, residual=node.residual
        )
        self.inputs[node.peer] = reduction.encoded_input
        self.results[node.peer] = await reduction.run()
        sender, own = reduction._sender, [cut.owner == node.peer for cut in self.layout.cuts]
        self.loads[node.peer] = [
            sender.result_load(own.index(True), 1),
            sender.contribution_load(own.index(False), 1),
        ]

    def lent(self) -> list[int]:
        return [node.hub.buffers.lent_bytes for node in self.swarm.nodes]


@pytest.mark.parametrize("codec", ["fp32", "int8", "topk"])
async def test_a_whole_result_takes_the_memory_of_its_encoding(codec: str) -> None:
    async with a_swarm(3) as swarm:
        give_input(swarm.nodes, SIZE, 5)
        rounds = Rounds(swarm, (codec, codec))
        with no_collection():
            await rounds.run()
            rounds.loads.clear()
            await trio.sleep(1)  # until all is acknowledged
            assert max(rounds.lent()) <= rounds.layout.down_bytes + rounds.idle_bytes
            for result in rounds.results.values():
                for where, values in result.pieces():
                    assert values.shape == (where.stop - where.start,)
                    assert not values.flags.writeable
                    assert (
                        max(rounds.lent())
                        <= rounds.layout.down_bytes + rounds.idle_bytes + 4 * CHUNK
                    )
                del values
            assert min(rounds.lent()) >= rounds.layout.down_bytes
            del result
            rounds.results.clear()
            assert max(rounds.lent()) <= rounds.idle_bytes


@pytest.mark.parametrize("codec", ["fp32", "int8"])
async def test_a_frame_that_may_be_sent_again_keeps_its_chunk_and_no_more(codec: str) -> None:
    async with a_swarm(3) as swarm:
        give_input(swarm.nodes, SIZE, 5)
        rounds = Rounds(swarm, (codec, codec))
        with no_collection():
            await rounds.run()
            await trio.sleep(1)
            rounds.results.clear()
            chunk_bytes = rounds.layout.cuts[0].down_bytes
            assert min(rounds.lent()) >= chunk_bytes
            assert max(rounds.lent()) <= chunk_bytes + rounds.idle_bytes
            for node in swarm.nodes:
                for load in rounds.loads[node.peer]:
                    frame = load()
                    assert frame is not None
                    assert len(frame[1]) == frame[0].payload_bytes
            del frame, load
            rounds.loads.clear()
            assert max(rounds.lent()) <= rounds.idle_bytes


async def test_error_feedback_keeps_what_was_sent_until_the_round_is_over() -> None:
    async with a_swarm(3) as swarm:
        give_input(swarm.nodes, SIZE, 5)
        for node in swarm.nodes:
            node.residual = Residual(SIZE.value_count)
        rounds = Rounds(swarm, ("int8", "int8"))
        with no_collection():
            await rounds.run()
            rounds.loads.clear()
            await trio.sleep(1)
            rounds.results.clear()
            sent_bytes = sum(cut.up_bytes for cut in rounds.layout.cuts if not cut.is_counters)
            assert min(rounds.lent()) >= sent_bytes
            assert max(rounds.lent()) <= sent_bytes + rounds.idle_bytes
            for encoded in rounds.inputs.values():
                assert encoded is not None
                encoded.settle()
            for node in swarm.nodes:
                assert node.residual is not None
                assert node.residual.values.any()
            del encoded
            rounds.inputs.clear()
            assert max(rounds.lent()) <= rounds.idle_bytes


async def test_the_peak_is_one_result_and_the_chunks_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_sender, "CONTRIBUTIONS_BYTES_MAX", 0)  # AHEAD_MIN chunks of each
    async with a_swarm(4) as swarm:
        give_input(swarm.nodes, SIZE, 5)
        for node in swarm.nodes[1:]:  # all chunks of the others wait for the first one
            swarm.world.link("n0", f"n{node.number}", bytes_per_s=20_000.0)
        rounds = Rounds(swarm, ("int8", "int8"))
        for _round in range(2):
            await rounds.run()
            rounds.results.clear()
            rounds.loads.clear()
            await trio.sleep(1)
            gc.collect()
        result_bytes, chunk_bytes = rounds.layout.down_bytes, rounds.layout.cuts[0].up_bytes
        waiting_bytes = 3 * chunk_sender.AHEAD_MIN * chunk_bytes
        for node in swarm.nodes:
            pool = node.hub.buffers
            held_bytes = pool.lent_bytes + pool._spare_bytes  # as much as was lent at one time
            # And two chunks of values, for one is added up while another is checked.
            most_bytes = result_bytes + waiting_bytes + rounds.idle_bytes + 8 * CHUNK
            assert result_bytes <= held_bytes <= most_bytes

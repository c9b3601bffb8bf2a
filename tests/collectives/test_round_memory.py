"""A reduction holds one encoded result; what is encoded, sent, summed or read by chunk is never
whole.
"""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio
from attrs import evolve

from holdfast.collectives import chunk_sender, reduction
from holdfast.collectives.arithmetic import ChunkLayout
from holdfast.collectives.codecs.error_feedback import Residual
from holdfast.collectives.encoded_input import EncodedInput
from holdfast.collectives.links.send_queue import Load
from holdfast.collectives.reduction import ReduceResult, Reduction
from holdfast.protocol.messages import FragmentSize
from tests.collectives.swarm import Node, Swarm, a_swarm, give_input, reduction_at, run

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

    def __init__(self, swarm: Swarm, codecs: tuple[str, str], *, keeps: bool = False) -> None:
        self.swarm = swarm
        self.keeps = keeps
        self.results: dict[str, ReduceResult] = {}
        self.reductions: dict[str, Reduction] = {}
        self.inputs: dict[str, EncodedInput | None] = {}
        self.loads: dict[str, list[Load]] = {}
        contributors = [(node, 1, 1.0) for node in swarm.nodes]
        self.order = swarm.order(SIZE, contributors, chunk_elements=CHUNK, codecs=codecs)
        self.layout = ChunkLayout.of(self.order.plan, SIZE)
        # An idle lane that is no socket may refer to what it received last.
        self.idle_bytes = (len(swarm.nodes) - 1) * self.layout.cuts[0].down_bytes

    async def run(self) -> None:
        self.order = evolve(self.order, round=self.order.round + 1)
        async with trio.open_nursery() as nursery:
            for node in self.swarm.nodes:
                nursery.start_soon(self._reduce, node)

    async def _reduce(self, node: Node) -> None:
        mine = reduction_at(node, self.order, SIZE, residual=node.residual)
        self.inputs[node.peer] = mine.encoded_input
        if self.keeps:
            self.reductions[node.peer] = mine
        self.results[node.peer] = await run(mine)
        sender, own = mine._sender, [cut.owner == node.peer for cut in self.layout.cuts]
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


@pytest.mark.parametrize("codecs", [("fp32", "fp32"), ("int8", "int8"), ("topk", "fp32+zstd")])
@pytest.mark.parametrize("to_send", [False, True])
async def test_a_result_that_waits_is_read_from_a_file_and_takes_no_memory(
    codecs: tuple[str, str], to_send: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "IN_MEMORY_BYTES_MAX", 0)
    async with a_swarm(3) as swarm:
        give_input(swarm.nodes, SIZE, 5)
        rounds = Rounds(swarm, codecs, keeps=True)
        await rounds.run()
        rounds.loads.clear()
        await trio.sleep(1)
        before = {
            peer: [values.tobytes() for _where, values in result.pieces()]
            for peer, result in rounds.results.items()
        }
        for node in swarm.nodes:
            mine = rounds.reductions[node.peer]
            own = [i for i, cut in enumerate(rounds.layout.cuts) if cut.owner == node.peer]
            chunks = {i: bytes(mine._context.result.chunk(i)) for i in own}
            mine.move_result(tmp_path, to_send=to_send)
            mine.move_result(tmp_path, to_send=to_send)  # harmless
            for index, chunk in chunks.items():
                _kind, payload = mine._context.result.payload(index)
                assert b"".join(map(bytes, payload)) == chunk
        gc.collect()
        assert max(rounds.lent()) <= rounds.idle_bytes
        assert not list(tmp_path.iterdir())
        if not to_send:
            for peer, result in rounds.results.items():
                assert [values.tobytes() for _where, values in result.pieces()] == before[peer]


@asynccontextmanager
async def a_finished_round() -> AsyncIterator[tuple[Swarm, Rounds]]:
    """Run a round of three nodes in float32, and keep its reductions."""
    async with a_swarm(3) as swarm:
        give_input(swarm.nodes, SIZE, 5)
        rounds = Rounds(swarm, ("fp32", "fp32"), keeps=True)
        await rounds.run()
        yield swarm, rounds


async def test_a_result_stays_in_memory_if_the_disk_does_not_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "IN_MEMORY_BYTES_MAX", 0)
    async with a_finished_round() as (swarm, rounds):
        for node in swarm.nodes:
            before = rounds.results[node.peer].values.tobytes()
            rounds.reductions[node.peer].move_result(tmp_path / "no folder", to_send=False)
            assert rounds.results[node.peer].values.tobytes() == before


async def test_a_chunk_whose_file_cannot_be_read_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduction, "IN_MEMORY_BYTES_MAX", 0)
    async with a_finished_round() as (swarm, rounds):
        mine = rounds.reductions[swarm.nodes[0].peer]
        mine.move_result(tmp_path, to_send=True)
        monkeypatch.setattr(os, "pread", lambda *_: b"short")
        assert mine._sender.result_load(0, 1)() is None


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

"""A spot check: what a checker gets, what it compares, and what it says of what does not fit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from holdfast.collectives.reduction import Reduction
from holdfast.collectives.spot_check import DIGEST_BYTES, SpotCheck
from holdfast.protocol.messages import Audited, AuditOrder, CheckerChunks, ChunkFinding
from holdfast.protocol.network.lane import Buffer, FrameHeader, FrameKind
from tests.background import until
from tests.collectives.swarm import Swarm, a_real_swarm, a_swarm
from tests.collectives.test_repair import CHUNK, SIZE, WEIGHTS, Round

CHUNKS = tuple(range(-(-SIZE.value_count // CHUNK) + 1))  # with that of the counters
TRANSFER = 7


def a_round(
    swarm: Swarm, codecs: tuple[str, str] = ("fp32", "fp32"), combine: str = "mean"
) -> Round:
    contributors = [(node, weight, 1.0) for node, weight in zip(swarm.nodes, WEIGHTS, strict=False)]
    order = swarm.order(SIZE, contributors, chunk_elements=CHUNK, codecs=codecs, combine=combine)
    round_ = Round(swarm, order)
    round_.check = lambda result: None  # type: ignore[method-assign]
    return round_


@asynccontextmanager
async def finished(count: int = 4, *options: Any) -> AsyncIterator[Round]:
    """A round whose results are whole at all nodes."""
    async with a_swarm(count) as swarm:
        round_ = a_round(swarm, *options)
        await round_.finish()
        yield round_


async def check(
    round_: Round, checker: int = 0, chunks: tuple[int, ...] = CHUNKS
) -> tuple[ChunkFinding, ...]:
    """Have a node check chunks of others once all results are whole; return its findings."""
    me = round_.swarm.nodes[checker].peer
    chunks = tuple(chunk for chunk in chunks if round_.owners[chunk] != me)
    order = AuditOrder(1, round_.attempt, TRANSFER, (CheckerChunks(me, chunks),))
    told: list[Audited] = []
    for serving in round_.left():
        serving.reduction.audit(order, told.append)
    await until(lambda: told)
    (audited,) = told
    assert (audited.round, audited.attempt, audited.transfer) == (1, round_.attempt, TRANSFER)
    return audited.findings


def lie(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    who: Callable[[], str],
    instead: Callable[[Buffer], Buffer | None],
) -> None:
    """Have one node send checkers something else."""
    honest = getattr(SpotCheck, method)

    def lying(self: SpotCheck, chunk: int) -> Buffer | None:
        payload = honest(self, chunk)
        return instead(payload) if self._context.me == who() else payload

    monkeypatch.setattr(SpotCheck, method, lying)


def falsify(reduction: Reduction) -> None:
    """Have an owner use one contribution in place of all others."""
    honest = reduction._adder.make_result

    def wrong(index: int, arrived: dict[str, memoryview]) -> None:
        one = next(iter(arrived.values()))
        honest(index, dict.fromkeys(arrived, one))

    reduction._adder.make_result = wrong  # type: ignore[method-assign,assignment]


def other_bytes(payload: Buffer) -> Buffer:
    changed = bytearray(payload)
    changed[2] ^= 0x20
    return changed


@pytest.mark.parametrize("combine", ["mean", "clipped"])
@pytest.mark.parametrize(
    "codecs", [("fp32", "fp32"), ("int8", "int8"), ("int8+zstd", "int8+zstd"), ("nf4", "bf16")]
)
async def test_a_checker_gets_the_owners_bytes(codecs: tuple[str, str], combine: str) -> None:
    async with finished(4, codecs, combine) as round_:
        for checker in range(4):
            assert await check(round_, checker) == ()


@pytest.mark.real_time
def test_over_sockets_and_threads(tmp_path: Path) -> None:
    async def main() -> None:
        async with a_real_swarm(3, tmp_path) as swarm:
            round_ = a_round(swarm)
            await round_.finish()
            assert await check(round_) == ()

    trio.run(main)


async def test_a_false_sum_differs() -> None:
    async with a_swarm(4) as swarm:
        round_ = a_round(swarm)
        owner = swarm.nodes[1].peer
        falsify(round_.serving[owner].reduction)
        await round_.finish()
        findings = await check(round_)
        assert {f.chunk for f in findings} == {c for c in CHUNKS[:-1] if round_.owners[c] == owner}
        assert all(f.differs and not f.peer for f in findings)


async def test_a_contributor_that_sends_unlike_bytes_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with finished() as round_:
        liar = round_.swarm.nodes[3].peer
        lie(monkeypatch, "contribution", lambda: liar, other_bytes)
        findings = await check(round_, chunks=CHUNKS[:-1])
        assert findings
        assert all(f == ChunkFinding(f.chunk, True, liar) for f in findings)


@pytest.mark.parametrize("junk", [b"", b"\xff" * 4, b"\xff" * 4 * CHUNK])
@pytest.mark.parametrize("codec", ["fp32", "int8+zstd", "topk"])
async def test_junk_is_named(monkeypatch: pytest.MonkeyPatch, junk: bytes, codec: str) -> None:
    async with finished(4, (codec, "fp32")) as round_:
        liar = round_.swarm.nodes[3].peer
        longest = round_.serving[liar].reduction._context.layout.cuts[0].up_bytes
        lie(monkeypatch, "contribution", lambda: liar, lambda _payload: junk[:longest])
        (finding,) = await check(round_, chunks=(1,))
        assert finding == ChunkFinding(1, True, liar)


async def test_an_owner_that_blames_several_contributors_is_alone_with_its_checker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One liar cannot have sent the unlike bytes of two."""
    async with a_swarm(4) as swarm:
        round_ = a_round(swarm)
        owner = swarm.nodes[1].peer
        falsify(round_.serving[owner].reduction)
        await round_.finish()
        lie(monkeypatch, "digests", lambda: owner, lambda digests: bytes(len(digests)))
        findings = await check(round_)
        assert findings
        assert all(f == ChunkFinding(f.chunk, True, "") for f in findings)


@pytest.mark.parametrize("method", ["contribution", "digests"])
async def test_what_does_not_come_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with finished() as round_:
        silent = round_.swarm.nodes[1].peer
        lie(monkeypatch, method, lambda: silent, lambda _payload: None)
        findings = await check(round_)
        assert findings
        assert all(f == ChunkFinding(f.chunk, False, silent) for f in findings)


async def test_after_a_repair_a_successors_chunks_can_be_checked() -> None:
    async with a_swarm(4) as swarm:
        await swarm.settle()
        round_ = a_round(swarm)
        lost = swarm.nodes[3].peer
        round_.kill(lost)
        round_.repair(lost)
        await round_.finish()
        successors = [at for run in round_.repairs[0].assignments for at in [run.first_chunk]]
        assert successors
        for checker in range(3):
            assert all(not f.differs for f in await check(round_, checker))


async def test_a_check_of_another_attempt_is_none() -> None:
    async with finished(3) as round_:
        me = round_.swarm.nodes[0].peer
        order = AuditOrder(1, round_.attempt + 1, TRANSFER, (CheckerChunks(me, (1,)),))
        told: list[Audited] = []
        for serving in round_.left():
            serving.reduction.audit(order, told.append)
        await trio.sleep(60)
        assert told == []


async def test_frames_that_nobody_needs_get_no_memory() -> None:
    async with a_swarm(3) as swarm:
        round_ = a_round(swarm)
        await round_.finish()
        node, owner = swarm.nodes[0], swarm.nodes[1].peer
        (chunk, *_rest) = [c for c in CHUNKS if round_.owners[c] == owner]
        order = AuditOrder(1, 1, TRANSFER, (CheckerChunks(node.peer, (chunk,)),))
        told: list[Audited] = []
        round_.serving[node.peer].reduction.audit(order, told.append)  # the others do not know it
        await trio.sleep(0.01)
        (sink,) = [s for key, s in node.hub.router._sinks.items() if key[1] == TRANSFER]

        def place(peer: str, index: int, length: int) -> memoryview | None:
            return sink.place(peer, FrameHeader(FrameKind.BLOCK, 0, 0, index, TRANSFER, length))

        digests = len(CHUNKS) + chunk
        assert place(owner, chunk, 4 * CHUNK) is not None
        assert place(owner, chunk, 4 * CHUNK + 1) is None
        assert place(owner, chunk + 1, 4) is None
        assert place("f" * 32, chunk, 4) is None
        assert place(owner, digests, 3 * DIGEST_BYTES) is not None
        assert place(owner, digests, 4 * DIGEST_BYTES) is None
        assert place(swarm.nodes[2].peer, digests, 3 * DIGEST_BYTES) is None
        assert place(owner, 2**32 - 1, 4) is None

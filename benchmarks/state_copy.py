"""One rank of ``holdfast bench transfer``: the code of a peer, without a master.

In each repetition rank 0 starts with an empty state and copies all fragments as a master would order it.
Then it copies them again, which transfers nothing and only checks its memory. Then it hashes the state,
as peers do and by single calls of BLAKE3.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import trio
from attrs import define, field, frozen
from blake3 import blake3

from ...checkpoint.blocks import digest_blocks
from ...checkpoint.donor import Donor
from ...checkpoint.joiner import Joiner
from ...checkpoint.shared_state import SharedState
from ...membership.master.sync.state_sync import FETCHES_MAX
from ...protocol.arena import arena_bytes, create_arena_file, map_arena
from ...protocol.errors import UserError
from ...protocol.messages import (
    BlocksRefused,
    BlocksRequest,
    FragmentHead,
    FragmentSize,
    Index,
    IndexRequest,
    Message,
    SyncFragment,
)
from ...protocol.network.sockets import SocketNetwork
from .allreduce_rank import PeakMemory
from .rank_links import BenchRank, joined
from .rank_processes import RankSeat, Report

VALUE_BYTES = 4


@frozen
class TransferOptions:
    """The options of the command, equal at all ranks except the seat's rank."""

    seat: RankSeat
    bytes: int
    fragments: int
    repeat: int
    warm_up: int

    @property
    def sizes(self) -> tuple[FragmentSize, ...]:
        """The fragments' sizes, with as much momentum as values, as in most runs."""
        count = max(1, self.bytes // (2 * VALUE_BYTES * self.fragments))
        return (FragmentSize(count, count, 1),) * self.fragments


def make_state(options: TransferOptions) -> SharedState:
    """Make an empty state in shared memory, as daemons share with their trainers."""
    sizes = options.sizes
    file = create_arena_file(sizes)
    try:
        return SharedState(sizes, map_arena(file, sizes), "bench")
    finally:
        os.close(file)


def fill(state: SharedState) -> None:
    """Fill a state with random values, the same at every donor."""
    rng = np.random.default_rng(0)
    for fragment, size in enumerate(state.sizes):
        values = rng.standard_normal(size.value_count, np.float32)
        state.load_initial(fragment, values, np.ones(size.counter_count, np.int64))
        mean = rng.standard_normal(size.value_count, np.float32)
        step = partial(_step, mean)
        state.apply(fragment, 1, np.ones(size.counter_count, np.int64), step)


def _step(
    mean: np.ndarray[Any, Any], values: np.ndarray[Any, Any], momentum: np.ndarray[Any, Any]
) -> None:
    momentum += mean
    values -= mean


@define
class TransferFigures:
    """The durations of each repetition, in seconds, and the copier's peak memory."""

    copy: list[float] = field(factory=list)
    copier_cpu: list[float] = field(factory=list)
    donor_cpu: list[float] = field(factory=list)  # the busiest donor's
    memory_bytes: list[int] = field(factory=list)  # the copier's, the state included
    equal: list[float] = field(factory=list)
    ours: list[float] = field(factory=list)
    one: list[float] = field(factory=list)
    all: list[float] = field(factory=list)


@define
class StateCopier:
    """Rank 0, connected to the others at the rendezvous."""

    options: TransferOptions
    node: BenchRank[SocketNetwork]
    heads: list[FragmentHead] = field(factory=list)
    joiner: Joiner | None = None

    def receive(self, peer: str, message: Message) -> None:
        assert isinstance(message, Index | BlocksRefused)
        if self.joiner is not None:
            self.joiner.receive(peer, message)

    async def turn(self, figures: TransferFigures) -> None:
        """Copy the state, copy it again while it is equal, and hash it, once each."""
        self.joiner = None  # frees the state of the last turn
        memory = PeakMemory()
        state = make_state(self.options)
        self.joiner = Joiner(state, self.node.hub, self.node.network)
        before = await self._cpu_s()
        figures.copy.append(await self._fetch_all(self.joiner))
        used = [then - was for then, was in zip(await self._cpu_s(), before, strict=True)]
        figures.copier_cpu.append(used[0])
        figures.donor_cpu.append(max(used[1:]))
        unseen_bytes = arena_bytes(state.sizes) - memory.shared_bytes()  # written but not mapped
        figures.memory_bytes.append(memory.extra_bytes() + max(0, unseen_bytes))
        if list(state.heads()) != self.heads:
            raise UserError("the copy is not what the donors have")
        figures.equal.append(await self._fetch_all(self.joiner))
        await trio.to_thread.run_sync(partial(_digest, state, figures))

    async def _cpu_s(self) -> list[float]:
        exchange = self.node.rendezvous.exchange
        await exchange({})  # so that all ranks read their clocks at the same time
        answers = await exchange({"cpu_s": time.process_time()})
        return [each["cpu_s"] for each in answers]

    async def _fetch_all(self, joiner: Joiner) -> float:
        """Fetch all fragments, ``FETCHES_MAX`` at a time; return the seconds it took."""
        donors = tuple(member.peer for member in self.node.members[1:])
        left = self.heads[::-1]

        async def fetch() -> None:
            while left:
                await joiner.fetch(SyncFragment(left.pop(), donors))

        started_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(FETCHES_MAX):
                nursery.start_soon(fetch)
        return trio.current_time() - started_s


def _digest(state: SharedState, figures: TransferFigures) -> None:
    """Time the hashing of a state: as peers do, and by BLAKE3 calls per array on one and all cores."""
    arrays = [
        array.view(np.uint8)
        for fragment in range(len(state.sizes))
        for array in (state.values(fragment), state.momentum(fragment))
    ]

    def ours() -> None:
        for fragment in range(len(state.sizes)):
            digest_blocks(state.parts(fragment), state.places(fragment))

    def theirs(threads: int) -> None:
        for array in arrays:
            blake3(array.data, max_threads=threads).digest()

    for seconds, work in (
        (figures.ours, ours),
        (figures.one, partial(theirs, 1)),
        (figures.all, partial(theirs, blake3.AUTO)),
    ):
        seconds.append(_timed(work))


def _timed(work: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


async def run_rank(options: TransferOptions) -> Report | None:
    """Run one rank and return the report, at rank 0 only."""
    async with joined(options.seat, SocketNetwork) as node:
        if options.seat.rank == 0:
            return await _copy(options, node)
        await _give(options, node)
        return None


async def _give(options: TransferOptions, node: BenchRank[SocketNetwork]) -> None:
    state = make_state(options)
    await trio.to_thread.run_sync(fill, state)
    donor = Donor(state, node.hub, node.network)

    async def hear(peer: str, message: Message) -> None:
        assert isinstance(message, IndexRequest | BlocksRequest)
        donor.receive(peer, message)

    node.hub.on_message = hear
    await node.nursery.start(donor.run)
    node.hub.set_members(node.members)
    exchange = node.rendezvous.exchange
    await exchange({"heads": [[h.fragment, h.version, h.root.hex()] for h in state.heads()]})
    for _copy_begins_or_ends in range(2 * (options.warm_up + options.repeat)):
        await exchange({})
        await exchange({"cpu_s": time.process_time()})
    await exchange({})  # keeps the donor running until all is copied


async def _copy(options: TransferOptions, node: BenchRank[SocketNetwork]) -> Report:
    copier = StateCopier(options, node)

    async def hear(peer: str, message: Message) -> None:
        copier.receive(peer, message)

    node.hub.on_message = hear
    node.hub.set_members(node.members)
    answers = await node.rendezvous.exchange({})
    copier.heads = [FragmentHead(f, v, bytes.fromhex(root)) for f, v, root in answers[1]["heads"]]
    await node.link_all()
    figures = TransferFigures()
    for _repetition in range(options.warm_up + options.repeat):
        await copier.turn(figures)
    await node.rendezvous.exchange({})
    return report_of(options, figures)


def report_of(options: TransferOptions, figures: TransferFigures) -> Report:
    """Return the results without the warm-up repetitions."""
    size_bytes = sum(
        VALUE_BYTES * (size.value_count + size.momentum_count) for size in options.sizes
    )

    def times(seconds: list[float]) -> dict[str, Any]:
        counted = seconds[options.warm_up :]
        return {"median_s": statistics.median(counted), "min_s": min(counted), "all_s": counted}

    def rate(seconds: list[float]) -> float:
        return size_bytes / statistics.median(seconds[options.warm_up :]) / 1e9

    return {
        "donors": options.seat.count - 1,
        "bytes": size_bytes,
        "fragments": options.fragments,
        "copy": times(figures.copy),
        "copier_cpu_s": statistics.median(figures.copier_cpu[options.warm_up :]),
        "donor_cpu_s": statistics.median(figures.donor_cpu[options.warm_up :]),
        "memory_bytes": max(figures.memory_bytes[options.warm_up :]),
        "equal": times(figures.equal),
        "digest": {
            "ours_gb_s": rate(figures.ours),
            "one_gb_s": rate(figures.one),
            "all_gb_s": rate(figures.all),
        },
    }

"""The duration of a copy of the shared state over real sockets, and of the check of one that is
equal.

    python -m benchmarks.transfer --donors 3 --size 1GiB

In each repetition rank 0 starts with an empty state and copies all fragments from the other ranks,
as a master would order it. Then it copies them again, which transfers nothing and only checks its
memory. See ``ranks``.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import trio
from attrs import define, field, frozen

from benchmarks.ranks import (
    BenchRank,
    RankSeat,
    Report,
    bench_main,
    joined,
    rank_parser,
    run_ranks,
    size,
)
from benchmarks.report import BenchError, Measured, Table, run_main, say
from holdfast.checkpoint.donor import Donor
from holdfast.checkpoint.joiner import Joiner
from holdfast.checkpoint.shared_state import SharedState
from holdfast.membership.planning.predict import FETCHES_MAX
from holdfast.protocol import messages as m
from holdfast.protocol.arena import create_arena_file, map_arena

VALUE_BYTES = 4
FRAGMENTS = 4  # of the state
TRANSFERS = ((1, 256), (3, 256), (1, 1_024))  # donors, MiB of state
# PCCL's shared-state synchronization of 256 MiB, as it was measured for this project: between two
# processes on one machine like this one, not encrypted.
PCCL = "PCCL moves 256 MiB in 1.28 s in the clear, and needs 0.24 s to find it equal."


@frozen
class TransferOptions:
    """The options of the command, equal at all ranks except the seat's rank."""

    seat: RankSeat
    bytes: int
    repeat: int
    warm_up: int

    @property
    def sizes(self) -> tuple[m.FragmentSize, ...]:
        """The fragments' sizes, with as much momentum as values, as in most runs."""
        count = max(1, self.bytes // (2 * VALUE_BYTES * FRAGMENTS))
        return (m.FragmentSize(count, count, 1),) * FRAGMENTS


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
    for fragment, each in enumerate(state.sizes):
        values = rng.standard_normal(each.value_count, np.float32)
        state.load_initial(fragment, values, np.ones(each.counter_count, np.int64))
        mean = rng.standard_normal(each.value_count, np.float32)
        step = partial(_step, mean)
        state.apply(fragment, 1, np.ones(each.counter_count, np.int64), step)


def _step(
    mean: np.ndarray[Any, Any], values: np.ndarray[Any, Any], momentum: np.ndarray[Any, Any]
) -> None:
    momentum += mean
    values -= mean


@define
class TransferFigures:
    """The durations of each repetition, in seconds."""

    copy: list[float] = field(factory=list)
    copier_cpu: list[float] = field(factory=list)
    donor_cpu: list[float] = field(factory=list)  # the busiest donor's
    equal: list[float] = field(factory=list)


@define
class StateCopier:
    """Rank 0, connected to the others at the rendezvous."""

    options: TransferOptions
    node: BenchRank
    heads: list[m.FragmentHead] = field(factory=list)
    joiner: Joiner | None = None

    def receive(self, peer: str, message: m.Message) -> None:
        assert isinstance(message, m.Index | m.BlocksRefused)
        if self.joiner is not None:
            self.joiner.receive(peer, message)

    async def turn(self, figures: TransferFigures) -> None:
        """Copy the state, then copy it again while it is equal."""
        self.joiner = None  # frees the state of the last turn
        state = make_state(self.options)
        self.joiner = Joiner(state, self.node.hub, self.node.network)
        before = await self._cpu_s()
        figures.copy.append(await self._fetch_all(self.joiner))
        used = [then - was for then, was in zip(await self._cpu_s(), before, strict=True)]
        figures.copier_cpu.append(used[0])
        figures.donor_cpu.append(max(used[1:]))
        if list(state.heads()) != self.heads:
            raise BenchError("the copy is not what the donors have")
        figures.equal.append(await self._fetch_all(self.joiner))

    async def _cpu_s(self) -> list[float]:
        exchange = self.node.seat.exchange
        await exchange({})  # so that all ranks read their clocks at the same time
        answers = await exchange({"cpu_s": time.process_time()})
        return [each["cpu_s"] for each in answers]

    async def _fetch_all(self, joiner: Joiner) -> float:
        """Fetch all fragments, ``FETCHES_MAX`` at a time; return the seconds it took."""
        donors = tuple(member.peer for member in self.node.members[1:])
        left = self.heads[::-1]

        async def fetch() -> None:
            while left:
                await joiner.fetch(m.SyncFragment(left.pop(), donors))

        started_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(FETCHES_MAX):
                nursery.start_soon(fetch)
        return trio.current_time() - started_s


async def run_rank(options: TransferOptions) -> Report | None:
    """Run one rank and return the report, at rank 0 only."""
    async with joined(options.seat) as node:
        if options.seat.rank == 0:
            return await _copy(options, node)
        await _give(options, node)
        return None


async def _give(options: TransferOptions, node: BenchRank) -> None:
    state = make_state(options)
    await trio.to_thread.run_sync(fill, state)
    donor = Donor(state, node.hub, node.network)

    async def hear(peer: str, message: m.Message) -> None:
        assert isinstance(message, m.IndexRequest | m.BlocksRequest)
        donor.receive(peer, message)

    node.hub.on_message = hear
    await node.nursery.start(donor.run)
    node.hub.set_members(node.members)
    exchange = node.seat.exchange
    await exchange({"heads": [[h.fragment, h.version, h.root.hex()] for h in state.heads()]})
    for _copy_begins_or_ends in range(2 * (options.warm_up + options.repeat)):
        await exchange({})
        await exchange({"cpu_s": time.process_time()})
    await exchange({})  # keeps the donor running until all is copied


async def _copy(options: TransferOptions, node: BenchRank) -> Report:
    copier = StateCopier(options, node)

    async def hear(peer: str, message: m.Message) -> None:
        copier.receive(peer, message)

    node.hub.on_message = hear
    node.hub.set_members(node.members)
    answers = await node.seat.exchange({})
    copier.heads = [m.FragmentHead(f, v, bytes.fromhex(root)) for f, v, root in answers[1]["heads"]]
    await node.link_all()
    figures = TransferFigures()
    for _repetition in range(options.warm_up + options.repeat):
        await copier.turn(figures)
    await node.seat.exchange({})
    return report_of(options, figures)


def report_of(options: TransferOptions, figures: TransferFigures) -> Report:
    """Return the results without the warm-up repetitions."""
    sizes = options.sizes

    def times(seconds: list[float]) -> dict[str, Any]:
        counted = seconds[options.warm_up :]
        return {"median_s": statistics.median(counted), "min_s": min(counted), "all_s": counted}

    return {
        "donors": options.seat.count - 1,
        "bytes": sum(VALUE_BYTES * (each.value_count + each.momentum_count) for each in sizes),
        "copy": times(figures.copy),
        "copier_cpu_s": statistics.median(figures.copier_cpu[options.warm_up :]),
        "donor_cpu_s": statistics.median(figures.donor_cpu[options.warm_up :]),
        "equal": times(figures.equal),
    }


def transfer() -> Measured:
    """The section of RESULTS.md."""
    rows, commands, raw = [], [], []
    for donors, size_mib in TRANSFERS:
        options = [f"--donors={donors}", f"--size={size_mib}MiB", "--repeat=7", "--warm-up=2"]
        say(f"{size_mib} MiB from {donors} donors, and once more when they are equal")
        figures = run_ranks("transfer", donors + 1, options)
        raw.append(figures)
        commands.append(f"python -m benchmarks.transfer {' '.join(options)}")
        copy_s, equal_s = (figures[each]["median_s"] for each in ("copy", "equal"))
        rows.append(
            [
                f"{size_mib} MiB, {donors} donor{'s' * (donors > 1)}",
                f"{copy_s:.2f}",
                f"{size_mib * 2**20 / copy_s / 1e9:.2f}",
                f"{figures['copier_cpu_s']:.2f}",
                f"{figures['donor_cpu_s']:.2f}",
                f"{equal_s:.3f}",
            ]
        )
    table = Table(
        "A copy of the state between processes on this machine: checked by BLAKE3, encrypted; "
        "median of 7, 2 discarded",
        commands,
        [
            *("state, from", "copied, s", "GB/s", "CPU of the copier, s", "of a donor"),
            "found equal, s",
        ],
        rows,
        [
            "The copier begins with fresh memory each time. Found equal: the order to copy what is "
            f"here already; all bytes are digested, none travels. {PCCL}"
        ],
    )
    return [table], raw


def main() -> int:
    parser = rank_parser("transfer", __doc__)
    parser.set_defaults(repeat=7, warm_up=2)
    parser.add_argument("--donors", type=int, default=1, help="number of ranks to copy from")
    parser.add_argument("--size", type=size, default="256MiB", help="of values and momentum")
    options = parser.parse_args()

    async def work(seat: RankSeat) -> Report | None:
        return await run_rank(TransferOptions(seat, options.size, options.repeat, options.warm_up))

    return bench_main("transfer", options, options.donors + 1, work)


if __name__ == "__main__":
    sys.exit(run_main("transfer", main))

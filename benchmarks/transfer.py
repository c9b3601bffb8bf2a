"""The duration of a copy of the shared state over real sockets, and of the check of one that is equal.

    python -m benchmarks.transfer --donors 3 --size 1GiB      all ranks on this machine's loopback
    python -m benchmarks.transfer --rank R --master ...       one rank; start one on each machine

In each repetition rank 0 starts with an empty state and copies all fragments from the other ranks, as a master
would order it. Then it copies them again, which transfers nothing and only checks its memory. See ``ranks``.
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

from benchmarks.ranks import BenchRank, Report, joined, rank_parser, run_ranks, size
from benchmarks.rendezvous import RankSeat
from benchmarks.report import BenchError, run_main
from holdfast.checkpoint.donor import Donor
from holdfast.checkpoint.joiner import Joiner
from holdfast.checkpoint.shared_state import SharedState
from holdfast.membership.master.sync.state_sync import FETCHES_MAX
from holdfast.protocol.arena import create_arena_file, map_arena
from holdfast.protocol.messages import (
    BlocksRefused,
    BlocksRequest,
    FragmentHead,
    FragmentSize,
    Index,
    IndexRequest,
    Message,
    SyncFragment,
)
from holdfast.protocol.network.sockets import SocketNetwork

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
    node: BenchRank[SocketNetwork]
    heads: list[FragmentHead] = field(factory=list)
    joiner: Joiner | None = None

    def receive(self, peer: str, message: Message) -> None:
        assert isinstance(message, Index | BlocksRefused)
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
        VALUE_BYTES * (each.value_count + each.momentum_count) for each in options.sizes
    )

    def times(seconds: list[float]) -> dict[str, Any]:
        counted = seconds[options.warm_up :]
        return {"median_s": statistics.median(counted), "min_s": min(counted), "all_s": counted}

    return {
        "donors": options.seat.count - 1,
        "bytes": size_bytes,
        "fragments": options.fragments,
        "copy": times(figures.copy),
        "copier_cpu_s": statistics.median(figures.copier_cpu[options.warm_up :]),
        "donor_cpu_s": statistics.median(figures.donor_cpu[options.warm_up :]),
        "equal": times(figures.equal),
    }


def show(report: Report) -> None:
    """Print the results."""
    megabytes = report["bytes"] / 1e6
    print(f"{megabytes:.0f} MB in {report['fragments']} fragments from {report['donors']} donors")
    for name, what in (
        ("copy", "copied, every block checked"),
        ("equal", "checked as equal, every byte hashed"),
    ):
        took = report[name]
        print(f"  {what}: {took['median_s'] * 1e3:.0f} ms (best {took['min_s'] * 1e3:.0f})")
    print(
        f"  a copy needs {report['copier_cpu_s'] * 1e3:.0f} ms of CPU time at the copier, "
        f"{report['donor_cpu_s'] * 1e3:.0f} ms at a donor"
    )


def main() -> int:
    parser = rank_parser("benchmarks.transfer", __doc__)
    parser.set_defaults(repeat=7, warm_up=2)
    parser.add_argument("--donors", type=int, default=1, help="number of ranks to copy from")
    parser.add_argument("--size", type=size, default="256MiB", help="of values and momentum")
    parser.add_argument("--fragments", type=int, default=4, help="of the state")
    options = parser.parse_args()

    async def work(seat: RankSeat) -> Report | None:
        return await run_rank(
            TransferOptions(seat, options.size, options.fragments, options.repeat, options.warm_up)
        )

    return run_ranks("benchmarks.transfer", options, options.donors + 1, work, show)


if __name__ == "__main__":
    sys.exit(run_main("transfer", main))

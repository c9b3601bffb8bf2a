"""The duration of one all-reduce over real sockets, between processes that run the code of peers.

    python -m benchmarks.allreduce --peers 4 --size 64MiB

TLS control streams, encrypted lanes, links and reduction are the production code; see ``ranks``.

With ``--vs gloo`` every rank also has a worker process with torch's gloo. The two libraries
alternate, controlled by a pipe, and never run at the same time.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

import numpy as np
import trio
from attrs import define, field, frozen

from benchmarks.gloo import GlooWorker
from benchmarks.parts import PartTimes
from benchmarks.ranks import (
    LOOPBACK,
    BenchRank,
    RankSeat,
    Report,
    bench_main,
    free_port,
    joined,
    rank_parser,
    size,
)
from benchmarks.report import BenchError, run_main
from holdfast.collectives.reduction import ReduceResult, Reduction
from holdfast.collectives.reduction_context import ReductionContext
from holdfast.membership.planning.bandwidth import Bandwidth, LineCapacities
from holdfast.membership.planning.plan import make_plan
from holdfast.membership.spec.spec import CODECS, ReduceTable, RunSpec
from holdfast.protocol.errors import PeerLostError
from holdfast.protocol.messages import Contributor, FragmentSize, Plan, Reduce

VALUE_BYTES = 4  # float32
LINE = Bandwidth(1e9, 1e9)  # of every rank, for the planner
CHECKED_VALUES = 2**16  # values of each result that are checked
# Relative errors that only a wrong sum exceeds: fp32 only rounds, topk keeps a 64th of the values
# or more, and the coarsest of the other codecs has 4 bits per value.
ERRORS_MAX = {"fp32": 1e-5, "topk": 0.99, "topk16": 0.95, "topk8": 0.9, "topk4": 0.8}
ERROR_MAX = 0.2


@frozen
class AllreduceOptions:
    """The options of the command, equal at all ranks except the seat's rank."""

    seat: RankSeat
    bytes: int
    codec: str
    repeat: int
    warm_up: int
    gloo: bool

    @property
    def size(self) -> FragmentSize:
        return FragmentSize(max(1, self.bytes // VALUE_BYTES), 0, 0)


@define
class AllreduceBench:
    """One rank with links to all others, and its measurements."""

    options: AllreduceOptions
    node: BenchRank
    values: np.ndarray[tuple[int], np.dtype[np.float32]]
    times: PartTimes
    round: int = 0
    ours_s: list[float] = field(factory=list)
    gloo_s: list[float] = field(factory=list)
    cpu_s: list[float] = field(factory=list)  # CPU time, mean over ranks
    parts_s: list[dict[str, float]] = field(factory=list)  # of it, of this rank, by part
    gloo_cpu_s: list[float] = field(factory=list)
    sent_bytes: list[list[int]] = field(factory=list)  # per repetition and rank, headers included

    @property
    def peers(self) -> list[str]:
        return [member.peer for member in self.node.members]

    def plan(self) -> Plan:
        peers = self.peers
        table = ReduceTable(codec_up=self.options.codec, codec_down=self.options.codec)
        lines = LineCapacities(dict.fromkeys(peers, LINE))
        return make_plan(self.options.size, peers, peers, lines, RunSpec(reduce=table))[0]

    def order(self) -> Reduce:
        peers = self.peers
        return Reduce(
            round=self.round,
            attempt=1,
            fragment=0,
            version=0,
            view=1,
            contributors=tuple(Contributor(peer, 1, 1.0) for peer in peers),
            receivers=tuple(peers),
            plan=self.plan(),
        )

    async def reduce(self) -> None:
        """Time one reduction that all ranks start at the same moment; the slowest rank counts."""
        self.round += 1
        order = self.order()
        hub, network, exchange = self.node.hub, self.node.network, self.node.seat.exchange
        size, before = self.options.size, hub.sent_bytes
        await exchange({})
        self.times.take(0.0)
        cpu_before_s = time.process_time()
        started_s = trio.current_time()
        context = ReductionContext(order, hub.me, size, hub, self.values, None)
        send, receive = trio.open_memory_channel[ReduceResult](1)
        reduction = Reduction(context, network, on_lost=_refuse)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reduction.serve, send.send_nowait)
            result = await receive.receive()
            took_s = trio.current_time() - started_s
            cpu_s = time.process_time() - cpu_before_s
            error = self._error(result)
            first = await exchange({"s": took_s, "digest": result.digest.hex()})
            nursery.cancel_scope.cancel()
        sent = hub.sent_bytes - before
        second = await exchange({"sent_bytes": sent, "error": error, "cpu_s": cpu_s})
        if len({each["digest"] for each in first}) != 1:
            raise BenchError("the ranks' results differ")
        error_max = ERRORS_MAX.get(self.options.codec.partition("+")[0], ERROR_MAX)
        if max(each["error"] for each in second) > error_max:
            raise BenchError("the result is not the mean")
        self.parts_s.append(self.times.take(cpu_s))
        self.ours_s.append(max(each["s"] for each in first))
        self.cpu_s.append(statistics.mean(each["cpu_s"] for each in second))
        self.sent_bytes.append([each["sent_bytes"] for each in second])

    def _error(self, result: ReduceResult) -> float:
        """Return the relative error of part of the result; the inputs are multiples of one
        another.
        """
        found = next(values for _where, values in result.pieces())[:CHECKED_VALUES]
        mine = self.values[: found.size]
        seat = self.options.seat
        mean = mine / (seat.rank + 1) * ((seat.count + 1) / 2)
        return float(np.linalg.norm(found - mean) / np.linalg.norm(mean))

    async def gloo(self, worker: GlooWorker) -> None:
        await self.node.seat.exchange({})
        answer = await trio.to_thread.run_sync(worker.turn, "reduce")
        answers = await self.node.seat.exchange(answer)
        if max(each["error"] for each in answers) > ERRORS_MAX["fp32"]:
            raise BenchError("gloo's result is not the sum")
        self.gloo_s.append(max(each["s"] for each in answers))
        self.gloo_cpu_s.append(statistics.mean(each["cpu_s"] for each in answers))

    def report(self) -> Report:
        """Return the results without the warm-up repetitions."""
        skipped = self.options.warm_up
        ours_s, gloo_s = self.ours_s[skipped:], self.gloo_s[skipped:]
        parts_s = self.parts_s[skipped:]
        median_s = statistics.median(ours_s)
        gloo_median_s = statistics.median(gloo_s) if gloo_s else None

        sent = zip(*self.sent_bytes[skipped:], strict=True)
        return {
            "peers": self.options.seat.count,
            "bytes": self.options.size.value_count * VALUE_BYTES,
            "codec": self.options.codec,
            "repeat": len(ours_s),
            "median_s": median_s,
            "min_s": min(ours_s),
            "max_s": max(ours_s),
            "all_s": ours_s,
            "gloo_median_s": gloo_median_s,
            "gloo_all_s": gloo_s,
            "ratio": gloo_median_s / median_s if gloo_median_s else None,
            "cpu_s": statistics.median(self.cpu_s[skipped:]),
            "parts_s": {
                part: statistics.median(each[part] for each in parts_s) for part in parts_s[0]
            },
            "gloo_cpu_s": statistics.median(self.gloo_cpu_s[skipped:]) if gloo_s else None,
            "sent_bytes_per_peer": [round(statistics.mean(each)) for each in sent],
        }


def _refuse(error: PeerLostError) -> None:
    raise BenchError(str(error))


async def run_rank(options: AllreduceOptions) -> Report | None:
    """Run one rank and return the report, at rank 0 only."""
    seat = options.seat
    times = PartTimes()  # before there are links
    async with joined(seat) as node:
        await node.link_all()
        values = np.random.default_rng(0).standard_normal(options.size.value_count, np.float32)
        values *= seat.rank + 1
        bench = AllreduceBench(options, node, values, times)
        port = free_port() if seat.rank == 0 else 0
        first = (await seat.exchange({"port": port}))[0]
        with ExitStack() as stack:
            worker = None
            if options.gloo:
                worker = GlooWorker(
                    subprocess.Popen,
                    rank=seat.rank,
                    peers=seat.count,
                    master=LOOPBACK,
                    port=first["port"],
                    interface="lo",
                    values=options.size.value_count,
                )
                stack.callback(worker.close)
                await trio.to_thread.run_sync(worker.turn, "begin")
            for _repetition in range(options.warm_up + options.repeat):
                await bench.reduce()
                if worker is not None:
                    await bench.gloo(worker)
        await seat.exchange({})  # so that no rank cuts links that other ranks still need
    return bench.report() if seat.rank == 0 else None


# ---------------------------------------------------------------- the command


def main() -> int:
    parser = rank_parser("allreduce", __doc__)
    parser.add_argument("--peers", type=int, default=2, help="number of ranks")
    parser.add_argument("--size", type=size, default="256MiB", help="of the float32 values")
    parser.add_argument("--codec", choices=CODECS, default="fp32", help="for both directions")
    parser.add_argument("--vs", choices=["gloo"], help="alternate with another library")
    options = parser.parse_args()

    async def work(seat: RankSeat) -> Report | None:
        return await run_rank(
            AllreduceOptions(
                seat=seat,
                bytes=options.size,
                codec=options.codec,
                repeat=options.repeat,
                warm_up=options.warm_up,
                gloo=options.vs == "gloo",
            )
        )

    return bench_main("allreduce", options, options.peers, work)


if __name__ == "__main__":
    sys.exit(run_main("allreduce", main))

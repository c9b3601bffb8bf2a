"""One rank of ``holdfast bench allreduce``: the code of a peer, without a master.

TLS control streams, encrypted lanes, links and reduction are the production code. Rank 0 makes a
temporary certificate authority; the ranks meet at a rendezvous.

With ``--vs gloo`` every rank also has a worker process with torch's gloo. The two libraries alternate,
controlled by a pipe, and never run at the same time.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import trio
from attrs import define, field, frozen

from ...collectives.arithmetic import ChunkLayout
from ...collectives.links.link_parts import LaneRules
from ...collectives.reduction import ReduceResult, Reduction
from ...membership.planning.bandwidth import Bandwidth, LineCapacities
from ...membership.planning.plan import PlanEstimate, make_plan
from ...membership.spec.spec import ReduceTable, RunSpec
from ...protocol.addresses import Address
from ...protocol.errors import UserError
from ...protocol.messages import Contributor, FragmentSize, Plan, Reduce
from ...protocol.network.interface import Channel, ChannelHandler, LaneHandler
from ...protocol.network.sockets import SocketNetwork
from ...protocol.trust.authority import Party
from ...protocol.trust.credentials import Credentials
from ...protocol.trust.notary import Notary
from .rank_links import BenchRank, joined
from .rank_processes import RankSeat, Report, free_port

GLOO_WORKER = Path(__file__).parents[2] / "benchmarks" / "gloo_worker.py"
VALUE_BYTES = 4  # float32
UNTOLD = Bandwidth(1e9, 1e9)  # of every rank, if no rates are given: the chunks of a fast line
CHECKED_VALUES = 2**16  # values of each result that are checked
# Relative errors that only a wrong sum exceeds: fp32 only rounds, topk keeps a 64th of the values or
# more, and the coarsest of the other codecs has 4 bits per value.
ERRORS_MAX = {"fp32": 1e-5, "topk": 0.99, "topk16": 0.95, "topk8": 0.9, "topk4": 0.8}
ERROR_MAX = 0.2

# Offsets in Linux's struct tcp_info of payload bytes received and sent; those retransmitted follow.
_TCP_INFO_BYTES = 216
_BYTES_RECEIVED, _BYTES_SENT = 128, 200
_CLEAR_PEAK = "5"  # resets the peak, see clear_refs in proc(5)


@frozen
class AllreduceOptions:
    """The options of the command, equal at all ranks except the seat's rank."""

    seat: RankSeat
    bytes: int
    codec: str
    repeat: int
    warm_up: int
    gloo: bool
    up_mbit: tuple[float, ...] = ()
    down_mbit: tuple[float, ...] = ()
    delay_ms: float = 0.0
    max_upload_mbit: tuple[float, ...] = ()  # limits of the ranks; empty: none
    congestion: str = LaneRules().congestion  # TCP's, of lanes, where the kernel has it
    sealed: bool = False  # contributions are signed and kept, as audits require

    @property
    def size(self) -> FragmentSize:
        return FragmentSize(max(1, self.bytes // VALUE_BYTES), 0, 0)

    def lines(self, peers: Sequence[str]) -> LineCapacities:
        """Return the line capacities for the planner: without given rates, those of one machine."""
        if not self.up_mbit:
            return LineCapacities(dict.fromkeys(peers, UNTOLD))
        rates = {
            peer: Bandwidth(up * 1e6 / 8, down * 1e6 / 8)
            for peer, up, down in zip(peers, self.up_mbit, self.down_mbit, strict=True)
        }
        return LineCapacities(rates, delay_s=self.delay_ms / 1e3)


class CountedNetwork(SocketNetwork):
    """The production network, which records its sockets to read the kernel's byte counts.

    A closed lane stays readable because its descriptor is duplicated. That does not delay the end of
    its connection, because lanes are shut down before they are closed.
    """

    def __init__(self, credentials: Credentials) -> None:
        super().__init__(credentials)
        self.notary = Notary(credentials.run_id, credentials.identity)
        self._sockets: list[socket.socket | trio.socket.SocketType] = []

    def _note(self, stream: trio.abc.Stream) -> None:
        if isinstance(stream, trio.SSLStream):
            transport = stream.transport_stream
            assert isinstance(transport, trio.SocketStream)
            self._sockets.append(transport.socket)
            return
        assert isinstance(stream, trio.SocketStream)
        self._sockets.append(socket.socket(fileno=os.dup(stream.socket.fileno())))

    async def serve(
        self,
        bind: Sequence[Address],
        on_channel: ChannelHandler,
        on_lane: LaneHandler | None,
        *,
        on_relay: LaneHandler | None = None,
        task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        async def noted_channel(channel: Channel) -> None:
            self._note(channel.stream)
            await on_channel(channel)

        async def noted_lane(stream: trio.abc.Stream) -> None:
            self._note(stream)
            assert on_lane is not None
            await on_lane(stream)

        await super().serve(
            bind, noted_channel, noted_lane, on_relay=on_relay, task_status=task_status
        )

    async def dial(self, address: Address, *, party: Party, peer: str | None = None) -> Channel:
        channel = await super().dial(address, party=party, peer=peer)
        self._note(channel.stream)
        return channel

    async def dial_lane(self, address: Address) -> trio.abc.Stream:
        stream = await super().dial_lane(address)
        self._note(stream)
        return stream

    def traffic(self) -> Traffic:
        """Return the bytes of all sockets until now."""
        total = Traffic()
        for sock in self._sockets:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
            total.sent_bytes += sent - again
            total.received_bytes += struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]
            total.retransmitted_bytes += again
        return total


@define
class Traffic:
    """TCP payload bytes, including TLS and lane headers, excluding TCP and IP headers.

    Retransmitted bytes are counted separately.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    retransmitted_bytes: int = 0


class PeakMemory:
    """The peak of this process's memory above its size at the start of the measurement.

    The kernel records the peak and can reset it.
    """

    def __init__(self) -> None:
        self._before_bytes = _memory_bytes("VmRSS")
        self._shared_before_bytes = _memory_bytes("RssShmem")
        Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)

    def extra_bytes(self) -> int:
        """Return the peak until now, above the size at the start."""
        return max(0, _memory_bytes("VmHWM") - self._before_bytes)

    def shared_bytes(self) -> int:
        """Return the mapped bytes of in-memory files, which are part of ``extra_bytes``."""
        return _memory_bytes("RssShmem") - self._shared_before_bytes


def _memory_bytes(name: str) -> int:
    """Return a figure of /proc/self/status, where they are in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise UserError(f"/proc/self/status has no {name}", hint="this benchmark needs Linux")


class GlooWorker:
    """The gloo process of a rank, which waits for its turn."""

    def __init__(self, options: AllreduceOptions, interface_address: str, port: int) -> None:
        arguments = {
            "rank": options.seat.rank,
            "peers": options.seat.count,
            "master": options.seat.master.host,
            "port": port,
            "address": interface_address,
            "values": options.size.value_count,
        }
        self._process = subprocess.Popen(
            [sys.executable, str(GLOO_WORKER), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def turn(self, command: str) -> dict[str, Any]:
        """Send a command and wait for the answer without using the processor."""
        return await trio.to_thread.run_sync(self._turn, command)

    def _turn(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise UserError("the gloo worker ended", hint="check that this Python has torch")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@define
class AllreduceBench:
    """One rank with links to all others, and its measurements."""

    options: AllreduceOptions
    node: BenchRank[CountedNetwork]
    values: np.ndarray[tuple[int], np.dtype[np.float32]]
    round: int = 0
    ours_s: list[float] = field(factory=list)
    gloo_s: list[float] = field(factory=list)
    extra_bytes: list[int] = field(factory=list)  # peak memory, by rank
    cpu_s: list[float] = field(factory=list)  # CPU time, mean over ranks
    gloo_cpu_s: list[float] = field(factory=list)
    traffic: list[list[Traffic]] = field(factory=list)  # per repetition and rank

    @property
    def peers(self) -> list[str]:
        return [member.peer for member in self.node.members]

    def plan(self) -> tuple[Plan, PlanEstimate]:
        peers = self.peers
        codec, audit = self.options.codec, 1.0 if self.options.sealed else 0.0
        table = ReduceTable(codec_up=codec, codec_down=codec, audit=audit)
        lines = self.options.lines(peers)
        return make_plan(self.options.size, peers, peers, lines, RunSpec(reduce=table))

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
            plan=self.plan()[0],
        )

    async def reduce(self) -> None:
        """Time one reduction that all ranks start at the same moment; the slowest rank counts."""
        self.round += 1
        order = self.order()
        network, exchange = self.node.network, self.node.rendezvous.exchange
        before = network.traffic()
        await exchange({})
        cpu_before_s = time.process_time()
        started_s = trio.current_time()
        result = await Reduction(
            order,
            self.node.hub.me,
            self.options.size,
            self.node.hub,
            network,
            self.values,
            None,
            notary=network.notary,
        ).run()
        took_s = trio.current_time() - started_s
        cpu_s = time.process_time() - cpu_before_s
        error = self._error(result)
        first = await exchange({"s": took_s, "digest": result.digest.hex()})
        after = network.traffic()
        mine = [
            after.sent_bytes - before.sent_bytes,
            after.received_bytes - before.received_bytes,
            after.retransmitted_bytes - before.retransmitted_bytes,
        ]
        second = await exchange({"traffic": mine, "error": error, "cpu_s": cpu_s})
        if len({each["digest"] for each in first}) != 1:
            raise UserError("the ranks' results differ")
        error_max = ERRORS_MAX.get(self.options.codec.partition("+")[0], ERROR_MAX)
        if max(each["error"] for each in second) > error_max:
            raise UserError("the result is not the mean")
        self.ours_s.append(max(each["s"] for each in first))
        self.cpu_s.append(statistics.mean(each["cpu_s"] for each in second))
        self.traffic.append([Traffic(*each["traffic"]) for each in second])

    def _error(self, result: ReduceResult) -> float:
        """Return the relative error of part of the result; the inputs are multiples of one another."""
        found = next(values for _where, values in result.pieces())[:CHECKED_VALUES]
        mine = self.values[: found.size]
        seat = self.options.seat
        mean = mine / (seat.rank + 1) * ((seat.count + 1) / 2)
        return float(np.linalg.norm(found - mean) / np.linalg.norm(mean))

    async def gloo(self, worker: GlooWorker) -> None:
        await self.node.rendezvous.exchange({})
        answer = await worker.turn("reduce")
        answers = await self.node.rendezvous.exchange(answer)
        if max(each["error"] for each in answers) > ERRORS_MAX["fp32"]:
            raise UserError("gloo's result is not the sum")
        self.gloo_s.append(max(each["s"] for each in answers))
        self.gloo_cpu_s.append(statistics.mean(each["cpu_s"] for each in answers))

    def report(self) -> Report:
        """Return the results without the warm-up repetitions."""
        skipped = self.options.warm_up
        ours_s, gloo_s, traffic = (
            self.ours_s[skipped:],
            self.gloo_s[skipped:],
            self.traffic[skipped:],
        )
        plan, estimate = self.plan()
        layout = ChunkLayout.of(plan, self.options.size)
        known = bool(self.options.up_mbit)  # without rates there are no estimates
        least_s = estimate.bound_s if known else None
        median_s = statistics.median(ours_s)
        gloo_median_s = statistics.median(gloo_s) if gloo_s else None

        def per_peer(name: str) -> list[int]:
            runs = [[getattr(each, name) for each in run] for run in traffic]
            return [round(statistics.mean(counts)) for counts in zip(*runs, strict=True)]

        return {
            "peers": self.options.seat.count,
            "bytes": self.options.size.value_count * VALUE_BYTES,
            "codec": self.options.codec,
            "sealed": self.options.sealed,
            "encoded_bytes": layout.down_bytes,
            "repeat": len(ours_s),
            "median_s": median_s,
            "min_s": min(ours_s),
            "max_s": max(ours_s),
            "all_s": ours_s,
            "gloo_median_s": gloo_median_s,
            "gloo_all_s": gloo_s,
            "ratio": gloo_median_s / median_s if gloo_median_s else None,
            "cpu_s": statistics.median(self.cpu_s[skipped:]),
            "gloo_cpu_s": statistics.median(self.gloo_cpu_s[skipped:]) if gloo_s else None,
            "t_lb_s": least_s,
            "ring_s": estimate.ring_s if known else None,
            "predicted_s": estimate.predicted_s if known else None,
            "t_lb_ratio": median_s / least_s if least_s else None,
            "socket_bytes_per_peer": per_peer("sent_bytes"),
            "received_bytes_per_peer": per_peer("received_bytes"),
            "retransmitted_bytes_per_peer": per_peer("retransmitted_bytes"),
            "extra_memory_bytes_per_peer": self.extra_bytes,
        }


async def run_rank(options: AllreduceOptions) -> Report | None:
    """Run one rank and return the report, at rank 0 only."""
    seat, caps = options.seat, options.max_upload_mbit
    cap = caps[seat.rank] if caps else None
    async with joined(seat, CountedNetwork, upload_mbit=cap) as node:
        node.hub.configure(rules=LaneRules(congestion=options.congestion))
        await node.link_all()
        values = np.random.default_rng(0).standard_normal(options.size.value_count, np.float32)
        values *= seat.rank + 1
        bench = AllreduceBench(options, node, values)
        exchange = node.rendezvous.exchange
        port = free_port(seat.master.host) if seat.rank == 0 else 0
        ports = await exchange({"port": port})
        with ExitStack() as stack:
            worker = None
            if options.gloo:
                worker = GlooWorker(options, node.rendezvous.host, ports[0]["port"])
                stack.callback(worker.close)
                await worker.turn("begin")
            memory = PeakMemory()
            for _repetition in range(options.warm_up + options.repeat):
                await bench.reduce()
                if worker is not None:
                    await bench.gloo(worker)
        # This exchange also keeps a rank from cutting links that other ranks still need.
        peaks = await exchange({"extra_bytes": memory.extra_bytes()})
        bench.extra_bytes = [each["extra_bytes"] for each in peaks]
    return bench.report() if seat.rank == 0 else None

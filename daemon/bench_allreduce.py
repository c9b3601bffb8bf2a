"""``holdfast bench allreduce``: how long one reduction takes over real sockets.

Every rank is a process of its own that runs what a peer runs: TLS control streams, encrypted lanes,
links, reduction. There is no master: rank 0 makes a certificate authority for the occasion.

    holdfast bench allreduce --peers 4               all ranks on this machine's loopback
    holdfast bench allreduce --rank R --master ...   one rank; start each where it belongs

The ranks find each other by a *rendezvous* with rank 0, protected by nothing but a token. It hands
out certificates: use it in a lab, never on a network with strangers.

With ``--vs gloo`` every rank also has a worker (``benchmarks/gloo_worker.py``, the only part that
knows torch). Ours and gloo's take turns, told by a pipe; the two never run at the same time.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
import trio
from attrs import define, field, frozen

from ..collectives.allreduce import Reduction, ReduceResult
from ..collectives.arithmetic import Layout
from ..collectives.hub import LinkHub
from ..membership.bandwidth import Bandwidth, Bandwidths, Lines
from ..membership.plan import make_plan
from ..membership.spec import CODECS, ReduceTable, RunSpec
from ..protocol.addresses import Address
from ..protocol.authority import Authority
from ..protocol.credentials import Credentials
from ..protocol.errors import UserError
from ..protocol.identity import Identity
from ..protocol.messages import Contributor, FragmentSize, MemberInfo, Reduce, Role
from ..protocol.network import Channel, ChannelHandler, LaneHandler, Party
from ..protocol.sockets import SocketNetwork
from .rendezvous import Rendezvous

GLOO_WORKER = Path(__file__).parents[1] / "benchmarks" / "gloo_worker.py"
LINK_S = 60.0  # for a link to come up, lanes and all; the benchmark ends without it
VALUE_BYTES = 4  # float32
CHECKED_VALUES = 2**16  # of each result are compared with what they should be
ERROR_MAX = 0.5  # relative; the coarsest codec is far better, a wrong sum far worse

# Offsets in Linux's struct tcp_info: payload bytes that the other side has acknowledged, that came
# in, and that had to be sent again.
_TCP_INFO_BYTES = 216
_BYTES_ACKED, _BYTES_RECEIVED, _BYTES_RETRANSMITTED = 120, 128, 208

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6}


@frozen
class Options:
    """What was asked for; equal at all ranks but for ``rank``."""

    peers: int
    rank: int
    master: Address
    token: str
    bytes: int
    codec: str
    repeat: int
    warm_up: int
    gloo: bool
    up_mbit: tuple[float, ...] = ()
    down_mbit: tuple[float, ...] = ()
    delay_ms: float = 0.0
    chunk_bytes: int = 2**20

    @property
    def size(self) -> FragmentSize:
        return FragmentSize(max(1, self.bytes // VALUE_BYTES), 0, 0)

    def lines(self, peers: Sequence[str]) -> Lines:
        """What the planner is told; nothing if the rates are not given."""
        if not self.up_mbit:
            return Bandwidths().lines(peers, {})
        rates = {
            peer: Bandwidth(up * 1e6 / 8, down * 1e6 / 8)
            for peer, up, down in zip(peers, self.up_mbit, self.down_mbit, strict=True)
        }
        return Lines(rates, delay_s=self.delay_ms / 1e3)

    def least_possible_s(self, encoded_bytes: int) -> float | None:
        """No all-reduce over such links is faster: rates of each and of all, and two hops."""
        if not self.up_mbit:
            return None
        seconds = 0.0
        for mbits in (self.up_mbit, self.down_mbit):
            rates = [mbit * 1e6 / 8 for mbit in mbits]
            seconds = max(seconds, 1 / min(rates), 2 * (self.peers - 1) / sum(rates))
        return encoded_bytes * seconds + 2 * self.delay_ms / 1e3


# ---------------------------------------------------------------- a rank


class CountedNetwork(SocketNetwork):
    """The production network, with its sockets noted: the kernel counts what goes through them."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__(credentials)
        self._sockets: list[trio.socket.SocketType] = []

    def _note(self, stream: trio.abc.Stream) -> None:
        if isinstance(stream, trio.SSLStream):
            stream = stream.transport_stream
        assert isinstance(stream, trio.SocketStream)
        self._sockets.append(stream.socket)

    async def serve(
        self,
        bind: Sequence[Address],
        on_channel: ChannelHandler,
        on_lane: LaneHandler | None,
        *,
        task_status: trio.TaskStatus[Sequence[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        async def noted_channel(channel: Channel) -> None:
            self._note(channel.stream)
            await on_channel(channel)

        async def noted_lane(stream: trio.abc.Stream) -> None:
            self._note(stream)
            assert on_lane is not None
            await on_lane(stream)

        await super().serve(bind, noted_channel, noted_lane, task_status=task_status)

    async def dial(self, address: Address, *, party: Party, peer: str | None = None) -> Channel:
        channel = await super().dial(address, party=party, peer=peer)
        self._note(channel.stream)
        return channel

    async def dial_lane(self, address: Address) -> trio.abc.Stream:
        stream = await super().dial_lane(address)
        self._note(stream)
        return stream

    def traffic(self) -> Traffic:
        """Of all sockets, until now."""
        total = Traffic()
        for sock in self._sockets:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            total.sent_bytes += struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
            total.received_bytes += struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]
            total.retransmitted_bytes += struct.unpack_from("=Q", info, _BYTES_RETRANSMITTED)[0]
        return total


@define
class Traffic:
    """TCP payload: TLS, lanes' headers and tags included, TCP's and IP's headers not."""

    sent_bytes: int = 0
    received_bytes: int = 0
    retransmitted_bytes: int = 0


class GlooWorker:
    """The other library's rank, in a process that waits for its turn."""

    def __init__(self, options: Options, interface_address: str, port: int) -> None:
        arguments = {
            "rank": options.rank,
            "peers": options.peers,
            "master": options.master.host,
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
        """Have it do something; wait without using the processor."""
        return await trio.to_thread.run_sync(self._turn, command)

    def _turn(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise UserError("the gloo worker ended", hint="does this Python have torch?")
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
class Bench:
    """One rank, met with the others and linked to them."""

    options: Options
    rendezvous: Rendezvous
    network: CountedNetwork
    hub: LinkHub
    members: list[MemberInfo]
    values: np.ndarray[tuple[int], np.dtype[np.float32]]
    round: int = 0
    ours_s: list[float] = field(factory=list)
    gloo_s: list[float] = field(factory=list)
    traffic: list[list[Traffic]] = field(factory=list)  # per repetition and rank

    def order(self) -> Reduce:
        peers = [member.peer for member in self.members]
        codec = self.options.codec
        spec = RunSpec(
            reduce=ReduceTable(
                codec_up=codec, codec_down=codec, chunk_bytes=self.options.chunk_bytes
            )
        )
        plan, _estimate = make_plan(
            self.options.size, peers, peers, self.options.lines(peers), spec
        )
        return Reduce(
            round=self.round,
            attempt=1,
            fragment=0,
            version=0,
            view=1,
            contributors=tuple(Contributor(peer, 1, 1.0) for peer in peers),
            receivers=tuple(peers),
            plan=plan,
        )

    async def reduce(self) -> None:
        """One reduction, begun by all at the same moment; its time is the slowest rank's."""
        self.round += 1
        order = self.order()
        before = self.network.traffic()
        await self.rendezvous.exchange({})
        started_s = trio.current_time()
        result = await Reduction(
            order, self.hub.me, self.options.size, self.hub, self.network, self.values, None
        ).run()
        took_s = trio.current_time() - started_s
        error = self._error(result)
        # What was sent last counts once it is acknowledged; by now all have what they need.
        first = await self.rendezvous.exchange({"s": took_s, "digest": result.digest.hex()})
        after = self.network.traffic()
        mine = [
            after.sent_bytes - before.sent_bytes,
            after.received_bytes - before.received_bytes,
            after.retransmitted_bytes - before.retransmitted_bytes,
        ]
        second = await self.rendezvous.exchange({"traffic": mine, "error": error})
        if len({each["digest"] for each in first}) != 1:
            raise UserError("the ranks' results differ")
        if max(each["error"] for each in second) > ERROR_MAX:
            raise UserError("the result is not the mean")
        self.ours_s.append(max(each["s"] for each in first))
        self.traffic.append([Traffic(*each["traffic"]) for each in second])

    def _error(self, result: ReduceResult) -> float:
        """Relative error of some of the result; every rank's input is a multiple of the same."""
        mine = self.values[:CHECKED_VALUES]
        mean = mine / (self.options.rank + 1) * ((self.options.peers + 1) / 2)
        found = result.values[:CHECKED_VALUES]
        return float(np.linalg.norm(found - mean) / np.linalg.norm(mean))

    async def gloo(self, worker: GlooWorker) -> None:
        await self.rendezvous.exchange({})
        answer = await worker.turn("reduce")
        answers = await self.rendezvous.exchange(answer)
        if max(each["error"] for each in answers) > ERROR_MAX:
            raise UserError("gloo's result is not the sum")
        self.gloo_s.append(max(each["s"] for each in answers))

    def report(self) -> dict[str, Any]:
        """The figures, first repetitions (warm-up) left out."""
        skipped = self.options.warm_up
        ours_s, gloo_s, traffic = (
            self.ours_s[skipped:],
            self.gloo_s[skipped:],
            self.traffic[skipped:],
        )
        layout = Layout.of(self.order().plan, self.options.size)
        wire_bytes = max(layout.up_bytes, layout.down_bytes)
        least_s = self.options.least_possible_s(wire_bytes)
        median_s = statistics.median(ours_s)
        gloo_median_s = statistics.median(gloo_s) if gloo_s else None

        def per_peer(name: str) -> list[int]:
            runs = [[getattr(each, name) for each in run] for run in traffic]
            return [round(statistics.mean(counts)) for counts in zip(*runs, strict=True)]

        return {
            "peers": self.options.peers,
            "bytes": self.options.size.value_count * VALUE_BYTES,
            "codec": self.options.codec,
            "encoded_bytes": wire_bytes,
            "repeat": len(ours_s),
            "median_s": median_s,
            "min_s": min(ours_s),
            "max_s": max(ours_s),
            "all_s": ours_s,
            "gloo_median_s": gloo_median_s,
            "gloo_all_s": gloo_s,
            "ratio": gloo_median_s / median_s if gloo_median_s else None,
            "t_lb_s": least_s,
            "t_lb_ratio": median_s / least_s if least_s else None,
            "socket_bytes_per_peer": per_peer("sent_bytes"),
            "received_bytes_per_peer": per_peer("received_bytes"),
            "retransmitted_bytes_per_peer": per_peer("retransmitted_bytes"),
        }


async def run_rank(options: Options) -> dict[str, Any] | None:
    """Be one rank; the report at rank 0."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-bench-")))
        async with trio.open_nursery() as nursery:
            rendezvous = await Rendezvous.open(
                peers=options.peers,
                rank=options.rank,
                master=options.master,
                token=options.token,
                nursery=nursery,
            )
            bench = await _link_up(options, rendezvous, directory, nursery)
            port = _free_port(options.master.host) if options.rank == 0 else 0
            ports = await rendezvous.exchange({"port": port})
            worker = None
            if options.gloo:
                worker = GlooWorker(options, rendezvous.host, ports[0]["port"])
                stack.callback(worker.close)
                await worker.turn("begin")
            for _repetition in range(options.warm_up + options.repeat):
                await bench.reduce()
                if worker is not None:
                    await bench.gloo(worker)
            await rendezvous.exchange({})
            nursery.cancel_scope.cancel()
        return bench.report() if options.rank == 0 else None


async def _link_up(
    options: Options, rendezvous: Rendezvous, directory: Path, nursery: trio.Nursery
) -> Bench:
    """Certificates from rank 0, then links with everybody."""
    identity = Identity.generate()
    name = f"rank-{options.rank}"
    requests = await rendezvous.exchange({"request": identity.request_pem(name).decode()})
    issued: dict[str, Any] = {}
    if options.rank == 0:
        authority = Authority.load_or_create(directory / "authority", "bench")
        issued["authority"] = authority.certificate_pem.decode()
        issued["certificates"] = [
            authority.issue(each["request"].encode(), f"rank-{rank}", Party.PEER).decode()
            for rank, each in enumerate(requests)
        ]
    issued = (await rendezvous.exchange(issued))[0]
    certificate = issued["certificates"][options.rank].encode()
    credentials = Credentials(directory, identity, certificate, issued["authority"].encode())
    network = CountedNetwork(credentials)
    hub = LinkHub(network, identity.peer_id)
    bound: Sequence[Address] = await nursery.start(
        network.serve, [Address(rendezvous.host, 0)], hub.handle_channel, hub.handle_lane
    )
    await nursery.start(hub.run)
    everyone = await rendezvous.exchange({"peer": identity.peer_id, "address": str(bound[0])})
    members = [
        MemberInfo(each["peer"], f"rank-{rank}", rank, (each["address"],), Role.CONTRIBUTOR, True)
        for rank, each in enumerate(everyone)
    ]
    hub.set_members(members)
    for member in members:
        if member.peer != hub.me:
            await hub.link(member.peer, LINK_S)
    values = np.random.default_rng(0).standard_normal(options.size.value_count, np.float32)
    values *= options.rank + 1
    return Bench(options, rendezvous, network, hub, members, values)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------- command line


def parse_size(_context: click.Context, _parameter: click.Parameter, value: str) -> int:
    """``256MiB``, ``4 KiB``, ``1000000``."""
    number = value.strip().rstrip("BbIiKkMmGg ")
    unit = value.strip()[len(number) :].strip().upper()
    if not number.isdigit() or unit not in UNITS or int(number) * UNITS[unit] < VALUE_BYTES:
        raise click.BadParameter(f"{value!r} is no size; write it like 256MiB")
    return int(number) * UNITS[unit]


def parse_rates(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[float, ...]:
    """Mbit/s, one for all ranks or one for each, with commas."""
    try:
        rates = tuple(float(text) for text in value.split(",")) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r} are no rates; write them like 20,20,1000") from None
    if any(not rate > 0 for rate in rates):
        raise click.BadParameter("a rate is more than 0")
    return rates


def _per_rank(name: str, rates: tuple[float, ...], peers: int) -> tuple[float, ...]:
    if len(rates) == 1:
        return rates * peers
    if len(rates) not in (0, peers):
        raise UserError(f"{name} has {len(rates)} rates for {peers} peers")
    return rates


@click.command("allreduce")
@click.option("--peers", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option(
    "--size",
    callback=parse_size,
    default="256MiB",
    show_default=True,
    help="Of the float32 values.",
)
@click.option("--codec", type=click.Choice(CODECS), default="fp32", show_default=True)
@click.option("--repeat", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--warm-up", type=click.IntRange(0), default=1, show_default=True, help="Not counted."
)
@click.option("--vs", type=click.Choice(["gloo"]), help="Take turns with another library.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the figures there; - prints them.",
    allow_dash=True,
)
@click.option("--rank", type=click.IntRange(0), help="Be only this rank.")
@click.option("--master", metavar="HOST:PORT", help="Where rank 0 listens (with --rank).")
@click.option("--token", default="", help="The same at all ranks (with --rank).")
@click.option(
    "--up",
    callback=parse_rates,
    metavar="MBIT[,...]",
    help="The ranks' upload rates, for the plan and the bound.",
)
@click.option(
    "--down",
    callback=parse_rates,
    metavar="MBIT[,...]",
    help="Likewise download; default: as --up.",
)
@click.option(
    "--delay-ms",
    type=click.FloatRange(0),
    default=0.0,
    help="One way between two ranks, for the bound.",
)
def allreduce(
    peers: int,
    size: int,
    codec: str,
    repeat: int,
    warm_up: int,
    vs: str | None,
    json_path: Path | None,
    rank: int | None,
    master: str | None,
    token: str,
    up: tuple[float, ...],
    down: tuple[float, ...],
    delay_ms: float,
) -> None:
    """Time the all-reduce between processes that run what peers run.

    Without --rank all ranks are started here, on loopback. With --rank and --master this is one of
    them: start each where it belongs. That is for a lab: whoever knows the token gets a certificate
    from rank 0, over a connection that is not encrypted.
    """
    if vs == "gloo" and not GLOO_WORKER.exists():
        raise UserError(
            f"{GLOO_WORKER} is missing", hint="--vs gloo needs a clone of the repository"
        )
    arguments = {
        "--peers": peers,
        "--size": size,
        "--codec": codec,
        "--repeat": repeat,
        "--warm-up": warm_up,
        "--vs": vs,
        "--up": ",".join(map(str, up)),
        "--down": ",".join(map(str, down)),
        "--delay-ms": delay_ms,
    }
    if rank is None:
        if master is not None:
            raise UserError("--master without --rank", hint="say which rank this is")
        report = run_here(peers, [f"{name}={value}" for name, value in arguments.items() if value])
    else:
        if master is None or not token:
            raise UserError("--rank needs --master and --token")
        if rank >= peers:
            raise UserError(f"there is no rank {rank} of {peers}")
        up = _per_rank("--up", up, peers)
        options = Options(
            peers=peers,
            rank=rank,
            master=Address.parse(master),
            token=token,
            bytes=size,
            codec=codec,
            repeat=repeat,
            warm_up=warm_up,
            gloo=vs == "gloo",
            up_mbit=up,
            down_mbit=_per_rank("--down", down, peers) or up,
            delay_ms=delay_ms,
        )
        report = trio.run(run_rank, options)
    if report is not None:
        show(report, json_path)


def run_here(peers: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Start all ranks on loopback; rank 0's report."""
    token = secrets.token_hex(16)
    master = Address("127.0.0.1", _free_port("127.0.0.1"))
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(peers):
            own = [f"--rank={rank}", f"--master={master}", f"--token={token}", "--json=-"]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "holdfast", "bench", "allreduce", *arguments, *own],
                    stdout=subprocess.PIPE if rank == 0 else None,
                    text=True,
                )
            )
        assert processes[0].stdout is not None
        text = processes[0].stdout.read()
        if any(process.wait() for process in processes) or not text:
            raise UserError("a rank failed; what it said is above")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    report: dict[str, Any] = json.loads(text)
    return report


def show(report: dict[str, Any], json_path: Path | None) -> None:
    """Print the figures, or write them where ``--json`` says."""
    text = json.dumps(report, indent=2)
    if json_path is not None and str(json_path) == "-":
        click.echo(text)
        return
    if json_path is not None:
        json_path.write_text(text + "\n")
    megabytes = report["bytes"] / 1e6
    click.echo(f"{report['peers']} peers, {megabytes:g} MB of float32, {report['codec']}")
    median_s = report["median_s"]
    click.echo(f"  holdfast  {_milliseconds(median_s)} (best {_milliseconds(report['min_s'])})")
    if report["gloo_median_s"] is not None:
        click.echo(f"  gloo      {_milliseconds(report['gloo_median_s'])}")
        click.echo(f"  holdfast is {report['ratio']:.2f} times as fast as gloo")
    if report["t_lb_s"] is not None:
        click.echo(
            f"  no all-reduce over these links takes less than {_milliseconds(report['t_lb_s'])}"
        )
    sent = max(report["socket_bytes_per_peer"])
    click.echo(f"  a peer sent at most {sent / 1e6:.3f} MB a reduction, all overhead included")


def _milliseconds(seconds: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(max(seconds * 1e3, 1e-3))))
    return f"{seconds * 1e3:.{digits}f} ms"

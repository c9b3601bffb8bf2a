"""Ranks of a bench: processes that run the code of peers, without a master.

All ranks run on this machine's loopback, or one on each machine (``--rank R --master HOST:PORT --token T``).
They meet at a ``Rendezvous``, where rank 0 issues certificates to every process that knows the token, over an
unencrypted connection. So this is for a lab only.
"""

from __future__ import annotations

import argparse
import gc
import json
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import frozen

from benchmarks.rendezvous import RankSeat, Rendezvous
from benchmarks.report import ROOT, BenchError, bench_parser, keep_json
from holdfast.collectives.links.hub import LinkHub
from holdfast.protocol.addresses import Address
from holdfast.protocol.messages import MemberInfo, Role
from holdfast.protocol.network.sockets import SocketNetwork
from holdfast.protocol.trust.authority import Authority, Party
from holdfast.protocol.trust.credentials import Credentials
from holdfast.protocol.trust.identity import Identity

LOOPBACK = "127.0.0.1"
INTERRUPT_S = 5.0  # for a bench to end by itself
LINK_S = 60.0  # limit for a link with its lanes to come up
UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6}

Report = dict[str, Any]


def size(text: str) -> int:
    """Parse a size in bytes: ``256MiB``, ``4 KiB``, ``1000000``."""
    number = text.strip().rstrip("BbIiKkMmGg ")
    unit = text.strip()[len(number) :].strip().upper()
    if not number.isdigit() or unit not in UNITS or int(number) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; example: 256MiB")
    return int(number) * UNITS[unit]


def rank_parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all of these commands have."""
    parser = bench_parser(module, about)
    parser.add_argument("--rank", type=int, help="run only this rank")
    parser.add_argument("--master", metavar="HOST:PORT", help="address of rank 0")
    parser.add_argument("--token", default="", help="secret shared by all ranks")
    parser.add_argument("--repeat", type=int, default=5, help="counted repetitions")
    parser.add_argument("--warm-up", type=int, default=1, help="repetitions before those")
    return parser


def run_ranks(
    module: str,
    options: argparse.Namespace,
    count: int,
    run_rank: Callable[[RankSeat], Awaitable[Report | None]],
) -> int:
    """Run this process's rank, or all ranks here, and print or write the report of rank 0.

    Raises:
      BenchError: the options are incomplete, the rank does not exist, or a rank failed.
    """
    if options.rank is None:
        if options.master is not None:
            raise BenchError("--master without --rank", hint="give this process's rank")
        report: Report | None = _run_ranks_here(module, count)
    else:
        if options.master is None or not options.token:
            raise BenchError("--rank needs --master and --token")
        if not 0 <= options.rank < count:
            raise BenchError(f"there is no rank {options.rank} of {count}")
        seat = RankSeat(options.rank, count, Address.parse(options.master), options.token)
        gc.freeze()  # as the daemons do
        report = trio.run(partial(run_rank, seat), restrict_keyboard_interrupt_to_checkpoints=True)
    if report is not None:
        keep_json(report, options.json or "-")
    return 0


def _run_ranks_here(module: str, count: int) -> Report:
    """Start all ranks on loopback with this command line, and return rank 0's report."""
    master = Address(LOOPBACK, free_port(LOOPBACK))
    own = [f"--master={master}", f"--token={secrets.token_hex(16)}", "--json=-"]
    command = [sys.executable, "-m", f"benchmarks.{module}", *sys.argv[1:], *own]
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(count):
            stdout = subprocess.PIPE if rank == 0 else None
            argv = [*command, f"--rank={rank}"]
            processes.append(subprocess.Popen(argv, stdout=stdout, text=True, cwd=ROOT))
        text, _ = processes[0].communicate()
        if any(process.wait() for process in processes) or not text:
            raise BenchError("a rank failed; see its message above")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    report: Report = json.loads(text)
    return report


def figures_of(module: str, options: Sequence[str]) -> Report:
    """Run a bench in a process of its own, with all its ranks on loopback; return its figures.

    Raises:
      BenchError: it failed.
    """
    argv = [sys.executable, "-m", f"benchmarks.{module}", *options, "--json=-"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        out, _ = process.communicate()
    except BaseException:
        end(process)
        raise
    if process.returncode != 0:
        raise BenchError(f"{module} {' '.join(options)} ended with {process.returncode}")
    found: Report = json.loads(out)
    return found


def end(process: subprocess.Popen[Any]) -> None:
    """Interrupt a bench, so that it ends the ranks that it has started; kill it after a while."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(INTERRUPT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port(host: str) -> int:
    """Return a port that is free at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@frozen
class BenchRank:
    """One rank with a serving network, a running hub and the list of all ranks."""

    seat: RankSeat
    rendezvous: Rendezvous
    nursery: trio.Nursery
    network: SocketNetwork
    hub: LinkHub
    members: list[MemberInfo]  # by rank

    async def link_all(self) -> None:
        """Link to all other ranks."""
        self.hub.set_members(self.members)
        for member in self.members:
            if member.peer != self.hub.me:
                await self.hub.link(member.peer, LINK_S)


@asynccontextmanager
async def joined(seat: RankSeat) -> AsyncGenerator[BenchRank]:
    """Meet the other ranks, get a certificate from rank 0, listen, and learn all addresses.

    Links come up after a call of ``hub.set_members(members)``.
    """
    async with Rendezvous.open(seat) as rendezvous, trio.open_nursery() as nursery:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
            credentials = await _credentials(seat.rank, rendezvous, Path(folder))
            network = SocketNetwork(credentials)
            hub = LinkHub(network, credentials.identity.peer_id)
            bound: Sequence[Address] = await nursery.start(
                network.serve, [Address(rendezvous.host, 0)], hub.handle_channel, hub.handle_lane
            )
            await nursery.start(hub.run)
            everyone = await rendezvous.exchange({"peer": hub.me, "address": str(bound[0])})
            members = [
                MemberInfo(
                    each["peer"], f"rank-{rank}", rank, (each["address"],), Role.CONTRIBUTOR, True
                )
                for rank, each in enumerate(everyone)
            ]
            yield BenchRank(seat, rendezvous, nursery, network, hub, members)
        nursery.cancel_scope.cancel()


async def _credentials(rank: int, rendezvous: Rendezvous, folder: Path) -> Credentials:
    """Get a certificate from rank 0, which makes a certificate authority in the folder."""
    identity = Identity.generate()
    request = identity.request_pem(f"rank-{rank}").decode()
    requests = await rendezvous.exchange({"request": request})
    issued: dict[str, Any] = {}
    if rank == 0:
        authority = Authority.load_or_create(folder / "authority", "bench")
        issued["authority"] = authority.certificate_pem.decode()
        issued["certificates"] = [
            authority.issue(each["request"].encode(), f"rank-{number}", Party.PEER).decode()
            for number, each in enumerate(requests)
        ]
    issued = (await rendezvous.exchange(issued))[0]
    certificate = issued["certificates"][rank].encode()
    return Credentials(folder, identity, certificate, issued["authority"].encode())

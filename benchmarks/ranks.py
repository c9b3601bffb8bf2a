"""Ranks of a bench: processes of one machine that run the code of peers, without a master.

All are on loopback. They meet in a folder, where they exchange small messages, and all clocks are
one, so they begin at the same moment.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
from attrs import Factory, define, frozen

from benchmarks.report import ROOT, BenchError, bench_parser, keep_json
from holdfast.collectives.links.hub import LinkHub
from holdfast.protocol.addresses import Address
from holdfast.protocol.messages import MemberInfo, Role
from holdfast.protocol.network.sockets import SocketNetwork
from holdfast.protocol.trust.authority import Authority, Party
from holdfast.protocol.trust.credentials import Credentials
from holdfast.protocol.trust.identity import Identity

LOOPBACK = "127.0.0.1"
LINK_S = 60.0  # limit for a link with its lanes to come up
STOPS = (signal.SIGINT, signal.SIGTERM)
POLL_S = 0.005  # for the other ranks' messages
MARGIN_S = 3 * POLL_S  # in which all ranks have seen the last message
REPORT = "report.json"
UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

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
    parser.add_argument("--repeat", type=int, default=5, help="counted repetitions")
    parser.add_argument("--warm-up", type=int, default=1, help="repetitions before those")
    for name, kind in (("--rank", int), ("--meet", Path)):  # see ``run_ranks``
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser


@define
class RankSeat:
    """One rank among ``count``, and the folder where all of them meet."""

    rank: int
    count: int
    folder: Path
    _turn: int = 0
    _parent: int = Factory(os.getppid)

    async def exchange(self, mine: Report) -> list[Report]:
        """Give ``mine`` and return all ranks' objects, by rank, at the same moment everywhere."""
        self._turn += 1
        paths = [self.folder / f"{self._turn}-{rank}.json" for rank in range(self.count)]
        scratch = paths[self.rank].with_suffix(".new")
        scratch.write_text(json.dumps({**mine, "at_s": time.monotonic()}))
        scratch.replace(paths[self.rank])
        while not all(path.exists() for path in paths):
            if os.getppid() != self._parent:
                raise BenchError("the bench was killed")
            await trio.sleep(POLL_S)
        found: list[Report] = [json.loads(path.read_text()) for path in paths]
        start_s = max(each["at_s"] for each in found) + MARGIN_S
        time.sleep(max(0.0, start_s - time.monotonic()))  # trio would wake up to 1 ms late
        return found


def bench_main(
    module: str,
    options: argparse.Namespace,
    count: int,
    run_rank: Callable[[RankSeat], Awaitable[Report | None]],
) -> int:
    """Run all ranks on loopback and write rank 0's figures, or be one of these ranks."""
    if options.rank is None:
        keep_json(run_ranks(module, count, sys.argv[1:]), options.json or "-")
        return 0
    seat = RankSeat(options.rank, count, options.meet)
    gc.freeze()  # as the daemons do
    report = trio.run(partial(run_rank, seat), restrict_keyboard_interrupt_to_checkpoints=True)
    if report is not None:
        keep_json(report, options.meet / REPORT)
    return 0


def run_ranks(module: str, count: int, options: Sequence[str]) -> Report:
    """Run each rank of a bench; return rank 0's figures.

    Raises:
      BenchError: a rank failed.
    """
    ranks: list[subprocess.Popen[Any]] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        Authority.load_or_create(Path(folder) / "authority", "bench")
        try:
            # A signal between a start and its note would leave a rank; they are all ended by
            # SIGKILL.
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
            for rank in range(count):
                argv = [sys.executable, "-m", f"benchmarks.{module}", *options]
                argv += [f"--rank={rank}", f"--meet={folder}"]
                ranks.append(subprocess.Popen(argv, cwd=ROOT, process_group=0))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
            while any(each.poll() is None for each in ranks) and not _failed(ranks):
                time.sleep(0.05)
            if _failed(ranks):
                raise BenchError("a rank failed; what it said is above")
            report: Report = json.loads((Path(folder) / REPORT).read_text())
        finally:
            for each in ranks:  # with what they have started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)
                each.wait()
    return report


def _failed(ranks: Sequence[subprocess.Popen[Any]]) -> bool:
    return any(each.poll() not in (None, 0) for each in ranks)


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


@frozen
class BenchRank:
    """One rank with a serving network, a running hub and the list of all ranks."""

    seat: RankSeat
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
    """Get a certificate, listen, and learn all ranks' addresses.

    Links come up after a call of ``hub.set_members(members)``.
    """
    identity, name = Identity.generate(), f"rank-{seat.rank}"
    authority = Authority.load_or_create(seat.folder / "authority", "bench")
    certificate = authority.issue(identity.request_pem(name), name, Party.PEER)
    folder = seat.folder / name
    folder.mkdir()
    network = SocketNetwork(Credentials(folder, identity, certificate, authority.certificate_pem))
    async with trio.open_nursery() as nursery:
        hub = LinkHub(network, identity.peer_id)
        bound: Sequence[Address] = await nursery.start(
            network.serve, [Address(LOOPBACK, 0)], hub.handle_channel, hub.handle_lane
        )
        await nursery.start(hub.run)
        everyone = await seat.exchange({"peer": hub.me, "address": str(bound[0])})
        members = [
            MemberInfo(
                each["peer"], f"rank-{rank}", rank, (each["address"],), Role.CONTRIBUTOR, True
            )
            for rank, each in enumerate(everyone)
        ]
        yield BenchRank(seat, nursery, network, hub, members)
        nursery.cancel_scope.cancel()

"""Command line, local processes and JSON report of the benchmarks that have ranks."""

from __future__ import annotations

import gc
import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import trio
from attrs import frozen

from ...protocol.addresses import Address
from ...protocol.errors import UserError

ADAPTIVE = "adaptive"  # the link chooses its number of lanes
LOOPBACK = "127.0.0.1"

Report = dict[str, Any]


@frozen
class RankSeat:
    """The rank of this process among ``count``, and the address and token of the rendezvous."""

    rank: int
    count: int
    master: Address
    token: str


@frozen
class RankStart:
    """The options that all of these commands have, and the command line."""

    arguments: Sequence[str]
    json_path: Path | None
    rank: int | None
    master: str | None
    token: str

    def run(
        self, count: int, run_rank: Callable[[RankSeat], Awaitable[Report | None]]
    ) -> Report | None:
        """Run this process's rank, or all ranks here; write the report to the file of ``--json``.

        Returns:
          The report, which is still to be shown. None at other ranks than 0, and after it was printed.

        Raises:
          UserError: the options are incomplete, the rank does not exist, or a rank failed.
        """
        seat = self._seat(count)
        if seat is None:
            report: Report | None = self._run_ranks_here(count)
        else:
            work = partial(run_rank, seat)
            gc.freeze()  # as the daemons do
            report = trio.run(work, restrict_keyboard_interrupt_to_checkpoints=True)
        if report is None or self.json_path is None:
            return report
        text = json.dumps(report, indent=2)
        if str(self.json_path) == "-":
            click.echo(text)
            return None
        self.json_path.write_text(text + "\n")
        return report

    def _seat(self, count: int) -> RankSeat | None:
        """Return the seat that the options define, or None if all ranks are to be started here."""
        if self.rank is None:
            if self.master is not None:
                raise UserError("--master without --rank", hint="give this process's rank")
            return None
        if self.master is None or not self.token:
            raise UserError("--rank needs --master and --token")
        if self.rank >= count:
            raise UserError(f"there is no rank {self.rank} of {count}")
        return RankSeat(self.rank, count, Address.parse(self.master), self.token)

    def _run_ranks_here(self, count: int) -> Report:
        """Start all ranks on loopback with this command line and return rank 0's report."""
        master = Address(LOOPBACK, free_port(LOOPBACK))
        bench = click.get_current_context().command.name or ""
        own = [f"--master={master}", f"--token={secrets.token_hex(16)}", "--json=-"]
        command = [sys.executable, "-m", "holdfast", "bench", bench, *self.arguments, *own]
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(count):
                stdout = subprocess.PIPE if rank == 0 else None
                argv = [*command, f"--rank={rank}"]
                processes.append(subprocess.Popen(argv, stdout=stdout, text=True))
            text, _ = processes[0].communicate()
            if any(process.wait() for process in processes) or not text:
                raise UserError("a rank failed; see its message above")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        report: Report = json.loads(text)
        return report


class RankCommand(click.Command):
    """A command whose function takes a ``RankStart`` as ``start``, in place of these options."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.params += [
            click.Option(
                ["--json", "json_path"],
                type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
                help="Write the results to this file; - prints them.",
            ),
            click.Option(["--rank"], type=click.IntRange(0), help="Run only this rank."),
            click.Option(
                ["--master"], metavar="HOST:PORT", help="Address of rank 0 (with --rank)."
            ),
            click.Option(
                ["--token"],
                default="",
                show_default=False,
                help="Secret shared by all ranks (with --rank).",
            ),
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        arguments = tuple(args)
        rest = super().parse_args(ctx, args)
        own = (ctx.params.pop(name) for name in ("json_path", "rank", "master", "token"))
        ctx.params["start"] = RankStart(arguments, *own)
        return rest


def free_port(host: str) -> int:
    """Return a port that is free at this moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])

"""Command-line options, local processes and JSON report that the benchmarks with ranks share."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from attrs import frozen

from ...protocol.addresses import Address
from ...protocol.errors import UserError

ADAPTIVE = "adaptive"  # the link chooses its number of lanes
LOOPBACK = "127.0.0.1"
F = TypeVar("F", bound=Callable[..., object])

_OPTIONS = (
    click.option(
        "--json",
        "json_path",
        type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
        help="Write the results to this file; - prints them.",
    ),
    click.option("--rank", type=click.IntRange(0), help="Run only this rank."),
    click.option("--master", metavar="HOST:PORT", help="Address of rank 0 (with --rank)."),
    click.option("--token", default="", help="Secret shared by all ranks (with --rank)."),
)


@frozen
class RankSeat:
    """The rank of this process, and the address and token of the rendezvous."""

    rank: int
    master: Address
    token: str


def rank_options(function: F) -> F:
    """Add the options that all of these commands have: ``--json`` and a rank's seat."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def seat_of(rank: int | None, master: str | None, token: str, count: int) -> RankSeat | None:
    """Return the seat that the options define, or None if all ranks are to be started here.

    Raises:
      UserError: the options are incomplete, or the rank does not exist.
    """
    if rank is None:
        if master is not None:
            raise UserError("--master without --rank", hint="give this process's rank")
        return None
    if master is None or not token:
        raise UserError("--rank needs --master and --token")
    if rank >= count:
        raise UserError(f"there is no rank {rank} of {count}")
    return RankSeat(rank, Address.parse(master), token)


def run_ranks_here(bench: str, count: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Start all ranks of ``holdfast bench BENCH`` on loopback and return rank 0's report.

    Raises:
      UserError: a rank failed; it has printed the reason.
    """
    from .rendezvous import free_port  # imports sockets and TLS: slow

    master = Address(LOOPBACK, free_port(LOOPBACK))
    own = [f"--master={master}", f"--token={secrets.token_hex(16)}", "--json=-"]
    command = [sys.executable, "-m", "holdfast", "bench", bench, *arguments, *own]
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
    report: dict[str, Any] = json.loads(text)
    return report


def put_json(report: dict[str, Any], json_path: Path | None) -> bool:
    """Write the report to the path of ``--json``; return True if that is standard output."""
    if json_path is None:
        return False
    text = json.dumps(report, indent=2)
    if str(json_path) == "-":
        click.echo(text)
        return True
    json_path.write_text(text + "\n")
    return False

"""What the benchmarks between ranks share on their command lines: processes here, and the report."""

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

ADAPTIVE = "adaptive"  # as a number of lanes: as many as a link finds best
LOOPBACK = "127.0.0.1"
F = TypeVar("F", bound=Callable[..., object])

_OPTIONS = (
    click.option(
        "--json",
        "json_path",
        type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
        help="Write the figures there; - prints them.",
    ),
    click.option("--rank", type=click.IntRange(0), help="Be only this rank."),
    click.option("--master", metavar="HOST:PORT", help="Where rank 0 listens (with --rank)."),
    click.option("--token", default="", help="The same at all ranks (with --rank)."),
)


@frozen
class RankSeat:
    """Which rank this process is, and where it meets the others."""

    rank: int
    master: Address
    token: str


def rank_options(function: F) -> F:
    """``--json``, and a seat: the options that all of these commands have."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def seat_of(rank: int | None, master: str | None, token: str, count: int) -> RankSeat | None:
    """The seat that the options give, of so many; None: all ranks are to be started here.

    Raises:
      UserError: they give none, or half of one.
    """
    if rank is None:
        if master is not None:
            raise UserError("--master without --rank", hint="say which rank this is")
        return None
    if master is None or not token:
        raise UserError("--rank needs --master and --token")
    if rank >= count:
        raise UserError(f"there is no rank {rank} of {count}")
    return RankSeat(rank, Address.parse(master), token)


def run_ranks_here(bench: str, count: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Start all ranks of ``holdfast bench BENCH`` on loopback; rank 0's report.

    Raises:
      UserError: a rank failed; it has said why.
    """
    from .rendezvous import free_port  # sockets and TLS: every command would pay for them

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
            raise UserError("a rank failed; what it said is above")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    report: dict[str, Any] = json.loads(text)
    return report


def put_json(report: dict[str, Any], json_path: Path | None) -> bool:
    """Write the report where ``--json`` says; whether that was standard output."""
    if json_path is None:
        return False
    text = json.dumps(report, indent=2)
    if str(json_path) == "-":
        click.echo(text)
        return True
    json_path.write_text(text + "\n")
    return False

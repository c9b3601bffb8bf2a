"""What the benchmarks between ranks share on their command lines: processes here, and the report."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..protocol.addresses import Address
from ..protocol.errors import UserError

LOOPBACK = "127.0.0.1"


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

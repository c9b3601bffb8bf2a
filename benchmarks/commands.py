"""Running what a section measures, so that Ctrl+C leaves nothing behind.

Programs get an interrupt and time to clean up after themselves; only then are they killed. That
matters for ``benchmarks.allreduce``, which has started its ranks itself.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, BenchError
from benchmarks.wan_lab import Host, WanLab

Figures = dict[str, Any]
ALLREDUCE = "benchmarks.allreduce"
INTERRUPT_S = 5.0  # for a program to end by itself
PORT_FIRST = 29_500
TOKEN = "bench"  # nobody else is in the lab, nor on the loopback of this benchmark's ranks


def end(process: subprocess.Popen[Any]) -> None:
    """Interrupt it, wait a little, kill it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(INTERRUPT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def figures_of(module: str, *options: str) -> Figures:
    """Run a bench with all its ranks on this machine's loopback, and return its figures.

    Raises:
      BenchError: it failed.
    """
    argv = [sys.executable, "-m", module, *options, "--json=-"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        out, _ = process.communicate()
    except BaseException:
        end(process)
        raise
    if process.returncode != 0:
        raise BenchError(f"{command_of(module, options)} ended with {process.returncode}")
    found: Figures = json.loads(out)
    return found


def command_of(module: str, options: Sequence[str]) -> str:
    """Return the command as one would type it."""
    return f"python -m {module} {' '.join(options)}"


def allreduce_in(lab: WanLab, turn: int, *options: str) -> Figures:
    """Run ``benchmarks.allreduce`` with one rank on each of a lab's hosts, and return its figures.

    Args:
      turn: differs in each use of a lab, so that no port of the last one is waited for.
    """
    lab.stats()  # from here on the hub counts for us
    ranks: list[subprocess.Popen[Any]] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        figures = Path(directory) / "figures.json"
        given = [
            f"--peers={len(lab.hosts)}",
            f"--master={lab.address(0)}:{PORT_FIRST + turn}",
            f"--token={TOKEN}",
            f"--json={figures}",
            *options,
        ]
        try:
            for rank in range(len(lab.hosts)):
                argv = [sys.executable, "-m", ALLREDUCE, f"--rank={rank}", *given]
                ranks.append(lab.popen(rank, argv, cwd=ROOT, stdout=subprocess.DEVNULL))
            failed = [rank for rank, process in enumerate(ranks) if process.wait()]
        finally:
            for process in ranks:
                end(process)
        if failed:
            raise BenchError(f"rank {failed[0]} failed; what it said is above")
        answer: Figures = json.loads(figures.read_text())
    answer["hub_late_ms_max"] = lab.stats()["late_ms_max"]
    return answer


def lab_command(host: Host, count: int, options: Sequence[str]) -> str:
    """How to do by hand what ``allreduce_in`` does, for a lab of equal hosts."""
    return (
        f"W --hosts {count} --up-mbit {host.up_mbit:g} --down-mbit {host.down_mbit:g} "
        f"--delay-ms {host.delay_ms:g} --loss {host.loss:g} -- python -m {ALLREDUCE} "
        f"--rank {{rank}} --peers {{peers}} --master 198.18.0.1:{PORT_FIRST} --token {TOKEN} "
        + " ".join(options)
    )

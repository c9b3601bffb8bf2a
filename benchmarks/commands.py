"""Running what a section measures, so that Ctrl+C leaves nothing behind.

Programs get an interrupt and time to clean up after themselves; only then are they killed. That
matters for ``holdfast bench allreduce``, which has started its ranks itself.
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

from benchmarks.wan_lab import Host, WanLab

ROOT = Path(__file__).resolve().parents[1]
HOLDFAST = [sys.executable, "-m", "holdfast"]
INTERRUPT_S = 5.0  # for a program to end by itself
PORT_FIRST = 29_500
TOKEN = "bench"  # nobody else is in the lab, nor on the loopback of this benchmark's ranks


class BenchError(Exception):
    """A program that was to be measured failed; its own words are above."""


def run(argv: Sequence[str], **options: Any) -> str:
    """What a program prints on standard output.

    Raises:
      BenchError: it failed.
    """
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT, **options)
    try:
        out, _ = process.communicate()
    except BaseException:
        end(process)
        raise
    if process.returncode != 0:
        raise BenchError(f"{' '.join(argv)} ended with {process.returncode}")
    return str(out)


def end(process: subprocess.Popen[Any]) -> None:
    """Interrupt it, wait a little, kill it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(INTERRUPT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def allreduce(*options: str) -> dict[str, Any]:
    """``holdfast bench allreduce`` with all ranks on this machine's loopback; its figures."""
    answer: dict[str, Any] = json.loads(
        run([*HOLDFAST, "bench", "allreduce", *options, "--json=-"])
    )
    return answer


def allreduce_in(lab: WanLab, turn: int, *options: str) -> dict[str, Any]:
    """The same with one rank on each of a lab's hosts.

    Args:
      turn: differs in each use of a lab, so that no port of the last one is waited for.
    """
    lab.stats()  # from here on the hub counts for us
    hub_before_s = lab.stats()["cpu_s"]
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
                argv = [*HOLDFAST, "bench", "allreduce", f"--rank={rank}", *given]
                ranks.append(lab.popen(rank, argv, cwd=ROOT, stdout=subprocess.DEVNULL))
            failed = [rank for rank, process in enumerate(ranks) if process.wait()]
        finally:
            for process in ranks:
                end(process)
        if failed:
            raise BenchError(f"rank {failed[0]} failed; what it said is above")
        answer: dict[str, Any] = json.loads(figures.read_text())
    stats = lab.stats()
    answer["hub"] = {
        "late_ms_max": stats["late_ms_max"],
        "cpu_s": stats["cpu_s"] - hub_before_s,
        "lost": sum(host[way]["lost"] for host in stats["hosts"] for way in ("up", "down")),
        "dropped": sum(host[way]["dropped"] for host in stats["hosts"] for way in ("up", "down")),
    }
    return answer


def lab_command(host: Host, count: int, options: Sequence[str]) -> str:
    """How to do by hand what ``allreduce_in`` does, for a lab of equal hosts."""
    shown = [option for option in options if not option.startswith("--json")]
    return (
        f"W --hosts {count} --up-mbit {host.up_mbit:g} --down-mbit {host.down_mbit:g} "
        f"--delay-ms {host.delay_ms:g} --loss {host.loss:g} -- holdfast bench allreduce "
        f"--rank {{rank}} --peers {{peers}} --master 198.18.0.1:{PORT_FIRST} --token {TOKEN} "
        + " ".join(shown)
    )

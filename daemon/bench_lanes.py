"""``holdfast bench lanes``: what a link carries over how many lanes.

    holdfast bench lanes                             two processes, this machine's loopback
    holdfast bench lanes --rank R --master ...       one of the two; start each where it belongs

Rank 0 sends, rank 1 counts what arrives, over a new link for each row: some seconds until TCP has
found its rate (and, where lanes adapt, until their number is found), then the measured ones.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import trio
from rich.console import Console
from rich.table import Table

from ..protocol.addresses import Address
from ..protocol.errors import UserError

LOOPBACK = "127.0.0.1"
RANKS = 2
ADAPTIVE = "adaptive"
COUNTS = ("1", "2", "4", "8", "16", ADAPTIVE)
CONGESTION = ("cubic", "bbr")


def parse_list(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Words with commas between them."""
    return tuple(word for word in value.replace(" ", "").split(",") if word)


@click.command("lanes")
@click.option(
    "--counts",
    callback=parse_list,
    default=",".join(COUNTS),
    show_default=True,
    help="Lanes to try.",
)
@click.option(
    "--congestion",
    callback=parse_list,
    default=",".join(CONGESTION),
    show_default=True,
    help="TCP congestion controls to try.",
)
@click.option("--seconds", type=click.FloatRange(0.1), default=3.0, show_default=True)
@click.option("--warm-up", type=click.FloatRange(0), default=1.0, show_default=True)
@click.option("--adaptive-warm-up", type=click.FloatRange(0), default=3.0, show_default=True)
@click.option("--max-mbit", type=click.FloatRange(0, min_open=True), help="Cap the sender.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write the figures there; - prints them.",
)
@click.option("--rank", type=click.IntRange(0, RANKS - 1), help="Be only this rank.")
@click.option("--master", metavar="HOST:PORT", help="Where rank 0 listens (with --rank).")
@click.option("--token", default="", help="The same at both ranks (with --rank).")
def lanes(
    counts: tuple[str, ...],
    congestion: tuple[str, ...],
    seconds: float,
    warm_up: float,
    adaptive_warm_up: float,
    max_mbit: float | None,
    json_path: Path | None,
    rank: int | None,
    master: str | None,
    token: str,
) -> None:
    """Measure what a link carries over 1, 2, 4 ... lanes, and over as many as it takes itself.

    Without --rank both ends are started here, on loopback. With --rank and --master this is one of
    them: start each where it belongs. That is for a lab: whoever knows the token gets a certificate
    from rank 0, over a connection that is not encrypted.

    \b
    Examples:
      holdfast bench lanes
      holdfast bench lanes --counts 1,adaptive --congestion bbr --json -
    """
    # Not at the top: whoever asks for --help need not wait for numpy.
    from .bench_lanes_rank import Options, run_rank

    for count in counts:
        if count != ADAPTIVE and not (count.isdigit() and 1 <= int(count) <= 64):
            raise UserError(f"{count!r} is no number of lanes", hint=f"write {','.join(COUNTS)}")
    report: dict[str, Any] | None
    if rank is None:
        if master is not None:
            raise UserError("--master without --rank", hint="say which rank this is")
        given = [
            f"--counts={','.join(counts)}",
            f"--congestion={','.join(congestion)}",
            f"--seconds={seconds}",
            f"--warm-up={warm_up}",
            f"--adaptive-warm-up={adaptive_warm_up}",
            *([] if max_mbit is None else [f"--max-mbit={max_mbit}"]),
        ]
        report = run_here(given)
    else:
        if master is None or not token:
            raise UserError("--rank needs --master and --token")
        address = Address.parse(master)
        warm_ups = (warm_up, adaptive_warm_up)
        options = Options(
            rank, address, token, counts, congestion, seconds, *warm_ups, max_mbit=max_mbit
        )
        report = trio.run(run_rank, options)
    if report is not None:
        show(report, json_path)


def run_here(arguments: Sequence[str]) -> dict[str, Any]:
    """Start both ranks on loopback; the report of rank 0."""
    from .rendezvous import free_port  # sockets and TLS: every command would pay for them

    own = [f"--master={Address(LOOPBACK, free_port(LOOPBACK))}", f"--token={secrets.token_hex(16)}"]
    command = [sys.executable, "-m", "holdfast", "bench", "lanes", *arguments, *own, "--json=-"]
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(RANKS):
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


def show(report: dict[str, Any], json_path: Path | None) -> None:
    """Print the figures, or write them where ``--json`` says."""
    text = json.dumps(report, indent=2)
    if json_path is not None and str(json_path) == "-":
        click.echo(text)
        return
    if json_path is not None:
        json_path.write_text(text + "\n")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("lanes", "congestion", "Mbit/s"):
        table.add_column(heading, justify="left" if heading == "congestion" else "right")
    for row in report["rows"]:
        adaptive = row["lanes"] == ADAPTIVE
        lanes = f"{ADAPTIVE} ({row['lanes_open']})" if adaptive else row["lanes"]
        table.add_row(lanes, row["congestion"], f"{row['mbit_per_s']:.1f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"[dim]round trip {report['round_trip_ms']:.3g} ms[/dim]")

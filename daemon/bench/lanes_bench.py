"""``holdfast bench lanes``: what a link carries over how many lanes.

    holdfast bench lanes                             two processes, this machine's loopback
    holdfast bench lanes --rank R --master ...       one of the two; start each where it belongs

Rank 0 sends, rank 1 counts what arrives, over a new link for each row: some seconds until TCP has
found its rate (and, where lanes adapt, until their number is found), then the measured ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import trio
from rich.console import Console
from rich.table import Table

from ...protocol.errors import UserError
from .rank_processes import ADAPTIVE, put_json, rank_options, run_ranks_here, seat_of

RANKS = 2
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
@rank_options
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
    from .lanes_rank import LanesOptions, run_rank

    for count in counts:
        if count != ADAPTIVE and not (count.isdigit() and 1 <= int(count) <= 64):
            raise UserError(f"{count!r} is no number of lanes", hint=f"write {','.join(COUNTS)}")
    seat = seat_of(rank, master, token, RANKS)
    report: dict[str, Any] | None
    if seat is None:
        given = [
            f"--counts={','.join(counts)}",
            f"--congestion={','.join(congestion)}",
            f"--seconds={seconds}",
            f"--warm-up={warm_up}",
            f"--adaptive-warm-up={adaptive_warm_up}",
            *([] if max_mbit is None else [f"--max-mbit={max_mbit}"]),
        ]
        report = run_ranks_here("lanes", RANKS, given)
    else:
        warm_ups = (warm_up, adaptive_warm_up)
        options = LanesOptions(
            seat.rank,
            seat.master,
            seat.token,
            counts,
            congestion,
            seconds,
            *warm_ups,
            max_mbit=max_mbit,
        )
        report = trio.run(run_rank, options, restrict_keyboard_interrupt_to_checkpoints=True)
    if report is not None:
        show(report, json_path)


def show(report: dict[str, Any], json_path: Path | None) -> None:
    """Print the figures, or write them where ``--json`` says."""
    if put_json(report, json_path):
        return
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

"""``holdfast bench lanes``: a link's rate as a function of its number of lanes.

    holdfast bench lanes                             two processes on this machine's loopback
    holdfast bench lanes --rank R --master ...       one of the two; start one on each machine

Rank 0 sends and rank 1 counts the received bytes, over a new link for each row. The warm-up lets TCP
find its rate, and with adaptive lanes the link its number of lanes.
"""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

from ...protocol.errors import UserError
from .rank_processes import ADAPTIVE, RankCommand, RankStart, Report

RANKS = 2
COUNTS = ("1", "2", "4", "8", "16", ADAPTIVE)
CONGESTION = ("cubic", "bbr")


def parse_list(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """Parse a list of words separated by commas."""
    return tuple(word for word in value.replace(" ", "").split(",") if word)


@click.command("lanes", cls=RankCommand)
@click.option(
    "--counts", callback=parse_list, default=",".join(COUNTS), help="Numbers of lanes to try."
)
@click.option(
    "--congestion",
    callback=parse_list,
    default=",".join(CONGESTION),
    help="TCP congestion controls to try.",
)
@click.option(
    "--seconds", type=click.FloatRange(0.1), default=3.0, help="Measured time of each row."
)
@click.option(
    "--warm-up", type=click.FloatRange(0), default=1.0, help="Seconds before the measurement."
)
@click.option(
    "--adaptive-warm-up", type=click.FloatRange(0), default=3.0, help="The same for adaptive lanes."
)
@click.option(
    "--max-mbit",
    type=click.FloatRange(0, min_open=True),
    help="Upload limit of the sender, Mbit/s.",
)
def lanes(
    start: RankStart,
    counts: tuple[str, ...],
    congestion: tuple[str, ...],
    seconds: float,
    warm_up: float,
    adaptive_warm_up: float,
    max_mbit: float | None,
) -> None:
    """Measure a link's rate with 1, 2, 4 ... lanes, and with the number that it chooses itself.

    Without --rank both ends are started here, on loopback. With --rank and --master this is one end;
    start one on each machine. Use this in a lab only: rank 0 issues certificates to every process that
    knows the token, over an unencrypted connection.

    \b
    Examples:
      holdfast bench lanes
      holdfast bench lanes --counts 1,adaptive --congestion bbr --json -
    """
    # Imported here so that --help need not wait for numpy.
    from .lanes_rank import LanesOptions, run_rank

    for count in counts:
        if count != ADAPTIVE and not (count.isdigit() and 1 <= int(count) <= 64):
            raise UserError(
                f"{count!r} is not a number of lanes", hint=f"example: {','.join(COUNTS)}"
            )
    warm_ups = (warm_up, adaptive_warm_up)
    report = start.run(
        RANKS,
        lambda seat: run_rank(
            LanesOptions(seat, counts, congestion, seconds, *warm_ups, max_mbit=max_mbit)
        ),
    )
    if report is not None:
        show(report)


def show(report: Report) -> None:
    """Print the results."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("lanes", "congestion", "Mbit/s"):
        table.add_column(heading, justify="left" if heading == "congestion" else "right")
    for row in report["rows"]:
        adaptive = row["lanes"] == ADAPTIVE
        lanes = f"{ADAPTIVE} ({row['lanes_open']})" if adaptive else row["lanes"]
        table.add_row(lanes, row["congestion"], f"{row['mbit_per_s']:.1f}")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"[dim]round-trip time {report['round_trip_ms']:.3g} ms[/dim]")

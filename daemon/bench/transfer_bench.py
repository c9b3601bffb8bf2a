"""``holdfast bench transfer``: how long a copy of the shared state takes over real sockets.

    holdfast bench transfer                          all ranks on this machine's loopback
    holdfast bench transfer --rank R --master ...    one rank; start each where it belongs

Rank 0 copies, the others give. This file owns the command line; what a rank does is in
``transfer_rank``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import trio

from .allreduce_bench import parse_size
from .rank_processes import put_json, rank_options, run_ranks_here, seat_of


@click.command("transfer")
@click.option("--donors", type=click.IntRange(1, 16), default=1, show_default=True)
@click.option(
    "--size",
    callback=parse_size,
    default="256MiB",
    show_default=True,
    help="Of the state: float32 values and as much momentum.",
)
@click.option("--fragments", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--repeat", type=click.IntRange(1), default=7, show_default=True)
@click.option(
    "--warm-up", type=click.IntRange(0), default=2, show_default=True, help="Not counted."
)
@rank_options
def transfer(
    donors: int,
    size: int,
    fragments: int,
    repeat: int,
    warm_up: int,
    json_path: Path | None,
    rank: int | None,
    master: str | None,
    token: str,
) -> None:
    """Time a copy of the shared state, and the check of one that is equal already.

    Without --rank all ranks are started here, on loopback. With --rank and --master this is one of
    them: start each where it belongs. That is for a lab: whoever knows the token gets a certificate
    from rank 0, over a connection that is not encrypted.

    \b
    Examples:
      holdfast bench transfer
      holdfast bench transfer --donors 3 --size 1GiB --json -
    """
    # Not at the top: whoever asks for --help need not wait for numpy.
    from .transfer_rank import TransferOptions, run_rank

    seat = seat_of(rank, master, token, donors + 1)
    report: dict[str, Any] | None
    if seat is None:
        given = [
            f"--donors={donors}",
            f"--size={size}",
            f"--fragments={fragments}",
            f"--repeat={repeat}",
            f"--warm-up={warm_up}",
        ]
        report = run_ranks_here("transfer", donors + 1, given)
    else:
        options = TransferOptions(
            donors, seat.rank, seat.master, seat.token, size, fragments, repeat, warm_up
        )
        report = trio.run(run_rank, options, restrict_keyboard_interrupt_to_checkpoints=True)
    if report is not None:
        show(report, json_path)


def show(report: dict[str, Any], json_path: Path | None) -> None:
    """Print the figures, or write them where ``--json`` says."""
    if put_json(report, json_path):
        return
    click.echo(
        f"{report['bytes'] / 1e6:.0f} MB in {report['fragments']} fragments "
        f"from {report['donors']} donors"
    )
    for name, what in (
        ("copy", "copied, every block checked"),
        ("equal", "found equal, every byte digested"),
    ):
        took = report[name]
        click.echo(f"  {what}: {took['median_s'] * 1e3:.0f} ms (best {took['min_s'] * 1e3:.0f})")
    click.echo(
        f"  a copy takes {report['copier_cpu_s'] * 1e3:.0f} ms of CPU at the copier, "
        f"{report['donor_cpu_s'] * 1e3:.0f} at a donor"
    )
    click.echo(
        f"  the copier takes {report['memory_bytes'] / 1e6:.0f} MB at the most, the state included"
    )
    digest = report["digest"]
    click.echo(
        f"  digests: {digest['ours_gb_s']:.2f} GB/s; BLAKE3 itself {digest['one_gb_s']:.2f} on one "
        f"core, {digest['all_gb_s']:.2f} on all"
    )

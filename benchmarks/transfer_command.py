"""``holdfast bench transfer``: the duration of a copy of the shared state over real sockets.

    holdfast bench transfer                          all ranks on this machine's loopback
    holdfast bench transfer --rank R --master ...    one rank; start one on each machine

Rank 0 copies from the other ranks. This is the command line; ``transfer_rank`` is the work of a rank.
"""

from __future__ import annotations

import click

from .allreduce_bench import parse_size
from .rank_processes import RankCommand, RankStart, Report


@click.command("transfer", cls=RankCommand)
@click.option(
    "--donors", type=click.IntRange(1, 16), default=1, help="Number of ranks to copy from."
)
@click.option(
    "--size",
    callback=parse_size,
    default="256MiB",
    help="Size of the state: float32 values and as much momentum.",
)
@click.option(
    "--fragments", type=click.IntRange(1, 64), default=4, help="Number of fragments of the state."
)
@click.option("--repeat", type=click.IntRange(1), default=7, help="Counted repetitions.")
@click.option(
    "--warm-up", type=click.IntRange(0), default=2, help="Repetitions before those, not counted."
)
def transfer(
    start: RankStart, donors: int, size: int, fragments: int, repeat: int, warm_up: int
) -> None:
    """Time a copy of the shared state, and the check of a copy that is already equal.

    Without --rank all ranks are started here, on loopback. With --rank and --master this is one rank;
    start one on each machine. Use this in a lab only: rank 0 issues certificates to every process that
    knows the token, over an unencrypted connection.

    \b
    Examples:
      holdfast bench transfer
      holdfast bench transfer --donors 3 --size 1GiB --json -
    """
    # Imported here so that --help need not wait for numpy.
    from .transfer_rank import TransferOptions, run_rank

    report = start.run(
        donors + 1,
        lambda seat: run_rank(TransferOptions(seat, size, fragments, repeat, warm_up)),
    )
    if report is not None:
        show(report)


def show(report: Report) -> None:
    """Print the results."""
    click.echo(
        f"{report['bytes'] / 1e6:.0f} MB in {report['fragments']} fragments "
        f"from {report['donors']} donors"
    )
    for name, what in (
        ("copy", "copied, every block checked"),
        ("equal", "checked as equal, every byte hashed"),
    ):
        took = report[name]
        click.echo(f"  {what}: {took['median_s'] * 1e3:.0f} ms (best {took['min_s'] * 1e3:.0f})")
    click.echo(
        f"  a copy needs {report['copier_cpu_s'] * 1e3:.0f} ms of CPU time at the copier, "
        f"{report['donor_cpu_s'] * 1e3:.0f} ms at a donor"
    )
    click.echo(
        f"  peak memory of the copier: {report['memory_bytes'] / 1e6:.0f} MB, with the state"
    )
    digest = report["digest"]
    click.echo(
        f"  digests: {digest['ours_gb_s']:.2f} GB/s; plain BLAKE3: {digest['one_gb_s']:.2f} GB/s on "
        f"one core, {digest['all_gb_s']:.2f} GB/s on all"
    )

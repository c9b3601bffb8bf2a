"""``holdfast bench allreduce``: the duration of one reduction over real sockets.

    holdfast bench allreduce --peers 4               all ranks on this machine's loopback
    holdfast bench allreduce --rank R --master ...   one rank; start one on each machine

This is the command line; ``allreduce_rank`` is the work of a rank.
"""

from __future__ import annotations

import math

import click

from ...membership.spec.spec import CODECS
from ...protocol.errors import UserError
from .rank_processes import RankCommand, RankStart, Report

VALUE_BYTES = 4  # the least size
UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6}


def parse_size(_context: click.Context, _parameter: click.Parameter, value: str) -> int:
    """Parse a size in bytes: ``256MiB``, ``4 KiB``, ``1000000``."""
    number = value.strip().rstrip("BbIiKkMmGg ")
    unit = value.strip()[len(number) :].strip().upper()
    if not number.isdigit() or unit not in UNITS or int(number) * UNITS[unit] < VALUE_BYTES:
        raise click.BadParameter(f"{value!r} is not a size; example: 256MiB")
    return int(number) * UNITS[unit]


def parse_rates(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[float, ...]:
    """Parse rates in Mbit/s: one for all ranks, or one for each, separated by commas."""
    try:
        rates = tuple(float(text) for text in value.split(",")) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of rates; example: 20,20,1000") from None
    if any(not rate > 0 for rate in rates):
        raise click.BadParameter("a rate must be more than 0")
    return rates


def _per_rank(name: str, rates: tuple[float, ...], peers: int) -> tuple[float, ...]:
    if len(rates) == 1:
        return rates * peers
    if len(rates) not in (0, peers):
        raise UserError(f"{name} has {len(rates)} rates, but there are {peers} peers")
    return rates


@click.command("allreduce", cls=RankCommand)
@click.option("--peers", type=click.IntRange(1, 64), default=2, help="Number of ranks.")
@click.option("--size", callback=parse_size, default="256MiB", help="Size of the float32 values.")
@click.option(
    "--codec",
    type=click.Choice(CODECS),
    metavar="CODEC",
    default="fp32",
    help="Codec for both directions.",
)
@click.option("--repeat", type=click.IntRange(1), default=5, help="Counted repetitions.")
@click.option(
    "--warm-up", type=click.IntRange(0), default=1, help="Repetitions before those, not counted."
)
@click.option("--vs", type=click.Choice(["gloo"]), help="Alternate with another library.")
@click.option(
    "--up",
    callback=parse_rates,
    metavar="MBIT[,...]",
    help="Upload rates of the ranks, for the plan and the lower bound.",
)
@click.option(
    "--down",
    callback=parse_rates,
    metavar="MBIT[,...]",
    help="Download rates of the ranks (default: as --up).",
)
@click.option(
    "--delay-ms",
    type=click.FloatRange(0),
    default=0.0,
    help="One-way delay between two ranks, for the lower bound.",
)
@click.option(
    "--max-upload",
    callback=parse_rates,
    metavar="MBIT[,...]",
    help="Upload limits of the ranks, unknown to the plan.",
)
@click.option(
    "--congestion", metavar="NAME", default="bbr", help="TCP congestion control to ask for."
)
@click.option("--sealed", is_flag=True, help="Sign and keep contributions, as audits require.")
def allreduce(
    start: RankStart,
    peers: int,
    size: int,
    codec: str,
    repeat: int,
    warm_up: int,
    vs: str | None,
    up: tuple[float, ...],
    down: tuple[float, ...],
    delay_ms: float,
    max_upload: tuple[float, ...],
    congestion: str,
    sealed: bool,
) -> None:
    """Time the all-reduce between processes that run the code of peers.

    Without --rank all ranks are started here, on loopback. With --rank and --master this is one rank;
    start one on each machine. Use this in a lab only: rank 0 issues certificates to every process that
    knows the token, over an unencrypted connection.

    \b
    Examples:
      holdfast bench allreduce --peers 4 --size 64MiB
      holdfast bench allreduce --codec int8 --json -
    """
    # Imported here so that --help need not wait for numpy.
    from .allreduce_rank import GLOO_WORKER, AllreduceOptions, run_rank

    if vs == "gloo" and not GLOO_WORKER.exists():
        raise UserError(
            f"{GLOO_WORKER} does not exist", hint="--vs gloo needs a clone of the repository"
        )
    up = _per_rank("--up", up, peers)
    down = _per_rank("--down", down, peers) or up
    max_upload = _per_rank("--max-upload", max_upload, peers)
    report = start.run(
        peers,
        lambda seat: run_rank(
            AllreduceOptions(
                seat=seat,
                bytes=size,
                codec=codec,
                repeat=repeat,
                warm_up=warm_up,
                gloo=vs == "gloo",
                up_mbit=up,
                down_mbit=down,
                delay_ms=delay_ms,
                max_upload_mbit=max_upload,
                congestion=congestion,
                sealed=sealed,
            )
        ),
    )
    if report is not None:
        show(report)


def show(report: Report) -> None:
    """Print the results."""
    megabytes = report["bytes"] / 1e6
    click.echo(f"{report['peers']} peers, {megabytes:g} MB of float32, {report['codec']}")
    median_s = report["median_s"]
    click.echo(f"  holdfast  {_milliseconds(median_s)} (best {_milliseconds(report['min_s'])})")
    if report["gloo_median_s"] is not None:
        click.echo(f"  gloo      {_milliseconds(report['gloo_median_s'])}")
        click.echo(f"  holdfast is {report['ratio']:.2f} times as fast as gloo")
    if report["t_lb_s"] is not None:
        click.echo(
            f"  lower bound of any all-reduce over these links: {_milliseconds(report['t_lb_s'])}"
        )
    sent = max(report["socket_bytes_per_peer"])
    click.echo(f"  a peer sent at most {sent / 1e6:.3f} MB per reduction, with all overhead")


def _milliseconds(seconds: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(max(seconds * 1e3, 1e-3))))
    return f"{seconds * 1e3:.{digits}f} ms"

"""``holdfast bench allreduce``: how long one reduction takes over real sockets.

    holdfast bench allreduce --peers 4               all ranks on this machine's loopback
    holdfast bench allreduce --rank R --master ...   one rank; start each where it belongs

This file owns the command line; what a rank does is in ``allreduce_rank``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click
import trio

from ...membership.spec.spec import CODECS
from ...protocol.errors import UserError
from .rank_processes import put_json, rank_options, run_ranks_here, seat_of

VALUE_BYTES = 4  # a size below this holds no value at all
UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6}


def parse_size(_context: click.Context, _parameter: click.Parameter, value: str) -> int:
    """``256MiB``, ``4 KiB``, ``1000000``."""
    number = value.strip().rstrip("BbIiKkMmGg ")
    unit = value.strip()[len(number) :].strip().upper()
    if not number.isdigit() or unit not in UNITS or int(number) * UNITS[unit] < VALUE_BYTES:
        raise click.BadParameter(f"{value!r} is no size; write it like 256MiB")
    return int(number) * UNITS[unit]


def parse_rates(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[float, ...]:
    """Mbit/s, one for all ranks or one for each, with commas."""
    try:
        rates = tuple(float(text) for text in value.split(",")) if value else ()
    except ValueError:
        raise click.BadParameter(f"{value!r} are no rates; write them like 20,20,1000") from None
    if any(not rate > 0 for rate in rates):
        raise click.BadParameter("a rate is more than 0")
    return rates


def _per_rank(name: str, rates: tuple[float, ...], peers: int) -> tuple[float, ...]:
    if len(rates) == 1:
        return rates * peers
    if len(rates) not in (0, peers):
        raise UserError(f"{name} has {len(rates)} rates for {peers} peers")
    return rates


@click.command("allreduce")
@click.option("--peers", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option(
    "--size",
    callback=parse_size,
    default="256MiB",
    show_default=True,
    help="Of the float32 values.",
)
@click.option(
    "--codec", type=click.Choice(CODECS), metavar="CODEC", default="fp32", show_default=True
)
@click.option("--repeat", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--warm-up", type=click.IntRange(0), default=1, show_default=True, help="Not counted."
)
@click.option("--vs", type=click.Choice(["gloo"]), help="Take turns with another library.")
@rank_options
@click.option(
    "--up",
    callback=parse_rates,
    metavar="MBIT[,...]",
    help="The ranks' upload rates, for the plan and the bound.",
)
@click.option(
    "--down",
    callback=parse_rates,
    metavar="MBIT[,...]",
    help="Likewise download; default: as --up.",
)
@click.option(
    "--delay-ms",
    type=click.FloatRange(0),
    default=0.0,
    help="One way between two ranks, for the bound.",
)
@click.option(
    "--max-upload",
    callback=parse_rates,
    metavar="MBIT[,...]",
    help="What the ranks allow themselves to send; the plan is not told.",
)
@click.option("--sealed", is_flag=True, help="Sign and keep contributions, as with audits.")
def allreduce(
    peers: int,
    size: int,
    codec: str,
    repeat: int,
    warm_up: int,
    vs: str | None,
    json_path: Path | None,
    rank: int | None,
    master: str | None,
    token: str,
    up: tuple[float, ...],
    down: tuple[float, ...],
    delay_ms: float,
    max_upload: tuple[float, ...],
    sealed: bool,
) -> None:
    """Time the all-reduce between processes that run what peers run.

    Without --rank all ranks are started here, on loopback. With --rank and --master this is one of
    them: start each where it belongs. That is for a lab: whoever knows the token gets a certificate
    from rank 0, over a connection that is not encrypted.

    \b
    Examples:
      holdfast bench allreduce --peers 4 --size 64MiB
      holdfast bench allreduce --codec int8 --json -
    """
    # Not at the top: whoever asks for --help need not wait for numpy.
    from .allreduce_rank import GLOO_WORKER, AllreduceOptions, run_rank

    if vs == "gloo" and not GLOO_WORKER.exists():
        raise UserError(
            f"{GLOO_WORKER} is missing", hint="--vs gloo needs a clone of the repository"
        )
    arguments = {
        "--peers": peers,
        "--size": size,
        "--codec": codec,
        "--repeat": repeat,
        "--warm-up": warm_up,
        "--vs": vs,
        "--up": ",".join(map(str, up)),
        "--down": ",".join(map(str, down)),
        "--delay-ms": delay_ms,
        "--max-upload": ",".join(map(str, max_upload)),
    }
    seat = seat_of(rank, master, token, peers)
    report: dict[str, Any] | None
    if seat is None:
        given = [f"{name}={value}" for name, value in arguments.items() if value not in ("", None)]
        report = run_ranks_here("allreduce", peers, [*given, *(["--sealed"] if sealed else [])])
    else:
        up = _per_rank("--up", up, peers)
        options = AllreduceOptions(
            peers=peers,
            rank=seat.rank,
            master=seat.master,
            token=seat.token,
            bytes=size,
            codec=codec,
            repeat=repeat,
            warm_up=warm_up,
            gloo=vs == "gloo",
            up_mbit=up,
            down_mbit=_per_rank("--down", down, peers) or up,
            delay_ms=delay_ms,
            max_upload_mbit=_per_rank("--max-upload", max_upload, peers),
            sealed=sealed,
        )
        report = trio.run(run_rank, options, restrict_keyboard_interrupt_to_checkpoints=True)
    if report is not None:
        show(report, json_path)


def show(report: dict[str, Any], json_path: Path | None) -> None:
    """Print the figures, or write them where ``--json`` says."""
    if put_json(report, json_path):
        return
    megabytes = report["bytes"] / 1e6
    click.echo(f"{report['peers']} peers, {megabytes:g} MB of float32, {report['codec']}")
    median_s = report["median_s"]
    click.echo(f"  holdfast  {_milliseconds(median_s)} (best {_milliseconds(report['min_s'])})")
    if report["gloo_median_s"] is not None:
        click.echo(f"  gloo      {_milliseconds(report['gloo_median_s'])}")
        click.echo(f"  holdfast is {report['ratio']:.2f} times as fast as gloo")
    if report["t_lb_s"] is not None:
        click.echo(
            f"  no all-reduce over these links takes less than {_milliseconds(report['t_lb_s'])}"
        )
    sent = max(report["socket_bytes_per_peer"])
    click.echo(f"  a peer sent at most {sent / 1e6:.3f} MB a reduction, all overhead included")


def _milliseconds(seconds: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(max(seconds * 1e3, 1e-3))))
    return f"{seconds * 1e3:.{digits}f} ms"

"""``holdfast config plan``: the cost of a run's settings on a given network."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from attrs import asdict, evolve

from ...membership.planning.bandwidth import Bandwidth
from ...membership.planning.inside import GpuHost, Transformer, judge, simplest
from ...membership.planning.predict import (
    Conditions,
    Prediction,
    further_host_bytes,
    memory_bytes,
    predict,
)
from ...membership.spec.spec import RunSpec
from ...protocol.messages import MEMBERS_MAX, RANKS_MAX
from .options import Parsed, json_option

PARAMETERS_MAX = 1e15
STEP_S_MAX = 86_400.0
LATENCY_S_MAX = 60.0
BYTES_PER_S_MIN, BYTES_PER_S_MAX = 1e2, 1e12
# Of a line's rate, what is left for tensor bytes: IP and TCP headers take 3.5 %, acknowledgements
# of what comes the other way 2 %.
PAYLOAD_SHARE = 0.94
FACTOR_MAX = 1_000_000
VOCABULARY = 32_000
TOKENS = 2048

_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)\s*([a-z/]*)", re.IGNORECASE)


def _amount(
    name: str,
    units: Mapping[str, float],
    low: float,
    high: float,
    counted_in: str,
    examples: str,
) -> Parsed[float]:
    """Make the type of a number with a unit, which is converted to the base unit.

    Args:
      units: factor of each unit; matched as written, else in lower case. "" stands for no unit.
      low, high: bounds, in the base unit.
      counted_in: name of the base unit, for error messages.
      examples: valid values, for error messages.
    """

    def parse(text: str) -> float:
        found = _NUMBER.fullmatch(text.strip())
        unit = found.group(2) if found is not None else ""
        worth = units.get(unit, units.get(unit.lower()))
        if found is None or worth is None:
            raise click.BadParameter(f"{text!r} is not valid; examples: {examples}")
        amount = float(found.group(1)) * worth
        if not (math.isfinite(amount) and low <= amount <= high):
            raise click.BadParameter(
                f"{text!r} is not between {low:g} and {high:g} {counted_in}; examples: {examples}"
            )
        return amount

    return Parsed(name, parse)


def _products(
    name: str, factors: Sequence[int], examples: str, *, several: bool = False
) -> Parsed[tuple[tuple[int, ...], ...]]:
    """Make the type of products of whole numbers, with a comma between them: 2x24,1x12.

    Args:
      factors: how many numbers each may have; each is from 1 to a million.
      several: whether there may be more than one product.
      examples: valid values, for error messages.
    """

    def parse(text: str) -> tuple[tuple[int, ...], ...]:
        words = [each.lower().split("x") for each in text.split(",")]
        try:
            products = tuple(tuple(map(int, product)) for product in words)
        except ValueError:
            products = ()
        if (
            not 1 <= len(products) <= (MEMBERS_MAX if several else 1)
            or any(len(product) not in factors for product in products)
            or not all(1 <= number <= FACTOR_MAX for product in products for number in product)
        ):
            raise click.BadParameter(f"{text!r} is not valid; examples: {examples}")
        return products

    return Parsed(name, parse)


COUNT = _amount(
    "count",
    {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12},
    1.0,
    PARAMETERS_MAX,
    "parameters",
    "1e9, 30M or 1.3B",
)
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
STEP_TIME = _amount("seconds", _SECONDS, 1e-6, STEP_S_MAX, "s", "0.1, 100ms or 2s")
LATENCY = _amount("seconds", _SECONDS, 0.0, LATENCY_S_MAX, "s", "0.05, 50ms or 0")
# Converted to bytes per second. A capital B means bytes, as in 12MB/s; bit and bps mean bits.
LINE = _amount(
    "rate",
    {
        f"{prefix}{unit}": factor / 8
        for prefix, factor in (("", 1.0), ("k", 1e3), ("m", 1e6), ("g", 1e9))
        for unit in ("bit", "bit/s", "bps")
    }
    | {
        f"{prefix}B/s": factor
        for prefix, factor in (("k", 1e3), ("K", 1e3), ("M", 1e6), ("G", 1e9))
    },
    BYTES_PER_S_MIN,
    BYTES_PER_S_MAX,
    "B/s",
    "100mbit, 1gbit or 12MB/s",
)

# Of a host its GPUs and the GB of each; layers, width and vocabulary; sequences and tokens.
GPUS = _products("hosts", (1, 2), "24 (a GPU of 24 GB), 8x80, 2x24,1x12 (two hosts)", several=True)
SHAPE = _products("shape", (2, 3), "32x4096, or 32x4096x128256 with the vocabulary")
BATCH = _products("batch", (2,), "1x2048 or 8x1024")


@click.command()
@click.argument("run_tomls", type=click.Path(path_type=Path), nargs=-1, metavar="RUN_TOML...")
@click.option("--params", type=COUNT, help="Size of the model: 1e9, 30M, 1.3B; required.")
@click.option(
    "--step-time",
    type=STEP_TIME,
    help="Duration of an inner step: 0.1 (seconds), 100ms; required.",
)
@click.option(
    "--peers",
    type=click.IntRange(2, MEMBERS_MAX),
    help="Number of contributors (default: membership.contributors of the first RUN_TOML).",
)
@click.option("--bandwidth", type=LINE, help="Each peer's line, both ways: 100mbit, 1gbit.")
@click.option("--upload", type=LINE, help="Each peer's upload rate.")
@click.option("--download", type=LINE, help="Each peer's download rate.")
@click.option(
    "--latency",
    type=LATENCY,
    default="50ms",
    help="Round-trip time between two machines, as ping reports it.",
)
@click.option(
    "--gpus",
    type=GPUS,
    help="GPUs of a peer's hosts, number x GB: 24, 8x80, 2x24,1x12. Says which layout fits.",
)
@click.option(
    "--shape",
    type=SHAPE,
    help="With --gpus: layers x width of the model, and x vocabulary (default: by --params).",
)
@click.option(
    "--batch",
    type=BATCH,
    help="With --gpus: sequences x tokens that a GPU takes at a time (1x2048).",
)
@json_option
def plan(
    run_tomls: tuple[Path, ...],
    params: float | None,
    step_time: float | None,
    peers: int | None,
    bandwidth: float | None,
    upload: float | None,
    download: float | None,
    latency: float,
    gpus: tuple[tuple[int, ...], ...] | None,
    shape: tuple[tuple[int, ...], ...] | None,
    batch: tuple[tuple[int, ...], ...] | None,
    as_json: bool,
) -> None:
    """Predict the utilisation of a run's trainers, for one run.toml or for several side by side.

    All peers are assumed alike: same step time, same line; 94 % of it carries tensors. No daemon is
    needed. What to change where trainers wait: docs/choosing.md. With --gpus it says which layout
    of the model fits inside a peer, and needs --params alone: docs/large-models.md.

    \b
    Examples:
      holdfast config plan run.toml --params 1.3B --step-time 2s --peers 8 --bandwidth 100mbit
      holdfast config plan run.toml --params 30M --step-time 0.1 --upload 20mbit --download 300mbit
      holdfast config plan --gpus 2x24,1x12 --params 3B
    """
    from ...membership.master.rounds.round_scheduler import ROUNDS_IN_FLIGHT_MAX
    from ..spec_file import read_spec
    from .plan_table import show_plan

    specs = {str(path): read_spec(path) for path in run_tomls}
    if gpus is not None:
        if params is None:
            raise click.UsageError("give also --params 7B")
        if step_time is not None or peers is not None or len(specs) > 1:
            raise click.UsageError(
                "--gpus asks what fits inside a peer: leave --step-time and --peers out, and give "
                "one RUN_TOML at most"
            )
        tokens = math.prod(batch[0]) if batch else TOKENS
        model = _transformer(params, shape[0] if shape else None, tokens)
        _plan_inside(model, gpus, next(iter(specs.values()), RunSpec()), as_json=as_json)
        return
    if shape or batch:
        raise click.UsageError("--shape and --batch go with --gpus, as in --gpus 2x24,1x12")
    peers = peers or next((spec.membership.contributors for spec in specs.values()), 0)
    up, down = upload or bandwidth, download or bandwidth
    if not specs or params is None or step_time is None or peers < 2 or up is None or down is None:
        missing = {
            "RUN_TOML": not specs,
            "--params 30M": params is None,
            "--step-time 100ms": step_time is None,
            "--peers 8": peers < 2,
            "--bandwidth 100mbit (or --upload and --download)": up is None or down is None,
        }
        raise click.UsageError(f"give also {', '.join(name for name in missing if missing[name])}")
    if bandwidth and upload and download:
        raise click.UsageError("give --bandwidth for both ways, or --upload and --download")
    conditions = Conditions(
        round(params),
        step_time,
        peers,
        Bandwidth(PAYLOAD_SHARE * up, PAYLOAD_SHARE * down),
        latency / 2,
        ROUNDS_IN_FLIGHT_MAX,
    )
    found = {name: _on_the_line(predict(spec, conditions)) for name, spec in specs.items()}
    conditions = evolve(conditions, line=Bandwidth(up, down))  # as it was told
    if as_json:
        predictions = [_document(name, specs[name], each) for name, each in found.items()]
        answer = {"conditions": asdict(conditions), "predictions": predictions}
        click.echo(json.dumps(answer, indent=2))
    else:
        show_plan(conditions, specs, found)


def _transformer(params: float, shape: tuple[int, ...] | None, tokens: int) -> Transformer:
    if shape is None:
        return Transformer.usual(params, VOCABULARY, tokens)
    layers, width, vocabulary = (*shape, VOCABULARY)[:3]
    if layers > width:
        raise click.UsageError(f"--shape is layers x width: {width}x{layers}?")
    return Transformer(params, layers, width, vocabulary, tokens)


def _plan_inside(
    model: Transformer, gpus: Sequence[tuple[int, ...]], spec: RunSpec, *, as_json: bool
) -> None:
    """Print which layouts fit the GPUs of a peer's hosts."""
    from .plan_table import show_inside

    hosts = [GpuHost((1, *host)[-2], host[-1] * 1e9) for host in gpus]
    if sum(host.count for host in hosts) > RANKS_MAX:
        raise click.UsageError(f"a peer has at most {RANKS_MAX} GPUs, as in --gpus 8x80,8x80")
    fits = judge(model, hosts)
    chosen, values = simplest(fits), round(model.value_count)
    # The first host is the head: it has the whole state, and the boxes of the others pass there.
    further = [further_host_bytes(spec, values, share) for share in chosen.host_shares[1:]]
    memory = [memory_bytes(spec, values), *further]
    if not as_json:
        show_inside(model, hosts, fits, memory)
        return
    answer = {
        "model": asdict(model),
        "hosts": [asdict(host) for host in hosts],
        "fits": [asdict(fit) for fit in fits],
        "chosen": asdict(chosen),
        "memory_bytes": memory,
    }
    click.echo(json.dumps(answer, indent=2))


def _on_the_line(found: Prediction) -> Prediction:
    """Return the prediction with rates of lines, headers included, instead of tensor bytes."""
    return evolve(
        found,
        peak_bits_per_s=found.peak_bits_per_s / PAYLOAD_SHARE,
        mean_bits_per_s=found.mean_bits_per_s / PAYLOAD_SHARE,
        needed_bits_per_s=found.needed_bits_per_s / PAYLOAD_SHARE,
    )


def _document(name: str, spec: RunSpec, found: Prediction) -> dict[str, object]:
    figures = asdict(found)
    return {
        "run_toml": name,
        "sync_every": spec.diloco.sync_every,
        "fragments": spec.diloco.fragments,
        "overlap": spec.diloco.overlap_steps,
        "codec_up": spec.reduce.codec_up,
        "codec_down": spec.reduce.codec_down,
        **{key: value if math.isfinite(value) else None for key, value in figures.items()},
    }

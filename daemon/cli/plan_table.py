"""``holdfast config plan`` as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from ...membership.planning.inside import Fit, GpuHost, Transformer, judge, simplest
from ...membership.planning.predict import Conditions, Prediction
from ...membership.spec.spec import RunSpec
from .run_tables import plain_table

DAY_S = 86_400.0
GIGABIT_BYTES_PER_S = 1e9 / 8
Row = tuple[str, Callable[[RunSpec, Prediction], str]]

ROWS: tuple[Row, ...] = (
    ("sync_every (H)", lambda spec, _: str(spec.diloco.sync_every)),
    ("fragments (P)", lambda spec, _: str(spec.diloco.fragments)),
    ("overlap (tau)", lambda spec, _: str(spec.diloco.overlap)),
    ("codec_up, codec_down", lambda spec, _: _codecs(spec)),
    ("trainers are busy", lambda _, found: part(found.utilisation)),
    ("  without overlap", lambda _, found: part(found.blocking_utilisation)),
    ("  data parallel", lambda _, found: part(found.baseline_utilisation)),
    ("a round every", lambda _, found: seconds(found.period_s)),
    ("  takes", lambda _, found: seconds(found.round_s)),
    ("  of that, trainers wait", lambda _, found: seconds(found.waited_s)),
    ("  moves, each way", lambda _, found: size(found.round_bytes)),
    ("peak bandwidth", lambda _, found: rate(found.peak_bits_per_s)),
    ("mean bandwidth", lambda _, found: rate(found.mean_bits_per_s)),
    ("  a day, each way", lambda _, found: size(found.mean_bits_per_s / 8 * DAY_S)),
    ("no trainer waits above", lambda _, found: rate(found.needed_bits_per_s)),
    ("memory, beside script's", lambda _, found: size(found.memory_bytes)),
    ("bytes a step, each way", lambda _, found: size(found.bytes_per_step)),
    ("  data parallel moves", lambda _, found: f"{found.times_fewer_bytes:.0f} times as many"),
)


def show_plan(
    conditions: Conditions, specs: Mapping[str, RunSpec], found: Mapping[str, Prediction]
) -> None:
    """Print the predictions side by side."""
    console = Console(highlight=False, markup=False)
    line = conditions.line
    up, down = (rate(8 * each) for each in (line.up_bytes_per_s, line.down_bytes_per_s))
    console.print(
        f"{count(conditions.value_count)} parameters, {conditions.peers} peers, steps of "
        f"{seconds(conditions.step_s)}\nlines of {up if up == down else f'{up} up, {down} down'}, "
        f"round-trip time {seconds(2 * conditions.delay_s)}\n"
    )
    table = plain_table("each peer", *found)
    for name, cell in ROWS:
        table.add_row(name, *(cell(specs[each], found[each]) for each in found))
    console.print(table)


def _codecs(spec: RunSpec) -> str:
    """Format the codecs of contributions and results: of all fragments, or the distinct ones."""
    return ", ".join(
        codec if isinstance(codec, str) else "/".join(dict.fromkeys(codec))
        for codec in (spec.reduce.codec_up, spec.reduce.codec_down)
    )


# ---------------------------------------------------------------- inside a peer

WHY = {
    "plain": "every GPU holds the whole model, and nothing is sharded",
    "FSDP2": "no GPU holds the whole model; sharded equally, the smallest GPU decides",
    "pipeline": "equal shards are too large for the smallest GPU; stages go by memory",
    "pipeline of hosts, FSDP2 in each": "each host is a stage, sharded over its GPUs",
}


def show_inside(
    model: Transformer,
    hosts: Sequence[GpuHost],
    fits: Sequence[Fit],
    memory_bytes: Sequence[float],
) -> None:
    """Print which layout fits, and what each host needs; ``memory_bytes`` are of the hosts."""
    console = Console(highlight=False, markup=False)
    chosen = simplest(fits)
    console.print(
        f"{count(model.value_count)} parameters, {model.layers} layers of width {model.width:.0f}\n"
        f"{model.vocabulary} words, batches of {model.tokens} tokens on each GPU\n"
    )
    table = plain_table("inside the peer", "tightest GPU", "recomputed", "fits")
    for kept, recomputed in zip(fits[::2], fits[1::2], strict=True):
        table.add_row(kept.layout, _of(kept), _of(recomputed), _verdict(kept, recomputed))
    console.print(table)
    alone = all(simplest(judge(model, [host])).left_bytes >= 0 for host in hosts)
    console.print(f"\n{_recommendation(chosen, several=len(hosts) > 1, alone=alone)}\n")
    others = ("to others a micro-batch",) if len(hosts) > 1 else ()
    table = plain_table("host", "GPUs", "host memory", *others)
    for at, host in enumerate(hosts):
        name = "1, the head" if others and at == 0 else str(at + 1)
        gpus = f"{host.count} x {host.gpu_bytes / 1e9:g} GB"
        sent = (size(chosen.moved_bytes[at]),) if others else ()
        table.add_row(name, gpus, size(memory_bytes[at]), *sent)
    console.print(table)


def _of(fit: Fit) -> str:
    at = fit.tightest
    return f"{size(fit.needed_bytes[at])} of {fit.gpu_bytes[at] / 1e9:g}"


def _verdict(kept: Fit, recomputed: Fit) -> str:
    if kept.left_bytes >= 0:
        return f"yes, {size(kept.left_bytes)} left"
    if recomputed.left_bytes >= 0:
        return f"recomputed, {size(recomputed.left_bytes)} left"
    return f"no, {size(-recomputed.left_bytes)} too much"


def _recommendation(chosen: Fit, *, several: bool, alone: bool) -> str:
    """Return what to take; ``alone``: each of several hosts could hold the model by itself."""
    how = chosen.layout
    if chosen.recomputed:
        how += ", activations recomputed (a third more computation)"
    if chosen.left_bytes < 0:
        lacking = size(-chosen.left_bytes)
        return (
            f"Nothing fits. Least is lacking with {how}: {lacking} on a GPU. It takes more hosts,"
            " a smaller --batch or a smaller model."
        )
    text = f"take: {how}: {WHY[chosen.layout]}."
    if several and alone:
        text += (
            " But each host holds the model alone: let each join as a peer of its own, and nothing "
            "crosses their network at a step."
        )
    elif several:
        most_bytes = max(chosen.moved_bytes)
        text += (
            f" A micro-batch's {size(most_bytes)} between the hosts take "
            f"{seconds(most_bytes / GIGABIT_BYTES_PER_S)} on 1 Gbit/s."
        )
    return text


# ---------------------------------------------------------------- formatted figures


def part(share: float) -> str:
    return f"{share:.1%}"


def count(number: float) -> str:
    for word, factor in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= factor:
            return f"{number / factor:.3g} {word}"
    return f"{number:.0f}"


def size(count_bytes: float) -> str:
    return _scaled(count_bytes, "B")


def rate(bits_per_s: float) -> str:
    return "never" if math.isinf(bits_per_s) else f"{_scaled(bits_per_s, 'bit')}/s"


def seconds(amount_s: float) -> str:
    if amount_s == 0:
        return "0 s"
    if amount_s < 1:
        return f"{amount_s * 1e3:.3g} ms"
    return f"{amount_s:.0f} s" if amount_s >= 100 else f"{amount_s:.3g} s"


def _scaled(amount: float, unit: str) -> str:
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= factor:
            number = amount / factor
            shown = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
            return f"{shown} {prefix}{unit}"
    return f"{amount:.3g} {unit}"

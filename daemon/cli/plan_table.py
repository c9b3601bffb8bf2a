"""``holdfast config plan`` as text: a table, and a sentence about each run.toml."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from rich.console import Console

from ...membership.planning.inside import GPU_FLOPS, STAGES_MIN, Advice, Fit, GpuHost, largest_host
from ...membership.planning.predict import Conditions, Prediction
from ...membership.spec.spec import RunSpec
from .run_tables import plain_table

DAY_S = 86_400.0
YEAR_S = 365.25 * DAY_S
GIGABIT_BYTES_PER_S = 1e9 / 8
WORTH_BUSY = 0.9  # share of its time that a stage computes, above which its line is no hindrance
Row = tuple[str, Callable[[RunSpec, Prediction], str]]

ROWS: tuple[Row, ...] = (
    ("sync_every (H)", lambda spec, _: str(spec.diloco.sync_every)),
    ("fragments (P)", lambda spec, _: str(spec.diloco.fragments)),
    ("overlap (tau)", lambda spec, _: str(spec.diloco.overlap)),
    ("codec_up, codec_down", lambda spec, found: _codecs(spec, found)),
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
    """Print the predictions side by side, and a sentence about each."""
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
    console.print()
    for name, each in found.items():
        console.print(f"{name}: {sentence(specs[name], each, conditions)}")


def sentence(spec: RunSpec, found: Prediction, conditions: Conditions) -> str:
    """Return what trainers do while a round takes place."""
    diloco, overlap = spec.diloco, spec.diloco.overlap_steps
    what = "the model" if diloco.fragments == 1 else f"one of {diloco.fragments} fragments"
    rounds = (
        f"every {found.steps_per_round:g} steps"
        f" ({seconds(found.steps_per_round * conditions.step_s)}) {what} is averaged, which takes"
        f" {seconds(found.round_s)}."
    )
    if overlap == 0:
        return f"{rounds} Trainers stop meanwhile, {part(1 - found.utilisation)} of their time."
    meanwhile = f"{rounds} Trainers take {overlap} step{'s' if overlap > 1 else ''} meanwhile"
    if overlap > found.steps_per_round:
        meanwhile += ", in which the next rounds begin"
    if not found.waited_s:
        return f"{meanwhile}, so no trainer waits."
    waits = (
        f"{meanwhile} ({seconds(overlap * conditions.step_s)}), and wait for "
        f"{seconds(found.waited_s)} a round."
    )
    if math.isinf(found.needed_bits_per_s):
        return f"{waits} The round-trip time alone is longer than the overlap."
    return f"{waits} On lines of {rate(found.needed_bits_per_s)} none would wait."


def _codecs(spec: RunSpec, _found: Prediction) -> str:
    return ", ".join(map(format_codec, (spec.reduce.codec_up, spec.reduce.codec_down)))


def format_codec(codec: str | tuple[str, ...]) -> str:
    """Format the codec of all fragments, or the distinct codecs of each."""
    return codec if isinstance(codec, str) else "/".join(dict.fromkeys(codec))


# ---------------------------------------------------------------- inside a peer

WHY = {
    "plain": "every GPU holds the whole model, and nothing is sharded",
    "FSDP2": "no GPU holds the whole model; sharded equally, the smallest GPU decides",
    "pipeline": "equal shards are too large for the smallest GPU; stages go by memory",
    "pipeline of hosts, FSDP2 in each": "each host is a stage, sharded over its GPUs",
}


def show_advice(advice: Advice) -> None:
    """Print which layout fits, what each host needs, and why stages stay in one place."""
    console = Console(highlight=False, markup=False)
    model, hosts, chosen = advice.model, advice.hosts, advice.chosen
    console.print(
        f"{count(model.value_count)} parameters, {model.layers} layers of width {model.width:.0f}\n"
        f"{model.vocabulary} words, batches of {model.tokens} tokens on each GPU\n"
    )
    table = plain_table("inside the peer", "tightest GPU", "recomputed", "fits")
    for kept, recomputed in zip(advice.fits[::2], advice.fits[1::2], strict=True):
        table.add_row(kept.layout, _of(kept), _of(recomputed), _verdict(kept, recomputed))
    console.print(table)
    console.print(f"\n{_recommendation(advice)}\n")
    others = ("to others a micro-batch", "a round") if len(hosts) > 1 else ()
    table = plain_table("host", "GPUs", "host memory", *others)
    for at, host in enumerate(hosts):
        sent = (size(chosen.moved_bytes[at]), size(advice.round_bytes[at]))[: len(others)]
        name = "1, the head" if others and at == 0 else str(at + 1)
        table.add_row(name, _gpus(host), size(advice.memory_bytes[at]), *sent)
    console.print(table)
    console.print(f"\n{_across_the_internet(advice)}")


def _gpus(host: GpuHost) -> str:
    return f"{host.count} x {host.gpu_bytes / 1e9:g} GB"


def _of(fit: Fit) -> str:
    at = fit.tightest
    return f"{size(fit.needed_bytes[at])} of {fit.gpu_bytes[at] / 1e9:g}"


def _verdict(kept: Fit, recomputed: Fit) -> str:
    if kept.left_bytes >= 0:
        return f"yes, {size(kept.left_bytes)} left"
    if recomputed.left_bytes >= 0:
        return f"recomputed, {size(recomputed.left_bytes)} left"
    return f"no, {size(-recomputed.left_bytes)} too much"


def _recommendation(advice: Advice) -> str:
    chosen = advice.chosen
    how = chosen.layout
    if chosen.recomputed:
        how += ", activations recomputed (a third more computation)"
    if chosen.left_bytes < 0:
        ways = []
        if advice.hosts_lacking is not None:
            ways.append(f"{advice.hosts_lacking} more of {_gpus(largest_host(advice.hosts))}")
        if advice.largest_tokens is not None:
            ways.append(f"batches of {advice.largest_tokens} tokens")
        if advice.largest_values is not None:
            ways.append(f"a model of {count(advice.largest_values)} parameters")
        return (
            f"Nothing fits. Least is lacking with {how}: {size(-chosen.left_bytes)} on a GPU. "
            f"It would take {' or '.join(ways) or 'more than a peer may have'}."
        )
    text = f"take: {how}: {WHY[chosen.layout]}."
    if len(advice.hosts) > 1 and advice.alone:
        text += (
            " But each host holds the model alone: let each join as a peer of its own, and nothing "
            "crosses their network at a step."
        )
    elif len(advice.hosts) > 1:
        most_bytes = max(chosen.moved_bytes)
        text += (
            f" A micro-batch's {size(most_bytes)} between the hosts take "
            f"{seconds(most_bytes / GIGABIT_BYTES_PER_S)} on 1 Gbit/s."
        )
    return text


def _across_the_internet(advice: Advice) -> str:
    stages = max(STAGES_MIN, sum(host.count for host in advice.hosts))
    bf16, nf4 = advice.upload_bits_per_s
    in_bf16, in_nf4 = advice.stage_busy
    pays = "do not pay" if in_bf16 < WORTH_BUSY else "are not built, though a line might carry them"
    return (
        f"Stages across the internet {pays}: each of {stages}, of {GPU_FLOPS / 1e12:.0f} TFLOP/s "
        f"(an RTX 4090 in training), uploads {rate(bf16)} if it never waits. On "
        f"{rate(advice.line_bits_per_s)} it computes {part(in_bf16)} of its time; with activations "
        f"and gradients in 4.25 bits ({rate(nf4)}), whose loss is not measured, {part(in_nf4)}. "
        f"Training on 20 tokens a parameter takes such GPUs {advice.optimal_s / YEAR_S:.2g} "
        "years at least."
    )


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
            return (
                f"{number:.0f} {prefix}{unit}" if number >= 100 else f"{number:.3g} {prefix}{unit}"
            )
    return f"{amount:.3g} {unit}"

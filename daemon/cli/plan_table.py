"""``holdfast plan`` as text: a table, and the reasons for the proposal."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.console import Console

from ...membership.planning.advice import BUSY_ENOUGH, QUALITIES, STEPS_TRIED, Proposal
from ...membership.planning.predict import Conditions, Prediction
from ...membership.spec.spec import RunSpec
from .run_tables import plain_table

Row = tuple[str, Callable[[RunSpec, Prediction], str]]

ROWS: tuple[Row, ...] = (
    ("sync_every (H)", lambda spec, _: str(spec.diloco.sync_every)),
    ("fragments (P)", lambda spec, _: str(spec.diloco.fragments)),
    ("overlap (tau)", lambda spec, _: str(spec.diloco.overlap)),
    ("codec_up, codec_down", lambda spec, _: ", ".join(map(format_codec, codecs_of(spec)))),
    ("trainers are busy", lambda _, found: part(found.utilisation)),
    ("  without overlap", lambda _, found: part(found.blocking_utilisation)),
    ("  data parallel", lambda _, found: part(found.baseline_utilisation)),
    ("a round every", lambda _, found: seconds(found.period_s)),
    ("  takes", lambda _, found: seconds(found.round_s)),
    ("  of that, trainers wait", lambda _, found: seconds(found.waited_s)),
    ("  moves, each way", lambda _, found: size(found.round_bytes)),
    ("peak bandwidth", lambda _, found: rate(found.peak_bits_per_s)),
    ("mean bandwidth", lambda _, found: rate(found.mean_bits_per_s)),
    ("no trainer waits above", lambda _, found: rate(found.needed_bits_per_s)),
    ("memory, beside script's", lambda _, found: size(found.memory_bytes)),
    ("bytes a step, each way", lambda _, found: size(found.bytes_per_step)),
    ("  data parallel moves", lambda _, found: f"{found.times_fewer_bytes:.0f} times as many"),
)


def show_plan(
    conditions: Conditions, quality: str, given: Proposal | None, proposal: Proposal
) -> None:
    """Print the prediction for a spec, if there is one, beside the proposal and its reasons."""
    console = Console(highlight=False)
    line = conditions.line
    up, down = (rate(8 * each) for each in (line.up_bytes_per_s, line.down_bytes_per_s))
    console.print(
        f"{count(conditions.value_count)} parameters, {conditions.peers} peers, steps of "
        f"{seconds(conditions.step_s)}\nlines of {up if up == down else f'{up} up, {down} down'}, "
        f"round-trip time {seconds(2 * conditions.delay_s)}\n"
    )
    if given is not None and given.spec.run.preset:
        console.print(f'preset = "{given.spec.run.preset}": what run.toml leaves out\n')
    columns = [("run.toml", given), (f"proposed ({quality})", proposal)]
    shown = [(heading, each) for heading, each in columns if each is not None]
    table = plain_table("each peer", *(heading for heading, _ in shown))
    for name, cell in ROWS:
        table.add_row(name, *(cell(each.spec, each.prediction) for _, each in shown))
    console.print(table)
    console.print()
    for sentence in reasons(proposal, conditions, quality):
        console.print(sentence)
    if given is not None and same(given.spec, proposal.spec):
        console.print("run.toml already has these settings.")
    else:
        console.print()
        if given is not None and given.spec.diloco.groups:
            console.print("Instead of groups:")
        # The console would read [diloco] as markup.
        print(toml_of(proposal.spec))  # noqa: T201


def reasons(proposal: Proposal, conditions: Conditions, quality: str) -> list[str]:
    """Return sentences that explain the proposed settings."""
    spec, found = proposal.spec, proposal.prediction
    diloco = spec.diloco
    what = "the model" if diloco.fragments == 1 else f"one of {diloco.fragments} fragments"
    lines = [
        f"Every {found.steps_per_round:g} steps ({seconds(found.steps_per_round * conditions.step_s)})"
        f" {what} is averaged, which takes {seconds(found.round_s)}. {_waiting(proposal, conditions)}"
    ]
    codecs = QUALITIES[quality]
    if not proposal.enough:
        coarser = "" if quality == list(QUALITIES)[-1] else "; a coarser --quality needs less"
        lines.append(
            f"No settings of this quality keep trainers busy for {BUSY_ENOUGH:.0%}. "
            f"{_enough(found)}{coarser}."
        )
        return lines
    if diloco.sync_every > STEPS_TRIED[0]:
        coarsest = " and ".join(dict.fromkeys(codecs[-1]))
        lines.append(
            f"With more frequent rounds trainers would not be busy for {BUSY_ENOUGH:.0%} with any "
            f"fragments and overlap, even with {coarsest}."
        )
    finer = codecs[: codecs.index(spec.reduce.codecs(0))]
    if finer:
        lines.append(
            f"{' and '.join(dict.fromkeys(finer[-1]))} would not suffice with as many steps either."
        )
    return lines


def _waiting(proposal: Proposal, conditions: Conditions) -> str:
    found, overlap = proposal.prediction, proposal.spec.diloco.overlap_steps
    if overlap == 0:
        return f"Trainers stop meanwhile, {part(1 - found.utilisation)} of their time."
    meanwhile = f"Trainers take {overlap} step{'s' if overlap > 1 else ''} meanwhile"
    if overlap > found.steps_per_round:
        meanwhile += ", in which the next rounds begin"
    if not found.waited_s:
        return f"{meanwhile}, so no trainer waits."
    return (
        f"{meanwhile} ({seconds(overlap * conditions.step_s)}), and wait for "
        f"{seconds(found.waited_s)} a round."
    )


def _enough(found: Prediction) -> str:
    if math.isinf(found.needed_bits_per_s):
        return "The round-trip time alone is longer than the overlap"
    return f"With these, no trainer would wait on lines of {rate(found.needed_bits_per_s)}"


def codecs_of(spec: RunSpec) -> tuple[str | tuple[str, ...], str | tuple[str, ...]]:
    return spec.reduce.codec_up, spec.reduce.codec_down


def format_codec(codec: str | tuple[str, ...]) -> str:
    """Format the codec of all fragments, or the distinct codecs of each."""
    return codec if isinstance(codec, str) else "/".join(dict.fromkeys(codec))


def same(one: RunSpec, other: RunSpec) -> bool:
    """Return whether two specs agree in all settings that a proposal makes."""
    first, second = (
        (s.diloco.sync_every, s.diloco.fragments, s.diloco.overlap_steps, *codecs_of(s))
        for s in (one, other)
    )
    return first == second


def toml_of(spec: RunSpec) -> str:
    """Return the proposed settings as TOML for run.toml."""
    diloco, reduce = spec.diloco, spec.reduce
    return (
        f"[diloco]\nsync_every = {diloco.sync_every}\nfragments = {diloco.fragments}\n"
        f"overlap = {diloco.overlap}\n[reduce]\n"
        f'codec_up = "{reduce.codec_up}"\ncodec_down = "{reduce.codec_down}"'
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

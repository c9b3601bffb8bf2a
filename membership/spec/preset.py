"""Presets: named sets of settings, each of them measured, which ``run.toml`` may override key by key.

    [run]
    preset = "streaming"
    [diloco]
    fragments = 8         # every other setting of the preset holds

An algorithm says what a run is, and refuses what contradicts it; a preset also says how often, how coarse
and at which outer rate. It is written out when the text is read: ``RunSpec.toml_text`` has every setting that
the preset stands for, as if the operator had typed it. So the journal, all peers and every checkpoint have
the values themselves, and a later holdfast with other values in this table changes no run under way.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

Document = dict[str, Any]  # TOML: values by key, by table

_NOT_A_LINE = (
    "must stand in lines of its own, under [{table}], for a preset to be written beside it"
)


@frozen
class Preset:
    """A named set of settings.

    Attributes:
      what: it is, in a few words.
      settings: by ``table.key``.
      inner: the inner optimizer that it was measured with; the training script chooses it.
    """

    what: str
    settings: Mapping[str, bool | int | float | str]
    inner: str = "AdamW"


# Rates and momenta are those of runs of tens of rounds, as in ``benchmarks/RESULTS.md``; docs/choosing.md has
# the loss of each.
_SHORT: Final = {"diloco.outer_lr": 0.7, "diloco.outer_momentum": 0.7}

# Updates of replicas that use Muon agree more, so the run may follow their mean the whole way.
_SHORT_MUON: Final = {**_SHORT, "diloco.outer_lr": 1.0}

PRESETS: Final[Mapping[str, Preset]] = {
    "diloco": Preset(
        "the whole model every 20 steps",
        {"diloco.algorithm": "diloco", "diloco.sync_every": 20, **_SHORT},
    ),
    "streaming": Preset(
        "a fifth of the model every 4 steps, with 4 bits a value, while training goes on",
        {
            "diloco.algorithm": "streaming",
            "diloco.sync_every": 20,
            "diloco.fragments": 5,
            "diloco.overlap": 1,
            **_SHORT,
            "reduce.codec_up": "nf4",
            "reduce.codec_down": "nf4",
        },
    ),
    "sparse": Preset(
        "the 8th part of the values every 10 steps, with 2 bits each",
        {
            "diloco.algorithm": "sparse",
            "diloco.sync_every": 10,
            "diloco.outer_lr": 2.0,  # in place of momentum
            "diloco.outer_momentum": 0.0,
            "reduce.codec_up": "topk8",
            "reduce.feedback_decay": 1.0,
        },
    ),
    "muon": Preset(
        "the whole model every 10 steps",
        {"diloco.algorithm": "diloco", "diloco.sync_every": 10, **_SHORT_MUON},
        inner="Muon",
    ),
    "muon-streaming": Preset(
        "a fifth of the model every 2 steps, with 4 bits a value, while training goes on",
        {
            "diloco.algorithm": "streaming",
            "diloco.sync_every": 10,
            "diloco.fragments": 5,
            "diloco.overlap": 1,
            **_SHORT_MUON,
            "reduce.codec_up": "nf4",
            "reduce.codec_down": "nf4",
        },
        inner="Muon",
    ),
    "allreduce": Preset(
        "every step is averaged: the baseline of all others",
        {
            "diloco.algorithm": "allreduce",
            "diloco.sync_every": 1,
            "diloco.outer_lr": 1.0,
            "diloco.outer_momentum": 0.0,
        },
        inner="SGD",
    ),
}


def preset_settings(document: Document) -> dict[str, bool | int | float | str]:
    """Return what the document's preset sets beyond the document itself, by ``table.key``.

    Empty without a preset, with an unknown one (which the spec's validator names) and where a table is no table.
    """
    run = document.get("run")
    preset = run.get("preset") if isinstance(run, dict) else None
    if not isinstance(preset, str) or preset not in PRESETS:
        return {}
    found = {}
    for place, value in PRESETS[preset].settings.items():
        table, key = place.split(".")
        given = document.get(table, {})
        if not isinstance(given, dict):
            return {}
        # Groups say how many fragments there are.
        if key not in given and not (key == "fragments" and given.get("groups")):
            found[place] = value
    return found


def write_out(toml_text: str, document: Document) -> str:
    """Return the text with a line for each setting of its preset that it leaves out.

    Args:
      document: the parsed text.

    Raises:
      ValueError: a table is written in a way to which no line can be added.
    """
    settings = preset_settings(document)
    if not settings:
        return toml_text
    lines = toml_text.split("\n")
    expected = {
        table: dict(values) for table, values in document.items() if isinstance(values, dict)
    }
    comment = f"  # of preset {document['run']['preset']}"
    for table in dict.fromkeys(place.partition(".")[0] for place in settings):
        mine = {
            place.partition(".")[2]: value
            for place, value in settings.items()
            if place.startswith(f"{table}.")
        }
        expected.setdefault(table, {}).update(mine)
        header = re.compile(rf"\s*\[\s*{table}\s*\]\s*(#.*)?")
        at = next((n for n, line in enumerate(lines, 1) if header.fullmatch(line)), 0)
        if not at:
            lines += [f"[{table}]"]
            at = len(lines)
        lines[at:at] = [f"{key} = {json.dumps(value)}{comment}" for key, value in mine.items()]
        # Read back at once: the header may stand inside a longer string, or the table in another one.
        try:
            written = tomllib.loads("\n".join(lines))
        except tomllib.TOMLDecodeError:
            written = {}
        if written.get(table) != expected[table]:
            raise ValueError(f"[{table}] {_NOT_A_LINE.format(table=table)}")
    return "\n".join(lines)


def format_preset(document: Document) -> str:
    """Return a line about what a document's preset sets; empty without a valid one."""
    settings = preset_settings(document)
    name = document["run"]["preset"] if settings else ""
    told = ", ".join(
        f"{place.partition('.')[2]} = {json.dumps(v)}" for place, v in settings.items()
    )
    return f'preset "{name}" sets {told}' if settings else ""

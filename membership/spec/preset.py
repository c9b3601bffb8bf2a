"""Presets: named sets of settings, measured but for ``delayed``, which ``run.toml`` may override
key by key.

    [run]
    preset = "streaming"
    [diloco]
    fragments = 8         # every other setting of the preset holds

A preset is resolved once, when the file is read: ``with_preset`` fills in what the file leaves out.
All that comes later (journal, peers, checkpoints) has the values themselves, so a later holdfast
with other values in this table changes no run under way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

Document = dict[str, Any]  # TOML: values by key, by table


# Rates and momenta are those of runs of tens of rounds, as in ``benchmarks/RESULTS.md``;
# docs/choosing.md has the loss of each.
_SHORT: Final = {"diloco.outer_lr": 0.7, "diloco.outer_momentum": 0.7}

# Updates of replicas that use Muon agree more, so the run may follow their mean the whole way.
_SHORT_MUON: Final = {**_SHORT, "diloco.outer_lr": 1.0}

_NF4: Final = {"reduce.codec_up": "nf4", "reduce.codec_down": "nf4"}

# By preset its settings, by ``table.key``.
PRESETS: Final[Mapping[str, Mapping[str, bool | int | float | str]]] = {
    # The whole model every 20 steps; all trainers wait for the mean (arXiv 2311.08105).
    "diloco": {"diloco.sync_every": 20, **_SHORT},
    # The whole model every 20 steps, while the next 20 are trained: the mean is one phase late (the
    # asynchronous DiLoCo of PCCL's documentation, with the rate of its example; not measured here).
    "delayed": {
        "diloco.sync_every": 20,
        "diloco.overlap": 20,
        "diloco.outer_lr": 0.7,
        "diloco.outer_momentum": 0.0,
    },
    # A fifth of the model every 4 steps, with 4 bits a value, while training goes on (arXiv
    # 2501.18512).
    "streaming": {
        "diloco.sync_every": 20,
        "diloco.fragments": 5,
        "diloco.overlap": 1,
        **_SHORT,
        **_NF4,
    },
    # The 8th part of the values every 10 steps, with 2 bits each (SparseLoCo, arXiv 2508.15706).
    "sparse": {
        "diloco.sync_every": 10,
        "diloco.outer_lr": 2.0,  # in place of momentum
        "diloco.outer_momentum": 0.0,
        "reduce.codec_up": "topk8",
        "reduce.codec_down": "int8+zstd",
        "reduce.feedback_decay": 1.0,
    },
    # The whole model every 10 steps; all trainers wait for the mean (MuLoCo, arXiv 2505.23725).
    "muon": {"diloco.sync_every": 10, **_SHORT_MUON},
    # A fifth of the model every 2 steps, with 4 bits a value, while training goes on.
    "muon-streaming": {
        "diloco.sync_every": 10,
        "diloco.fragments": 5,
        "diloco.overlap": 1,
        **_SHORT_MUON,
        **_NF4,
    },
    # Every step is averaged; with plain SGD inside this is data parallel training: the baseline of
    # all others.
    "allreduce": {
        "diloco.sync_every": 1,
        "diloco.outer_lr": 1.0,
        "diloco.outer_momentum": 0.0,
        "diloco.pace": "lockstep",
    },
}


def preset_settings(document: Document) -> dict[str, bool | int | float | str]:
    """Return what the document's valid preset sets beyond the document itself, by ``table.key``."""
    run = document.get("run")
    preset = run.get("preset") if isinstance(run, dict) else None
    if not isinstance(preset, str) or preset not in PRESETS:
        return {}
    found = {}
    for place, value in PRESETS[preset].items():
        table, key = place.split(".")
        given = document.get(table, {})
        if not isinstance(given, dict):
            return {}
        # Groups say how many fragments there are.
        if key not in given and not (key == "fragments" and given.get("groups")):
            found[place] = value
    return found


def with_preset(document: Document) -> Document:
    """Return a copy of the document in which preset and groups have set what it leaves out."""
    filled = {
        name: dict(values) if isinstance(values, dict) else values
        for name, values in document.items()
    }
    for place, value in preset_settings(document).items():
        table, key = place.split(".")
        filled.setdefault(table, {})[key] = value
    diloco = filled.get("diloco")
    groups = diloco.get("groups") if isinstance(diloco, dict) else None
    if groups and isinstance(groups, list):
        filled["diloco"].setdefault("fragments", len(groups))
    return filled


def format_preset(document: Document) -> str:
    """Return a line about what a document's preset sets; empty without a valid one."""
    settings = preset_settings(document)
    name = document["run"]["preset"] if settings else ""
    told = ", ".join(
        f"{place.partition('.')[2]} = {json.dumps(v)}" for place, v in settings.items()
    )
    return f'preset "{name}" sets {told}' if settings else ""


_GONE: Final = {
    "diloco.merge": "it is gone: delta is the one way, leave it out",
    "diloco.pattern": "it is gone: fragments are strided; for others name their tensors in groups",
    "reduce.error_feedback": "it is gone: feedback_decay = 0.0 is none of it, else leave it out",
}


def gone_reason(place: str, value: object) -> str:
    """Return what stands for a key (``table.key``) that is gone; empty for any other."""
    if place == "diloco.algorithm":
        name = value if isinstance(value, str) and value in PRESETS else "NAME"
        return f'it is gone: write preset = "{name}" under [run], one of {", ".join(PRESETS)}'
    return _GONE.get(place, "")

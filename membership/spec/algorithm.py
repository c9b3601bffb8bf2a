"""The algorithms that a spec may name: the settings that each fixes, and its defaults.

An algorithm is a set of settings. Naming one fills in what ``run.toml`` leaves out and refuses what
contradicts it. All other modules read the resulting settings and never the name.

    diloco      all trainers stop, the whole model is averaged (arXiv 2311.08105)
    streaming   fragments in turn, training goes on meanwhile (arXiv 2501.18512)
    delayed     the reduction runs beside the whole next phase, and its result is one phase late: the
                asynchronous DiLoCo of PCCL's documentation, with the rate of its example
    allreduce   the change of every step is averaged; with plain SGD as inner optimizer this averages
                gradients: data parallel training. The moments of an inner optimizer stay local
    sparse      the largest values with 2 bits each, and a decaying residual in place of outer
                momentum: SparseLoCo (arXiv 2508.15706)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import Factory, field, frozen

AUTO: Final = "auto"  # of an overlap; see ``DilocoTable.overlap_steps``
WHOLE_PHASE: Final = object()  # stands for the number of steps between two rounds

Values = dict[str, Any]  # of one table of the spec, by key


@frozen
class Fixed:
    """A setting that an algorithm fixes.

    Attributes:
      why: the reason, and what to use for another value.
      variants: other allowed values.
    """

    value: object
    why: str
    variants: tuple[object, ...] = ()


@frozen
class Algorithm:
    """Settings, by table and key.

    Attributes:
      fixed: other values are an error.
      presumed: defaults, which ``run.toml`` may change.
      fills_phase: the overlap may be as long as ``sync_every``; else it must be shorter.
    """

    fixed: Mapping[str, Fixed] = Factory(dict)
    presumed: Mapping[str, object] = Factory(dict)
    fills_phase: bool = field(default=False, kw_only=True)


ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    "diloco": Algorithm(
        {
            "diloco.fragments": Fixed(1, "diloco synchronises the whole model; use streaming"),
            "diloco.overlap": Fixed(0, "diloco has no overlap; use streaming"),
        },
        {"diloco.outer_lr": 0.7, "diloco.outer_momentum": 0.9, "diloco.nesterov": True},
    ),
    "streaming": Algorithm(
        {},
        {
            "diloco.overlap": AUTO,
            "diloco.outer_lr": 0.4,
            "diloco.outer_momentum": 0.9,
            "diloco.nesterov": True,
        },
    ),
    "delayed": Algorithm(
        {
            "diloco.fragments": Fixed(1, "delayed synchronises the whole model; use streaming"),
            "diloco.overlap": Fixed(
                WHOLE_PHASE, "delayed overlaps the whole next phase; use streaming"
            ),
        },
        {"diloco.outer_lr": 0.7, "diloco.outer_momentum": 0.0},
        fills_phase=True,
    ),
    "allreduce": Algorithm(
        {
            "diloco.sync_every": Fixed(1, "allreduce averages every step; use diloco"),
            "diloco.fragments": Fixed(1, "allreduce averages the whole model; use streaming"),
            "diloco.overlap": Fixed(0, "allreduce has no step to overlap; use streaming"),
            "diloco.outer_lr": Fixed(1.0, "allreduce takes the mean as it is; use diloco"),
            "diloco.outer_momentum": Fixed(0.0, "allreduce takes the mean as it is; use diloco"),
            "diloco.pace": Fixed("lockstep", "allreduce is a step of all trainers; use diloco"),
        },
    ),
    "sparse": Algorithm(
        {
            "diloco.outer_momentum": Fixed(
                0.0, "sparse has its residual in place of outer momentum; use streaming"
            ),
            "reduce.codec_up": Fixed(
                "topk",
                "sparse sends the largest values only; use streaming with this codec",
                ("topk16", "topk8", "topk4"),
            ),
            "reduce.error_feedback": Fixed(
                True, "sparse needs what it left out; use streaming without it"
            ),
        },
        {"diloco.outer_lr": 1.0, "reduce.codec_down": "int8+zstd", "reduce.feedback_decay": 0.95},
    ),
}

NONE: Final = Algorithm()  # for a spec that names none: the keys' own defaults hold


def algorithm_named(name: object) -> Algorithm:
    """Return the algorithm of this name, or ``NONE``: the spec's validator refuses unknown names."""
    return ALGORITHMS.get(name, NONE) if isinstance(name, str) else NONE


def resolved(diloco: Values, reduce: Values, sync_every: int) -> tuple[Values, Values]:
    """Return both tables with the settings of their algorithm filled in.

    Args:
      diloco: ``[diloco]`` as it was written, ``algorithm`` among its keys or not.
      reduce: ``[reduce]``, likewise.
      sync_every: the default, where the spec does not say.

    Raises:
      ValueError: a key contradicts the algorithm.
    """
    name = diloco.get("algorithm")
    algorithm = algorithm_named(name)
    phase_steps = diloco.get("sync_every", sync_every)
    tables = {"diloco": dict(diloco), "reduce": dict(reduce)}
    for place, fixed in algorithm.fixed.items():
        table, key = place.split(".")
        value = phase_steps if fixed.value is WHOLE_PHASE else fixed.value
        if tables[table].setdefault(key, value) not in (value, *fixed.variants):
            raise ValueError(
                f"[{table}] {key} = {_toml(tables[table][key])} contradicts "
                f'algorithm = "{name}": {fixed.why}'
            )
    for place, value in algorithm.presumed.items():
        table, key = place.split(".")
        tables[table].setdefault(key, phase_steps if value is WHOLE_PHASE else value)
    return tables["diloco"], tables["reduce"]


def _toml(value: object) -> str:
    """Format a value as TOML would have it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value}"

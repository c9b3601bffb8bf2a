"""Changes of a run's spec: what differs between two, and another number of rounds or epochs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import attrs

from .spec import TABLES, RunSpec


def changed_settings(before: RunSpec, after: RunSpec) -> list[str]:
    """Return a phrase for each setting that differs, such as "membership.grace_s from 5 to 10"."""
    return [
        f"{key} from {_shown(old)} to {_shown(new)}"
        for (key, old), (_key, new) in zip(_settings(before), _settings(after), strict=True)
        if old != new
    ]


def _settings(spec: RunSpec) -> Iterator[tuple[str, object]]:
    for table, kind in TABLES.items():
        for attribute in attrs.fields(kind):
            yield f"{table}.{attribute.name}", getattr(getattr(spec, table), attribute.name)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False, default=list)


def with_end(spec: RunSpec, *, rounds: int | None = None, epochs: int | None = None) -> RunSpec:
    """Return the spec with another number of rounds or epochs, or with its own for None."""
    run, data = spec.run, spec.data
    return attrs.evolve(
        spec,
        run=run if rounds is None else attrs.evolve(run, rounds=rounds),
        data=data if epochs is None else attrs.evolve(data, epochs=epochs),
    )
